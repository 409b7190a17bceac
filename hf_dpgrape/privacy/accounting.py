"""Epsilon and noise calibration, by dp-accounting.

Both directions are pure functions of public numbers. The privacy loss distribution (PLD) is
discretized pessimistically, so its epsilon is an upper bound (Koskela et al. 2020,
arXiv 1906.03049; Doroshenko et al. 2022, arXiv 2207.04380). Renyi accounting is looser and
faster (Mironov et al. 2019, arXiv 1908.10530).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from typing import Literal, get_args

import dp_accounting
from dp_accounting import pld, rdp

Accountant = Literal["pld", "rdp"]

#: Relative width at which the search for the noise multiplier stops.
_CALIBRATION_TOLERANCE = 1e-4


def _fresh(accountant: Accountant) -> dp_accounting.PrivacyAccountant:
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if accountant == "pld":
        return pld.PLDAccountant(relation)
    if accountant == "rdp":
        return rdp.RdpAccountant(neighboring_relation=relation)
    raise ValueError(f"`accountant` must be one of {get_args(Accountant)}, got {accountant!r}.")


@contextlib.contextmanager
def _without_order_warnings() -> Iterator[None]:
    """Silences dp-accounting's note on each Renyi order that it leaves out of its minimum.

    Leaving orders out can only make the bound looser.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.lru_cache(maxsize=4096)
def epsilon(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """Epsilon of `num_steps` Poisson-sampled Gaussian releases, add-or-remove-one neighbors.

    Guarantees:
        An upper bound, non-decreasing in `num_steps`; 0 for no steps and infinite without noise.

    Args:
        noise_multiplier: noise standard deviation over sensitivity.
        sampling_prob: probability with which each example enters a step.
        num_steps: number of releases.
        delta: the delta of the (epsilon, delta) statement.
        accountant: "pld" or "rdp".
    """
    if num_steps < 0:
        raise ValueError(f"`num_steps` must be zero or more, got {num_steps}.")
    fresh = _fresh(accountant)
    if num_steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    event = dp_accounting.PoissonSampledDpEvent(
        sampling_prob, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    with _without_order_warnings():
        fresh.compose(dp_accounting.SelfComposedDpEvent(event, num_steps))
        return float(fresh.get_epsilon(delta))


@functools.lru_cache(maxsize=256)
def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """Smallest noise multiplier (to a relative 1e-4) whose epsilon stays within the target.

    Renyi accounting, being cheap and looser, supplies the upper end of the search for PLD.

    Guarantees:
        `epsilon(result) <= target_epsilon`, by the same accountant that reports it.

    Raises:
        ValueError: the target is not positive, or no noise multiplier below 2**20 meets it.
    """
    if not target_epsilon > 0 or math.isinf(target_epsilon):
        raise ValueError(f"`target_epsilon` must be positive and finite, got {target_epsilon}.")

    def spent(sigma: float) -> float:
        return epsilon(
            noise_multiplier=sigma,
            sampling_prob=sampling_prob,
            num_steps=num_steps,
            delta=delta,
            accountant=accountant,
        )

    if accountant == "pld":
        upper = calibrate_noise_multiplier(
            target_epsilon=target_epsilon,
            sampling_prob=sampling_prob,
            num_steps=num_steps,
            delta=delta,
            accountant="rdp",
        )
    else:
        upper = 1.0
    while spent(upper) > target_epsilon:
        upper *= 1.5
        if upper > 2**20:
            raise ValueError(
                f"No noise multiplier reaches `target_epsilon`={target_epsilon} at "
                f"`target_delta`={delta}: take fewer steps, smaller batches or a larger epsilon."
            )
    lower = upper / 1.5
    while spent(lower) <= target_epsilon:
        upper, lower = lower, lower / 1.5
    while upper / lower > 1 + _CALIBRATION_TOLERANCE:
        middle = math.sqrt(lower * upper)
        if spent(middle) <= target_epsilon:
            upper = middle
        else:
            lower = middle
    return upper
