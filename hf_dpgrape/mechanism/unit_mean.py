"""The vector of a unit of several rows: the mean of its rows' vectors, clipped as one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_dpgrape.gradients.forms import Dense, PerSampleGradients
from hf_dpgrape.mechanism.estimators.base import Estimate


class UnitMean:
    """Adds up the vectors of one unit's rows, over as many physical batches as they come in.

    The mean, not the sum, so that the clip norm means what it means for single rows. What is done
    to a row needs no norm of its own: it is added as soon as a tensor is complete, in the middle
    of backward, and freed.

    Guarantees:
        The estimate is a function of the rows that were added alone, and the same, but for
        rounding, however they are split into physical batches. A row of which anything is not
        finite makes the unit's vector not finite there.

    Args:
        num_rows: number of rows that will be added, at least 1.
        means: zero for each part of the vector, by name; added to in place.
    """

    def __init__(self, num_rows: int, means: Mapping[str, Tensor]) -> None:
        self._num_rows = num_rows
        self._means = means
        self._losses: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, vectors: PerSampleGradients, name: str) -> None:
        """Adds what some rows have of a part that is complete."""
        mean = self._means[name]
        weights = mean.new_full((vectors.batch_size,), 1 / self._num_rows)
        vectors.add_weighted_sum_(name, mean, weights)
        vectors.discard(name)

    def add(self, rows: Estimate) -> None:
        """Adds some rows, of which parts may have been added as they were complete."""
        for name in list(rows.vectors):
            self(rows.vectors, name)
        self._losses.append(rows.losses.detach().cpu().double())

    def estimate(self) -> Estimate:
        """The unit as one sample: the mean loss (1,), and the mean vector."""
        vectors = PerSampleGradients(1)
        for name, mean in self._means.items():
            vectors.add(name, Dense(mean[None]))
        return Estimate(torch.cat(self._losses).mean()[None], vectors)
