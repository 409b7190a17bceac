"""Peak memory of whole private training steps, of the process that runs them.

Each cell is a model shape, batch and precision; two steps with AdamW are run, optimizer state and
noise included, and the peak resident set of the whole process is read from the system.

    python benchmarks/peak_memory.py --cell roberta-large-fp32-ckpt
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass

import torch
import transformers
from rich.console import Console
from rich.table import Table
from workloads import make_inputs, make_model, private_training_step


@dataclass(frozen=True)
class Cell:
    """One measured configuration."""

    shape: str
    batch_size: int
    length: int
    rank: int
    dtype: str = "float32"
    checkpointing: bool = False


CELLS = {
    "roberta-large-fp32-ckpt": Cell("roberta-large", 40, 128, 16, checkpointing=True),
    "roberta-large-bf16": Cell("roberta-large", 40, 128, 16, dtype="bfloat16"),
    "opt-1.3b-fp32": Cell("opt-1.3b", 4, 128, 16),
    "opt-6.7b-bf16": Cell("opt-6.7b", 1, 128, 64, dtype="bfloat16"),
}


def peak_gib() -> float:
    """Largest resident set of this process so far, in GiB."""
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def return_freed_memory() -> None:
    """Makes glibc hand freed tensors back to the system at once.

    Otherwise the resident set is that of a fragmented heap (measured: 9.3 GiB where 3 are in use),
    which depends on the order of allocations more than on what is needed. Has no effect on GPUs.
    """
    if sys.platform == "linux":
        m_mmap_threshold = -3
        ctypes.CDLL("libc.so.6").mallopt(m_mmap_threshold, 2**18)


def main() -> None:
    """Runs one cell; prints a table, and the figures as one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cell", choices=list(CELLS), required=True)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    cell = CELLS[options.cell]
    return_freed_memory()

    start = time.perf_counter()
    model = make_model(cell.shape, getattr(torch, cell.dtype))
    if cell.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
    built = peak_gib()
    inputs = make_inputs(model, cell.batch_size, cell.length)
    run = private_training_step(model, inputs, rank=cell.rank)
    peaks = []
    for _ in range(options.steps):
        run()
        peaks.append(peak_gib())
    figures = {
        "cell": options.cell,
        **asdict(cell),
        "weights_gib": weights,
        "built_gib": built,
        "peak_gib": peaks[-1],
        "seconds": time.perf_counter() - start,
    }
    table = Table(title=f"Peak resident set of the process, {options.steps} private steps")
    for column in ("cell", "weights", "after building", "after step 1", "at the end"):
        table.add_column(column)
    sizes = (weights, built, peaks[0], peaks[-1])
    table.add_row(options.cell, *(f"{size:.2f} GiB" for size in sizes))
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
