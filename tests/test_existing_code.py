"""Programs written for `transformers.Trainer` train privately after the documented change.

The change is the two lines in `PRIVATE_LINES`: another import, and the privacy arguments.
"""

from __future__ import annotations

import csv
import difflib
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from families import CAUSAL, CLASSIFY
from safetensors.torch import load_file
from test_scripts import WORDS, save_model

PROGRAMS = Path(__file__).parent / "existing_code"

#: Line of the program, and what takes its place.
PRIVATE_LINES = {
    "from transformers import Trainer, TrainingArguments": (
        "from hf_dpgrape import DPGrapeTrainer as Trainer, "
        "DPGrapeTrainingArguments as TrainingArguments"
    ),
    "    training_args = TrainingArguments(": (
        "    training_args = TrainingArguments(target_epsilon=3.0, target_delta=1e-2,"
    ),
}


def made_private(program: str) -> str:
    """The program after the documented change."""
    for line, private_line in PRIVATE_LINES.items():
        assert program.count(f"{line}\n") == 1
        program = program.replace(f"{line}\n", f"{private_line}\n")
    return program


@pytest.fixture(params=["train_classifier", "train_language_model"])
def program(request: pytest.FixtureRequest) -> Path:
    return PROGRAMS / f"{request.param}.py"


@pytest.fixture
def arguments(program: Path, tmp_path: Path) -> list[str]:
    """Model, file and output folder."""
    causal = program.stem == "train_language_model"
    family, head = ("gpt2", CAUSAL) if causal else ("bert", CLASSIFY)
    texts = [" ".join(WORDS[i % 19 : i % 19 + 2 + i % 5]) for i in range(32)]
    file = tmp_path / "data.csv"
    with file.open("w", newline="") as stream:
        lines = [[text] if causal else [text, i % 3] for i, text in enumerate(texts)]
        csv.writer(stream).writerows(lines if causal else [["sentence", "label"], *lines])
    return [str(save_model(tmp_path / "model", family, head)), str(file), str(tmp_path / "out")]


def run(program: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.argv", [str(program), *arguments])
    monkeypatch.setenv("HF_HOME", str(Path(arguments[2]) / "cache"))
    runpy.run_path(str(program), run_name="__main__")
    return Path(arguments[2])


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "eval_results.json").read_text())


def test_as_it_is(program: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(program, arguments, monkeypatch)
    assert not (folder / "privacy.json").exists()
    assert "eval_loss" in results(folder)
    assert json.loads((folder / "train_results.json").read_text())["train_loss"] > 0


def test_made_private(
    program: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = program.read_text()
    changed = tmp_path / program.name
    changed.write_text(made_private(before))
    difference = difflib.ndiff(before.splitlines(), changed.read_text().splitlines())
    assert sum(line.startswith("+ ") for line in difference) == 2

    folder = run(changed, arguments, monkeypatch)
    record = json.loads((folder / "privacy.json").read_text())
    assert 2.9 < record["epsilon"] <= 3
    assert record["steps_done"] == record["plan"]["num_steps"]
    assert record["plan"]["expected_batch_size"] == 8
    assert record["plan"]["num_examples"] == 24
    assert "eval_loss" in results(folder)
    assert "train_loss" not in json.loads((folder / "train_results.json").read_text())
    assert "Not guaranteed" in (folder / "README.md").read_text()
    assert not list(folder.rglob("rng_state*"))
    trained, given = (
        load_file(folder / "model.safetensors"),
        load_file(Path(arguments[0]) / "model.safetensors"),
    )
    assert trained.keys() == given.keys()
    assert sum(bool((trained[name] != given[name]).any()) for name in given) > len(given) / 2
