"""Poisson sampling: every example enters a step by a coin of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import dp_accounting
import scipy.stats

from hf_dpgrape.privacy.sampling.base import Accountant, Sampling

if TYPE_CHECKING:  # epsilon is computed without torch
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampling):
    """Each example independently with `sampling_prob`.

    Guarantees:
        Inclusions are independent over examples and steps. A step may draw nothing. The union of
        what processes draw, each among its own examples with a generator of its own, is a Poisson
        sample of all.

    >>> Poisson(sampling_prob=0.01).describe()
    'Poisson'
    """

    accountants: ClassVar[tuple[Accountant, ...]] = ("pld", "rdp")
    over_processes: ClassVar[bool] = True

    def draw(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        """The examples whose coins say so."""
        # float64: a 24-bit uniform would misstate sampling probabilities near 1e-6.
        coins = indices.double().uniform_(generator=generator)
        return indices[coins < self.sampling_prob]

    def events(self, noise_multiplier: float) -> tuple[dp_accounting.DpEvent, ...]:
        """A Poisson-sampled Gaussian release."""
        release = dp_accounting.GaussianDpEvent(noise_multiplier)
        return (dp_accounting.PoissonSampledDpEvent(self.sampling_prob, release),)

    def unit_event(self, noise_multiplier: float, examples: int) -> dp_accounting.DpEvent:
        """A Gaussian release that moves by as many clip norms as coins of theirs say so.

        The number is binomial. The worst case is that all their examples move the sum into one
        direction by a whole clip norm each (Ganesh 2024, arXiv 2401.10294).
        """
        counts = range(examples + 1)
        probs = scipy.stats.binom.pmf(counts, examples, self.sampling_prob)
        return dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
            noise_multiplier, [float(j) for j in counts], [float(p) for p in probs]
        )

    def losses(self, noise_multiplier: float) -> tuple[tuple[float, float], ...]:
        """Those of the event."""
        return ((noise_multiplier, self.sampling_prob),)

    def describe(self, drawn: str = "examples") -> str:
        """For the record and the card."""
        del drawn
        return "Poisson"
