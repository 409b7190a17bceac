"""The privacy plan: what it refuses, and that everything in it is one consistent mechanism."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dpgrape.privacy import accounting
from hf_dpgrape.privacy.plan import BODY, HEAD, LOSS, PrivacyPlan, planned_steps, steps_per_epoch
from hf_dpgrape.privacy.sampling.base import Accountant
from hf_dpgrape.privacy.sampling.poisson import Poisson

NUMBERS: dict[str, Any] = {
    "num_examples": 701,
    "expected_batch_size": 90,
    "num_steps": 17,
    "l2_clip_norm": 1.9,
    "target_delta": 1e-4,
}


LOSS_PART: dict[str, Any] = {"clip_shares": {BODY: 0.8, LOSS: 0.6}, "private_loss_bound": 2.5}


def plan(**changes: Any) -> PrivacyPlan:
    return PrivacyPlan(**{**NUMBERS, "noise_multiplier": 1.3, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_examples": 0}, "at least one example and one step, got `num_examples`=0"),
        ({"num_steps": 0}, "at least one example and one step, got .*`num_steps`=0"),
        (
            {"expected_batch_size": 702},
            "`expected_batch_size` must be between 1 and the 701 training examples, got 702",
        ),
        ({"expected_batch_size": 0}, "`expected_batch_size` must be between 1 and .*, got 0"),
        ({"l2_clip_norm": 0.0}, "`l2_clip_norm` must be positive and finite, got 0.0"),
        ({"l2_clip_norm": math.inf}, "`l2_clip_norm` must be positive and finite"),
        ({"l2_clip_norm": math.nan}, "`l2_clip_norm` must be positive and finite"),
        (
            {"l2_clip_norm": 1e-13},
            "`l2_clip_norm` must be .*at least 1e-12 .*, got 1e-13 and 1e-13:",
        ),
        (
            {"l2_clip_norm": 2e12},
            "`l2_clip_norm` must be at most 1e\\+12 .*, got 2000000000000.0 and",
        ),
        (
            {"l2_clip_norm": 2e-12, "clip_shares": {BODY: 0.8**0.5, HEAD: 0.2**0.5}},
            "times the smallest of `clip_shares`, at least 1e-12 .*, got 2e-12 and 8.94427e-13",
        ),
        ({"noise_multiplier": -1.0}, "`noise_multiplier` must be zero or more and finite"),
        ({"noise_multiplier": math.nan}, "`noise_multiplier` must be zero or more and finite"),
        ({"noise_multiplier": math.inf}, "`noise_multiplier` must be zero or more and finite"),
        (
            {"noise_multiplier": 0.0, "secure_noise": True},
            "`secure_noise` needs noise, got `noise_multiplier`=0; leave one of them out",
        ),
        ({"target_delta": 0.0}, "`target_delta` must be between 0 and 1, got 0.0; choose it below"),
        ({"target_delta": 1.0}, "`target_delta` must be between 0 and 1"),
        ({"target_delta": math.nan}, "`target_delta` must be between 0 and 1"),
        ({"clipping": "ghost"}, "`clipping` must be 'flat' or 'automatic', got 'ghost'"),
        ({"clip_shares": {BODY: 0.9}}, "squares that sum to 1, got .*0.9.* with sum 0.81"),
        ({"clip_shares": {BODY: 1.0, HEAD: 1.0}}, "squares that sum to 1"),
        ({"clip_shares": {BODY: -1.0}}, "`clip_shares` must be positive"),
        ({"clip_shares": {BODY: math.nan}}, "squares that sum to 1"),
        ({"clip_shares": {}}, "squares that sum to 1"),
        ({**LOSS_PART, "private_loss_bound": 0.0}, "`private_loss_bound` must be positive and fin"),
        ({**LOSS_PART, "private_loss_bound": math.inf}, "must be positive and finite, got inf"),
        ({**LOSS_PART, "private_loss_bound": math.nan}, "must be positive and finite, got nan"),
        ({"private_loss_bound": 1.0}, "needs a share named 'loss' beside others"),
        (
            {"private_loss_bound": 1.0, "clip_shares": {LOSS: 1.0}},
            "needs a share named 'loss' beside others .*, got {'loss': 1.0}",
        ),
        ({"head_only_steps": 18}, "between 0 and the 17 planned steps, got 18"),
        ({"head_only_steps": -1}, "`head_only_steps` must be between 0"),
        (
            {"max_logical_batch_size": 89},
            "`max_logical_batch_size` must be at least `expected_batch_size`, .*, got 89 for a mea",
        ),
        (
            {"max_logical_batch_size": 120, "accountant": "rdp"},
            r"`accountant` must be one of \('pld',\) for sampling that is Poisson, cut.*got 'rdp'",
        ),
        (
            {"max_logical_batch_size": 120, "num_steps": 100_001},
            "`num_steps` must be at most 100,000 for sampling that is Poisson, cut.*got 100,001",
        ),
        ({"accountant": "gdp"}, "`accountant` must be one of .*, got 'gdp'"),
        ({"neighboring_relation": "replace_one"}, "twice the sensitivity"),
    ],
)
def test_refusals(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(**changes)


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        plan().noise_multiplier = 0.1  # type: ignore[misc]


def test_derived_numbers() -> None:
    p = plan()
    assert p.sampling_prob == 90 / 701
    assert p.noise_stddev == pytest.approx(1.3 * 1.9)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_that_of_its_numbers(accountant: Accountant) -> None:
    p = plan(accountant=accountant)
    for steps in (0, 1, 6, 17):
        expected = accounting.epsilon(
            noise_multiplier=1.3,
            sampling=Poisson(sampling_prob=90 / 701),
            num_steps=steps,
            delta=1e-4,
            accountant=accountant,
        )
        assert p.epsilon(steps) == expected
        assert p.epsilon(steps, accountant) == expected
    assert p.epsilon() == p.epsilon(17)


def test_epsilon_knows_nothing_of_the_clip_norm() -> None:
    # Noise follows the clip norm: another one is another scale, not another guarantee.
    other = plan(l2_clip_norm=0.019, clip_shares={BODY: 0.8, HEAD: 0.6}, clipping="automatic")
    assert other.epsilon() == plan().epsilon()
    assert other.noise_stddev == pytest.approx(plan().noise_stddev / 100)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibrated_plan_keeps_its_target(accountant: str) -> None:
    p = PrivacyPlan.calibrated(target_epsilon=2.3, accountant=accountant, **NUMBERS)
    assert p.target_epsilon == 2.3
    assert 0.995 * 2.3 < p.epsilon() <= 2.3
    given_noise = PrivacyPlan.calibrated(
        noise_multiplier=p.noise_multiplier, accountant=accountant, **NUMBERS
    )
    assert given_noise.target_epsilon is None
    assert given_noise.epsilon() == p.epsilon()


@pytest.mark.parametrize("budget", [{}, {"target_epsilon": 1.0, "noise_multiplier": 1.0}])
def test_exactly_one_budget(budget: dict[str, float]) -> None:
    came = "both" if budget else "neither"
    with pytest.raises(ValueError, match=f"exactly one of `target_epsilon`.*, got {came}"):
        PrivacyPlan.calibrated(**budget, **NUMBERS)


def test_wrong_numbers_are_refused_before_the_search_for_noise() -> None:
    for change in ({"target_delta": 1.5}, {"expected_batch_size": 999}, {"num_steps": 0}):
        with pytest.raises(ValueError, match=r"`target_delta`|`expected_batch_size`|`num_steps`"):
            PrivacyPlan.calibrated(target_epsilon=1.0, **{**NUMBERS, **change})


def test_round_trip_through_json() -> None:
    p = plan(
        target_epsilon=0.1 + 0.2,
        clip_shares={BODY: math.sqrt(1 - 0.3**2), HEAD: 0.3},
        head_only_steps=5,
        clipping="automatic",
        accountant="rdp",
    )
    read = PrivacyPlan.from_dict(json.loads(json.dumps(p.to_dict())))
    assert read == p
    assert not read.differences(p)
    assert PrivacyPlan.from_dict({**p.to_dict(), "added_later": 1}) == p


UNIT: dict[str, Any] = {"privacy_unit_column": "owner", "max_rows_per_unit": 4}
OTHER_VALUES: dict[str, Any] = {
    "num_examples": 702,
    "expected_batch_size": 91,
    "num_steps": 18,
    "noise_multiplier": 1.4,
    "l2_clip_norm": 2.0,
    "target_delta": 1e-5,
    "target_epsilon": 3.0,
    "clipping": "automatic",
    "clip_shares": {BODY: 0.8, HEAD: 0.6},
    "head_only_steps": 1,
    "private_loss_bound": 3.0,
    "max_logical_batch_size": 120,
    "accountant": "rdp",
    "privacy_unit_column": "patient",
    "max_rows_per_unit": 5,
    "secure_noise": True,
}


def test_every_field_with_a_choice_has_another_value_here() -> None:
    names = {f.name for f in fields(PrivacyPlan)}
    assert names - set(OTHER_VALUES) == {"neighboring_relation"}


@pytest.mark.parametrize("name", sorted(OTHER_VALUES))
def test_every_difference_is_named(name: str) -> None:
    base = LOSS_PART if name == "private_loss_bound" else {}
    if name in UNIT:
        base = UNIT
    (found,) = plan(**{**base, name: OTHER_VALUES[name]}).differences(plan(**base))
    assert found.startswith(f"`{name}` was ") and str(OTHER_VALUES[name]) in found


def test_head_alone_has_the_whole_clip_norm() -> None:
    p = plan(clip_shares={BODY: 0.8, HEAD: 0.6}, head_only_steps=5)
    assert [dict(p.shares_at(step)) for step in (4, 5)] == [{HEAD: 1.0}, {BODY: 0.8, HEAD: 0.6}]


def test_loss_keeps_its_share_while_the_head_is_alone() -> None:
    p = plan(
        clip_shares={BODY: 0.48, HEAD: 0.64, LOSS: 0.6}, private_loss_bound=2.5, head_only_steps=5
    )
    assert p.shares_at(5) == p.clip_shares
    assert p.shares_at(4) == pytest.approx({HEAD: 0.8, LOSS: 0.6})


def test_noise_of_the_released_loss() -> None:
    p = plan(**LOSS_PART)
    assert p.private_loss_scale * 2.5 == pytest.approx(0.6 * 1.9)  # a loss at the bound
    assert p.private_loss_stddev == pytest.approx(1.3 * 2.5 / (0.6 * 90))
    shown = p.mean_private_loss([1.0, 4.0, -0.5, 0.0])
    assert shown == {
        "private_loss": 1.125,
        "private_loss_stderr": pytest.approx(p.private_loss_stddev / 2),
    }
    assert plan().private_loss_scale == 0.0


def test_released_loss_costs_no_epsilon() -> None:
    assert plan(**LOSS_PART).epsilon() == plan().epsilon()
    assert plan(**LOSS_PART).noise_stddev == plan().noise_stddev


def test_plans_written_before_there_was_a_private_loss_can_be_read() -> None:
    # A layer may be called "loss"; only a bound makes it the loss's group.
    for p in (plan(), plan(clip_shares={BODY: 0.8, LOSS: 0.6})):
        old = p.to_dict()
        del old["private_loss_bound"]
        assert PrivacyPlan.from_dict(old) == p
        assert p.private_loss_scale == 0.0


@given(num=st.integers(1, 10**7), data=st.data())
def test_steps_cover_the_epochs(num: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, num))
    epochs = data.draw(st.integers(1, 40))
    per_epoch = steps_per_epoch(num, batch)
    assert (per_epoch - 1) * batch < num <= per_epoch * batch
    assert planned_steps(num, batch, num_train_epochs=epochs) == epochs * per_epoch
    assert planned_steps(num, batch, num_train_epochs=0.0, max_steps=3) == 3


@pytest.mark.parametrize("epochs", [0.0, -1.0, math.nan, math.inf])
def test_refuses_a_run_without_length(epochs: float) -> None:
    with pytest.raises(ValueError, match="`num_train_epochs` must be positive and finite"):
        planned_steps(9, 2, num_train_epochs=epochs)


def test_part_of_an_epoch_is_rounded_up() -> None:
    assert planned_steps(100, 30, num_train_epochs=0.3) == 2
