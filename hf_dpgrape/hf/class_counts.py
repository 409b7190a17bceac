"""Whether a classifier tells classes apart at all, counted while it is evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from hf_dpgrape.mechanism.synthetic import IGNORED

#: Fewer labels than this say nothing.
_FEWEST_LABELS = 20

#: By this factor the other classes are predicted more rarely than they are labels, or still more.
_RARER = 10


@dataclass(frozen=True, kw_only=True)
class OneClass:
    """An evaluation in which nearly all predictions were one class.

    Attributes:
        predicted_class: that class.
        predicted_share: share of the predictions that it has.
        largest_class_share: share of the labels that the most frequent class has.
    """

    predicted_class: int
    predicted_share: float
    largest_class_share: float

    def __str__(self) -> str:
        return (
            f"predicts class {self.predicted_class} for {self.predicted_share:.1%} of the "
            f"evaluation set, whose most frequent class has {self.largest_class_share:.1%}"
        )


class ClassCounts:
    """How often each class was predicted, and how often it is a label.

    Nothing but one pair of counts per class is kept. Positions without a label are left out.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # (2, classes): predictions, labels

    def add(self, outputs: Any, labels: Any) -> None:
        """Counts a batch whose labels are classes; anything else is passed over.

        Args:
            outputs: what the model returned; if no mapping, the loss and then the logits.
            labels: (B,) or (B, T), for logits with one dimension more.
        """
        logits = _logits_of(outputs)
        if logits is None or not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        if logits.shape[:-1] != labels.shape or logits.shape[-1] < 2:
            return
        own = labels != IGNORED
        pair = (logits.argmax(-1)[own], labels[own])
        counts = torch.stack([torch.bincount(c, minlength=logits.shape[-1]) for c in pair]).cpu()
        self._counts = counts if self._counts is None else self._counts + counts

    def over_processes(self) -> ClassCounts:
        """The counts of all processes together; every process has to call it."""
        total = ClassCounts()
        found: Sequence[Tensor | None] = gather_object([self._counts])
        parts = [counts for counts in found if counts is not None]
        total._counts = torch.stack(parts).sum(0) if parts else None
        return total

    def one_class(self) -> OneClass | None:
        """What there is to say if nearly all predictions are one class; else None.

        "Nearly all" goes by how rare the other classes are: they are predicted at most a tenth as
        often as they are labels. A set with one class in it, or a handful of labels, says nothing.
        """
        if self._counts is None:
            return None
        number = int(self._counts[1].sum())
        predicted, largest = (int(row.max()) for row in self._counts)
        other_labels, other_predictions = number - largest, number - predicted
        says_nothing = number < _FEWEST_LABELS or not other_labels
        if says_nothing or other_predictions * _RARER > other_labels:
            return None
        return OneClass(
            predicted_class=int(self._counts[0].argmax()),
            predicted_share=predicted / number,
            largest_class_share=largest / number,
        )


def _logits_of(outputs: Any) -> Tensor | None:
    """The logits among outputs of a model, beside its loss."""
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    else:
        logits = outputs[1] if isinstance(outputs, (tuple, list)) and len(outputs) > 1 else None
    return logits if isinstance(logits, Tensor) and logits.ndim > 1 else None
