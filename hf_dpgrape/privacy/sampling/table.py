"""The ways of sampling, one row each, by the number of a plan that asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hf_dpgrape.privacy.sampling.base import Sampling
from hf_dpgrape.privacy.sampling.poisson import Poisson
from hf_dpgrape.privacy.sampling.truncated_poisson import TruncatedPoisson

#: Number of a plan or a record -> the way of sampling that has it.
SAMPLINGS: dict[str, type[Sampling]] = {
    "max_logical_batch_size": TruncatedPoisson,
    "sampling_prob": Poisson,
}


def sampling_of(numbers: Mapping[str, Any]) -> Sampling:
    """The sampling of a plan's numbers, or of those that `Sampling.numbers` wrote.

    The first row whose number is given decides; numbers that it does not have are left out.

    >>> sampling_of({"sampling_prob": 0.1, "max_logical_batch_size": None})
    Poisson(sampling_prob=0.1)
    """
    kind = next(kind for asked, kind in SAMPLINGS.items() if numbers.get(asked) is not None)
    return kind(**{f.name: numbers[f.name] for f in fields(kind)})
