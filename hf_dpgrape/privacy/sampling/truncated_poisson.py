"""Truncated Poisson sampling: no step holds more examples than a bound, so time is bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import dp_accounting

from hf_dpgrape.privacy.sampling.base import Accountant, Sampling
from hf_dpgrape.privacy.sampling.poisson import Poisson

if TYPE_CHECKING:  # epsilon is computed without torch
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Sampling):
    """A Poisson sample, of which a uniformly random subset stays if it exceeds a bound.

    Where a sample is cut, an example more pushes another one out: the sum then moves by twice the
    clip norm (arXiv 2508.15089). How often that is follows from the number of examples. Neighbors
    have one example less than these, or one more, so both sizes count.

    Guarantees:
        A step draws at most `max_logical_batch_size` examples, all subsets of a size alike.
        Epsilon covers both neighbors, and is never below that of the sample without a bound.

    Attributes:
        num_examples: size of the data set.
        max_logical_batch_size: the bound.

    Raises:
        ValueError: the bound is below the mean, so that most steps would be cut.

    >>> TruncatedPoisson(sampling_prob=0.1, num_examples=90, max_logical_batch_size=20).describe()
    'Poisson, cut at random to at most 20 examples'
    """

    num_examples: int
    max_logical_batch_size: int

    accountants: ClassVar[tuple[Accountant, ...]] = ("pld",)
    over_processes: ClassVar[bool] = False  # whether to cut depends on what all have drawn

    def __post_init__(self) -> None:
        """Refuses what is no probability, and a bound that most samples exceed."""
        super().__post_init__()
        mean = self.sampling_prob * self.num_examples
        # Written so that NaN is refused. The mean is a whole number, but for rounding.
        if not self.max_logical_batch_size >= round(mean):
            raise ValueError(
                "`max_logical_batch_size` must be at least `expected_batch_size`, or most steps "
                f"would be cut, got {self.max_logical_batch_size} for a mean of {mean:g}; what is "
                "cut costs epsilon, little from 4 standard deviations, 4 sqrt(mean), above it on."
            )

    def draw(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        """The examples whose coins say so, or those with the least of uniform keys among them."""
        drawn = Poisson(sampling_prob=self.sampling_prob).draw(indices, generator)
        if len(drawn) <= self.max_logical_batch_size:
            return drawn
        keys = drawn.double().uniform_(generator=generator)
        kept = keys.argsort()[: self.max_logical_batch_size]
        return drawn[kept.sort().values]

    def events(self, noise_multiplier: float) -> tuple[dp_accounting.DpEvent, ...]:
        """Without a bound; and with it, for pairs of neighbors of which these are more, or less."""
        truncated = (
            dp_accounting.TruncatedSubsampledGaussianDpEvent(
                dataset_size=size,  # of the larger neighbor
                sampling_probability=self.sampling_prob,
                truncated_batch_size=self.max_logical_batch_size,
                noise_multiplier=noise_multiplier,
            )
            for size in (self.num_examples, self.num_examples + 1)
        )
        return (*Poisson(sampling_prob=self.sampling_prob).events(noise_multiplier), *truncated)

    def losses(self, noise_multiplier: float) -> tuple[tuple[float, float], ...]:
        """Those of a step that is not cut, and of one that is, with twice the sensitivity."""
        return tuple(
            (noise, self.sampling_prob) for noise in (noise_multiplier, noise_multiplier / 2)
        )

    def describe(self, drawn: str = "examples") -> str:
        """For the record and the card."""
        return f"Poisson, cut at random to at most {self.max_logical_batch_size} {drawn}"
