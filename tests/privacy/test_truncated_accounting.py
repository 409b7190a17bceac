"""Epsilon of truncated Poisson sampling against dp-accounting's own event."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dpgrape.privacy import accounting
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.sampling.truncated_poisson import TruncatedPoisson

NUMBERS: dict[str, Any] = {
    "num_examples": 701,
    "expected_batch_size": 90,
    "num_steps": 17,
    "l2_clip_norm": 1.9,
    "target_delta": 1e-4,
}


def plan(bound: int | None = 95, **changes: Any) -> PrivacyPlan:
    numbers = {**NUMBERS, "noise_multiplier": 1.3, "max_logical_batch_size": bound, **changes}
    return PrivacyPlan(**numbers)


def theirs(p: PrivacyPlan, dataset_size: int, bound: int) -> float:
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = pld.PLDAccountant(relation, 1e-4)
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(
        dataset_size, p.sampling_prob, bound, p.noise_multiplier
    )
    accountant.compose(event, p.num_steps)
    return float(accountant.get_epsilon(p.target_delta))


@pytest.mark.parametrize("bound", [90, 95, 110, 130, 700])
def test_epsilon_is_dp_accountings_of_the_worse_neighbor(bound: int) -> None:
    p = plan(bound)
    sizes = (p.num_examples, p.num_examples + 1)
    assert p.epsilon() == pytest.approx(max(theirs(p, n, bound) for n in sizes), rel=2e-3)


def test_both_neighbors_count() -> None:
    # Everything is drawn and fits, but with one example more something is always cut.
    p = plan(701, expected_batch_size=701, noise_multiplier=6.0)
    assert theirs(p, 701, 701) < 0.7 * p.epsilon()
    assert p.epsilon() == pytest.approx(theirs(p, 702, 701), rel=2e-3)


@settings(max_examples=15)
@given(
    batch=st.integers(1, 90),
    above=st.integers(0, 80),
    sigma=st.floats(0.5, 20),
    steps=st.integers(1, 60),
)
def test_never_below_the_epsilon_without_a_bound(
    batch: int, above: int, sigma: float, steps: int
) -> None:
    changes = {"expected_batch_size": batch, "noise_multiplier": sigma, "num_steps": steps}
    assert plan(batch + above, **changes).epsilon() >= plan(None, **changes).epsilon()


def test_what_is_never_cut_costs_nothing_and_what_is_costs_more() -> None:
    free = plan(None).epsilon()
    assert plan(300).epsilon() == pytest.approx(free, rel=1e-3)
    costs = [plan(bound).epsilon() for bound in (90, 100, 110, 126)]
    assert costs == sorted(costs, reverse=True)
    assert costs[2] > 1.5 * free  # at one step in 70 that is cut
    assert costs[3] < 1.01 * free  # at one in 16,000: 4 standard deviations above the mean


def test_calibration_keeps_the_target() -> None:
    numbers = {**NUMBERS, "max_logical_batch_size": 95}
    p = PrivacyPlan.calibrated(target_epsilon=2.3, **numbers)
    assert 0.995 * 2.3 < p.epsilon() <= 2.3
    assert (
        p.noise_multiplier > PrivacyPlan.calibrated(target_epsilon=2.3, **NUMBERS).noise_multiplier
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("sigma", "steps"), [(0.02, 3), (0.3, 1000), (900.0, 20_000)])
def test_extreme_values_finish(sigma: float, steps: int) -> None:
    found = plan(91, noise_multiplier=sigma, num_steps=steps).epsilon()
    assert found >= plan(None, noise_multiplier=sigma, num_steps=steps).epsilon() > 0


def test_where_no_accountant_knows_all_runs_nothing_is_claimed() -> None:
    p = plan()
    assert p.epsilon(accountant="rdp") == math.inf
    run = (1.3, p.sampling, 99_000)
    poisson = (1.3, plan(None).sampling, 2_000)
    assert accounting.composed_epsilon((run, poisson), delta=1e-4) == math.inf
    ledger = RunLedger(plan(None), earlier_runs=[(1.3, p.sampling, 17)])
    assert ledger.accountants == ("pld",)
    assert ledger.total_epsilon("pld") > p.epsilon()


def test_plan_hands_its_numbers_to_the_sampling() -> None:
    assert plan().sampling == TruncatedPoisson(
        sampling_prob=90 / 701, num_examples=701, max_logical_batch_size=95
    )
    assert PrivacyPlan.from_dict(plan().to_dict()) == plan()
