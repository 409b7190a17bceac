"""Epsilon and noise against closed forms, dp-accounting and published figures."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import dp_accounting
import pytest
import scipy.optimize
import scipy.stats
from dp_accounting import pld
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dpgrape.privacy.accounting import (
    _epsilon_at_once,
    _epsilon_in_blocks,
    calibrate_noise_multiplier,
    epsilon,
    unit_epsilon,
)
from hf_dpgrape.privacy.sampling.base import Accountant
from hf_dpgrape.privacy.sampling.poisson import Poisson
from hf_dpgrape.privacy.sampling.truncated_poisson import TruncatedPoisson

DELTA = 1e-5
BOTH: tuple[Accountant, ...] = ("pld", "rdp")


def spent(
    sigma: float, q: float, steps: int, accountant: Accountant = "pld", delta: float = DELTA
) -> float:
    return epsilon(
        noise_multiplier=sigma,
        sampling=Poisson(sampling_prob=q),
        num_steps=steps,
        delta=delta,
        accountant=accountant,
    )


def needed(target: float, q: float, steps: int, accountant: Accountant = "pld") -> float:
    return calibrate_noise_multiplier(
        target_epsilon=target,
        sampling=Poisson(sampling_prob=q),
        num_steps=steps,
        delta=DELTA,
        accountant=accountant,
    )


def exact_one_step(sigma: float, q: float) -> float:
    """Epsilon of one Poisson-sampled Gaussian release, from its two hockey-stick divergences."""

    def delta(eps: float) -> float:
        tail = scipy.stats.norm.sf
        found = [0.0]
        # Losses fall or rise with the output x, so each divergence is a difference of two tails.
        if (odds := (math.exp(eps) - 1 + q) / q) > 0:  # mixture against N(0): large x
            x = sigma**2 * math.log(odds) + 0.5
            mixture = (1 - q) * tail(x / sigma) + q * tail((x - 1) / sigma)
            found.append(mixture - math.exp(eps) * tail(x / sigma))
        if (odds := (math.exp(-eps) - 1 + q) / q) > 0:  # N(0) against mixture: small x
            x = sigma**2 * math.log(odds) + 0.5
            mixture = (1 - q) * tail(-x / sigma) + q * tail((1 - x) / sigma)
            found.append(tail(-x / sigma) - math.exp(eps) * mixture)
        return max(found)

    return float(scipy.optimize.brentq(lambda eps: delta(eps) - DELTA, 0, 200, xtol=1e-9))


@pytest.mark.parametrize(
    ("sigma", "by_pld", "by_rdp"), [(1.02295, 1.7448, 1.9971), (7.0675, 0.1437, 0.1674)]
)
def test_published_figures(sigma: float, by_pld: float, by_rdp: float) -> None:
    # dp-accounting's own PLD figures; our grid is finer where there is much noise.
    assert spent(sigma, 0.01, 1000) == pytest.approx(by_pld, rel=1e-3)
    assert spent(sigma, 0.01, 1000, "rdp") == pytest.approx(by_rdp, abs=6e-5)


@pytest.mark.parametrize("sigma", [0.9, 6.0, 70.0])
@pytest.mark.parametrize("steps", [1, 13, 40])
def test_exact_without_sampling(sigma: float, steps: int) -> None:
    exact = exact_one_step(sigma / math.sqrt(steps), 1.0)
    assert exact <= spent(sigma, 1.0, steps) <= 1.003 * exact
    assert exact <= spent(sigma, 1.0, steps, "rdp")


@pytest.mark.parametrize("sigma", [0.4, 1.3, 6.0])
@pytest.mark.parametrize("q", [0.003, 0.07, 0.6])
def test_exact_for_one_step(sigma: float, q: float) -> None:
    exact = exact_one_step(sigma, q)
    assert exact * (1 - 1e-6) <= spent(sigma, q, 1) <= 1.005 * exact + 1e-5
    assert exact <= spent(sigma, q, 1, "rdp")


@settings(max_examples=12)
@given(
    sigma=st.floats(1, 30),
    q=st.floats(0.02, 1),
    steps=st.integers(1, 90),
    more=st.floats(1.01, 2),
)
def test_monotone_and_below_renyi(sigma: float, q: float, steps: int, more: float) -> None:
    here, slack = spent(sigma, q, steps), 1 - 1e-5
    assert spent(sigma, q, math.ceil(steps * more)) >= here * slack
    assert spent(sigma, min(1.0, q * more), steps) >= here * slack
    assert spent(sigma * more, q, steps) * slack <= here
    assert spent(sigma, 1.0, steps) >= here * slack
    # Not a theorem about upper bounds, but what makes the tighter accountant worth its time.
    assert here <= spent(sigma, q, steps, "rdp")


@pytest.mark.parametrize("accountant", BOTH)
def test_no_steps_and_no_noise(accountant: Accountant) -> None:
    assert spent(1.1, 0.3, 0, accountant) == 0
    assert spent(0.0, 0.3, 0, accountant) == 0
    assert spent(0.0, 0.3, 1, accountant) == math.inf
    assert spent(1e-4, 0.3, 1, accountant) == math.inf


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sigma", "q", "steps"),
    [(0.01, 1e-3, 1), (0.05, 1.0, 10**6), (0.4, 1e-4, 10**3), (1000.0, 0.5, 10**5)],
)
def test_extreme_values_finish(sigma: float, q: float, steps: int) -> None:
    assert 0 <= spent(sigma, q, steps) <= spent(sigma, q, steps, "rdp")


def test_little_noise_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        assert 1400 < spent(0.05, 1e-3, 1000) < 1600
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**28  # gigabytes on a grid of fixed width


def test_much_noise_stays_below_the_renyi_bound() -> None:
    # Here a grid of fixed width 1e-4 is wider than a whole step's loss: several times too large.
    assert spent(100.0, 1e-3, 10**5) < spent(100.0, 1e-3, 10**5, "rdp")


def test_many_steps_in_blocks_are_as_many_at_once() -> None:
    runs = ((1.3, Poisson(sampling_prob=0.01), 3_001), (4.0, Poisson(sampling_prob=0.2), 1_999))
    blocks, at_once = _epsilon_in_blocks(runs, DELTA), _epsilon_at_once(runs, DELTA, "pld")
    assert blocks == pytest.approx(at_once, rel=1e-6)
    few = _epsilon_in_blocks((runs[0],), DELTA)
    assert few != pytest.approx(at_once, rel=1e-2)  # the power of the comparison


def test_epsilon_grows_where_the_way_of_counting_changes() -> None:
    steps = [99_999, 100_000, 100_001, 999_999, 1_000_000, 1_000_001, 10**9]
    for sigma, q in ((70.0, 0.128), (5.0, 0.001)):
        found = [spent(sigma, q, count) for count in steps]
        assert found == sorted(found) and math.isfinite(found[-1])


@pytest.mark.parametrize("accountant", BOTH)
@pytest.mark.parametrize(("q", "steps"), [(0.04, 120), (0.21, 50), (1.0, 7)])
@pytest.mark.parametrize("target", [0.3, 3.0, 9.5])
def test_calibration_keeps_the_target_tightly(
    target: float, q: float, steps: int, accountant: Accountant
) -> None:
    sigma = needed(target, q, steps, accountant)
    assert spent(sigma, q, steps, accountant) <= target
    assert spent(sigma * 0.999, q, steps, accountant) > target


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("target", "q", "steps"),
    [*itertools.product((0.01, 1000.0), (0.05, 1.0), (1, 700)), (0.001, 0.1, 300)],
)
def test_extreme_targets_are_kept(target: float, q: float, steps: int) -> None:
    sigma = needed(target, q, steps)
    assert math.isfinite(sigma) and spent(sigma, q, steps) <= target


def test_agrees_with_dp_accounting() -> None:
    target, q, steps = 2.9, 0.21, 50
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

    def event(sigma: float) -> dp_accounting.DpEvent:
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(q, gaussian), steps
        )

    theirs = dp_accounting.calibrate_dp_mechanism(
        lambda: pld.PLDAccountant(relation),
        event,
        target,
        DELTA,
        bracket_interval=dp_accounting.ExplicitBracketInterval(1.5, 4.5),
        tol=3e-3,
    )
    assert needed(target, q, steps) == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target_epsilon": 0.0}, "`target_epsilon` must be positive and finite, got 0.0"),
        ({"target_epsilon": -1.0}, "`target_epsilon` must be positive"),
        ({"target_epsilon": math.nan}, "`target_epsilon` must be positive"),
        ({"target_epsilon": math.inf}, "`target_epsilon` must be positive and finite"),
        ({"num_steps": 0}, "`num_steps` must be one or more, got 0"),
        ({"delta": 1.0}, "`target_delta` must be between 0 and 1, got 1.0"),
        ({"delta": 0.0}, "`target_delta` must be between 0 and 1"),
        ({"accountant": "gdp"}, "`accountant` must be one of .*, got 'gdp'"),
    ],
)
def test_refuses_what_describes_no_run(change: dict[str, float | str], sentence: str) -> None:
    numbers = {"target_epsilon": 1.3, "num_steps": 5, "delta": DELTA}
    with pytest.raises(ValueError, match=sentence):
        calibrate_noise_multiplier(
            sampling=Poisson(sampling_prob=0.2),
            **{**numbers, **change},  # type: ignore[arg-type]
        )


def test_refuses_noise_and_steps_below_zero() -> None:
    with pytest.raises(ValueError, match="`num_steps` must be zero or more, got -1"):
        spent(1.0, 0.1, -1)
    for sigma in (-0.1, math.nan):
        with pytest.raises(ValueError, match="`noise_multiplier` must be zero or more"):
            spent(sigma, 0.1, 3)


def test_unreachable_target_is_refused() -> None:
    # Renyi bounds of finitely many orders do not go to zero before an absurd amount of noise.
    with pytest.raises(ValueError, match="No noise multiplier reaches"):
        needed(1e-3, 1.0, 10**5, "rdp")


# ---- Owners of several examples ----------------------------------------------------------------


def owner(examples: int, **changes: Any) -> float:
    numbers = {
        "noise_multiplier": 1.0,
        "sampling": Poisson(sampling_prob=0.004),
        "num_steps": 792,
        "delta": 1e-5,
    }
    return unit_epsilon(examples_per_unit=examples, **{**numbers, **changes})


@pytest.mark.parametrize(("examples", "expected"), [(1, 0.61), (2, 1.31), (4, 2.81), (8, 6.15)])
def test_owners_of_several_examples_spend_more(examples: int, expected: float) -> None:
    assert owner(examples) == pytest.approx(expected, rel=5e-3)


def test_an_owners_epsilon_lies_between_one_example_and_full_participation() -> None:
    """With q = 1 all k examples always move the sum by k clip norms: a Gaussian of noise 1 / k."""
    everything = Poisson(sampling_prob=1.0)
    found = owner(4, sampling=everything, num_steps=1, noise_multiplier=4.0)
    alone = epsilon(noise_multiplier=1.0, sampling=everything, num_steps=1, delta=1e-5)
    assert alone <= found <= alone * 1.01


def test_no_steps_and_one_example_are_as_ever() -> None:
    assert owner(8, num_steps=0) == 0
    sampling = Poisson(sampling_prob=0.004)
    assert owner(1) == epsilon(noise_multiplier=1.0, sampling=sampling, num_steps=792, delta=1e-5)


def test_what_is_not_known_is_infinite() -> None:
    cut = TruncatedPoisson(sampling_prob=0.004, num_examples=1000, max_logical_batch_size=10)
    assert owner(2, sampling=cut, num_steps=2) == math.inf
    assert owner(2, noise_multiplier=0.0) == math.inf
    assert owner(2, num_steps=200_000) == math.inf


@pytest.mark.parametrize("examples", [0, -1, 257])
def test_impossible_numbers_of_an_owners_examples(examples: int) -> None:
    with pytest.raises(ValueError, match=r"`examples_per_unit` must be from 1 to 256, got"):
        owner(examples)
