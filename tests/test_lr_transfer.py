"""The study of widths, at a size that is quick: rates move less under DP-muP, and runs resume."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    """The study sets what is global to a process."""
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    yield
    torch.set_num_threads(threads)
    logging.set_verbosity(verbosity)


def study(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "scripts" / "lr_transfer.py"
    monkeypatch.setattr("sys.argv", [str(script), *words])
    monkeypatch.setattr("sys.path", [str(script.parent), *sys.path])
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
def test_quick_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--processes", "1", "--output_dir", str(tmp_path)]
    study(words, monkeypatch)
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    drift = found["small mlp/DP-Adam"]
    assert abs(drift["drift_dpmup"]) <= 0.5
    assert drift["drift_sp"] < drift["drift_dpmup"] - 0.5
    assert (tmp_path / "small mlp.png").read_bytes().startswith(b"\x89PNG")
    runs = (tmp_path / "runs.csv").read_text()
    study(words, monkeypatch)  # nothing is run twice
    assert (tmp_path / "runs.csv").read_text() == runs
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == found


def test_unknown_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        study(["--only", "nothing", "--output_dir", str(tmp_path)], monkeypatch)
