"""An evaluation in which a classifier predicts one class only is said, without keeping logits.

Covers: hf/class_counts.py, hf/evaluating.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_trainer import MakeTrainer, examples, make_trainer
from families import CAUSAL, CLASSIFY, QA, TOKENS, make_inputs, make_model
from torch import nn

from hf_dpgrape.hf.class_counts import ClassCounts, OneClass

__all__ = ["make_trainer"]

WARNING = "predicts class 2 for 100.0% of the evaluation set, whose most frequent class has 33.3%"


def constant(*, favorite: int | None = 2) -> nn.Module:
    """A classifier whose bias decides, or whose logits are as they come (all classes occur)."""
    model = make_model("roberta", CLASSIFY).float()
    with torch.no_grad():
        if favorite is not None:
            model.classifier.out_proj.weight.mul_(1e-3)
            model.classifier.out_proj.bias.zero_()[favorite] = 9.0
        else:
            model.classifier.out_proj.weight.mul_(50)
            model.classifier.out_proj.bias.zero_()
    return model


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "predicts class" in r.getMessage()]


def test_it_is_said_once_without_metrics(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(model=constant(), more={"eval_dataset": examples(30)})
    trainer.evaluate()  # with `prediction_loss_only`, as there are no metrics to compute
    (said,) = warnings_of(caplog)
    assert WARNING in said and "`hf-dpgrape suggest`" in said


def test_it_is_said_of_a_loss_of_ones_own_too(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(outputs: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(outputs.logits, labels)

    more = {"eval_dataset": examples(30), "compute_loss_func": loss}
    make_trainer(model=constant(), more=more).evaluate()
    assert len(warnings_of(caplog)) == 1


def test_a_model_that_tells_classes_apart_is_not_said(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(model=constant(favorite=None), more={"eval_dataset": examples(30)})
    logits = trainer.predict(examples(30)).predictions
    assert len({*logits.argmax(-1).tolist()}) > 1  # else the test would show nothing
    trainer.evaluate()
    assert not warnings_of(caplog)


def test_record_and_card_tell_of_the_last_evaluation(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(
        model=constant(), learning_rate=1e-6, more={"eval_dataset": examples(30)}
    )
    trainer.train()
    assert "evaluations_of_one_class" not in trainer.privacy_record()
    trainer.evaluate()
    told = trainer.privacy_record()["evaluations_of_one_class"]["eval"]
    assert told == {
        "step": 4,
        "predicted_class": 2,
        "predicted_share": 1.0,
        "largest_class_share": pytest.approx(1 / 3),
        "says": WARNING,
    }
    trainer.create_model_card()
    assert f"**at step 4 the model {WARNING}**" in (tmp_path / "out" / "README.md").read_text()
    trainer.model.classifier.out_proj.bias.data.zero_()
    trainer.model.classifier.out_proj.weight.data.mul_(5e4)
    trainer.evaluate()
    assert "evaluations_of_one_class" not in trainer.privacy_record()


def test_during_training_only_the_last_step_says_it(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        model=constant(),
        learning_rate=1e-6,
        eval_strategy="steps",
        eval_steps=1,
        more={"eval_dataset": examples(30)},
    )
    trainer.train()
    assert len(warnings_of(caplog)) == 1
    assert trainer.privacy_record()["evaluations_of_one_class"]["eval"]["step"] == 4


def test_several_sets_are_told_apart(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    sets = {"a": examples(30), "few": examples(6)}
    trainer = make_trainer(model=constant(), learning_rate=1e-6, more={"eval_dataset": sets})
    trainer.train()
    for given in (None, sets):
        trainer.evaluate(given)
        assert list(trainer.privacy_record()["evaluations_of_one_class"]) == ["eval_a"]
    assert len(warnings_of(caplog)) == 2


def test_nothing_is_said_of_the_training_set(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(
        model=constant(), learning_rate=1e-6, more={"eval_dataset": examples(30)}
    )
    trainer.train()
    trainer.evaluate()
    before = trainer.privacy_record()
    caplog.clear()

    def add(self: ClassCounts, outputs: Any, labels: Any) -> None:
        raise AssertionError("a private row was counted")

    monkeypatch.setattr(ClassCounts, "add", add)
    trainer.evaluate(trainer.train_dataset)
    assert not warnings_of(caplog) and trainer.privacy_record() == before


# ---- Counting ------------------------------------------------------------------------------------


def counted(predictions: list[int], labels: list[int], num_classes: int = 3) -> OneClass | None:
    counts = ClassCounts()
    for half in (slice(None, 7), slice(7, None)):
        logits = nn.functional.one_hot(torch.tensor(predictions[half]), num_classes).float()
        counts.add({"logits": logits}, torch.tensor(labels[half]))
    return counts.over_processes().one_class()


def test_nearly_all_goes_by_how_rare_the_others_are() -> None:
    labels = [0] * 50 + [1] * 50
    assert counted([0] * 95 + [1] * 5, labels)  # 5 of 50
    assert counted([0] * 94 + [1] * 6, labels) is None
    skewed = [0] * 90 + [1] * 10
    assert counted([0] * 99 + [1], skewed)
    assert counted([0] * 98 + [1] * 2, skewed) is None  # rare, but so they are
    found = counted([1] * 100, skewed)
    assert found == OneClass(predicted_class=1, predicted_share=1.0, largest_class_share=0.9)


def test_too_little_to_say() -> None:
    assert counted([0] * 19, [0, 1] * 9 + [1]) is None
    assert counted([0] * 20, [0, 1] * 10)
    assert counted([0] * 40, [0] * 40) is None  # the set has one class itself
    assert ClassCounts().over_processes().one_class() is None


def test_positions_without_a_label_are_left_out() -> None:
    counts, labels = ClassCounts(), torch.tensor([[0, 1, -100] * 10] * 2)
    logits = torch.zeros(2, 30, 2)
    logits[labels == -100, 1] = 5.0
    counts.add((torch.zeros(()), logits), labels)
    assert counts.one_class() == OneClass(
        predicted_class=0, predicted_share=1.0, largest_class_share=0.5
    )


@pytest.mark.parametrize("head", [QA, TOKENS])
def test_heads_that_have_no_classes_are_passed_over(head: str) -> None:
    model, inputs = make_model("bert", head), make_inputs("bert", head)
    counts = ClassCounts()
    counts.add(model(**inputs), inputs.get("labels"))
    assert (counts._counts is None) == (head == QA)


def test_language_models_are_not_classifiers(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("gpt2", CAUSAL).float()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(1e-3)
    make_trainer(model=model, causal=True, more={"eval_dataset": examples(30)}).evaluate()
    assert not warnings_of(caplog)


def test_numbers_and_yes_no_labels_are_passed_over() -> None:
    counts = ClassCounts()
    counts.add({"logits": torch.zeros(30, 1)}, torch.zeros(30))
    counts.add({"logits": torch.zeros(30, 3)}, torch.zeros(30, 3))
    counts.add({"logits": torch.zeros(30, 1)}, torch.zeros(30, dtype=torch.long))
    counts.add(torch.zeros(30, 3), torch.zeros(30, dtype=torch.long))
    assert counts.one_class() is None
