"""Words of record and card for what the guarantee protects as a whole: a row, or a unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dpgrape.privacy.plan import PrivacyPlan

#: What the guarantee protects as a whole, if nothing else is said.
ONE_ROW = "one row of the training set"

_BEFORE = (
    "Whatever was done to the data before training (a tokenizer or a vocabulary made from it, "
    "selection, near duplicates) is not covered."
)


def unit_of_privacy(plan: PrivacyPlan, example_unit: str = ONE_ROW) -> str:
    """What the guarantee protects as a whole, in words.

    Args:
        plan: of the run.
        example_unit: what one example, or one unit, is, as the user says.
    """
    if plan.privacy_unit_column is None:
        return example_unit
    text = (
        f"one value of column `{plan.privacy_unit_column}` (its rows, at most "
        f"{plan.max_rows_per_unit} of them per step, clipped together)"
    )
    return text if example_unit == ONE_ROW else f"{example_unit}: {text}"


def has_units(record: Mapping[str, Any]) -> bool:
    """Whether units of several rows were drawn, rather than rows."""
    return record["plan"].get("privacy_unit_column") is not None


def one(record: Mapping[str, Any]) -> str:
    """What is drawn and clipped as a whole."""
    return "unit" if has_units(record) else "example"


def each(record: Mapping[str, Any]) -> str:
    """For whom epsilon holds."""
    if not has_units(record):
        return "each example"
    return f"each value of column `{record['plan']['privacy_unit_column']}` with all of its rows"


def limits_of(record: Mapping[str, Any]) -> list[str]:
    """What is not guaranteed where rows are protected, or units."""
    if not has_units(record):
        return [
            "The number of training examples is treated as public.",
            f"{_BEFORE} One person's several examples are protected less.",
        ]
    return [
        "The number of units is treated as public.",
        f"{_BEFORE} Who is found under several values of the column is protected less.",
    ]
