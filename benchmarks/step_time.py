"""Time of a private step against an ordinary fine-tuning step of the same model.

Both kinds of step run in turn in one process, so that a drifting machine speed meets both alike;
the ratio of their CPU times is taken pair by pair, and the median reported.

    python benchmarks/step_time.py --shape roberta-base
    python benchmarks/step_time.py --shape mixtral-small --batch_size 8 --capture single
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable

import transformers
from rich.console import Console
from rich.table import Table
from workloads import (
    SHAPES,
    make_inputs,
    make_model,
    ordinary_training_step,
    private_training_step,
)


def cpu_seconds(run: Callable[[], None]) -> float:
    """CPU time of all threads of this process during one call."""
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    """Prints a table, and the figures as one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="roberta-base")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128, help="tokens per example")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--capture", choices=("batched", "single"), default="batched")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()

    private_model, ordinary_model = make_model(options.shape), make_model(options.shape)
    inputs = make_inputs(private_model, options.batch_size, options.length)
    private = private_training_step(
        private_model, inputs, rank=options.rank, capture=options.capture
    )
    ordinary = ordinary_training_step(ordinary_model, inputs)
    private(), ordinary()  # warm-up: optimizer state, allocator
    pairs = [(cpu_seconds(private), cpu_seconds(ordinary)) for _ in range(options.pairs)]
    ratios = [a / b for a, b in pairs]
    figures = {
        "shape": options.shape,
        "batch_size": options.batch_size,
        "length": options.length,
        "rank": options.rank,
        "capture": options.capture,
        "private_cpu_seconds": statistics.median(a for a, _ in pairs),
        "ordinary_cpu_seconds": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
    table = Table(title="Private step against an ordinary AdamW step (CPU time, medians)")
    for column in ("shape", "private", "ordinary", "ratio", "min .. max"):
        table.add_column(column)
    table.add_row(
        options.shape,
        f"{figures['private_cpu_seconds']:.2f} s",
        f"{figures['ordinary_cpu_seconds']:.2f} s",
        f"{figures['ratio']:.3f}",
        f"{min(ratios):.3f} .. {max(ratios):.3f}",
    )
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
