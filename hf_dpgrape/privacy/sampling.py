"""Poisson sampling: every example enters a step by a coin of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class PoissonSampler(Sampler[list[int]]):
    """Yields logical batches: lists of indices, each index independently with `sampling_prob`.

    A process of rank k owns the indices congruent to k modulo `num_processes` and flips the coins
    for those alone; the union over processes is a Poisson sample of the whole data set, without
    any communication, as long as the processes' generators are independent.

    Guarantees:
        Inclusions are independent over examples and steps. A batch may be empty.

    Args:
        num_examples: size of the data set.
        sampling_prob: probability of each coin.
        num_batches: batches yielded by one iteration.
        generator: secret CPU generator.
        rank: which process this is.
        num_processes: how many share the data set.
    """

    def __init__(
        self,
        *,
        num_examples: int,
        sampling_prob: float,
        num_batches: int,
        generator: torch.Generator,
        rank: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.indices = torch.arange(rank, num_examples, num_processes)
        self.sampling_prob = sampling_prob
        self.num_batches = num_batches
        self.generator = generator

    def __len__(self) -> int:
        """Number of logical batches per iteration."""
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Draws one logical batch after the other."""
        for _ in range(self.num_batches):
            # float64: a 24-bit uniform would misstate sampling probabilities near 1e-6.
            coins = torch.rand(len(self.indices), generator=self.generator, dtype=torch.float64)
            yield self.indices[coins < self.sampling_prob].tolist()
