"""Suggested settings train above the majority class; a run without hope is said so before.

Covers: hf/suggestions.py, hf/suggested_arguments.py, hf/little_signal.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest_trainer import MakeTrainer, make_trainer
from families import CAUSAL, CLASSIFY, make_model
from torch import Tensor, nn

from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments
from hf_dpgrape.hf.suggestions import TrainedSizes, suggest

__all__ = ["make_trainer"]

BUDGET = {"num_examples": 600, "target_epsilon": 3.0, "target_delta": 1e-5}
HEAD = {"head_modules": ["classifier"]}


class Classifier(nn.Module):
    """A pretrained layer, which keeps what it is given, and a new head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.classifier = nn.Linear(width, 2)
        with torch.no_grad():
            self.body.weight.copy_(torch.eye(width))
            self.body.bias.zero_()
            self.classifier.weight.copy_(torch.linspace(-0.4, 0.4, 2 * width).view(2, width))
            self.classifier.bias.zero_()

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        return {"logits": self.classifier(torch.tanh(self.body(x)))}


def task(number: int, seed: int) -> datasets.Dataset:
    """Two classes, three and two of five, that a line parts but for a tenth."""
    g = torch.Generator().manual_seed(seed)
    labels = (torch.arange(number) % 5 >= 3).long()
    x = torch.randn(number, 16, generator=g)
    x[:, 3] += 2.6 * (labels - 0.5)
    data = datasets.Dataset.from_dict({"x": x.tolist(), "labels": labels.tolist()})
    return data.with_format("torch")


def loss(outputs: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels)


def accuracy(prediction: Any) -> dict[str, float]:
    hits = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(hits.mean())}


def quiet(folder: Path, **more: Any) -> dict[str, Any]:
    plain = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    return {"output_dir": str(folder), **plain, "unsafe_test_seed": 7, **HEAD, **more}


def trained(args: DPGrapeTrainingArguments) -> float:
    trainer = DPGrapeTrainer(
        model=Classifier(),
        args=args,
        train_dataset=task(600, 0),
        eval_dataset=task(500, 1),
        compute_loss_func=loss,
        compute_metrics=accuracy,
    )
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "Expect the majority" in r.getMessage()]


def test_suggested_settings_end_above_the_majority_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = DPGrapeTrainingArguments.suggested(
        **BUDGET,  # type: ignore[arg-type]
        model=Classifier(),
        **quiet(tmp_path, per_device_train_batch_size=128),
    )
    assert args.head_only_steps and args.head_clip_share
    assert trained(args) > 0.75  # the majority class has .6
    assert not warnings_of(caplog)


def test_the_bare_swap_does_not_and_is_told_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = {k: v for k, v in BUDGET.items() if k != "num_examples"}
    assert trained(DPGrapeTrainingArguments(**budget, **quiet(tmp_path))) < 0.65  # type: ignore[arg-type]
    (said,) = warnings_of(caplog)
    found = suggest(**BUDGET)  # type: ignore[arg-type]
    assert "`learning_rate=5e-05` takes the new head at most" in said
    for name in ("expected_batch_size", "max_steps", "head_learning_rate"):
        assert f"`{name}={getattr(found, name)}`" in said


def test_too_much_noise_is_said_of_any_model(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    make_trainer(model=make_model("roberta", CLASSIFY).float(), noise_multiplier=1.0).train()
    (said,) = warnings_of(caplog)
    assert "`expected_batch_size=10` over 4 steps leaves a signal of at most 20 times" in said
    caplog.clear()
    make_trainer(noise_multiplier=0.0, allow_zero_noise=True).train()
    make_trainer(noise_multiplier=0.1).train()
    assert not warnings_of(caplog)


def test_where_no_settings_will_do_that_is_said(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(noise_multiplier=30.0).train()
    (said,) = warnings_of(caplog)
    assert "No settings will do with 40 examples at epsilon" in said
    (warning,) = suggest(num_examples=40, target_epsilon=0.5, target_delta=1e-3).warnings
    assert "40 examples at epsilon 0.5 leave a signal of at most" in warning


def test_a_head_rate_that_is_large_enough_is_not_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The same plan, of which only the rate is changed; and an optimizer with other steps.
    for change in ({"head_learning_rate": 1e-2}, {"optim": "sgd"}):
        budget = {"target_epsilon": 3.0, "target_delta": 1e-5, "max_steps": 1, **change}
        args = DPGrapeTrainingArguments(**quiet(tmp_path, expected_batch_size=300, **budget))
        trained(args)
    assert [w for w in warnings_of(caplog) if "takes the new head" in w] == []


# ---- What is suggested ---------------------------------------------------------------------------


def test_arguments_are_those_of_the_suggestion(tmp_path: Path) -> None:
    args = DPGrapeTrainingArguments.suggested(
        **BUDGET,  # type: ignore[arg-type]
        **quiet(tmp_path, learning_rate=1e-4, head_modules=None),
    )
    found = suggest(**BUDGET)  # type: ignore[arg-type]
    for name, value in found.arguments().items():
        assert getattr(args, name) == (1e-4 if name == "learning_rate" else value), name
    plan = args.make_plan(600, has_head=True)
    assert plan.noise_multiplier == pytest.approx(found.noise_multiplier)
    assert (plan.num_steps, plan.clipping) == (found.max_steps, "automatic")


def test_without_a_new_head_nothing_is_said_of_one(tmp_path: Path) -> None:
    model = make_model("gpt2", CAUSAL)
    args = DPGrapeTrainingArguments.suggested(
        **BUDGET,  # type: ignore[arg-type]
        model=model,
        **quiet(tmp_path, head_modules=None),
    )
    assert (args.head_learning_rate, args.head_clip_share, args.head_only_steps) == (None, None, 0)
    assert args.make_plan(600).head_only_steps == 0  # which a head's arguments would refuse


def test_with_a_head_alone_it_has_the_whole_clip_norm(tmp_path: Path) -> None:
    model = Classifier()
    model.body.requires_grad_(False)
    args = DPGrapeTrainingArguments.suggested(**BUDGET, model=model, **quiet(tmp_path))  # type: ignore[arg-type]
    assert (args.head_learning_rate, args.head_clip_share, args.head_only_steps) == (1e-2, None, 0)


def test_reasons_say_whether_more_computing_would_help() -> None:
    little, plenty = (suggest(**BUDGET, max_epochs=e).reasons[0] for e in (2.0, 60.0))  # type: ignore[arg-type]
    assert "all the computing that is allowed" in little
    assert "60 would have little more signal" in plenty


def test_reasons_tell_the_length_of_the_noise() -> None:
    found = suggest(**BUDGET, sizes=TrainedSizes(head=100, body=800))  # type: ignore[arg-type]
    per_weight = found.noise_multiplier / found.expected_batch_size
    assert f"{30 * per_weight:.3g} times the length" in found.reasons[-1]
    assert f"({10 * per_weight:.3g} with the head alone)" in found.reasons[-1]
