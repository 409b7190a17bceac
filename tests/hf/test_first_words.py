"""What a trainer says when it is made: of a budget that means little, of data that are no set."""

from __future__ import annotations

import logging

import datasets
import pytest
from conftest_trainer import MakeTrainer, examples


def test_a_budget_that_means_little_is_one_warning(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_dpgrape"):
        assert make_trainer().plan.warnings() == ()
        assert "hf_dpgrape.hf.trainer" not in [record.name for record in caplog.records]
        plan = make_trainer(noise_multiplier=0.1, target_delta=0.3).plan
    (record,) = [record for record in caplog.records if record.name == "hf_dpgrape.hf.trainer"]
    assert record.getMessage() == " ".join(plan.warnings()) and len(plan.warnings()) == 2
    assert "\n" not in record.getMessage()


def test_a_dictionary_of_splits_is_refused(make_trainer: MakeTrainer) -> None:
    splits = datasets.DatasetDict({"train": examples(), "test": examples()})
    sentence = (
        r"`train_dataset` must be one data set, got a dictionary of 2 splits; pass .*\[\"train"
    )
    with pytest.raises(ValueError, match=sentence):
        make_trainer(more={"train_dataset": splits})


def test_what_one_example_is_goes_on_the_record(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(example_unit="one e-mail", max_steps=1)
    trainer.train()
    assert trainer.privacy_record()["unit_of_privacy"] == "one e-mail"


def test_owners_of_several_examples_go_on_the_record(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(examples_per_unit=2, max_steps=1)
    trainer.train()
    assert trainer.privacy_record()["owner"] == {
        "examples": 2,
        "epsilon": trainer.plan.unit_epsilon(2),
    }
    with pytest.raises(ValueError, match="`examples_per_unit` must be from 1 to 256, got 0"):
        make_trainer(examples_per_unit=0)


def test_a_missing_label_column_does_not_list_the_columns(make_trainer: MakeTrainer) -> None:
    """In a file without a header, they are its first record."""
    unlabeled = examples().remove_columns("label")
    with pytest.raises(ValueError, match="none of the label columns") as raised:
        make_trainer(more={"train_dataset": unlabeled}).train()
    assert "input_ids" not in str(raised.value)


def test_a_run_says_how_many_processes_it_has(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A launcher may start one where several were asked for."""
    trainer = make_trainer(max_steps=1)
    with caplog.at_level(logging.INFO, logger="hf_dpgrape"):
        trainer.train()
    (said,) = [r.getMessage() for r in caplog.records if "process(es)" in r.getMessage()]
    assert said == "Training in 1 process(es), which draw an expected batch of 10 together."
    assert trainer.privacy_record()["num_processes"] == 1
