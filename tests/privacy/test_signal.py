"""Rules of thumb on signal and noise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.signal import (
    MOST_PROB,
    STEPS,
    best_batch,
    reach,
    rough_noise_multiplier,
    signal_to_noise,
)


def test_signal_adds_up_and_noise_adds_up_in_squares() -> None:
    numbers = {"expected_batch_size": 40.0, "noise_multiplier": 2.0}
    assert signal_to_noise(num_steps=25, **numbers) == 100
    assert signal_to_noise(num_steps=100, **numbers) == 200
    assert reach(sum_of_rates=0.5, **numbers) == 10
    no_noise = {"expected_batch_size": 40.0, "noise_multiplier": 0.0}
    assert signal_to_noise(num_steps=1, **no_noise) == math.inf
    assert reach(sum_of_rates=0.5, **no_noise) == math.inf


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
@pytest.mark.parametrize(("prob", "num_steps"), [(0.05, 200), (0.2, 100), (0.5, 50)])
def test_the_rough_noise_is_near_the_accountants(
    epsilon: float, prob: float, num_steps: int
) -> None:
    plan = PrivacyPlan.calibrated(
        target_epsilon=epsilon,
        num_examples=10_000,
        expected_batch_size=int(10_000 * prob),
        num_steps=num_steps,
        l2_clip_norm=1.0,
        target_delta=1e-5,
    )
    rough = rough_noise_multiplier(
        target_epsilon=epsilon, target_delta=1e-5, sampling_prob=prob, num_steps=num_steps
    )
    assert rough == pytest.approx(plan.noise_multiplier, rel=0.2)


def signal(batch: int, num_steps: int, num_examples: int, epsilon: float) -> float:
    sigma = rough_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=1e-6,
        sampling_prob=batch / num_examples,
        num_steps=num_steps,
    )
    return signal_to_noise(num_steps=num_steps, expected_batch_size=batch, noise_multiplier=sigma)


@settings(deadline=None, max_examples=40)
@given(
    num_examples=st.integers(60, 300_000),
    epsilon=st.floats(0.2, 10),
    max_epochs=st.floats(1, 100),
)
def test_the_batch_keeps_to_the_computing_and_has_the_signal(
    num_examples: int, epsilon: float, max_epochs: float
) -> None:
    batch, steps = best_batch(
        num_examples=num_examples,
        target_epsilon=epsilon,
        target_delta=1e-6,
        max_epochs=max_epochs,
    )
    assert steps in STEPS and 1 <= batch <= MOST_PROB * num_examples
    assert batch * steps <= max_epochs * num_examples
    found = signal(batch, steps, num_examples, epsilon)
    for other in STEPS:  # nothing within the computing has much more
        most = int(num_examples * min(MOST_PROB, max_epochs / other))
        if most >= 1:
            assert found >= 0.8 * signal(most, other, num_examples, epsilon)


def test_more_computing_or_more_epsilon_gives_no_smaller_batch() -> None:
    def batch(**changes: float) -> int:
        given = {"num_examples": 5000, "target_epsilon": 3.0, "target_delta": 1e-5}
        numbers = {**given, "max_epochs": 30.0, **changes}
        return best_batch(**numbers)[0]  # type: ignore[arg-type]

    assert batch(target_epsilon=1.0) < batch() < batch(target_epsilon=8.0)
    assert batch(num_examples=50_000) > batch()


def test_a_handful_of_examples_has_steps_for_its_computing() -> None:
    numbers = {"target_epsilon": 1.0, "target_delta": 1e-2}
    assert best_batch(num_examples=3, max_epochs=2.0, **numbers) == (1, 6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_examples": 0}, "`num_examples`=0 and 30 epochs"),
        ({"max_epochs": 0.0}, "epochs that are positive and finite, got .* and 0 epochs"),
        ({"max_epochs": math.inf}, "got .* and inf epochs"),
        ({"target_epsilon": -1.0}, "`target_epsilon` must be positive .*got -1"),
        ({"target_epsilon": math.nan}, "`target_epsilon` must be positive .*got nan"),
        ({"target_delta": 1.0}, "`target_delta` between 0 and 1, got 3 and 1"),
    ],
)
def test_wrong_numbers_are_refused(changes: dict[str, float], reason: str) -> None:
    given = {"num_examples": 100, "target_epsilon": 3.0, "target_delta": 1e-3, "max_epochs": 30.0}
    with pytest.raises(ValueError, match=reason):
        best_batch(**{**given, **changes})  # type: ignore[arg-type]
