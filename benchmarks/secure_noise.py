"""How much of a private step secure noise takes, beside the noise of torch's generators.

Steps of both kinds and draws of both kinds alternate in one process; CPU times, medians.

    python benchmarks/secure_noise.py
    python benchmarks/secure_noise.py --shape gpt2 --batch_size 8 --rank 64
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from workloads import SHAPES, make_inputs, make_model, private_training_step

from hf_dpgrape.mechanism.tensors import projected_shapes
from hf_dpgrape.privacy.cipher import CipherStream
from hf_dpgrape.privacy.noise import add_gaussian_noise_
from hf_dpgrape.privacy.randomness import SecretSource
from hf_dpgrape.privacy.secure_noise import add_secure_noise_


def cpu_seconds(run: Callable[[], None]) -> float:
    """CPU time of all threads of this process during one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def floating(sums: list[Tensor]) -> None:
    """One release's noise, as drawn by default."""
    add_gaussian_noise_(sums, noise_stddev=1.0, generator=SecretSource().generator())


def secure(sums: list[Tensor]) -> None:
    """One release's noise with `secure_noise`."""
    stream = CipherStream(secrets.token_bytes(32))
    add_secure_noise_(sums, noise_multiplier=1.0, l2_clip_norm=1.0, stream=stream)


def main() -> None:
    """Prints a table, and the figures as one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="roberta-base")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128, help="tokens per example")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()

    model = make_model(options.shape)
    shapes = projected_shapes(model, rank=options.rank, head=frozenset())
    sums = [torch.zeros(shape) for shape in shapes.values()]
    inputs = make_inputs(model, options.batch_size, options.length)
    step = private_training_step(model, inputs, rank=options.rank)
    step(), floating(sums), secure(sums)  # warm-up: optimizer state, tables, allocator
    rows = [
        (
            cpu_seconds(step),
            cpu_seconds(lambda: floating(sums)),
            cpu_seconds(lambda: secure(sums)),
        )
        for _ in range(options.pairs)
    ]
    whole, float_, exact = (statistics.median(column) for column in zip(*rows, strict=True))
    figures = {
        "shape": options.shape,
        "batch_size": options.batch_size,
        "length": options.length,
        "rank": options.rank,
        "num_coordinates": sum(tensor.numel() for tensor in sums),
        "step_cpu_seconds": whole,
        "floating_cpu_seconds": float_,
        "secure_cpu_seconds": exact,
        "secure_share": exact / (whole - float_ + exact),
    }
    table = Table(title="Noise of one private step (CPU time, medians)")
    for column in ("shape", "coordinates", "step", "floating", "secure", "share of a step"):
        table.add_column(column)
    table.add_row(
        options.shape,
        f"{figures['num_coordinates']:,}",
        f"{whole:.3f} s",
        f"{float_:.4f} s",
        f"{exact:.4f} s",
        f"{figures['secure_share']:.1%}",
    )
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
