"""Tells what it costs where a collator lets no lengths be rounded up."""

from __future__ import annotations

import logging
from typing import Any

from transformers import DefaultDataCollator, default_data_collator

from hf_dpgrape.mechanism.collation import (
    can_be_rounded,
    padding_collator,
    padding_of,
    wrapped_by,
)

logger = logging.getLogger(__name__)


def warn_of_exact_lengths(collate: Any, model: object, length_grid: int) -> None:
    """Says what it costs that no lengths can be rounded up, if that is so.

    Args:
        collate: the collator.
        model: which may take text, whose examples have lengths.
        length_grid: finest step to which lengths would be rounded; 0 if exact ones are asked for.
    """
    is_text = getattr(model, "main_input_name", "") == "input_ids"
    if length_grid and is_text and _leaves_lengths(collate):
        logger.warning(
            "`data_collator` lets no lengths be rounded up, so a step takes a physical batch for "
            "each distinct length drawn, if lengths vary. It is faster with a collator that has a "
            "`pad_to_multiple_of`, as DataCollatorWithPadding, or with examples that are padded in "
            "the data set."
        )


def _leaves_lengths(collate: Any) -> bool:
    """Whether different lengths stay different: no padding that can be rounded, nor a fixed one."""
    found = padding_collator(collate)
    if found is not None:
        fixed = found.pad_to_multiple_of is not None or padding_of(found) == "max_length"
        return not fixed and not can_be_rounded(found)
    while (inner := wrapped_by(collate)) is not None:
        collate = inner
    # These stack what has one length already.
    return collate is not default_data_collator and not isinstance(collate, DefaultDataCollator)
