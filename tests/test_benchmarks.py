"""The benchmarks run, at a size that is quick; what they measure is for a quiet machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, *words: str) -> tuple[str, Any]:
    """What a benchmark prints, and its last line."""
    path = os.pathsep.join(filter(None, (str(BENCHMARKS.parent), os.environ.get("PYTHONPATH"))))
    output = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "80"},
    ).stdout
    return output, json.loads(output.strip().splitlines()[-1])


def test_accelerator(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ("--device", "cpu", "--small", "--num_steps", "1", "--output", str(file))
    shown, figures = run("accelerator.py", *words)
    assert json.loads(file.read_text()) == figures
    assert figures["correctness"]["sum_float64"] < 1e-10
    steps = [row for row in figures["steps"] if row["step"] != "opacus"]
    assert {row["step"] for row in steps} == {"private", "ordinary", "full space"}
    assert len(steps) == 6 and all(math.isfinite(row["ms"]) for row in steps)
    assert "roberta-tiny" in shown and "\u2026" not in shown  # nothing is cut off at 80 columns


def test_step_time_by_either_capture() -> None:
    for capture in ("batched", "single"):
        words = ("--shape", "roberta-tiny", "--batch_size", "2", "--length", "8", "--pairs", "1")
        _, figures = run("step_time.py", *words, "--capture", capture)
        assert figures["capture"] == capture and figures["ratio"] > 0


def test_little_signal() -> None:
    _, figures = run("little_signal.py", "--small")
    assert len(figures["rows"]) == 4
    first = figures["rows"][0]  # with next to no signal
    assert first["signal"] < 10 and first["accuracy"] < 0.6
    assert figures["summary"]["little signal"]["far"] == first["accuracy"]


def test_secure_noise() -> None:
    words = ("--shape", "roberta-tiny", "--batch_size", "2", "--length", "8", "--pairs", "1")
    shown, figures = run("secure_noise.py", *words)
    assert figures["num_coordinates"] > 1000 and 0 < figures["secure_share"] < 1
    assert "roberta-tiny" in shown and "\u2026" not in shown  # nothing is cut off at 80 columns
