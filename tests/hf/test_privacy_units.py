"""Training by units of privacy: all rows with one value of a column.

Covers: artifacts/unit_words.py, hf/unit_arguments.py, hf/units.py, privacy/unit.py.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest_trainer import MakeTrainer, collate, examples
from families import CLASSIFY, make_model
from torch.utils.data import Dataset, IterableDataset
from transformers import TrainerCallback

from hf_dpgrape import PrivacyPlan
from hf_dpgrape.artifacts.model_card import render_card
from hf_dpgrape.artifacts.record import privacy_record
from hf_dpgrape.hf.units import units_of
from hf_dpgrape.mechanism.private_step import UnitBatch

NUM_ROWS, NUM_UNITS = 40, 13
BY_PATIENT: dict[str, Any] = {"privacy_unit_column": "patient", "max_rows_per_unit": 2}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


def with_patients(owners: list[Any] | None = None) -> datasets.Dataset:
    """The task, with a column that tells whose a row is: 3 or 4 rows each."""
    owners = [f"patient {i % NUM_UNITS}" for i in range(NUM_ROWS)] if owners is None else owners
    return examples(NUM_ROWS).add_column("patient", owners)


class Rows(Dataset[dict[str, Any]]):
    """Any data set whose items are mappings."""

    def __init__(self, table: datasets.Dataset) -> None:
        self.rows = list(table)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


def by_patient(make: MakeTrainer, *, more: Any = None, **changes: Any) -> Any:
    data = {"train_dataset": with_patients(), **(more or {})}
    return make(more=data, **{**BY_PATIENT, "expected_batch_size": 5, **changes})


# ---- Plan and training -------------------------------------------------------------------------


def test_the_plan_is_that_of_so_many_units(make_trainer: MakeTrainer) -> None:
    plan = by_patient(make_trainer, target_epsilon=2.0, noise_multiplier=None).plan
    assert (plan.num_examples, plan.expected_batch_size) == (NUM_UNITS, 5)
    assert plan.sampling_prob == 5 / NUM_UNITS
    numbers = plan.to_dict()
    del numbers["privacy_unit_column"], numbers["max_rows_per_unit"]
    plain = PrivacyPlan(**numbers)
    assert plain.epsilon() == plan.epsilon() <= 2.0
    assert plan.epsilon(accountant="rdp") == plain.epsilon(accountant="rdp")


@pytest.mark.parametrize(
    ("kind", "remove_unused_columns"), [("table", True), ("transform", False), ("rows", False)]
)
def test_all_kinds_of_data_sets_train_alike(
    make_trainer: MakeTrainer, kind: str, remove_unused_columns: bool
) -> None:
    seen: list[set[str]] = []

    def noting(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.extend({*row} for row in batch)
        return collate(batch)

    table: Any = with_patients()
    data = {"table": table, "rows": Rows(table), "transform": table.with_transform(dict)}[kind]
    trainer = by_patient(
        make_trainer,
        more={"train_dataset": data, "eval_dataset": table, "data_collator": noting},
        remove_unused_columns=remove_unused_columns,
        max_steps=1,
    )
    trainer.train()
    assert "eval_loss" in trainer.evaluate()
    assert seen and all(names == {"input_ids", "label"} for names in seen)
    reference = by_patient(make_trainer, max_steps=1)
    reference.train()
    pairs = zip(trainer.model.parameters(), reference.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_step_draws_units_with_at_most_so_many_rows(make_trainer: MakeTrainer) -> None:
    trainer = by_patient(make_trainer, max_steps=30)
    drawn = [unit for batch in trainer.get_train_dataloader() for unit in batch]
    assert drawn and all(isinstance(unit, UnitBatch) and unit.num_rows == 2 for unit in drawn)
    assert all(sum(p.num_samples for p in unit.parts) == 2 for unit in drawn)


def test_it_learns(make_trainer: MakeTrainer) -> None:
    """Labels follow from the text here, and every unit has rows of several labels."""
    table = with_patients().map(lambda row: {"input_ids": [3 + row["label"]] * 5})
    trainer = by_patient(
        make_trainer,
        more={"train_dataset": table, "eval_dataset": table},
        noise_multiplier=0.3,
        expected_batch_size=8,
        max_steps=10,
        learning_rate=3e-2,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before


def test_a_private_loss_is_released(make_trainer: MakeTrainer) -> None:
    trainer = by_patient(make_trainer, private_loss_share=0.5, logging_steps=2, max_steps=2)
    trainer.train()
    (log,) = (log for log in trainer.state.log_history if "private_loss" in log)
    assert abs(log["private_loss"]) < 20


# ---- What is told ------------------------------------------------------------------------------


WORDS = "one value of column `patient` (its rows, at most 2 of them per step, clipped together)"


def test_record_card_and_log_speak_of_units(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = by_patient(make_trainer, max_steps=2, max_logical_batch_size=9)
    with caplog.at_level(logging.INFO, logger="hf_dpgrape"):
        trainer.train()
    assert "draw an expected batch of 5 units of `patient` together" in caplog.text
    trainer.save_privacy_record(tmp_path)
    record = json.loads((tmp_path / "privacy.json").read_text(encoding="utf-8"))
    assert record["unit_of_privacy"] == WORDS
    assert record["sampling"] == "Poisson, cut at random to at most 9 units"
    assert record["plan"]["privacy_unit_column"] == "patient"
    assert record["plan"]["num_examples"] == NUM_UNITS
    assert record["epsilon"] == trainer.plan.epsilon()
    trainer.create_model_card()
    card = (Path(trainer.args.output_dir) / "README.md").read_text(encoding="utf-8")
    for row in (
        f"| unit of privacy | {WORDS} |",
        "| clip norm per unit | 1 (flat) |",
        f"| units, expected batch | {NUM_UNITS}, 5 |",
        "| gradients taken | from batches of one unit's rows; the mean over a unit's rows is c",
        "* The number of units is treated as public.",
        "Who is found under several values of the column is protected less.",
    ):
        assert row in card, row
    assert "example" not in card.partition("## Privacy")[2].lower()


def test_a_card_says_for_whom_epsilon_holds() -> None:
    numbers: dict[str, Any] = {
        "num_examples": 701,
        "expected_batch_size": 90,
        "num_steps": 24,
        "noise_multiplier": 1.25,
        "l2_clip_norm": 0.5,
        "target_delta": 1e-4,
    }
    projection = {"rank": 0, "capture": "single", "randomness": "secret", "seed": 1}

    def card(example_unit: str, **unit: Any) -> str:
        plan = PrivacyPlan(**numbers, **unit)
        record = privacy_record(plan, 24, projection, example_unit=example_unit)
        return str(render_card(record, model_name="m", task="other"))

    text = card("one patient", **BY_PATIENT)
    assert f"| unit of privacy | one patient: {WORDS} |" in text
    assert "delta 0.0001) for each value of column `patient` with all of its rows." in text
    assert "| gradients taken | one row at a time; the mean over a unit's rows is clipped |" in text
    plain = card("one e-mail")
    assert "| unit of privacy | one e-mail |" in plain and "for each example." in plain
    assert "One person's several examples are protected less." in plain


# ---- What is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy_unit_column": None}, "together, got None and 2; give both, or neither"),
        ({"max_rows_per_unit": 0}, "`max_rows_per_unit` must be one or more, got 0"),
        ({"privacy_unit_column": ""}, "must be the name of a column, got an empty one"),
        ({"examples_per_unit": 3}, r"`examples_per_unit`, got both \('patient' and 3\)"),
        (
            {"privacy_unit_column": "client"},
            r"one of \['input_ids', 'label', 'patient'\], the columns .*, got 'client'",
        ),
        ({"expected_batch_size": 14}, "between 1 and the 13 training units, got 14"),
        ({"max_logical_batch_size": 3}, "`max_logical_batch_size` must be at least"),
    ],
)
def test_wrong_arguments(make_trainer: MakeTrainer, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_patient(make_trainer, **changes)


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return iter(with_patients())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_patients(["a", None] * 20), "`privacy_unit_column=patient` in every row, got rows w"),
        (with_patients([["a"], ["b"]] * 20), "one number or text per row .*, got values of type l"),
        (with_patients().to_iterable_dataset(), "must have a length and indexed access"),
        (Stream(), "must have a length and indexed access"),
        (Rows(examples(NUM_ROWS)), r"to be one of \['input_ids', 'label'\], the columns of"),
        ([(row["input_ids"], 1) for row in examples()], "rows with fields by name, .* type tuple"),
    ],
)
def test_wrong_data(make_trainer: MakeTrainer, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_patient(make_trainer, more={"train_dataset": data})


def test_rows_that_draw_leave_the_global_generators_as_they_were() -> None:
    class Augmented(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "x": torch.rand(())}

    class Arguments:
        privacy_unit_column, rows_per_unit = "patient", 2

    torch.manual_seed(7)
    state = torch.get_rng_state()
    found = units_of(Arguments(), Augmented(with_patients()))  # type: ignore[arg-type]
    assert found is not None and len(found) == NUM_UNITS
    assert torch.equal(torch.get_rng_state(), state)


# ---- Resuming ----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> str:
    class Leaves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    by_patient(make_trainer, more={"callbacks": [Leaves()]}, **SAVES).train()
    return str(tmp_path / "out" / "checkpoint-2")


def test_a_run_goes_on(make_trainer: MakeTrainer, checkpoint: str) -> None:
    trainer = by_patient(make_trainer, **SAVES)
    trainer.train(resume_from_checkpoint=checkpoint)
    record = trainer.privacy_record()
    assert (record["steps_done"], record["unit_of_privacy"]) == (4, WORDS)
    assert trainer._planned.units == units_of(trainer.args, with_patients())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rows_per_unit": 3}, "`max_rows_per_unit` was 2, is now 3"),
        ({"max_rows_per_unit": None}, "`max_rows_per_unit` was 2, is now 8"),
        ({"privacy_unit_column": "owner"}, "`privacy_unit_column` was patient, is now owner"),
        (
            {"privacy_unit_column": None, "max_rows_per_unit": None},
            "`num_examples` was 13, is now 40; `privacy_unit_column` was patient, is now None",
        ),
    ],
)
def test_no_run_goes_on_with_other_units(
    make_trainer: MakeTrainer, checkpoint: str, changes: dict[str, Any], message: str
) -> None:
    table = with_patients()
    table = table.add_column("owner", table["patient"])
    model = make_model("roberta", CLASSIFY).float()
    trainer = by_patient(
        make_trainer, model=model, more={"train_dataset": table}, **{**SAVES, **changes}
    )
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=checkpoint)
