"""Where results may decide on a step, all steps count; what was true of a run stays on record.

Covers: hf/choices.py.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from conftest_trainer import MakeTrainer, examples
from families import CLASSIFY, make_model
from transformers import TrainerCallback


def recorded(folder: Any) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((Path(folder) / "privacy.json").read_text())
    return record


def steps(folder: Any) -> tuple[int, int]:
    record = recorded(folder)
    return record["steps_done"], record["steps_counted"]


def fresh(trial: Any = None) -> Any:
    return make_model("roberta", CLASSIFY).float()


class Scores:
    """A metric that takes given values, one per evaluation."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def __call__(self, prediction: Any) -> dict[str, float]:
        return {"score": self.values.pop(0)}


def scored(*values: float) -> dict[str, Any]:
    return {"eval_dataset": examples(6), "compute_metrics": Scores(*values)}


STEPWISE = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


# ---- Which checkpoint is kept ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"save_strategy": "best", "metric_for_best_model": "score"},
        {"load_best_model_at_end": True, "metric_for_best_model": "score"},
        {"save_total_limit": 1, "metric_for_best_model": "score"},  # keeps the best one, too
    ],
)
def test_checkpoints_that_results_keep_count_in_full(
    make_trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    trainer = make_trainer(more=scored(0.1, 0.8, 0.3, 0.2), **{**STEPWISE, **options})
    trainer.train()
    best = Path(trainer.args.output_dir) / "checkpoint-2"
    assert steps(best) == (2, 4)
    assert recorded(best)["epsilon"] == trainer.plan.epsilon(4) > trainer.plan.epsilon(2)
    assert recorded(best)["tuning"]["chosen_by_validation_data"] == ["the best checkpoint"]
    logged = [log["epsilon"] for log in trainer.state.log_history if "epsilon" in log]
    assert logged and set(logged) == {trainer.plan.epsilon(4)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_total_limit": 1, "metric_for_best_model": None},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "score"},
    ],
)
def test_checkpoints_of_fixed_steps_count_their_own(
    make_trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    # Rates that depend on results do not change what a step releases.
    trainer = make_trainer(more=scored(0.1, 0.8, 0.3, 0.2), **{**STEPWISE, **options})
    seen: list[tuple[int, int]] = []

    class Read(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(steps(f"{args.output_dir}/checkpoint-{state.global_step}"))

    trainer.add_callback(Read())
    trainer.train()
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]


# ---- When a run ends ---------------------------------------------------------------------------


class End(TrainerCallback):
    """Ends a run at an evaluation, in one way or another."""

    def __init__(self, how: str, step: int = 2) -> None:
        self.how, self.step = how, step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "crash":
            raise RuntimeError("out of memory")
        setattr(control, self.how, True)


@pytest.mark.parametrize("how", ["interrupt", "crash", "should_training_stop", "should_epoch_stop"])
def test_a_run_that_ends_early_counts_in_full(make_trainer: MakeTrainer, how: str) -> None:
    trainer = make_trainer(more={**scored(0, 0, 0, 0), "callbacks": [End(how)]}, **STEPWISE)
    if how in ("interrupt", "crash"):
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            trainer.train()
    else:
        trainer.train()
        # Saved at that step, when it was clear that no other would follow.
        assert steps(Path(trainer.args.output_dir) / "checkpoint-2") == (2, 4)
        assert trainer.state.log_history[-1]["epsilon"] == trainer.plan.epsilon(4)
    trainer.save_model()
    assert steps(trainer.args.output_dir) == (2, 4)
    assert recorded(trainer.args.output_dir)["epsilon"] == trainer.plan.epsilon(4)
    assert steps(Path(trainer.args.output_dir) / "checkpoint-1") == (1, 1)


@pytest.mark.parametrize("sigma", [1.0, 0.0])
def test_scripts_print_the_epsilon_of_the_record(
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sigma: float,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    script_data = importlib.import_module("script_data")
    more = {**scored(0, 0), "callbacks": [End("should_training_stop")]}
    trainer = make_trainer(more=more, noise_multiplier=sigma, allow_zero_noise=True, **STEPWISE)
    trainer.train()
    script_data.report(trainer, {})
    printed = capsys.readouterr().out
    assert f"epsilon={trainer.plan.epsilon(4):.4g} at delta=0.001 model and card in" in printed


def test_a_run_of_all_its_steps_counts_them(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(num_train_epochs=2, max_steps=-1)
    trainer.train()
    record = trainer.privacy_record()
    assert record["steps_done"] == record["steps_counted"] == trainer.plan.num_steps == 8


# ---- Resuming ----------------------------------------------------------------------------------


def test_what_was_not_private_before_a_checkpoint_stays_so(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(
        unsafe_test_seed=7,
        log_non_private_metrics=True,
        num_tuning_trials=5,
        validation_data_is_private=True,
        **saves,
    ).train()
    for step in (2, 4):  # the record of a resumed run is continued likewise
        trainer = make_trainer(unsafe_test_seed=None, num_tuning_trials=1, **saves)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"out/checkpoint-{step}"))
    record = trainer.privacy_record()
    assert record["projection"]["randomness"] == "FIXED TEST SEED: NOT PRIVATE"
    assert record["raw_metrics_were_logged"] is True
    assert record["tuning"]["num_tuning_trials"] == 5
    assert record["tuning"]["validation_data_is_private"] is True
    trainer.create_model_card()
    card = (tmp_path / "out/README.md").read_text()
    assert "It gives no privacy at all." in card and "Raw training losses or metrics were" in card


def test_a_private_checkpoint_resumed_with_a_fixed_seed_is_not_private(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make_trainer(unsafe_test_seed=None, save_strategy="steps", save_steps=2).train()
    trainer = make_trainer(unsafe_test_seed=7)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert "NOT PRIVATE" in trainer.privacy_record()["projection"]["randomness"]


def test_earlier_runs_are_still_added_up_after_a_resume(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "more": {"model_init": fresh}}
    trainer = make_trainer(noise_multiplier=0.75, **saves)
    trainer.train()
    trainer.args.noise_multiplier = 1.5
    trainer.train()
    spent = trainer.privacy_record()["tuning"]["all_runs"]
    assert spent["num_runs"] == 2
    trainer = make_trainer(noise_multiplier=1.5, **saves)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    record = trainer.privacy_record()
    assert record["tuning"]["all_runs"] == spent
    assert record["tuning"]["chosen_by_validation_data"] == []
    trainer.train()  # a fresh model, and a third run
    assert trainer.privacy_record()["tuning"]["all_runs"]["num_runs"] == 3


def test_several_runs_compose_and_are_no_choice_by_validation_data(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(max_steps=2, more={"model_init": fresh})
    trainer.train()
    trainer.train()
    record = trainer.privacy_record()
    assert record["tuning"]["chosen_by_validation_data"] == []
    assert "Evaluation data decide" not in caplog.text
    spent = record["tuning"]["all_runs"]
    assert spent["num_runs"] == 2
    assert spent["epsilon_by_accountant"]["pld"] > record["epsilon"]


def test_a_run_that_results_may_stop_does_so_when_resumed(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    best = {"save_strategy": "best", "metric_for_best_model": "score"}
    make_trainer(more=scored(0.1, 0.8, 0.3, 0.2), **{**STEPWISE, **best}).train()
    trainer = make_trainer(save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert steps(tmp_path / "out/checkpoint-3") == (3, 4)
    assert trainer.privacy_record()["tuning"]["chosen_by_validation_data"] == [
        "the best checkpoint"
    ]


def test_steps_are_not_repeated_in_the_same_trainer(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(save_strategy="steps", save_steps=1)
    trainer.train()
    with pytest.raises(ValueError, match=r"taken 4 steps, so continuing after step 1 would releas"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-1"))
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    assert trainer.privacy_record()["steps_done"] == 4


def test_a_refused_plan_does_not_reach_the_record(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(save_strategy="steps", save_steps=4)
    trainer.train()
    before = trainer.privacy_record()
    trainer.args.noise_multiplier = 50.0
    with pytest.raises(ValueError, match="must keep its privacy plan"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    assert trainer.privacy_record() == before


def test_folders_of_two_steps_are_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_strategy="steps", save_steps=2).train()
    old, new = (tmp_path / f"out/checkpoint-{step}" for step in (2, 4))
    (new / "trainer_state.json").write_bytes((old / "trainer_state.json").read_bytes())
    with pytest.raises(ValueError, match=r"record is of step 4 and `trainer_state.json` of anothe"):
        make_trainer().train(resume_from_checkpoint=str(new))


def test_weights_of_a_checkpoint_are_not_trained_as_new_ones(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make_trainer(save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "out/checkpoint-2"

    class Refuse(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("not now")

    trainer = make_trainer(more={"callbacks": [Refuse]})
    with pytest.raises(RuntimeError, match="not now"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer.remove_callback(Refuse)
    with pytest.raises(ValueError, match=r"already spent epsilon=.* in 2 steps"):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 4
