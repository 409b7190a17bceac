"""Collates one example at a time, at a length rounded up to a public grid.

A collator that sees several examples can let one change the tensors of another: by padding to the
longest, by mixing, by statistics over the batch. One that only ever sees one example cannot.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import numpy as np
from torch import Tensor

Collator = Callable[[list[Any]], Any]

#: Fields whose lengths padding collators round up.
_SEQUENCES = ("input_ids", "labels", "label")

#: Where objects that wrap a collator keep it.
_WRAPPED = ("data_collator", "collator", "collate_fn")


def grid_step(length: int, base: int) -> int:
    """The step of the grid at this length: `base`, or a quarter of the next power of two.

    Args:
        length: number of tokens, at least 1.
        base: finest step, a power of two.

    Example:
        >>> [-(-n // grid_step(n, 8)) * grid_step(n, 8) for n in (3, 9, 33, 49, 65, 130)]
        [8, 16, 48, 64, 96, 192]
    """
    return max(base, (1 << (length - 1).bit_length()) // 4)


class AloneCollator:
    """Makes the model inputs of one example, by a collator that is given that example alone.

    If the collator pads and lets its lengths be rounded (a `pad_to_multiple_of` that is None), they
    are rounded up to the grid, so that examples of similar length have equal shapes.

    Guarantees:
        Attributes that a call sets on the collator do not reach the next call. A length is rounded
        to a function of this example's own lengths, and never beyond `longest`.

    Args:
        collate: makes model inputs of a list of examples.
        length_grid: finest step of the grid, a power of two; 0 for exact lengths.
        longest: most tokens that the model takes; None if it does not limit them.
    """

    def __init__(
        self, collate: Collator, *, length_grid: int = 0, longest: int | None = None
    ) -> None:
        self._collate = collate
        self._base = length_grid if can_be_rounded(padding_collator(collate)) else 0
        self._longest = longest

    def __call__(self, example: Any) -> Any:
        """The inputs of this example, as the collator returns them."""
        if not self._base:
            return _fresh(self._collate, None)([example])
        exact = None
        lengths = _lengths(example)
        if not lengths:  # the collator makes the sequences, as one that tokenizes does
            exact = _fresh(self._collate, None)([example])
            lengths = _lengths(exact)
        step = self._step(max(lengths, default=0))
        if step is not None:
            rounded = _fresh(self._collate, step)([example])
            if not _kept(rounded, (n for n in lengths if n % step)):
                return rounded
        return _fresh(self._collate, None)([example]) if exact is None else exact

    def _step(self, length: int) -> int | None:
        """Of what an example's lengths become multiples, given the largest; None for exact."""
        if not length:
            return None
        step = grid_step(length, self._base)
        if self._longest is None or -(-length // step) * step <= self._longest:
            return step
        return self._longest if length <= self._longest else None


def padding_collator(collate: Any) -> Any:
    """The object with a `pad_to_multiple_of` among collators that wrap each other, or None."""
    while collate is not None and not hasattr(collate, "pad_to_multiple_of"):
        collate = wrapped_by(collate)
    return collate


def can_be_rounded(collator: Any) -> bool:
    """Whether a collator pads, and leaves it open to which multiple."""
    return (
        collator is not None
        and collator.pad_to_multiple_of is None
        and padding_of(collator) in (True, "longest")
        # Without a padding token it can only take what needs no padding.
        and getattr(getattr(collator, "tokenizer", None), "pad_token", "") is not None
    )


def padding_of(collator: Any) -> bool | str:
    """The choice of padding; collators without one pad to the longest."""
    choice: bool | str = getattr(collator, "padding", True)
    return choice


def wrapped_by(collate: Any) -> Any:
    """What a collator calls to collate, where that is known."""
    if isinstance(collate, functools.partial):
        return collate.func
    if isinstance(collate, MethodType):
        return collate.__self__
    inner = (vars(collate).get(name) for name in _WRAPPED if hasattr(collate, "__dict__"))
    return next((found for found in inner if callable(found)), None)


def _fresh(collate: Any, step: int | None) -> Any:
    """A shallow copy of a collator and of those inside, which pads to multiples of `step`."""
    if hasattr(collate, "_remove_columns"):  # transformers' RemoveColumnsCollator: a copy would log
        inner = _fresh(collate.data_collator, step)
        return lambda features: inner([collate._remove_columns(f) for f in features])
    if isinstance(collate, functools.partial):
        return functools.partial(_fresh(collate.func, step), *collate.args, **collate.keywords)
    if isinstance(collate, MethodType):
        return MethodType(collate.__func__, _fresh(collate.__self__, step))
    copied = copy.copy(collate)  # of a function: itself
    if hasattr(collate, "pad_to_multiple_of"):
        if step is not None:
            object.__setattr__(copied, "pad_to_multiple_of", step)  # also where it is frozen
        return copied
    for name in _WRAPPED:
        if callable(getattr(copied, "__dict__", {}).get(name)):
            object.__setattr__(copied, name, _fresh(vars(copied)[name], step))
            break
    return copied


def _lengths(fields: Any) -> set[int]:
    """Lengths of an example's sequences of tokens, before or after it is collated."""
    if not isinstance(fields, Mapping):
        fields = {"input_ids": fields}
    found = (_length(value) for name, value in fields.items() if str(name).endswith(_SEQUENCES))
    return {length for length in found if length}


def _length(value: Any) -> int:
    """Length of the innermost sequence, the longest if there are several; 0 if it is none."""
    if isinstance(value, Tensor | np.ndarray):
        return int(value.shape[-1]) if value.ndim else 0
    if not isinstance(value, list | tuple):
        return 0
    if value and isinstance(value[0], list | tuple | Tensor | np.ndarray):
        return max(map(_length, value))
    return len(value)


def _kept(inputs: Any, lengths: Iterable[int]) -> bool:
    """Whether some tensor still has one of these lengths: the collator pads only some of them."""
    exact = set(lengths)
    return isinstance(inputs, Mapping) and any(
        isinstance(value, Tensor) and not exact.isdisjoint(value.shape[1:])
        for value in inputs.values()
    )
