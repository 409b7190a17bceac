"""The units of a training set, from the column that tells whose a row is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_dpgrape.hf.unit_arguments import UnitArguments
from hf_dpgrape.mechanism.units import Units, fields_of
from hf_dpgrape.privacy.randomness import global_randomness_restored


def units_of(args: UnitArguments, train_dataset: Any) -> Units | None:
    """The units that the arguments ask for; None if every row is one by itself.

    Of a `datasets.Dataset` only the column is read. Any other data set is indexed once per row, as
    nothing else is known of it.

    Args:
        args: the arguments.
        train_dataset: the training set, with a length and indexed access.

    Raises:
        ValueError: there is no such column, or rows without a single value in it.
    """
    column, max_rows = args.privacy_unit_column, args.rows_per_unit
    if column is None or max_rows is None:
        return None
    return Units.of(_values(train_dataset, column), column=column, max_rows=max_rows)


def without_unit(dataset: Any, args: UnitArguments) -> Any:
    """A `datasets.Dataset` without the column of units, if it has it; others as they are.

    Args:
        dataset: to train or to evaluate on.
        args: the arguments.
    """
    column, names = args.privacy_unit_column, getattr(dataset, "column_names", None) or ()
    return dataset.remove_columns(column) if column is not None and column in names else dataset


def _values(train_dataset: Any, column: str) -> Iterable[Any]:
    """The column's value in each row."""
    if hasattr(train_dataset, "select_columns") and hasattr(train_dataset, "column_names"):
        _require_column(column, train_dataset.column_names)
        # Without format or transform, which would see the one column alone.
        return list(train_dataset.with_format(None).select_columns([column])[:][column])
    with global_randomness_restored():  # rows may draw, as an augmentation does
        return [_value(train_dataset[index], column) for index in range(len(train_dataset))]


def _value(row: Any, column: str) -> Any:
    """One row's value."""
    fields = fields_of(row, column)
    _require_column(column, fields)
    return fields[column]


def _require_column(column: str, names: Iterable[Any]) -> None:
    """Refuses a name that is none of these."""
    if column not in names:
        raise ValueError(
            f"Expected `privacy_unit_column` to be one of {sorted(map(str, names))}, the columns "
            f"of `train_dataset`, got {column!r}; name one of these, and keep it in the data set "
            "where it is tokenized or filtered."
        )
