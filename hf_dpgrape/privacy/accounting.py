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
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import dp_accounting
import numpy as np
import scipy.optimize
from dp_accounting import pld, rdp

from hf_dpgrape.privacy.sampling.base import Accountant, Sampling
from hf_dpgrape.privacy.sampling.poisson import Poisson

#: Relative width at which the search for the noise multiplier stops.
_CALIBRATION_TOLERANCE = 1e-4

#: Noise multipliers below the first count as none; the search ends at the second.
_LEAST_NOISE, _MOST_NOISE = 0.01, 2.0**20

#: Grid points per standard deviation of one step's privacy loss, and on the whole grid.
_POINTS_PER_STDDEV, _MAX_POINTS = 64, 2**18

#: Steps beyond which the PLD accountant composes in blocks: dp-accounting computes (points of one
#: step) ** steps as an integer; and beyond which it answers by the Renyi bound, since rounding in
#: convolutions grows with the steps.
_MANY_STEPS, _MOST_PLD_STEPS = 100_000, 1_000_000

#: The time that accounting takes grows with the examples of one owner.
_MOST_PER_UNIT = 256

#: Beyond any run; what follows stays within floating-point numbers.
_MOST_STEPS = 10**12


#: A run as the accountants see it: noise multiplier, sampling, number of steps.
Run = tuple[float, Sampling, int]


def _grid_interval(runs: Sequence[Run]) -> float:
    """Width of the grid on which privacy losses are discretized.

    Any width gives an upper bound (Doroshenko et al. 2022, arXiv 2207.04380), but a fixed one
    cannot serve: 1e-4 exceeds a whole step's loss under much noise, so that the bound grows past
    the Renyi one, and takes gigabytes under little noise. Here it follows the standard deviation of
    a step's loss (the smallest, if runs differ), as far as the number of points allows. It falls
    with the noise, grows with the steps, and is a power of two: a coarser grid is then part of a
    finer one, so that epsilon stays monotone in both.
    """
    found = [[_loss_of_step(*loss) for loss in s.losses(sigma)] for sigma, s, _ in runs]
    largest = [max(stddev for stddev, _ in losses) for losses in found]
    variance = sum(steps * s**2 for s, (_, _, steps) in zip(largest, runs, strict=True))
    reaches = (reach for losses in found for _, reach in losses)
    width = 2 * max(0.0, *reaches) + 16 * math.sqrt(variance)
    finest = max(min(losses[0][0] for losses in found) / _POINTS_PER_STDDEV, width / _MAX_POINTS)
    return float(2.0 ** math.ceil(math.log2(finest)))


def _loss_of_step(sigma: float, q: float) -> tuple[float, float]:
    """Standard deviation of one step's privacy loss, and about the largest that it takes."""
    # Second moments of the loss log(1 + q (exp(L) - 1)): one for small losses, one for large.
    small = q * math.sqrt(math.expm1(min(sigma**-2, 700.0)))
    large = math.sqrt(q * (sigma**-2 + sigma**-4 / 4))
    stddev = min(small, large) if sigma**-2 < 700 else large
    largest = 0.5 / sigma**2 + 10 / sigma  # loss of an example that was drawn, 10 stddevs out
    reach = largest + math.log(q) if largest > 700 else math.log1p(q * math.expm1(largest))
    return stddev, reach


def _fresh(accountant: Accountant, grid_interval: float) -> dp_accounting.PrivacyAccountant:
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if accountant == "pld":
        return pld.PLDAccountant(relation, grid_interval)
    return rdp.RdpAccountant(neighboring_relation=relation)


def require_accountant(name: str) -> None:
    """Refuses a name that no accountant has."""
    if name not in get_args(Accountant):
        raise ValueError(f"`accountant` must be one of {get_args(Accountant)}, got {name!r}.")


def require_known(sampling: Sampling, num_steps: int, accountant: Accountant) -> None:
    """Refuses a run that an accountant cannot account for as it is drawn."""
    require_accountant(accountant)
    known = sampling.accountants
    if accountant not in known:
        raise ValueError(
            f"`accountant` must be one of {known} for sampling that is {sampling.describe()}, got "
            f"{accountant!r}."
        )
    if "rdp" not in known and num_steps > _MANY_STEPS:
        raise ValueError(
            f"`num_steps` must be at most {_MANY_STEPS:,} for sampling that is "
            f"{sampling.describe()} (beyond, only Poisson sampling can be accounted for), got "
            f"{num_steps:,}."
        )


def _check(num_steps: int, delta: float, accountant: str) -> None:
    """Refuses numbers that describe no run."""
    if num_steps < 0:
        raise ValueError(f"`num_steps` must be zero or more, got {num_steps}.")
    if num_steps > _MOST_STEPS:
        raise ValueError(f"`num_steps` must be at most {_MOST_STEPS:,}; plan a shorter run.")
    if not 0 < delta < 1:
        raise ValueError(
            f"`target_delta` must be between 0 and 1, got {delta}; choose it below "
            "1 / num_examples."
        )
    require_accountant(accountant)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences dp-accounting's notes on Renyi orders that it leaves out, and on overflow.

    Leaving orders out can only make the bound looser; overflow makes it infinite.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(over="ignore"):
            yield
    finally:
        logger.setLevel(level)


@functools.lru_cache(maxsize=4096)
def epsilon(
    *,
    noise_multiplier: float,
    sampling: Sampling,
    num_steps: int,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """Epsilon of `num_steps` Gaussian releases on samples, add-or-remove-one neighbors.

    Guarantees:
        An upper bound, non-decreasing in `num_steps` (up to an epsilon of 700); 0 for no steps,
        and infinite for a noise multiplier below 0.01.

    Args:
        noise_multiplier: noise standard deviation over sensitivity.
        sampling: how each step draws.
        num_steps: number of releases.
        delta: the delta of the (epsilon, delta) statement.
        accountant: "pld" (beyond a million steps the Renyi bound, too) or "rdp".
    """
    steps = (num_steps, min(num_steps, _MOST_PLD_STEPS)) if accountant == "pld" else (num_steps,)
    # Not below what the tighter accountant said of fewer steps.
    return max(
        composed_epsilon(((noise_multiplier, sampling, count),), delta=delta, accountant=accountant)
        for count in set(steps)
    )


def require_unit_size(examples_per_unit: int) -> None:
    """Refuses a number of examples of one owner for which no epsilon is computed."""
    if not 1 <= examples_per_unit <= _MOST_PER_UNIT:
        raise ValueError(
            f"`examples_per_unit` must be from 1 to {_MOST_PER_UNIT:,}, got {examples_per_unit}; "
            "for more, keep a random part of an owner's examples."
        )


@functools.lru_cache(maxsize=256)
def unit_epsilon(
    *,
    noise_multiplier: float,
    sampling: Sampling,
    num_steps: int,
    delta: float,
    examples_per_unit: int,
) -> float:
    """Epsilon of whoever owns several examples, all of which are added or removed, by PLD.

    Guarantees:
        An upper bound, not below `epsilon` of one example. Infinite where no accountant knows it:
        sampling other than Poisson, more than 100,000 steps.

    Args:
        noise_multiplier: noise standard deviation over the sensitivity to one example.
        sampling: how each step draws.
        num_steps: number of releases.
        delta: the delta of the (epsilon, delta) statement.
        examples_per_unit: most examples that one owner has.

    Raises:
        ValueError: the number of examples is not between 1 and 256.
    """
    _check(num_steps, delta, "pld")
    require_unit_size(examples_per_unit)
    one = epsilon(
        noise_multiplier=noise_multiplier, sampling=sampling, num_steps=num_steps, delta=delta
    )
    event = sampling.unit_event(noise_multiplier, examples_per_unit)
    if examples_per_unit == 1 or num_steps == 0:
        return one
    if event is None or noise_multiplier < _LEAST_NOISE or num_steps > _MANY_STEPS:
        return math.inf
    # Losses of several examples are larger, and take more time for each point of the grid.
    coarser = 4 * 2 ** math.ceil(math.log2(examples_per_unit))
    with _without_warnings():
        interval = _grid_interval([(noise_multiplier, sampling, num_steps)])
        fresh = _fresh("pld", coarser * interval)
        fresh.compose(dp_accounting.SelfComposedDpEvent(event, num_steps))
        return max(one, float(fresh.get_epsilon(delta)))


@functools.lru_cache(maxsize=256)
def composed_epsilon(
    runs: tuple[Run, ...], *, delta: float, accountant: Accountant = "pld"
) -> float:
    """Epsilon of several runs on the same data, whose noise and sampling may differ.

    Guarantees:
        An upper bound on what all their steps together spend, if the numbers of every run are
        fixed beforehand. Infinite where no accountant knows how they are drawn.

    Args:
        runs: noise multiplier, sampling and number of steps of each.
        delta: the delta of the (epsilon, delta) statement.
        accountant: "pld" or "rdp".
    """
    for sigma, _, steps in runs:
        _check(steps, delta, accountant)
        if not sigma >= 0:
            raise ValueError(f"`noise_multiplier` must be zero or more, got {sigma}.")
    runs = tuple(run for run in runs if run[2] > 0)
    if not runs:
        return 0.0
    if min(sigma for sigma, _, _ in runs) < _LEAST_NOISE:
        return math.inf
    if sum(steps for _, _, steps in runs) > _MOST_PLD_STEPS:
        accountant = "rdp"
    if not all(accountant in sampling.accountants for _, sampling, _ in runs):
        return math.inf
    samplings = [sampling for _, sampling, _ in runs]
    num_steps = sum(steps for _, _, steps in runs)
    with _without_warnings():
        if num_steps > _MANY_STEPS and accountant == "pld":
            if not all(isinstance(sampling, Poisson) for sampling in samplings):
                return math.inf
            found = _epsilon_in_blocks(runs, delta)
        else:
            found = _epsilon_at_once(runs, delta, accountant)
    if math.isinf(found) and accountant == "pld":  # exp(epsilon) overflows
        return composed_epsilon(runs, delta=delta, accountant="rdp")
    return found


def _epsilon_at_once(runs: Sequence[Run], delta: float, accountant: Accountant) -> float:
    """Epsilon as dp-accounting composes it, in the worst case that ways of sampling name."""
    events = [sampling.events(sigma) for sigma, sampling, _ in runs]
    grid_interval = _grid_interval(runs)
    found = 0.0
    for case in range(max(map(len, events))):
        fresh = _fresh(accountant, grid_interval)
        for cases, (_, _, steps) in zip(events, runs, strict=True):
            event = cases[min(case, len(cases) - 1)]
            fresh.compose(dp_accounting.SelfComposedDpEvent(event, steps))
        found = max(found, float(fresh.get_epsilon(delta)))
    return found


def _epsilon_in_blocks(runs: Sequence[Run], delta: float) -> float:
    """Epsilon by PLD of Poisson-sampled runs of many steps: a block of them, and then the blocks.

    The mass that a block may lose in its tails (it counts as an infinite loss) is shared out, so
    that all blocks lose no more than one composition does by default, 1e-15.
    """
    interval = _grid_interval(runs)
    total = pld.privacy_loss_distribution.identity(interval)
    for sigma, sampling, steps in runs:
        assert isinstance(sampling, Poisson)
        one = pld.privacy_loss_distribution.from_gaussian_mechanism(
            sigma,
            value_discretization_interval=interval,
            sampling_prob=sampling.sampling_prob,
            neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        )
        num_blocks, rest = divmod(steps, math.isqrt(steps))
        block = one.self_compose(math.isqrt(steps), 1e-15 / num_blocks)
        total = total.compose(block.self_compose(num_blocks))
        total = total.compose(one.self_compose(rest)) if rest else total
    return float(total.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=256)
def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    sampling: Sampling,
    num_steps: int,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """Smallest noise multiplier (to a relative 1e-4) whose epsilon stays within the target.

    Guarantees:
        `epsilon(result) <= target_epsilon`, by the same accountant that reports it.

    Raises:
        ValueError: the target is not positive, or no noise multiplier below 2**20 meets it.
    """
    if not target_epsilon > 0 or math.isinf(target_epsilon):
        raise ValueError(f"`target_epsilon` must be positive and finite, got {target_epsilon}.")
    if num_steps < 1:
        raise ValueError(f"`num_steps` must be one or more, got {num_steps}.")

    def excess(log_sigma: float) -> float:
        """Logarithm of epsilon over its target."""
        spent = epsilon(
            noise_multiplier=math.exp(log_sigma),
            sampling=sampling,
            num_steps=num_steps,
            delta=delta,
            accountant=accountant,
        )
        return math.log(min(max(spent / target_epsilon, 1e-9), 1e9))

    lower, upper = _bracket(excess)
    if upper >= math.log(_MOST_NOISE):
        raise ValueError(
            f"No noise multiplier reaches `target_epsilon`={target_epsilon} at "
            f"`target_delta`={delta}: take fewer steps, smaller batches or a larger epsilon."
        )
    found: float = scipy.optimize.brentq(excess, lower, upper, xtol=_CALIBRATION_TOLERANCE / 4)
    # The search ends on either side of the target; ours is the one that keeps it.
    while excess(found) > 0:
        found += _CALIBRATION_TOLERANCE / 4
    return math.exp(found)


def _bracket(excess: Callable[[float], float]) -> tuple[float, float]:
    """Logarithms of two noise multipliers, the first of which spends too much; from 1 outwards."""
    lower = upper = 0.0
    step = math.log(1.5)
    while excess(upper) > 0 and upper < math.log(_MOST_NOISE):
        lower, upper = upper, upper + step
    while excess(lower) <= 0:
        lower, upper = lower - step, lower
    return lower, upper
