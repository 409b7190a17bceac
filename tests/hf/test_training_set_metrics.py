"""Metrics on the training set are for the caller: no log, callback, card, report or choice.

Covers: hf/disclosure.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest_trainer import MakeTrainer, examples
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_dpgrape.artifacts.report import RunReport

WARNING = "Metrics on the training set are not covered by epsilon"


class Size:
    """A metric that tells on how many examples it was taken."""

    def __call__(self, prediction: Any) -> dict[str, float]:
        return {"size": float(len(prediction.label_ids))}


class Watch(TrainerCallback):
    """What callbacks see."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        self.seen.append(dict(logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kw: Any) -> None:
        self.seen.append(dict(metrics))

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kw: Any) -> None:
        self.seen.append(dict(metrics))


def with_metrics(**more: Any) -> dict[str, Any]:
    return {"compute_metrics": Size(), "callbacks": [Watch()], **more}


def watched(trainer: Any) -> list[dict[str, Any]]:
    (watch,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Watch))
    return watch.seen


def everything_written(trainer: Any) -> str:
    """All that a run leaves, but for the pickled arguments and the optimizer."""
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    folder = Path(trainer.args.output_dir)
    RunReport(folder).write(folder / "report.html")
    texts = (p for kind in ("json", "md", "html") for p in folder.rglob(f"*.{kind}"))
    return "".join(p.read_text() for p in texts)


def test_the_stock_trainer_logs_them(make_trainer: MakeTrainer) -> None:
    """What this package changes."""
    trainer = make_trainer(more=with_metrics())
    Trainer.evaluate(trainer, trainer.train_dataset)
    assert trainer.state.log_history[-1]["eval_size"] == 40
    assert watched(trainer)[-1]["eval_size"] == 40


@pytest.mark.parametrize("copied", [False, True])
def test_an_evaluation_that_is_asked_for(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, copied: bool
) -> None:
    trainer = make_trainer(more=with_metrics(eval_dataset=examples(6)))
    trainer.train()
    on_dev = trainer.evaluate()
    training_set = examples() if copied else trainer.train_dataset
    metrics = [trainer.evaluate(training_set) for _ in range(2)]
    prediction = trainer.predict(training_set)
    assert on_dev["eval_size"] == 6
    assert [m["eval_size"] for m in metrics] == [40, 40] and metrics[0]["eval_loss"] > 0
    assert prediction.metrics["test_size"] == 40
    assert caplog.text.count(WARNING) == 1
    assert 40 not in [v for logs in watched(trainer) for v in logs.values()]
    text = everything_written(trainer)
    assert str(metrics[0]["eval_loss"]) not in text
    # The card and the report go on to show the last evaluation on other data.
    assert f"value: {on_dev['eval_loss']}" in text and "| size | 6 |" in text
    assert trainer.evaluate()["eval_size"] == 6
    assert watched(trainer)[-1]["eval_size"] == 6


def test_one_of_several_evaluation_sets(make_trainer: MakeTrainer) -> None:
    train = examples()
    more = with_metrics(train_dataset=train, eval_dataset={"dev": examples(6), "train": train})
    trainer = make_trainer(eval_strategy="steps", eval_steps=2, more=more)
    trainer.train()
    metrics = trainer.evaluate()
    assert (metrics["eval_dev_size"], metrics["eval_train_size"]) == (6, 40)
    text = everything_written(trainer)
    assert "dev_size" in text and "train_size" not in text and "train_loss" not in text
    assert not [name for logs in watched(trainer) for name in logs if "eval_train" in name]


def test_the_only_evaluation_set(make_trainer: MakeTrainer) -> None:
    train = [dict(row) for row in examples()]  # no fingerprint, the same object
    more = with_metrics(train_dataset=train, eval_dataset=train)
    trainer = make_trainer(eval_strategy="steps", eval_steps=2, more=more)
    trainer.train()
    text = everything_written(trainer)
    assert not any(word in text for word in ("eval_loss", "eval_size", "model-index"))


def test_names_of_metrics_do_not_matter(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(more=with_metrics())
    trainer.train()
    metrics = trainer.evaluate(trainer.train_dataset, metric_key_prefix="train")
    assert metrics["train_loss"] > 0 and "epsilon" not in metrics
    assert str(metrics["train_loss"]) not in everything_written(trainer)


def test_logged_under_an_honest_name_if_asked_for(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(log_non_private_metrics=True, more=with_metrics())
    trainer.train()
    metrics = trainer.evaluate(trainer.train_dataset)
    logged = trainer.state.log_history[-1]
    assert logged["non_private_eval_loss"] == metrics["eval_loss"] and "eval_loss" not in logged
    assert WARNING not in caplog.text
    trainer.args.log_non_private_metrics = False  # too late
    assert trainer.privacy_record()["raw_metrics_were_logged"] is True
    trainer.save_model()
    trainer.create_model_card()
    card = (Path(trainer.args.output_dir) / "README.md").read_text()
    assert "Raw training losses or metrics were logged" in card and "model-index" not in card


@pytest.mark.parametrize(
    ("options", "callbacks", "several"),
    [
        ({"save_strategy": "best", "metric_for_best_model": "size"}, [], False),
        (
            {
                "load_best_model_at_end": True,
                "save_strategy": "steps",
                "save_steps": 2,
                "metric_for_best_model": "train_loss",
            },
            [],
            True,
        ),
        ({"metric_for_best_model": "loss"}, [EarlyStoppingCallback()], False),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, [], False),
    ],
)
def test_choices_by_them_are_refused(
    make_trainer: MakeTrainer, options: dict[str, Any], callbacks: list[Any], several: bool
) -> None:
    more = with_metrics(callbacks=callbacks)
    trainer = make_trainer(
        **{"eval_strategy": "steps", "eval_steps": 2, **options},
        more={**more, "eval_dataset": {"dev": examples(6), "train": examples()}}
        if several
        else {**more, "eval_dataset": examples()},
    )
    with pytest.raises(ValueError, match=r"would choose by metrics on the training set"):
        trainer.train()


def test_choices_by_the_other_set_are_free(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        metric_for_best_model="dev_size",
        more=with_metrics(eval_dataset={"dev": examples(6), "train": examples()}),
    )
    trainer.train()
    state = json.loads(
        (Path(trainer.args.output_dir) / "checkpoint-2/trainer_state.json").read_text()
    )
    assert state["best_metric"] == 6 and "eval_train" not in json.dumps(state)
