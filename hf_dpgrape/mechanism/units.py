"""Units of privacy: the rows of one owner (a patient, a customer), drawn and clipped as a whole."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.randomness import Seeds


@dataclass(frozen=True, kw_only=True)
class Units:
    """Which rows of a training set belong to which unit, and how many of them a step takes.

    Guarantees:
        Every row belongs to exactly one unit. Which of a unit's rows a step takes is a function of
        the number of its rows and of seeds of its own: all of them, or a uniformly random subset
        of `max_rows`.

    Attributes:
        column: whose values are the units.
        max_rows: most rows of a unit that a step takes.
        rows: indices of each unit's rows, increasing; units in the order of their first rows.
    """

    column: str
    max_rows: int
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, values: Iterable[Any], *, column: str, max_rows: int) -> Self:
        """The units of a column.

        Args:
            values: the column's value in each row; equal values are one unit.
            column: its name.
            max_rows: most rows of a unit that a step takes.

        Raises:
            ValueError: a row has no value, or one that is no single value.

        >>> Units.of(["a", "b", "a"], column="patient", max_rows=8).rows
        ((0, 2), (1,))
        """
        found: dict[Hashable, list[int]] = {}
        for index, value in enumerate(values):
            found.setdefault(_single(value, column), []).append(index)
        return cls(column=column, max_rows=max_rows, rows=tuple(map(tuple, found.values())))

    def __len__(self) -> int:
        """Number of units."""
        return len(self.rows)

    def draw(self, unit: int, seeds: Seeds) -> list[tuple[int, int]]:
        """The rows of a unit that a step takes: places among the unit's rows, and their indices.

        Args:
            unit: its index.
            seeds: secret ones of this unit and step.
        """
        rows = self.rows[unit]
        places = list(range(len(rows)))
        if len(rows) > self.max_rows:
            generator = torch.Generator().manual_seed(seeds.seed())
            order = torch.randperm(len(rows), generator=generator)
            places = order[: self.max_rows].sort().values.tolist()
        return [(place, rows[place]) for place in places]

    def without_column(self, row: Any) -> dict[Any, Any]:
        """A row without its unit, which no collator and no model sees.

        Raises:
            ValueError: rows do not have their fields by name.
        """
        fields = fields_of(row, self.column)
        return {name: value for name, value in fields.items() if name != self.column}


def refuse_other_units(units: Units | None, plan: PrivacyPlan) -> None:
    """Refuses data whose units are not those that a plan is for."""
    planned = (plan.privacy_unit_column, plan.max_rows_per_unit)
    given = (None, None) if units is None else (units.column, units.max_rows)
    if planned != given:
        raise ValueError(
            "Expected `units` of the plan's `privacy_unit_column` and `max_rows_per_unit`, "
            f"{planned[0]!r} and {planned[1]}, got {given[0]!r} and {given[1]}; make plan and "
            "`Units` with the same."
        )


def fields_of(row: Any, column: str) -> Mapping[Any, Any]:
    """A row's fields by name.

    Raises:
        ValueError: it has none.
    """
    if isinstance(row, Mapping):
        return row
    raise ValueError(
        f"Expected rows with fields by name, of which `privacy_unit_column={column}` is one, got "
        f"rows of type {type(row).__name__}; return dictionaries from the data set."
    )


def _single(value: Any, column: str) -> Hashable:
    """A value as something that equal values are found by."""
    try:
        # A tensor or NumPy's number is not equal to, or not hashed as, the number that it holds.
        single: Hashable = value.item() if hasattr(value, "item") else value
        hash(single)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"Expected one number or text per row in `privacy_unit_column={column}`, got values of "
            f"type {type(value).__name__}; make it a column of identifiers."
        ) from None
    if single is None or single != single:
        raise ValueError(
            f"Expected a value of `privacy_unit_column={column}` in every row, got rows without "
            "one, of which nobody knows whose they are; leave such rows out, or give each an "
            "identifier of its own if it is known to be nobody else's."
        )
    return single
