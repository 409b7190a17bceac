"""What comes with a Trainer: callbacks, best checkpoints, searches, own optimizers, the bar.

Covers: hf/callbacks.py, hf/given_optimizer.py.
"""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import dp_accounting
import optuna
import pytest
import torch
from conftest_trainer import MakeTrainer, examples
from dp_accounting import pld
from families import CLASSIFY, make_model
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_dpgrape.hf.callbacks import EpsilonProgressCallback

optuna.logging.set_verbosity(optuna.logging.WARNING)

WARNING = "epsilon does not cover that choice"


def best(**changes: Any) -> dict[str, Any]:
    """Evaluation and saving at every step, and the best checkpoint at the end."""
    return {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        **changes,
    }


class Scores:
    """A metric that takes given values, one per evaluation."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def __call__(self, prediction: Any) -> dict[str, float]:
        return {"score": self.values.pop(0)}


def tuned(*values: float, callbacks: list[Any] | None = None) -> dict[str, Any]:
    return {
        "eval_dataset": examples(6),
        "compute_metrics": Scores(*values),
        "callbacks": callbacks or [],
    }


def card_of(trainer: Any) -> str:
    trainer.create_model_card()
    return (Path(trainer.args.output_dir) / "README.md").read_text()


# ---- Choices by validation data ----------------------------------------------------------------


def test_best_checkpoint(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(more=tuned(0.1, 0.8, 0.3, 0.4), **best())
    trainer.train()
    assert sum(WARNING in line for line in caplog.messages) == 1
    folder = Path(trainer.args.output_dir) / "checkpoint-2"
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, trainer.model.state_dict()[name])
    record = trainer.privacy_record()
    assert record["steps_done"] == record["steps_counted"] == 4
    assert record["epsilon"] == trainer.plan.epsilon()
    assert record["tuning"]["chosen_by_validation_data"] == ["the best checkpoint"]
    line = "* Validation data decided about the best checkpoint: if they are private, epsilon does"
    assert line in card_of(trainer)


def test_early_stopping_spends_the_whole_plan(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    stop = EarlyStoppingCallback(early_stopping_patience=1)
    trainer = make_trainer(more=tuned(0.5, 0.4, 0.3, 0.2, callbacks=[stop]), **best(max_steps=9))
    trainer.train()
    assert "about the best checkpoint and when to stop" in caplog.text
    record = trainer.privacy_record()
    assert (record["steps_done"], record["steps_counted"]) == (2, 9)
    assert record["epsilon"] == trainer.plan.epsilon(9) > trainer.plan.epsilon(2)
    assert "2 of 9 planned; epsilon counts all 9" in card_of(trainer)
    # Also in what was saved before it stopped: that there is no later checkpoint is a result.
    saved = json.loads((Path(trainer.args.output_dir) / "checkpoint-1/privacy.json").read_text())
    assert (saved["steps_done"], saved["steps_counted"]) == (1, 9)


def test_any_other_reason_to_stop_counts_likewise(make_trainer: MakeTrainer) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    trainer = make_trainer(more={"callbacks": [Stop()]})
    assert trainer.train().global_step == 2
    assert trainer.privacy_record()["epsilon"] == trainer.plan.epsilon(4)


def test_public_validation_data_need_no_warning(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    options = best(validation_data_is_private=False, num_tuning_trials=0)
    trainer = make_trainer(more=tuned(0.1, 0.8, 0.3, 0.4), **options)
    trainer.train()
    assert WARNING not in caplog.text
    card = card_of(trainer)
    assert "| validation data | public |" in card
    assert "| tuning trials on the same data | 0 |" in card
    assert "decided about the best checkpoint: they are stated to be public" in card


def test_no_choice_no_warning(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    assert WARNING not in caplog.text
    assert trainer.privacy_record()["tuning"] == {
        "num_tuning_trials": None,
        "validation_data_is_private": None,
        "chosen_by_validation_data": [],
        "all_runs": None,
    }


def test_tuning_arguments_are_checked(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"`num_tuning_trials` must be 0 \(none\) or positive"):
        make_trainer(num_tuning_trials=-1)


# ---- Searches ----------------------------------------------------------------------------------


def fresh(trial: Any = None) -> Any:
    return make_model("roberta", CLASSIFY).float()


def composed(*runs: tuple[float, float, int]) -> float:
    """Epsilon of several runs, straight from dp-accounting, on a finer grid."""
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    for sigma, q, steps in runs:
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    return float(accountant.get_epsilon(1e-3))


def search(trainer: Any, space: Any, **options: Any) -> Any:
    options = {"n_trials": 3, "sampler": optuna.samplers.RandomSampler(seed=0), **options}
    return trainer.hyperparameter_search(
        hp_space=space, compute_objective=lambda m: m["eval_score"], **options
    )


def test_search_adds_up_what_its_trials_spend(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    more = {**tuned(0.1, 0.9, 0.2, 0.5), "model_init": fresh}
    trainer = make_trainer(more=more, max_steps=3)
    sigmas: list[float] = []

    def space(trial: Any) -> dict[str, float]:
        sigmas.append(trial.suggest_float("noise_multiplier", 0.7, 3.0))
        return {"noise_multiplier": sigmas[-1], "learning_rate": 1e-3}

    found = search(trainer, space, direction="maximize")
    assert len(set(sigmas)) == 3
    assert found.hyperparameters["noise_multiplier"] == sigmas[1] and found.objective == 0.9
    assert "3 runs on the same data have spent epsilon=" in caplog.text

    trainer.args.noise_multiplier = 2.0
    trainer.train()  # the final run, on the same data
    record = trainer.privacy_record()
    runs = record["tuning"]["all_runs"]
    assert [r["noise_multiplier"] for r in runs["runs"]] == [*sigmas, 2.0]
    spent = runs["epsilon_by_accountant"]
    assert spent["pld"] == pytest.approx(
        composed(*((sigma, 0.25, 3) for sigma in (*sigmas, 2.0))), rel=0.01
    )
    assert record["epsilon"] == trainer.plan.epsilon() < spent["pld"] < spent["rdp"]
    assert record["tuning"]["chosen_by_validation_data"] == ["the hyperparameters"]
    trainer.save_model()
    assert json.loads((Path(trainer.args.output_dir) / "privacy.json").read_text()) == record
    card = card_of(trainer)
    assert f"| all 4 runs of this trainer together | epsilon PLD {spent['pld']:.4g}," in card


def test_pruned_trials_count(make_trainer: MakeTrainer) -> None:
    more = {**tuned(*(0.9, 0.9, 0.9), *(0.1, 0.1, 0.1), *(0.2, 0.2, 0.2)), "model_init": fresh}
    trainer = make_trainer(more=more, max_steps=3, eval_strategy="steps", eval_steps=1)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    space = lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3)}  # noqa: E731
    search(trainer, space, n_trials=2, direction="maximize", pruner=pruner)
    assert trainer.state.global_step < 3  # the second was pruned
    trainer.train()
    runs = trainer.privacy_record()["tuning"]["all_runs"]
    assert [run["num_steps"] for run in runs["runs"]] == [3, 3, 3]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_grad_norm": 1.0}, r"`max_grad_norm=1.0` is not possible in private training"),
        ({"gradient_accumulation_steps": 2}, "`gradient_accumulation_steps` must not be changed"),
        ({"rank": -1}, "`rank` must be 0"),
    ],
)
def test_a_trial_cannot_break_privacy(
    make_trainer: MakeTrainer, setting: dict[str, Any], message: str
) -> None:
    trainer = make_trainer(more={**tuned(0.1), "model_init": fresh})
    with pytest.raises(ValueError, match=message):
        search(trainer, lambda trial: setting, n_trials=1)


def test_searches_that_nobody_adds_up_are_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(more={"model_init": fresh})
    with pytest.raises(ValueError, match=r"`backend='ray'` runs trials in other processes"):
        search(trainer, lambda trial: {}, backend="ray")
    with pytest.raises(ValueError, match=r"`n_jobs` must be 1, got 2"):
        search(trainer, lambda trial: {}, n_jobs=2)


def test_model_init_trains_anew_and_keeps_the_precision(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(more={"model_init": fresh}, max_steps=2, bf16_weights=True)
    for _ in range(2):
        trainer.train()
        assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert trainer.privacy_record()["tuning"]["all_runs"]["num_runs"] == 2


# ---- Own optimizers ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 5])
def test_own_optimizer_and_schedule(make_trainer: MakeTrainer, rank: int) -> None:
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = make_trainer(
        model=model, more={"optimizers": (optimizer, schedule)}, rank=rank, max_steps=3
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer.train()
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())
    assert schedule.get_last_lr() == [0.4 * 0.5**3]
    assert [group["lr"] for group in optimizer.param_groups] == [0.4 * 0.5**3]


def test_own_schedule_moves_projected_weights_at_its_rate(make_trainer: MakeTrainer) -> None:
    # Without noise and signal, decay alone moves the weights, at the schedule's rate.
    model = fresh()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 0.0}], lr=0.4
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, after], [2])
    trainer = make_trainer(
        model=model,
        more={"optimizers": (optimizer, schedule)},
        max_steps=3,
        noise_multiplier=0.0,
        allow_zero_noise=True,
        l2_clip_norm=1e-12,
    )
    name = "roberta.encoder.layer.0.output.dense.weight"
    before = model.get_parameter(name).detach().clone()
    trainer.train()
    assert trainer.private_training.subspace.projections[name].side is not None
    kept = (1 - 0.0 * 0.5) * (1 - 0.2 * 0.5) * (1 - 0.4 * 0.5)
    torch.testing.assert_close(model.get_parameter(name).detach(), before * kept)


@pytest.mark.parametrize("whole", [False, True])
def test_own_schedule_does_not_know_of_other_rates(make_trainer: MakeTrainer, whole: bool) -> None:
    model = fresh()
    head = [p for n, p in model.named_parameters() if n.startswith("classifier")]
    body = [p for n, p in model.named_parameters() if not n.startswith("classifier")]
    parts = [head, body] if whole else [head + body]
    optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=0.4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    options = {"head_modules": ["classifier"], "head_learning_rate": 0.8}
    trainer = make_trainer(model=model, more={"optimizers": (optimizer, schedule)}, **options)
    with pytest.raises(ValueError, match=r"schedule in `optimizers` was made before `head_learnin"):
        trainer.train()
    # The Trainer's own schedule, which is made later, takes them up.
    optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=0.4)
    trainer = make_trainer(
        model=model, more={"optimizers": (optimizer, None)}, max_steps=1, **options
    )
    trainer.train()
    assert [group["lr"] for group in optimizer.param_groups] == [0.8, 0.4]


def test_optimizer_of_another_model_is_refused(make_trainer: MakeTrainer) -> None:
    optimizer = torch.optim.SGD(fresh().parameters(), lr=0.1)
    trainer = make_trainer(more={"optimizers": (optimizer, None)})
    with pytest.raises(ValueError, match=r"holds parameters that are not the model's; build it on"):
        trainer.train()


def test_own_optimizer_with_model_init_is_refused(make_trainer: MakeTrainer) -> None:
    optimizer = torch.optim.SGD(fresh().parameters(), lr=0.1)
    with pytest.raises(
        RuntimeError, match="`model_init` is incompatible with providing the `optimizers`"
    ):
        make_trainer(more={"model_init": fresh, "optimizers": (optimizer, None)})


# ---- The progress bar --------------------------------------------------------------------------


def test_bar_shows_epsilon(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(disable_tqdm=False)
    (bar,) = (c for c in trainer.callback_handler.callbacks if "Progress" in type(c).__name__)
    assert type(bar) is EpsilonProgressCallback
    trainer.train()
    shown = capsys.readouterr().err
    for step in range(1, 5):
        assert f"epsilon = {trainer.plan.epsilon(step):.4g}" in shown


def test_bar_of_a_long_run_shows_a_bound_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    asked: list[int] = []
    bar = EpsilonProgressCallback(lambda step: asked.append(step) or float(step))
    monkeypatch.setattr("sys.stderr", io.StringIO())
    args, control = TrainingArguments(report_to=[]), TrainerControl()
    state = TrainerState(max_steps=1003, is_world_process_zero=True)
    bar.on_train_begin(args, state, control)
    for step in range(1, 1004):
        state.global_step = step
        bar.on_step_end(args, state, control)
        postfix = bar.training_bar.postfix
        assert float(postfix.split()[-1]) >= float(f"{step:.4g}")
    assert len(asked) < 60 and postfix == "epsilon = 1003"


def test_stock_callbacks_stay(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            seen.extend(logs)

    caplog.set_level(logging.INFO)
    make_trainer(more={"callbacks": [Tracker]}, logging_steps=1, max_steps=2).train()
    assert {"epsilon", "target_delta", "learning_rate"} < set(seen)
    assert not [name for name in seen if "loss" in name]
