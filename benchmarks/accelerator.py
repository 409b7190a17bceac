"""Time, memory and correctness of private steps on one accelerator.

Models of published shapes are made on the device, with random weights. Each is trained by private
steps, ordinary AdamW steps and private steps in full space; where Opacus is installed, by its
fastest per-sample gradients, too. A cell that runs out of memory says so and does not end the run.

    python benchmarks/accelerator.py --output accelerator.json     # one GPU with 80 GB, 8 minutes
    python benchmarks/accelerator.py --device cpu --small          # the same lines of code, tiny
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from workloads import (
    make_inputs,
    make_model,
    opacus_hooks_step,
    ordinary_training_step,
    private_training_step,
)

from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.mechanism.private_step import PhysicalBatch
from hf_dpgrape.mechanism.private_training import PrivateTraining
from hf_dpgrape.privacy.noise import add_gaussian_noise_
from hf_dpgrape.privacy.plan import PrivacyPlan

GIB = 2**30
RANK = 16
#: Memory of common cards, in GiB, for which the largest physical batch is looked for.
CARDS = (24, 80)


@dataclass(frozen=True)
class Cell:
    """One model, batch and precision."""

    shape: str
    batch_size: int
    length: int
    dtype: str = "bfloat16"
    checkpointing: bool = False


CELLS = (
    Cell("roberta-large", 40, 128, "float32"),
    Cell("roberta-large", 40, 128, "float32", checkpointing=True),
    Cell("roberta-large", 40, 128),
    Cell("roberta-large", 40, 128, checkpointing=True),
    Cell("vit-base", 64, 197),
    Cell("opt-1.3b", 8, 256),
    Cell("opt-2.7b", 8, 256),
    Cell("opt-6.7b", 8, 256),
)
SMALL_CELLS = (
    Cell("roberta-tiny", 4, 16, "float32"),
    Cell("roberta-tiny", 4, 16, checkpointing=True),
)


def built(cell: Cell, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    """Model and inputs of a cell on the device."""
    with torch.device(device):
        model = make_model(cell.shape, getattr(torch, cell.dtype))
        if cell.checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model, make_inputs(model, cell.batch_size, cell.length)


def private_step(cell: Cell, device: torch.device) -> Callable[[], None]:
    """A private step with projection."""
    model, inputs = built(cell, device)
    return private_training_step(model, inputs, rank=RANK)


def full_space_step(cell: Cell, device: torch.device) -> Callable[[], None]:
    """DP-Adam: a private step without projection."""
    model, inputs = built(cell, device)
    return private_training_step(model, inputs, rank=0)


def ordinary_step(cell: Cell, device: torch.device) -> Callable[[], None]:
    """An ordinary AdamW step."""
    return ordinary_training_step(*built(cell, device))


def opacus_step(cell: Cell, device: torch.device) -> Callable[[], None]:
    """A step of Opacus with its hooks for per-sample gradients.

    Raises:
        ImportError: it is not installed.
    """
    return opacus_hooks_step(*built(cell, device))


KINDS: dict[str, Callable[[Cell, torch.device], Callable[[], None]]] = {
    "private": private_step,
    "ordinary": ordinary_step,
    "full space": full_space_step,
    "opacus": opacus_step,
}


def milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """Duration of one call, by the device's own events where it has them."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def emptied(device: torch.device) -> None:
    """Frees what the cell before held, and starts a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measured(cell: Cell, kind: str, device: torch.device, num_steps: int) -> dict[str, Any]:
    """One row: time and peaks, or why there are none."""
    emptied(device)
    row: dict[str, Any] = {**asdict(cell), "step": kind}
    try:
        run = KINDS[kind](cell, device)
        run()  # warm-up: optimizer state, allocator
        row["ms"] = statistics.median(milliseconds(run, device) for _ in range(num_steps))
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    except Exception as error:  # a peer's failure is a result
        row["failed"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:100]
    if device.type == "cuda":
        row["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return row


def largest_batches(device: torch.device) -> list[dict[str, Any]]:
    """The largest power of two that a private and an ordinary step take, in each card's memory."""
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    rows = []
    for card in (card for card in CARDS if card <= total):
        torch.cuda.set_per_process_memory_fraction(card / total)
        for kind in ("private", "ordinary"):
            largest, size = 0, 8
            while size <= 4096:
                cell = Cell("roberta-large", size, 128, checkpointing=True)
                if "failed" in measured(cell, kind, device, 1):
                    break
                largest, size = size, 2 * size
            rows.append({"card_gib": card, "step": kind, "largest_batch": largest})
    torch.cuda.set_per_process_memory_fraction(1.0)
    return rows


def gradient(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The clipped sum of a small fixed batch, in float64 on the CPU."""
    model = make_model("roberta-tiny").to(dtype)  # the same weights in both
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs = make_inputs(model, 4, 16)
    model.to(device)
    training = PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        PrivacyPlan(
            num_examples=100,
            expected_batch_size=4,
            num_steps=1,
            noise_multiplier=0.0,
            l2_clip_norm=0.5,
            target_delta=1e-3,
        ),
        PerSampleLoss(model),
        examples=range(100),
        collate=lambda _: make_inputs(model, 1, 16),
        capture="batched",
        rank=4,
        head=frozenset(),
    )
    training.take_gradient([PhysicalBatch(4, {k: v.to(device) for k, v in inputs.items()})])
    return torch.cat([g.detach().cpu().double().flatten() for g in training.gradients()])


def correctness(device: torch.device) -> dict[str, float]:
    """Deviations that have to be small; each is checked.

    Raises:
        RuntimeError: one of them is not.
    """
    reference = gradient(torch.device("cpu"), torch.float64)
    noise = torch.zeros(2**20, device=device)
    generator = torch.Generator(device).manual_seed(1)
    add_gaussian_noise_([noise], noise_stddev=3.0, generator=generator)
    bounds = {"sum_float64": 1e-10, "sum_float32": 1e-4, "noise_scale": 5e-3}
    figures = {"noise_scale": abs(float(noise.double().std()) / 3.0 - 1)}
    for dtype in ("float64", "float32"):
        found = gradient(device, getattr(torch, dtype))
        figures[f"sum_{dtype}"] = float((found - reference).norm() / reference.norm())
    for name, bound in bounds.items():
        if not figures[name] <= bound:
            raise RuntimeError(f"Expected `{name}` within {bound:g}, got {figures[name]:g}.")
    return figures


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per cell and kind of step."""
    shown = Table(title="Median step, peak of the device's memory")
    for column in ("model", "B x T", "dtype", "step", "ms", "GiB used", "GiB held"):
        shown.add_column(column, no_wrap=True)
    for row in rows:
        dtype = {"float32": "fp32", "bfloat16": "bf16"}[row["dtype"]]
        figures = (row.get(key) for key in ("ms", "allocated_gib", "reserved_gib"))
        shown.add_row(
            row["shape"],
            f"{row['batch_size']} x {row['length']}",
            dtype + (" ckpt" if row["checkpointing"] else ""),
            row["step"],
            *("-" if figure is None else f"{figure:.1f}" for figure in figures),
        )
    return shown


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """One line per cell that gave no time."""
    failed = (row for row in rows if "failed" in row)
    return [f"{row['shape']}, {row['dtype']}, {row['step']}: {row['failed']}" for row in failed]


def main() -> None:
    """Prints a table, and writes everything as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--num_steps", type=int, default=3)
    parser.add_argument("--max_seconds", type=float, default=450, help="start no cell after that")
    parser.add_argument("--output", metavar="FILE.json")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device, start = torch.device(options.device), time.perf_counter()

    report: dict[str, Any] = {"torch": torch.__version__, "correctness": correctness(device)}
    rows: list[dict[str, Any]] = []
    kinds = [k for k in KINDS if k != "opacus" or importlib.util.find_spec("opacus")]
    for cell in SMALL_CELLS if options.small else CELLS:
        for kind in kinds:
            if time.perf_counter() - start < options.max_seconds:
                rows.append(measured(cell, kind, device, options.num_steps))
    report["steps"] = rows
    if device.type == "cuda" and time.perf_counter() - start < options.max_seconds:
        report["largest_batches"] = largest_batches(device)
    Console().print(table(rows), *failures(rows), sep="\n")
    text = json.dumps(report)
    if options.output:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
