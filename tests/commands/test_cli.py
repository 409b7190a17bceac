"""The command line: figures of the library, one sentence for every wrong input.

Covers: commands/budget.py, commands/check.py, hf/models.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from hf_dpgrape.commands.cli import main
from hf_dpgrape.hf.models import build_on_meta
from hf_dpgrape.mechanism.tensors import report_tensors
from hf_dpgrape.privacy.plan import PrivacyPlan, planned_steps

BUDGET = {
    "num_examples": "701",
    "expected_batch_size": "90",
    "num_train_epochs": "3",
    "target_epsilon": "2.3",
    "target_delta": "1e-4",
}


def budget(*flags: str, **changes: str | None) -> list[str]:
    options = {**BUDGET, **changes}
    given = [[f"--{name}", value] for name, value in options.items() if value is not None]
    return ["budget", *(word for pair in given for word in pair), *flags]


def plan(accountant: str, **changes: Any) -> PrivacyPlan:
    numbers: dict[str, Any] = {
        "num_examples": 701,
        "expected_batch_size": 90,
        "num_steps": planned_steps(701, 90, num_train_epochs=3),
        "l2_clip_norm": 1.0,
        "target_delta": 1e-4,
        "accountant": accountant,
    }
    return PrivacyPlan.calibrated(**{**numbers, **changes})


def test_budget_from_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(budget("--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_steps"], report["steps_per_epoch"]) == (24, 8)
    assert report["sampling_prob"] == 90 / 701
    plans = {name: plan(name, target_epsilon=2.3) for name in ("pld", "rdp")}
    assert report["noise_multiplier"] == {n: p.noise_multiplier for n, p in plans.items()}
    assert report["epsilon"] == {n: p.epsilon() for n, p in plans.items()}
    assert [(e["epoch"], e["step"]) for e in report["epochs"]] == [(1, 8), (2, 16), (3, 24)]
    assert [e["epsilon"]["pld"] for e in report["epochs"]] == [
        plans["pld"].epsilon(step) for step in (8, 16, 24)
    ]


def test_budget_of_owners(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(budget("--json", "--examples_per_unit", "1", "3")) == 0
    units = json.loads(capsys.readouterr().out)["units"]
    whole = plan("pld", target_epsilon=2.3)
    assert units == [{"examples": k, "epsilon": whole.unit_epsilon(k)} for k in (1, 3)]
    assert units[0]["epsilon"] == whole.epsilon() < units[1]["epsilon"]
    assert main(budget("--examples_per_unit", "3")) == 0
    assert f"{units[1]['epsilon']:.4f}" in capsys.readouterr().out
    assert main(budget("--examples_per_unit", "0")) == 2
    assert "`examples_per_unit` must be from 1" in capsys.readouterr().err


def test_budget_of_units(capsys: pytest.CaptureFixture[str]) -> None:
    unit = ("--privacy_unit_column", "patient")
    assert main(budget("--json", *unit, "--max_rows_per_unit", "3")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["epsilon"]["pld"] == plan("pld", target_epsilon=2.3).epsilon()
    words = "one value of column `patient` (its rows, at most 3 of them per step, clipped together)"
    assert report["unit_of_privacy"] == words
    assert main(budget(*unit)) == 0
    shown = capsys.readouterr().out
    assert "one value of column `patient`" in shown and "at most 8" in shown
    assert "units" in shown and "examples" not in shown
    assert main(budget("--max_rows_per_unit", "3")) == 2
    assert "`privacy_unit_column` and `max_rows_per_unit` together" in capsys.readouterr().err
    assert main(budget(*unit, "--examples_per_unit", "3")) == 2
    assert "`privacy_unit_column` or `examples_per_unit`, got both" in capsys.readouterr().err
    assert main(budget(*unit, expected_batch_size="702")) == 2
    assert "between 1 and the 701 training units, got 702" in capsys.readouterr().err


def test_budget_from_noise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(budget("--json", target_epsilon=None, noise_multiplier="1.7")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["noise_multiplier"] == {"pld": 1.7, "rdp": 1.7}
    assert report["target_epsilon"] is None
    for name, value in report["epsilon"].items():
        assert value == plan(name, noise_multiplier=1.7).epsilon()
    assert report["epochs"][-1]["epsilon"] == report["epsilon"]


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"max_steps": "5"}, [5]),
        ({"max_steps": "19"}, [8, 16, 19]),
        ({"num_train_epochs": "2.5"}, [8, 16, 20]),
        ({"num_train_epochs": "23"}, [16, 32, 48, 72, 88, 104, 128, 144, 160, 184]),
    ],
)
def test_epochs(
    capsys: pytest.CaptureFixture[str], length: dict[str, str], steps: list[int]
) -> None:
    noise = {"target_epsilon": None, "noise_multiplier": "9", "num_train_epochs": None}
    assert main(budget("--json", **{**noise, **length})) == 0
    report = json.loads(capsys.readouterr().out)
    assert [epoch["step"] for epoch in report["epochs"]] == steps
    assert report["num_steps"] == steps[-1]


def test_budget_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(budget()) == 0
    out = capsys.readouterr().out
    sigma = plan("pld", target_epsilon=2.3).noise_multiplier
    for text in ("24 (8 per epoch)", f"{sigma:.6g}", "PLD", "RDP", "0.128388"):
        assert text in out
    assert "Warning" not in out
    assert main(budget(target_delta="0.01")) == 0
    (warning,) = plan("pld", target_epsilon=2.3, target_delta=0.01).warnings()
    assert f"Warning: {warning}" in " ".join(capsys.readouterr().out.split())
    assert main(budget("--json", target_epsilon="30")) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("Epsilon 30 is above 20")


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        pytest.param({"num_train_epochs": "1e9"}, 2.3, marks=pytest.mark.slow),
        pytest.param(
            {"num_train_epochs": None, "max_steps": "1000000"}, 2.3, marks=pytest.mark.slow
        ),
        pytest.param(
            {"num_train_epochs": None, "max_steps": "1000000", "target_epsilon": "0.01"},
            0.01,
            marks=pytest.mark.slow,
        ),
        ({"target_epsilon": "1000"}, 1000.0),
        ({"expected_batch_size": "701", "max_steps": "1000", "num_train_epochs": None}, 2.3),
        ({"num_examples": "1", "expected_batch_size": "1"}, 2.3),
    ],
)
def test_extreme_budgets_end_and_keep_their_target(
    capsys: pytest.CaptureFixture[str], changes: dict[str, str | None], target: float
) -> None:
    assert main(budget("--json", **changes)) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert output.err == "" and all(0 < spent <= target for spent in report["epsilon"].values())
    spent = [epoch["epsilon"]["pld"] for epoch in report["epochs"]]
    assert spent == sorted(spent)


def test_an_epsilon_whose_exponential_overflows_is_still_bounded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = {"expected_batch_size": "701", "num_train_epochs": None, "max_steps": "100000"}
    assert main(budget("--json", target_epsilon="1000", **whole)) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(epoch["epsilon"]["pld"] <= 1100 for epoch in report["epochs"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_epsilon": "-1"}, "`target_epsilon` must be positive and finite, got -1.0"),
        ({"target_epsilon": "nan"}, "`target_epsilon` must be positive and finite"),
        ({"target_delta": "1"}, "`target_delta` must be between 0 and 1, got 1.0"),
        ({"target_delta": "-0.1"}, "`target_delta` must be between 0 and 1"),
        ({"expected_batch_size": "702"}, "between 1 and the 701 training examples, got 702"),
        ({"expected_batch_size": "0"}, "between 1 and the 701 training examples, got 0"),
        ({"num_examples": "0"}, "between 1 and the 0 training examples"),
        ({"num_train_epochs": "1e308"}, "`num_train_epochs` must be positive and finite"),
        ({"num_train_epochs": "1e20"}, "`num_steps` must be at most 1,000,000,000,000"),
        ({"num_train_epochs": "0"}, "`num_train_epochs` must be positive"),
        ({"num_train_epochs": None, "max_steps": "0"}, "`max_steps` must be one or more, got 0"),
        ({"noise_multiplier": "1"}, "exactly one of `target_epsilon` .*, got both"),
        ({"target_epsilon": None}, "exactly one of `target_epsilon` .*, got neither"),
        ({"target_epsilon": None, "noise_multiplier": "-1"}, "`noise_multiplier` must be zero or"),
        ({"target_epsilon": None, "noise_multiplier": "0"}, "gives no privacy to speak of"),
    ],
)
def test_wrong_budgets_get_one_sentence(
    capsys: pytest.CaptureFixture[str], changes: dict[str, str | None], sentence: str
) -> None:
    assert main(budget(**changes)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert pytest.RaisesExc(ValueError, match=sentence).matches(ValueError(output.err))
    assert output.err.startswith("hf-dpgrape budget: ") and output.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["spend"],
        budget(num_examples="many"),
        budget(max_steps="3"),
        budget(num_train_epochs=None),
        budget(target_delta=None),
    ],
)
def test_unreadable_words_are_refused_by_argparse(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2


SIZES: dict[str, Any] = {
    "roberta": {
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "vocab_size": 53,
        "max_position_embeddings": 37,
        "architectures": ["RobertaForMaskedLM"],
    },
    "resnet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 12],
        "depths": [1, 1],
        "architectures": ["ResNetForImageClassification"],
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two folders with nothing but a config.json."""
    for model_type, sizes in SIZES.items():
        AutoConfig.for_model(model_type, **sizes).save_pretrained(tmp_path / model_type)
    return tmp_path


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["check", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_check_lists_what_the_engine_reports(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = check(capsys, str(folder / "roberta" / "config.json"), "--rank", "5")
    assert code == 0 and report["architecture"] == "RobertaForMaskedLM" and report["has_loss"]
    model = build_on_meta(AutoConfig.from_pretrained(folder / "roberta"))
    rows = report_tensors(model, rank=5, head=frozenset())
    assert [t["name"] for t in report["tensors"]] == [row.name for row in rows]
    assert [t["projected_shape"] for t in report["tensors"]] == [
        list(row.projected_shape) for row in rows
    ]
    assert report["num_parameters"] == sum(p.numel() for p in model.parameters())
    by_name = {t["name"]: t for t in report["tensors"]}
    tied = by_name["roberta.embeddings.word_embeddings.weight"]
    assert (tied["shape"], tied["projected_shape"]) == ([53, 24], [53, 5])
    assert tied["rule"] == "EmbeddingRule + LinearRule"
    assert report["num_floats_per_sample"] < report["num_parameters"] / 2
    assert report["num_projected_parameters"] < report["num_parameters"]


def test_check_takes_a_missing_head_for_new(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(folder / "roberta")
    _, report = check(capsys, source, "--task", "sequence-classification", "--rank", "5")
    assert report["head"] == sorted(
        f"classifier.{layer}.{kind}"
        for layer in ("dense", "out_proj")
        for kind in ("weight", "bias")
    )
    shapes = {t["name"]: (t["shape"], t["projected_shape"]) for t in report["tensors"]}
    assert shapes["classifier.dense.weight"] == ([24, 24], [24, 24])
    _, report = check(capsys, source, "--rank", "5", "--head_modules", "lm_head")
    assert all(name.startswith("lm_head.") for name in report["head"]) and report["head"]


def test_full_space(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = check(capsys, str(folder / "roberta"), "--rank", "0")
    assert report["num_projected_parameters"] == 0
    assert report["num_floats_per_sample"] == report["num_parameters"]


def test_check_refuses_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capsys, str(folder / "resnet"))
    assert code == 1
    assert "resnet.embedder.embedder.normalization" in report["refused"]
    assert all("BatchNorm2d mixes the samples" in reason for reason in report["refused"].values())
    assert not any("normalization" in t["name"] for t in report["tensors"])


@pytest.mark.parametrize(("name", "code"), [("roberta", 0), ("resnet", 1)])
def test_check_tables(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["check", str(folder / name)]) == code
    out = capsys.readouterr().out
    assert "floats per sample" in out and SIZES[name]["architectures"][0] in out
    assert ("Refused: freeze or replace it" in out) == bool(code)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere/nothing"], "Expected a model folder, a config.json or the name of a model"),
        (["{folder}/gone"], "Expected a model folder, a config.json .*, got '.*gone'"),
        (["{folder}"], "Expected a model folder, a config.json"),
        (["{folder}/roberta", "--task", "poetry"], "`task` must be auto or one of .*'poetry'"),
        (["{folder}/resnet", "--task", "causal-lm"], "head for the task 'causal-lm', got 'resnet'"),
        (["{folder}/roberta", "--rank", "-2"], "`rank` must be 0 .*, got -2"),
        (
            ["{folder}/roberta", "--head_modules", "tail"],
            "`head_modules` to .*'tail', which matches none",
        ),
    ],
)
def test_wrong_models_get_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["check", *(word.format(folder=folder) for word in words)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert pytest.RaisesExc(ValueError, match=sentence).matches(ValueError(output.err))
    assert output.err.startswith("hf-dpgrape check: ") and output.err.count("\n") == 1


def test_config_without_architecture_needs_a_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {**SIZES["roberta"], "architectures": None}
    AutoConfig.for_model("roberta", **sizes).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path)]) == 2
    assert "choose a `--task` out of causal-lm" in capsys.readouterr().err
    assert main(["check", str(tmp_path), "--task", "token-classification"]) == 0


def test_check_says_what_is_trained_one_example_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {**SIZES["roberta"], "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    sizes["architectures"] = ["DebertaV2ForMaskedLM"]
    AutoConfig.for_model("deberta-v2", **sizes).save_pretrained(tmp_path / "deberta")
    code, report = check(capsys, str(tmp_path / "deberta"))
    assert code == 0 and not report["refused"]
    assert report["rehearsal"].startswith("one example at a time: `")
    assert "pos_key_proj" in report["rehearsal"]
    assert any("pos_key_proj" in tensor["name"] for tensor in report["tensors"])
    code, report = check(capsys, str(tmp_path / "deberta"), "--no_rehearsal")
    assert code == 0 and report["rehearsal"] == "not done"


def test_check_compares_with_one_backward_per_example(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = check(capsys, str(folder / "roberta"))
    assert report["rehearsal"].startswith("exact within ")


def test_budget_with_a_bound_on_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = budget("--max_logical_batch_size", "120")
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    p = plan("pld", target_epsilon=2.3, max_logical_batch_size=120)
    assert report["epsilon"] == {"pld": p.epsilon()}
    assert report["sampling"] == p.sampling.describe()
    assert main(words) == 0
    assert "cut at random to at most 120 examples" in capsys.readouterr().out
