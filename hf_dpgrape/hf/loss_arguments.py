"""The arguments that say how the loss of one example is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_dpgrape.hf.cross_entropy import CrossEntropy


@dataclass
class LossArguments:
    """What changes an example's own loss, beside transformers' `label_smoothing_factor`."""

    class_weights: list[float] | None = field(
        default=None,
        metadata={
            "help": "One weight per class, for classification of examples or tokens: it "
            "multiplies the loss of a label, before clipping and without division by a sum of "
            "weights. Choose them by public knowledge: epsilon does not cover a count of the "
            "training labels. Under `clipping=automatic` an example's own weight has no effect."
        },
    )

    def cross_entropy(self) -> CrossEntropy:
        """The cross entropy that these arguments ask for.

        Raises:
            ValueError: a number is impossible, in one sentence.
        """
        smoothing: float = getattr(self, "label_smoothing_factor", 0.0)  # transformers' own
        return CrossEntropy.of(self.class_weights, smoothing)

    def loss_record(self) -> dict[str, object]:
        """For the record: what was changed about the loss; empty if nothing was."""
        found = self.cross_entropy()
        if found.is_plain:
            return {}
        weights = found.class_weights
        return {
            "loss": {
                "class_weights": None if weights is None else list(weights),
                "label_smoothing_factor": found.label_smoothing,
            }
        }
