"""Epsilon of several different runs together."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from hf_dpgrape.privacy.accounting import composed_epsilon, epsilon
from hf_dpgrape.privacy.sampling.base import Accountant, Sampling
from hf_dpgrape.privacy.sampling.poisson import Poisson

DELTA = 1e-5


def run(sigma: float, prob: float, steps: int) -> tuple[float, Sampling, int]:
    return sigma, Poisson(sampling_prob=prob), steps


RUNS = (run(0.8, 0.02, 90), run(1.7, 0.1, 40), run(6.0, 0.3, 150))
BOTH: list[Accountant] = ["pld", "rdp"]


def one(run: tuple[float, Sampling, int], accountant: Accountant) -> float:
    sigma, sampling, steps = run
    return epsilon(
        noise_multiplier=sigma,
        sampling=sampling,
        num_steps=steps,
        delta=DELTA,
        accountant=accountant,
    )


def reference(accountant: Any) -> float:
    for sigma, sampling, steps in RUNS:
        q = sampling.sampling_prob
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        for _ in range(2):  # in two halves, for another path through the library
            accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps // 2))
    return float(accountant.get_epsilon(DELTA))


def test_different_runs_compose_as_dp_accounting_says() -> None:
    fine = reference(pld.PLDAccountant(value_discretization_interval=1e-4))
    assert composed_epsilon(RUNS, delta=DELTA) == pytest.approx(fine, rel=5e-3)
    orders = reference(rdp.RdpAccountant())
    assert composed_epsilon(RUNS, delta=DELTA, accountant="rdp") == pytest.approx(orders, rel=1e-9)


@pytest.mark.parametrize("accountant", BOTH)
def test_between_the_largest_and_the_sum(accountant: Accountant) -> None:
    parts = [one(run, accountant) for run in RUNS]
    assert max(parts) < composed_epsilon(RUNS, delta=DELTA, accountant=accountant) < sum(parts)


@pytest.mark.parametrize("accountant", BOTH)
def test_equal_runs_are_one_long_run(accountant: Accountant) -> None:
    whole = one(run(1.1, 0.05, 90), accountant)
    parts = composed_epsilon((run(1.1, 0.05, 30),) * 3, delta=DELTA, accountant=accountant)
    assert parts == pytest.approx(whole, rel=1e-6)


def test_one_run_and_none() -> None:
    assert composed_epsilon(RUNS[:1], delta=DELTA) == one(RUNS[0], "pld")
    assert composed_epsilon((), delta=DELTA) == 0
    assert composed_epsilon((RUNS[0], run(1.0, 0.1, 0)), delta=DELTA) == one(RUNS[0], "pld")
    assert composed_epsilon((RUNS[0], run(0.0, 0.1, 1)), delta=DELTA) == math.inf


@pytest.mark.parametrize("numbers", [(1.0, 0.0, 3), (1.0, 0.1, -1), (-1.0, 0.1, 3)])
def test_numbers_that_describe_no_run_are_refused(numbers: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        composed_epsilon((RUNS[0], run(*numbers)), delta=DELTA)
