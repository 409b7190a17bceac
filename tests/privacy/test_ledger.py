"""The ledger: every release is counted once, and all planned ones where results may decide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dpgrape.privacy.accounting import composed_epsilon
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.sampling.poisson import Poisson


def make_plan(num_steps: int = 5, noise_multiplier: float = 1.0) -> PrivacyPlan:
    return PrivacyPlan(
        num_examples=100,
        expected_batch_size=10,
        num_steps=num_steps,
        noise_multiplier=noise_multiplier,
        l2_clip_norm=1.0,
        target_delta=1e-5,
    )


def after(num_releases: int, num_steps: int = 5) -> RunLedger:
    ledger = RunLedger(make_plan(num_steps))
    for index in range(num_releases):
        assert ledger.count_release() == index
    return ledger


def test_no_release_after_the_planned_ones() -> None:
    ledger = after(5)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="The plan's 5 steps are done"):
            ledger.count_release()
    assert ledger.num_releases == ledger.steps_counted() == 5
    assert ledger.epsilon() == ledger.plan.epsilon(5)


def test_a_run_counts_its_releases() -> None:
    ledger = after(2)
    assert (ledger.num_releases, ledger.steps_counted(), ledger.reasons) == (2, 2, ())
    assert ledger.epsilon() == ledger.plan.epsilon(2) < ledger.epsilon(4) == ledger.plan.epsilon(4)
    assert ledger.epsilon(accountant="rdp") == ledger.plan.epsilon(2, "rdp")
    assert after(0).epsilon() == 0


def test_all_steps_count_where_results_may_decide() -> None:
    ledger = after(2)
    ledger.results_may_decide("early stopping")
    assert ledger.steps_counted() == ledger.steps_counted(3) == 5 and ledger.num_releases == 2
    ledger.count_release()
    ledger.results_may_decide("early stopping")
    ledger.results_may_decide("the best checkpoint is kept")
    assert ledger.steps_counted() == 5
    assert ledger.reasons == ("early stopping", "the best checkpoint is kept")


@pytest.mark.parametrize(("done", "counted"), [(0, 0), (1, 5), (4, 5), (5, 5)])
def test_an_early_end_counts_all_steps(done: int, counted: int) -> None:
    ledger = after(done)
    ledger.end("interrupted")
    assert ledger.steps_counted() == counted
    assert ledger.reasons == (("interrupted",) if 0 < done < 5 else ())


def test_a_plan_does_not_change_after_the_first_release() -> None:
    ledger = after(0)
    ledger.set_plan(make_plan(7))
    assert ledger.plan.num_steps == 7
    ledger.count_release()
    ledger.set_plan(make_plan(7))  # the same again
    with pytest.raises(ValueError, match=r"1 steps were taken under .*`num_steps` was 7, is now 9"):
        ledger.set_plan(make_plan(9))
    assert ledger.plan.num_steps == 7


def test_a_resumed_run_goes_on_counting() -> None:
    ledger = after(0)
    ledger.resume(
        3, reasons=["early stopping"], earlier_runs=[(2.0, Poisson(sampling_prob=0.1), 8)]
    )
    assert ledger.count_release() == 3
    assert (ledger.num_releases, ledger.steps_counted()) == (4, 5)
    assert ledger.runs == (
        (2.0, Poisson(sampling_prob=0.1), 8),
        (1.0, Poisson(sampling_prob=0.1), 5),
    )
    ledger.count_release()
    with pytest.raises(RuntimeError, match="5 steps are done"):
        ledger.count_release()


def test_releases_are_not_repeated() -> None:
    ledger = after(3)
    with pytest.raises(ValueError, match=r"taken 3 steps, so continuing after step 2 would releas"):
        ledger.resume(2)
    ledger.resume(3)
    assert ledger.num_releases == 3
    with pytest.raises(ValueError, match="between 0 and the 5 planned steps, got 6"):
        ledger.resume(6)
    with pytest.raises(ValueError, match="between 0 and the 5 planned steps, got 6"):
        RunLedger(make_plan(), num_releases=6)


def test_earlier_runs_count_with_their_whole_plans() -> None:
    ledger = after(2)
    ledger.results_may_decide("early stopping")
    ledger.begin_run()
    assert (ledger.num_releases, ledger.reasons) == (0, ())
    ledger.set_plan(make_plan(3, noise_multiplier=2.0))
    ledger.begin_run()  # of a model that was never trained: nothing to add
    assert ledger.runs == (
        (1.0, Poisson(sampling_prob=0.1), 5),
        (2.0, Poisson(sampling_prob=0.1), 3),
    )
    want = composed_epsilon(ledger.runs, delta=1e-5)
    assert ledger.total_epsilon("pld") == want > ledger.plan.epsilon()


@given(st.lists(st.sampled_from(["release", "decide", "end", "resume", "plan"]), max_size=12))
def test_whatever_is_told_the_count_never_falls(events: list[str]) -> None:
    ledger, releases = after(0), 0
    for event in events:
        before = ledger.steps_counted()
        if event == "release" and releases < 5:
            releases += ledger.count_release() == releases
        elif event == "decide":
            ledger.results_may_decide("early stopping")
        elif event == "end":
            ledger.end("interrupted")
        elif event == "resume":
            ledger.resume(ledger.num_releases)
        elif event == "plan":
            ledger.set_plan(make_plan())
        assert ledger.num_releases == releases
        assert max(before, releases) <= ledger.steps_counted() <= 5
