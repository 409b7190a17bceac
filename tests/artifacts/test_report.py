"""Pictures and reports: the figures of a run and of a plan, and one sentence if they cannot be.

Covers: artifacts/plots.py.
"""

from __future__ import annotations

import base64
import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest_trainer import make_trainer

from hf_dpgrape.artifacts.plots import curve_steps, plot_budget, plot_run
from hf_dpgrape.artifacts.report import RunReport
from hf_dpgrape.commands.cli import main
from hf_dpgrape.privacy.plan import PrivacyPlan

__all__ = ["make_trainer"]

PNG = b"\x89PNG\r\n\x1a\n"
PLAN = PrivacyPlan(
    noise_multiplier=1.4,
    num_examples=701,
    expected_batch_size=90,
    num_steps=24,
    l2_clip_norm=1.0,
    target_delta=1e-4,
)


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


# ---- budget --plot -----------------------------------------------------------------------------


def test_curves_of_a_budget_are_the_accountants() -> None:
    figure = plot_budget(PLAN, "a plan")
    over_steps, over_epsilon = figure.axes
    steps = curve_steps(24)
    assert steps[0] == 0 and steps[-1] == 24
    drawn = lines(over_steps)
    for name in ("pld", "rdp"):
        assert drawn[name.upper()] == (steps, [PLAN.epsilon(s, name) for s in steps])
    spent, sigmas = lines(over_epsilon)["PLD"]
    assert sigmas == sorted(sigmas) and spent == sorted(spent, reverse=True)
    here = sigmas.index(1.4)
    assert spent[here] == PLAN.epsilon()


BUDGET = [
    "budget",
    "--num_examples",
    "701",
    "--expected_batch_size",
    "90",
    "--max_steps",
    "24",
    "--noise_multiplier",
    "1.4",
    "--target_delta",
    "1e-4",
    "--json",
    "--plot",
]


def test_budget_draws_beside_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "budget.png"
    assert main([*BUDGET, str(path)]) == 0
    assert path.read_bytes().startswith(PNG)
    assert json.loads(capsys.readouterr().out)["noise_multiplier"]["pld"] == 1.4


@pytest.mark.parametrize("name", ["gone/budget.png", "budget.poem"])
def test_pictures_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main([*BUDGET, str(tmp_path / name)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "cannot be written" in output.err and "budget" in output.err


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.usefixtures("without_matplotlib")
def test_missing_matplotlib_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BUDGET, str(tmp_path / "budget.png")]) == 2
    assert capsys.readouterr().err == (
        "hf-dpgrape budget: `plot` needs matplotlib; install `hf-dpgrape[plots]`.\n"
    )


# ---- report ------------------------------------------------------------------------------------


@pytest.fixture
def folder(make_trainer: Any, tmp_path: Path) -> Path:
    """What a run with evaluations and raw losses in its logs leaves behind."""
    from conftest_trainer import examples

    def metrics(prediction: Any) -> dict[str, float]:
        return {
            "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
        }

    trainer = make_trainer(
        max_steps=6,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
        log_non_private_metrics=True,
        more={"eval_dataset": examples(9), "compute_metrics": metrics},
    )
    trainer.train()
    return tmp_path / "out"


def test_report_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    report = RunReport(folder)  # of the last checkpoint, as nothing was saved in the folder itself
    assert [row["step"] for row in answer["evaluations"]] == [2, 4, 6]
    for row in answer["evaluations"]:
        assert row["epsilon"] == report.plan.epsilon(row["step"])
        assert set(row) == {"step", "epsilon", "loss", "accuracy"}

    page = (folder / "report.html").read_text()
    assert answer["file"] == str(folder / "report.html")
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(picture).startswith(PNG)
    # One file, which loads nothing.
    assert not re.findall(r"(?:src|href)=(?!\"data:)|<script|https?://", page)
    assert f"epsilon <b>{report.record['epsilon']:.4g}</b>" in page
    assert "neighboring relation" in page and "not stated" in page
    raw = [log["non_private_loss"] for log in report.logs if "non_private_loss" in log]
    assert raw and not [loss for loss in raw if str(loss) in page or f"{loss:.4g}" in page]


def test_report_of_one_checkpoint(folder: Path) -> None:
    report = RunReport(folder / "checkpoint-3")
    assert report.record["steps_done"] == 3
    assert [row["step"] for row in report.rows()] == [2]


def test_report_of_a_run_in_which_results_chose(make_trainer: Any, tmp_path: Path) -> None:
    from conftest_trainer import examples

    trainer = make_trainer(
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        metric_for_best_model="score",
        more={"eval_dataset": examples(9)},
    )
    trainer.compute_metrics = lambda prediction: {"score": -trainer.state.global_step}
    trainer.train()
    report = RunReport(tmp_path / "out" / "checkpoint-2")
    assert [row["epsilon"] for row in report.rows()] == [report.plan.epsilon(6)]
    report.write(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "2 of 6 planned; epsilon counts all 6" in page


def test_report_without_noise_is_valid_json(
    make_trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from conftest_trainer import examples

    trainer = make_trainer(
        max_steps=2,
        noise_multiplier=0.0,
        allow_zero_noise=True,
        eval_strategy="steps",
        eval_steps=2,
        more={"eval_dataset": examples(9)},
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "out"), "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [row["epsilon"] for row in answer["evaluations"]] == [None]


def test_report_as_picture(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    assert main(["report", str(folder), "--output", str(path)]) == 0
    assert path.read_bytes().startswith(PNG)


def test_panels_of_a_run() -> None:
    figure = plot_run(PLAN, 24, {"accuracy": [(8, 0.5), (24, 0.75)], "f1": [(24, 0.25)]})
    accuracy, f1, epsilon = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes[:2]] == ["accuracy", "f1"]
    ((steps, values),) = lines(accuracy).values()
    assert (steps, values) == ([8, 24], [0.5, 0.75])
    assert lines(epsilon)["PLD"][1][-1] == PLAN.epsilon()
    assert len(plot_run(PLAN, 24, {}).axes) == 1
    assert f1.get_lines()[0].get_marker() == "o"  # one value alone can be seen


@pytest.mark.parametrize("missing", ["privacy.json", "trainer_state.json"])
def test_folders_without_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    for path in folder.rglob(missing):
        path.unlink()
    capsys.readouterr()
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"with `{missing}` in it or in a checkpoint" in error and error.count("\n") == 1


def test_names_from_outside_are_escaped(folder: Path) -> None:
    hostile = folder.rename(folder.with_name("<b>x"))
    RunReport(hostile).write(hostile / "report.html")
    page = (hostile / "report.html").read_text()
    assert "<b>x" not in page and "&lt;b&gt;x" in page
