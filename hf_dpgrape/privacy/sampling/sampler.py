"""The loader's sampler: one logical batch of indices after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from hf_dpgrape.privacy.sampling.base import Sampling


class LogicalBatchSampler(Sampler[list[int]]):
    """Yields logical batches: lists of indices, as a way of sampling draws them.

    A process of rank k owns the indices congruent to k modulo `num_processes` and draws among those
    alone, without any communication; the processes' generators are independent.

    Args:
        sampling: of the plan.
        num_examples: size of the data set.
        num_batches: batches yielded by one iteration.
        generator: secret CPU generator.
        rank: which process this is.
        num_processes: how many share the data set.

    Raises:
        ValueError: processes cannot draw on their own in this way.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        num_examples: int,
        num_batches: int,
        generator: torch.Generator,
        rank: int = 0,
        num_processes: int = 1,
    ) -> None:
        if num_processes > 1 and not sampling.over_processes:
            raise ValueError(
                f"Expected one process for sampling that is {sampling.describe()} (whether a step "
                f"is cut depends on what all processes have drawn), got {num_processes}; leave "
                "`max_logical_batch_size` out, or train in one process."
            )
        self.sampling = sampling
        self.indices = torch.arange(rank, num_examples, num_processes)
        self.num_batches = num_batches
        self.generator = generator

    def __len__(self) -> int:
        """Number of logical batches per iteration."""
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Draws one logical batch after the other."""
        for _ in range(self.num_batches):
            yield self.sampling.draw(self.indices, self.generator).tolist()
