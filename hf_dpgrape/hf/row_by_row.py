"""A user's loss, called for one row of a batch at a time.

A function of the whole batch may look across it: it may keep the largest losses, weigh by frequency
or divide by a count. Here it is never given more than one row, so that it cannot.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

#: What a row holds of a value that belongs to no row in particular.
_PLAIN = (bool, int, float, str)


class RowByRow:
    """One loss per row, from a function of `(outputs, labels)`.

    The function sees the outputs of a batch of one: tensors (1, ...), in the containers that the
    model returned. What is not split by rows (caches, tensors whose first dimension is not the
    batch) is None there. `num_items_in_batch` is None, if the function takes it.

    Guarantees:
        Loss i is computed from row i alone, whatever the function does with what it is given.

    Args:
        function: `(outputs, labels)`, maybe with `num_items_in_batch`, as the Trainer's
            `compute_loss_func`; returns a tensor of one element.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._options = {"num_items_in_batch": None} if _takes_count(function) else {}

    def __call__(self, outputs: Any, labels: Any, num_rows: int) -> Tensor:
        """The losses (num_rows,).

        Raises:
            ValueError: the function returns something else than one number, or the outputs cannot
                be told apart by rows.
        """
        if not isinstance(outputs, (Tensor, Mapping, tuple, list, SimpleNamespace)) and not (
            dataclasses.is_dataclass(outputs)
        ):
            raise ValueError(
                "Expected a model that returns a tensor, a tuple, a mapping or a dataclass, of "
                "which `compute_loss_func` is given one row at a time, got "
                f"{type(outputs).__name__}; return a dictionary of tensors."
            )
        pairs = zip(rows_of(outputs, num_rows), rows_of(labels, num_rows), strict=True)
        return torch.stack([_number(self._function(*pair, **self._options)) for pair in pairs])


def rows_of(value: Any, num_rows: int) -> list[Any]:
    """What each row has of a value: batches of one, in the same containers."""
    if isinstance(value, Tensor):
        # One `split` for all rows: its backward is one concatenation, where a slice per row would
        # fill a tensor of the batch's size for each.
        parted = value.ndim and len(value) == num_rows
        return list(torch.split(value, 1)) if parted else [None] * num_rows
    if isinstance(value, ModelOutput):
        return [type(value)(**row) for row in _fields_of(value.items(), num_rows)]
    if isinstance(value, Mapping):
        return _fields_of(value.items(), num_rows)
    if isinstance(value, SimpleNamespace):
        return [SimpleNamespace(**row) for row in _fields_of(vars(value).items(), num_rows)]
    if dataclasses.is_dataclass(value):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
        make: Any = type(value)
        return [make(**row) for row in _fields_of(fields, num_rows)]
    if isinstance(value, (tuple, list)):
        parts = _fields_of(enumerate(value), num_rows)
        if hasattr(value, "_fields"):  # a named tuple
            return [type(value)(*row.values()) for row in parts]
        return [tuple(row.values()) for row in parts]
    return [value if isinstance(value, _PLAIN) else None] * num_rows


def _fields_of(items: Iterable[tuple[Any, Any]], num_rows: int) -> list[dict[Any, Any]]:
    """For each row, the fields of a container."""
    columns = {key: rows_of(value, num_rows) for key, value in items}
    return [{key: rows[i] for key, rows in columns.items()} for i in range(num_rows)]


def _takes_count(function: Callable[..., Tensor]) -> bool:
    """Whether a function can be passed `num_items_in_batch`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return False
    kinds = {parameter.kind for parameter in parameters.values()}
    return "num_items_in_batch" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _number(loss: Any) -> Tensor:
    """A row's loss without dimensions."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    came = f"a tensor of {loss.ndim} dimension(s)" if isinstance(loss, Tensor) else "no tensor"
    raise ValueError(
        "Expected `compute_loss_func` to return one number for the one example that it is given, "
        f"got {came}; average within the example."
    )
