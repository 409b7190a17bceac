"""Class weights and label smoothing in an example's own loss.

Covers: hf/cross_entropy.py, hf/loss_arguments.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest_trainer import MakeTrainer, collate, examples, make_trainer
from families import BATCH, CAUSAL, CLASSIFY, MASKED, QA, SEQ2SEQ, TOKENS, make_inputs, make_model
from oracle import select
from torch import Tensor
from torch.nn import functional as F

from hf_dpgrape.artifacts.model_card import privacy_facts
from hf_dpgrape.hf.cross_entropy import CrossEntropy
from hf_dpgrape.hf.losses import PerSampleLoss

__all__ = ["make_trainer"]

WEIGHTS = [0.5, 2.0, 0.0]
OPTIONS = [(None, 0.1), (WEIGHTS, 0.0), (WEIGHTS, 0.3)]


@pytest.mark.parametrize(("weights", "smoothing"), OPTIONS)
def test_of_classes_it_is_torchs_own_without_reduction(
    weights: list[float] | None, smoothing: float
) -> None:
    model, inputs = make_model("bert", CLASSIFY), make_inputs("bert", CLASSIFY)
    loss = PerSampleLoss(model, class_weights=weights, label_smoothing=smoothing)
    with torch.no_grad():
        logits = model(**inputs).logits
        want = F.cross_entropy(
            logits,
            inputs["labels"],
            weight=None if weights is None else logits.new_tensor(weights),
            reduction="none",
            label_smoothing=smoothing,
        )
        found = loss(model, inputs)
        assert torch.allclose(found, want, rtol=1e-6)
        for i in range(BATCH):  # whatever the neighbors are
            assert torch.allclose(loss(model, select(inputs, [i])), found[i], rtol=1e-6)


@pytest.mark.parametrize(("weights", "smoothing"), OPTIONS)
def test_of_tokens_it_is_averaged_over_the_examples_own_labels(
    weights: list[float] | None, smoothing: float
) -> None:
    model, inputs = make_model("bert", TOKENS), make_inputs("bert", TOKENS)
    inputs["labels"][1, 4:] = -100
    with torch.no_grad():
        found = PerSampleLoss(model, class_weights=weights, label_smoothing=smoothing)(
            model, inputs
        )
        for i, logits in enumerate(model(**inputs).logits):
            labels = inputs["labels"][i]
            each = F.cross_entropy(
                logits,
                labels,
                weight=None if weights is None else logits.new_tensor(weights),
                reduction="none",
                label_smoothing=smoothing,
            )
            assert torch.allclose(found[i], each.sum() / (labels != -100).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "head"), [("gpt2", CAUSAL), ("bert", MASKED), ("t5", SEQ2SEQ), ("bart", SEQ2SEQ)]
)
def test_token_labels_are_smoothed(family: str, head: str) -> None:
    model, inputs = make_model(family, head), make_inputs(family, head)
    with torch.no_grad():
        found = PerSampleLoss(model, label_smoothing=0.2)(model, inputs)
        for i in range(BATCH):
            one = select(inputs, [i])
            logits, labels = model(**one).logits[0], one["labels"][0]
            if head == CAUSAL:
                logits, labels = logits[:-1], labels[1:]
            want = F.cross_entropy(logits, labels, label_smoothing=0.2)
            assert torch.allclose(found[i], want, rtol=1e-5)


def test_the_comparison_with_the_models_own_loss_is_before_weighting() -> None:
    model, inputs = make_model("bert", CLASSIFY), make_inputs("bert", CLASSIFY)
    loss = PerSampleLoss(model, class_weights=[3.0, 5.0, 7.0], label_smoothing=0.5)
    assert loss.settle(model, select(inputs, [1])) == ""
    with torch.no_grad():  # and settling has not taken the weights away
        assert (loss(model, inputs) > 2 * PerSampleLoss(model)(model, inputs)).all()


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("bert", CLASSIFY, {"class_weights": [1.0, 2.0]}, "one weight for each of the model's 3 .*2"),
    ("bert", CLASSIFY, {"class_weights": [1.0, -1.0, 1.0]}, "0 or more, one per class .*-1"),
    ("bert", CLASSIFY, {"class_weights": [1.0, math.nan, 1.0]}, "finite numbers .*nan"),
    ("bert", CLASSIFY, {"class_weights": [0.0, 0.0, 0.0]}, "not all 0, got"),
    ("bert", CLASSIFY, {"label_smoothing": 1.0}, "`label_smoothing_factor` must be 0 .*below 1"),
    ("bert", CLASSIFY, {"label_smoothing": -0.1}, "`label_smoothing_factor` must be 0 .*got -0.1"),
    ("bert", QA, {"label_smoothing": 0.1}, "classes or tokens, got a head for question-answering"),
    ("gpt2", CAUSAL, {"class_weights": [1.0] * 53}, "single classes, got a head for text-gen"),
]


@pytest.mark.parametrize(("family", "head", "options", "reason"), REFUSED)
def test_wrong_inputs_are_refused(
    family: str, head: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        PerSampleLoss(make_model(family, head), **options)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_other_problems_are_refused(problem: str) -> None:
    model = make_model("bert", CLASSIFY)
    model.config.problem_type = problem
    with pytest.raises(ValueError, match=f"`label_smoothing_factor` needs .*{problem}"):
        PerSampleLoss(model, label_smoothing=0.1)
    model.config.problem_type = None  # left to the labels
    inputs = make_inputs("bert", CLASSIFY)
    inputs["labels"] = F.one_hot(inputs["labels"], 3).float()
    with pytest.raises(ValueError, match="got labels for multi_label_classification"):
        PerSampleLoss(model, label_smoothing=0.1)(model, inputs)


def test_beside_a_loss_of_ones_own_they_are_refused() -> None:
    with pytest.raises(ValueError, match="`class_weights` and `label_smoothing_factor` would cha"):
        PerSampleLoss(
            make_model("bert", CLASSIFY),
            lambda outputs, labels: outputs.logits.sum(),
            class_weights=WEIGHTS,
            label_smoothing=0.1,
        )


def test_the_models_own_loss_never_stands_in_for_a_weighted_one() -> None:
    class Odd(type(make_model("bert", CLASSIFY))):  # type: ignore[misc]
        def forward(self, **inputs: Any) -> Any:
            outputs = super().forward(**inputs)
            if outputs.loss is not None:
                outputs.loss = outputs.loss * 3
            return outputs

    Odd.__name__ = "BertForSequenceClassification"
    model = make_model("bert", CLASSIFY)
    model.__class__ = Odd
    one = select(make_inputs("bert", CLASSIFY), [0])
    loss = PerSampleLoss(model, class_weights=WEIGHTS)
    assert loss.settle(model, one)
    with pytest.raises(ValueError, match="cannot be applied to a loss of the model's own"):
        loss.take_own_()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"class_weights": [1.0, math.inf, 1.0]}, "`class_weights` must be finite"),
        ({"label_smoothing_factor": 1.5}, "`label_smoothing_factor` must be 0"),
        ({"class_weights": [1.0, 2.0]}, "one weight for each of the model's 3 classes, got 2"),
    ],
)
def test_a_trainer_refuses_them_before_training(
    make_trainer: MakeTrainer, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        make_trainer(**changes)


def test_training_and_evaluation_use_them(make_trainer: MakeTrainer) -> None:
    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            logits,
            labels,
            weight=torch.tensor(WEIGHTS),
            reduction="none",
            label_smoothing=0.1,
        )

    def own(outputs: Any, labels: Tensor) -> Tensor:
        return weighted(outputs.logits, labels).sum()

    changes: dict[str, Any] = {"class_weights": WEIGHTS, "label_smoothing_factor": 0.1}
    quiet: dict[str, Any] = {"noise_multiplier": 0.0, "allow_zero_noise": True, "max_steps": 2}
    data = {"eval_dataset": examples(12)}
    by_arguments = make_trainer(more=data, **changes, **quiet)
    by_function = make_trainer(more={**data, "compute_loss_func": own}, **quiet)
    plain = make_trainer(more=data, **quiet)
    for trainer in (by_arguments, by_function, plain):
        trainer.train()
    moved, same, other = (
        torch.cat([p.flatten() for p in trainer.model.parameters()])
        for trainer in (by_arguments, by_function, plain)
    )
    assert torch.allclose(moved, same, atol=1e-6) and not torch.allclose(moved, other, atol=1e-4)
    inputs = collate([examples(12)[i] for i in range(12)])
    by_arguments.model.eval()
    with torch.no_grad():
        logits = by_arguments.model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
    want = weighted(logits, inputs["labels"]).mean()
    assert by_arguments.evaluate()["eval_loss"] == pytest.approx(float(want), rel=1e-5)
    record = by_arguments.privacy_record()
    assert record["loss"] == {"class_weights": WEIGHTS, "label_smoothing_factor": 0.1}
    facts = dict(privacy_facts(record))
    assert facts["class weights, chosen by the user"].startswith("0.5, 2, 0; a count of training")
    assert facts["label smoothing"] == "0.1"
    assert "loss" not in plain.privacy_record()


def test_weights_that_clipping_undoes_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="change nothing under `clipping=automatic`"):
        make_trainer(class_weights=WEIGHTS, clipping="automatic")


def test_losses_do_not_depend_on_neighbors() -> None:
    g = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(7, 3, generator=g), torch.arange(7) % 3
    loss = CrossEntropy.of(WEIGHTS, 0.2)
    found = loss(logits, labels)
    logits[1:] *= 5
    assert torch.equal(loss(logits, labels)[0], found[0])
