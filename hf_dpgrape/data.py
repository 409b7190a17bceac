"""Logical batches for the private step: drawn by Poisson sampling, split into physical batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset

from hf_dpgrape.engine.private_step import PhysicalBatch


class LogicalBatches(Dataset[list[PhysicalBatch]]):
    """Maps the indices of a logical batch, none included, to its physical batches.

    Examples of similar length share a physical batch, which saves padding; how a logical batch is
    split does not change the private gradient.

    Args:
        examples: the training set.
        collate: makes model inputs of a list of examples.
        physical_batch_size: largest number of examples per physical batch.
    """

    def __init__(
        self, examples: Any, collate: Callable[[list[Any]], Any], physical_batch_size: int
    ) -> None:
        self.examples = examples
        self.collate = collate
        self._size = physical_batch_size

    def __len__(self) -> int:
        """Number of examples, as the Trainer's bookkeeping expects."""
        return len(self.examples)

    def __getitem__(self, indices: Sequence[int]) -> list[PhysicalBatch]:
        """The physical batches of the examples at these indices."""
        if not indices:
            return []
        if hasattr(self.examples, "__getitems__"):
            examples = list(self.examples.__getitems__(list(indices)))
        else:
            examples = [self.examples[i] for i in indices]
        examples.sort(key=num_tokens)
        return [
            PhysicalBatch(len(part), self.collate(part))
            for part in (examples[i : i + self._size] for i in range(0, len(examples), self._size))
        ]


def num_tokens(example: Any) -> int:
    """Number of tokens of an example, or 0 if it is not text."""
    try:
        return len(example["input_ids"])
    except (KeyError, TypeError, IndexError):
        return 0
