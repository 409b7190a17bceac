"""`scripts/compare_methods.py` on a tiny model and local files."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from families import CLASSIFY
from test_run_glue import RTE, rows, write
from test_scripts import ROOT, run, save_model

SCRIPT = "compare_methods.py"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    file = write(tmp_path / "data.csv", rows())
    model = save_model(tmp_path / "model", "roberta", CLASSIFY)
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"dp-grape": {"rank": 4}, "dp-head": {"rank": 3}}))
    given = {
        "model_name_or_path": model, "train_file": file, "validation_file": file,
        "task_name": RTE["task_name"], "target_delta": 1e-2, "max_steps": 2,
        "per_device_train_batch_size": 4, "expected_batch_size": 8, "epsilons": 3, "seeds": 1,
        "disable_tqdm": True, "dataloader_pin_memory": False, "method_args": own,
        "comparison_dir": tmp_path / "comparison",
    }  # fmt: skip
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def cells(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "comparison" / "cells.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_two_cells_and_one_that_fails(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run(SCRIPT, [*words, "--methods", "dp-grape", "dp-head"], monkeypatch, tmp_path)
    first, failed = cells(tmp_path)
    assert (first["method"], first["epsilon"], first["seed"], first["error"]) == (
        *("dp-grape", "3.0", "1", ""),
    )
    assert float(first["accuracy"]) in {i / 24 for i in range(25)}
    assert 0.5 <= float(first["majority_share"]) <= 1
    assert float(first["seconds"]) > 0 and float(first["peak_mib"]) > 50
    assert failed["error"].startswith("ValueError: `rank=3` does not go with `method=dp-head`")
    folder = tmp_path / "comparison"
    text = (folder / "comparison.md").read_text()
    assert "| dp-grape | 3 | 1 | " in text and "* dp-head, 3, 1: ValueError" in text
    for name in ("accuracy", "seconds"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    run(SCRIPT, [*words, "--methods", "dp-grape", "non-private"], monkeypatch, tmp_path)
    again = cells(tmp_path)
    assert again[:2] == [first, failed]  # nothing is run twice
    assert [row["method"] for row in again[2:]] == ["non-private"]
    assert again[2]["epsilon"] == "inf" and not again[2]["error"]
    with pytest.raises(SystemExit, match=r"Expected the options of the cells in .*, got others"):
        run(SCRIPT, [*words, "--max_steps", "3"], monkeypatch, tmp_path)


def test_unknown_methods_are_one_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"Expected `--methods` of dp-grape, .*, got dp\.$"):
        run(SCRIPT, [*words, "--methods", "dp"], monkeypatch, tmp_path)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("compare_methods_report")


def test_the_table_tells_spread_and_one_answer_for_all(report: Any) -> None:
    def cell(accuracy: float, share: float, error: str = "") -> dict[str, Any]:
        return {
            "accuracy": accuracy,
            "majority_share": share,
            "seconds": 2.0,
            "peak_mib": 9.0,
            "error": error,
        }

    text = report.markdown(
        {
            ("dp-adam", 1.0, 0): cell(0.6, 0.7),
            ("dp-adam", 1.0, 1): cell(0.8, 0.5),
            ("dpzero", 1.0, 0): cell(0.5, 1.0),
            ("dpzero", 1.0, 1): cell(0.9, 0.5, "OSError: gone"),
        }
    )
    assert "| dp-adam | 1 | 2 | 70.0% ± 10.0% | 60.0% | 2.0 | 9 |" in text
    assert "| dpzero | 1 | 1 | 50.0% ± 0.0% | 100.0% (**nearly all**) |" in text
