"""The cross entropy of one label, with class weights and label smoothing if they are wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hf_dpgrape.mechanism.synthetic import IGNORED

#: Tasks whose labels are classes; those with tokens for labels can be smoothed, too.
_OF_CLASSES = frozenset(
    {"text-classification", "image-classification", "audio-classification", "token-classification"}
)


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy per label: `F.cross_entropy` with its weights and its smoothing, unreduced.

    A weight multiplies the loss of the label, and nothing divides by a sum of weights: neither
    over the batch, which would tie examples together, nor within an example.

    Guarantees:
        Loss i depends on row i of logits and labels alone.

    Args:
        class_weights: one per class; None for 1 everywhere.
        label_smoothing: share of the target that is spread over all classes.

    Raises:
        ValueError: a weight or the share is impossible.
    """

    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        weights = self.class_weights
        if weights is not None and not (
            all(math.isfinite(w) and w >= 0 for w in weights) and any(weights)
        ):
            raise ValueError(
                "`class_weights` must be finite numbers of 0 or more, one per class and not all 0, "
                f"got {list(weights)}."
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                "`label_smoothing_factor` must be 0 (none) or more and below 1, got "
                f"{self.label_smoothing}."
            )

    @classmethod
    def of(cls, class_weights: Sequence[float] | None, label_smoothing: float) -> CrossEntropy:
        """From weights in any sequence."""
        return cls(None if class_weights is None else tuple(class_weights), label_smoothing)

    @property
    def is_plain(self) -> bool:
        """Whether it is the ordinary cross entropy, that of the models themselves."""
        return self.class_weights is None and not self.label_smoothing

    @property
    def asked_for(self) -> str:
        """The arguments that make it another one, for messages."""
        names = {
            "class_weights": self.class_weights is not None,
            "label_smoothing_factor": bool(self.label_smoothing),
        }
        return " and ".join(f"`{name}`" for name, is_set in names.items() if is_set)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses (N,) of logits (N, V) and labels (N,); 0 for a label that is ignored."""
        weights = self.class_weights
        return F.cross_entropy(
            logits,
            labels,
            weight=None if weights is None else logits.new_tensor(weights),
            reduction="none",
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )

    def refuse_unfit(self, task: str, config: Any, *, labels_are_tokens: bool) -> None:
        """Refuses a head whose labels are not what this is for.

        Args:
            task: the Hub's name of the head's task.
            config: of the head.
            labels_are_tokens: whether its labels are ids of tokens.

        Raises:
            ValueError: in one sentence.
        """
        problem = getattr(config, "problem_type", None)
        num_classes = getattr(config, "num_labels", 0)
        one_class = problem in (None, "single_label_classification") and num_classes > 1
        if not self.is_plain and not (
            (task in _OF_CLASSES and one_class)
            or (labels_are_tokens and self.class_weights is None)
        ):
            raise refused_for(self, f"a head for {problem or task}")
        weights = self.class_weights
        if weights is not None and len(weights) != num_classes:
            raise ValueError(
                f"`class_weights` must have one weight for each of the model's {num_classes} "
                f"classes, got {len(weights)}."
            )


#: The models' own.
PLAIN = CrossEntropy()


def refused_for(cross_entropy: CrossEntropy, came: str) -> ValueError:
    """The error of a loss that is no cross entropy of one label.

    Args:
        cross_entropy: what was asked for.
        came: where, in words.
    """
    tokens = "" if cross_entropy.class_weights is not None else " or tokens"
    return ValueError(
        f"{cross_entropy.asked_for} needs labels that are single classes{tokens}, got {came}; "
        "leave it out, or pass `compute_loss_func` with a loss of one example."
    )
