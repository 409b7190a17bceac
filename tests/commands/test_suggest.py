"""`hf-dpgrape suggest`: a table of 80 columns, a preset that scripts run, one-sentence errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from hf_dpgrape import DPGrapeTrainingArguments, parse_arguments
from hf_dpgrape.commands.cli import main
from hf_dpgrape.hf.suggestions import suggest

BUDGET = {"num_examples": 900, "target_epsilon": 3.0, "target_delta": 1e-5}


def words(*more: str, **changes: object) -> list[str]:
    pairs = ([f"--{name}", str(value)] for name, value in {**BUDGET, **changes}.items())
    return ["suggest", *(word for pair in pairs for word in pair), *more]


def config(folder: Path, **changes: object) -> str:
    sizes = {"hidden_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {**sizes, "intermediate_size": 60, "vocab_size": 70, **changes}
    AutoConfig.for_model("roberta", **settings).save_pretrained(folder)
    return str(folder / "config.json")


def test_table_reasons_and_preset_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words()) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    found = suggest(**BUDGET)  # type: ignore[arg-type]
    told = " ".join(shown.split())
    for reason in found.reasons:
        assert f"* {' '.join(reason.split())}" in told
    assert f"expected_batch_size: {found.expected_batch_size}\n" in shown


def test_json_has_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("--json")) == 0
    found = suggest(**BUDGET)  # type: ignore[arg-type]
    report = json.loads(capsys.readouterr().out)
    assert report["arguments"] == found.arguments()
    assert report["noise_multiplier"] == found.noise_multiplier
    assert report["reasons"] == list(found.reasons)


def test_the_preset_is_what_scripts_take(tmp_path: Path) -> None:
    file = tmp_path / "suggested.yaml"
    assert main(words("--output", str(file), target_delta=1e-6)) == 0
    line = [str(file), "--output_dir", str(tmp_path), "--use_cpu"]
    (args,) = parse_arguments([DPGrapeTrainingArguments], line)
    found = suggest(num_examples=900, target_epsilon=3.0, target_delta=1e-6)
    assert (args.target_epsilon, args.target_delta) == (3.0, 1e-6)
    assert {name: getattr(args, name) for name in found.arguments()} == found.arguments()


def test_a_little_signal_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(num_examples=50, target_epsilon=0.3)) == 0
    assert "Warning: Expect the majority class: 50 examples at" in capsys.readouterr().out


def test_the_model_says_whether_there_is_a_new_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = config(tmp_path, architectures=["RobertaForMaskedLM"])
    for task, has_head in (("sequence-classification", True), ("auto", False)):
        assert main(words("--json", "--task", task, "--model", model)) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["head_learning_rate"] is not None) == has_head
        assert ("with the head alone" in report["reasons"][-1]) == has_head
    for task, has_head in (("causal-lm", False), ("token-classification", True)):
        assert main(words("--json", "--task", task)) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["head_only_steps"] > 0) == has_head


def test_hours_bound_the_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    # Half an hour, in which an epoch of ten minutes passes three times.
    assert main(words("--json", "--max_hours", "0.5", "--seconds_per_epoch", "600")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_epochs"] <= 3
    assert report["arguments"] == suggest(**BUDGET, max_epochs=3.0).arguments()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (words(num_examples=0), "A run needs one example or more, .* got `num_examples`=0"),
        (words(target_epsilon=0), "`target_epsilon` must be positive and finite"),
        (words(target_delta=2), "`target_delta` between 0 and 1, got 3 and 2"),
        (words("--max_hours", "2"), "both of `max_hours` and `seconds_per_epoch`, .*the former al"),
        (words("--seconds_per_epoch", "2"), "both of `max_hours` .*the latter alone"),
        (words("--max_hours", "0", "--seconds_per_epoch", "2"), "`max_hours` must be positive"),
        (words("--task", "chess"), "`task` must be auto or one of .*got 'chess'"),
        (words("--output", "preset.txt"), "`output` must end in .yaml"),
        (words("--model", "no/such/folder/at/all"), "Expected a model folder, a config.json"),
    ],
)
def test_wrong_input_is_one_sentence(
    line: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("hf-dpgrape suggest: ") and re.search(reason, said)
