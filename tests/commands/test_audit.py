"""Audits find mechanisms that are broken on purpose, and nothing where nothing is broken.

Covers: commands/audit/bound.py, commands/audit/canaries.py, commands/audit/audited.py,
commands/audit/command.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from hf_dpgrape.commands.audit.audited import Access, Audit, Outcome, audit
from hf_dpgrape.commands.audit.bound import Coins, Scores, epsilon_refuted, lower_bound, p_value
from hf_dpgrape.commands.audit.canaries import (
    TABLE,
    CanaryModel,
    collate,
    gradient_losses,
    label_losses,
    rows_of,
)
from hf_dpgrape.commands.cli import main
from hf_dpgrape.mechanism import logical_batches, private_step
from hf_dpgrape.mechanism.logical_batches import LogicalBatches, LogicalBatchSampler
from hf_dpgrape.privacy.noise import add_gaussian_noise_
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.secure_noise import add_secure_noise_

#: A fault, planted while the block runs.
Fault = Callable[[], AbstractContextManager[Any]]

ACCESSES: tuple[Access, ...] = ("gradients", "loss")


def plan(**changes: Any) -> PrivacyPlan:
    """That of an audit of half a second."""
    numbers: dict[str, Any] = {
        "num_examples": 1500,
        "expected_batch_size": 750,
        "num_steps": 2,
        "noise_multiplier": 2.0,
        "l2_clip_norm": 1.0,
        "target_delta": 1e-5,
    }
    return PrivacyPlan(**{**numbers, **changes})


def default_plan(**changes: Any) -> PrivacyPlan:
    """That of the command."""
    numbers = {"num_examples": 4000, "expected_batch_size": 2000, "num_steps": 4}
    return plan(**{**numbers, "noise_multiplier": 3.0, **changes})


# ---- Faults ----------------------------------------------------------------------------------


def patched(target: object, name: str, value: object) -> AbstractContextManager[Any]:
    context = pytest.MonkeyPatch.context()

    class Planted(AbstractContextManager[Any]):
        def __enter__(self) -> None:
            context.__enter__().setattr(target, name, value)

        def __exit__(self, *error: Any) -> None:
            context.__exit__(*error)

    return Planted()


def noise_times(factor: float) -> AbstractContextManager[Any]:
    def less(tensors: Any, *, noise_stddev: float, generator: torch.Generator) -> None:
        add_gaussian_noise_(tensors, noise_stddev=factor * noise_stddev, generator=generator)

    return patched(private_step, "add_gaussian_noise_", less)


def quarter_of_secure_noise() -> AbstractContextManager[Any]:
    def less(tensors: Any, *, noise_multiplier: float, **rest: Any) -> None:
        add_secure_noise_(tensors, noise_multiplier=noise_multiplier / 4, **rest)

    return patched(private_step, "add_secure_noise_", less)


def clipped_by_batch() -> AbstractContextManager[Any]:
    """The mean of a physical batch is clipped, as `max_grad_norm` does, in place of each example.

    Canaries are orthogonal, so squares of their norms add up.
    """

    def factors(squared_norms: Tensor, *, bound: float, dtype: torch.dtype, **_: Any) -> Tensor:
        norm_of_mean = squared_norms.double().sum().sqrt() / len(squared_norms)
        return (bound / norm_of_mean).clamp(max=1.0).to(dtype).repeat(len(squared_norms))

    return patched(private_step, "clip_factors", factors)


def counted_twice() -> AbstractContextManager[Any]:
    once = LogicalBatches.__getitem__

    def twice(self: LogicalBatches, indices: Any) -> Any:
        return [*once(self, indices), *once(self, indices)]

    return patched(LogicalBatches, "__getitem__", twice)


def shuffled() -> AbstractContextManager[Any]:
    """Every example is drawn once in as many steps as batches make up the data."""

    def batches(self: LogicalBatchSampler) -> Iterator[list[int]]:
        waiting: list[Tensor] = []
        for _ in range(self.num_batches):
            if not waiting:
                order = torch.randperm(len(self.indices), generator=self.generator)
                waiting = list(order.chunk(round(1 / self.sampling.sampling_prob)))
            yield self.indices[waiting.pop()].tolist()

    assert logical_batches.LogicalBatchSampler is LogicalBatchSampler
    return patched(LogicalBatchSampler, "__iter__", batches)


FAULTS: dict[str, Fault] = {
    "no noise": lambda: noise_times(0.0),
    "a quarter of the noise": lambda: noise_times(0.25),
    "clipped by batch": clipped_by_batch,
}


def outcomes(
    num_runs: int,
    planned: PrivacyPlan,
    fault: Fault = nullcontext,
    access: Access = "gradients",
    **options: Any,
) -> list[Outcome]:
    """Of several audits, with seeds of their own."""
    with fault():
        return [
            audit(Audit(plan=planned, access=access, unsafe_seed=seed, **options))
            for seed in range(num_runs)
        ]


def num_violations(*arguments: Any, **options: Any) -> int:
    return sum(outcome.is_violation for outcome in outcomes(*arguments, **options))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_mechanism_is_found(fault: str) -> None:
    assert num_violations(2, plan(), FAULTS[fault]) == 2


@pytest.mark.parametrize("access", ACCESSES)
def test_nothing_is_found_where_nothing_is_broken(access: Access) -> None:
    for found in outcomes(2, plan(), access=access):
        assert found.claimed == plan().epsilon() and found.bound.epsilon < found.claimed


def test_secure_noise_is_audited_as_it_is_drawn() -> None:
    assert num_violations(1, plan(secure_noise=True)) == 0
    assert num_violations(1, plan(secure_noise=True), quarter_of_secure_noise) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_mechanism_is_found_in_nine_of_ten_runs(fault: str, access: Access) -> None:
    assert num_violations(10, default_plan(), FAULTS[fault], access) >= 9


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_examples_counted_twice_are_found_in_nine_of_ten_runs() -> None:
    # Twice the sensitivity is little: it takes many canaries, much noise, and one way of guessing
    # (a simulation of the scores alone finds 60 of 60 by it).
    many = plan(num_examples=40_000, expected_batch_size=36_000, num_steps=1, noise_multiplier=5.0)
    options: dict[str, Any] = {"guesses": ((0.02, 0.02),), "physical_batch_size": 1024}
    assert num_violations(10, many, counted_twice, **options) >= 9
    assert num_violations(2, many, **options) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("access", ACCESSES)
def test_nothing_is_found_in_twenty_right_runs(access: Access) -> None:
    assert num_violations(20, default_plan(), access=access) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shuffling_is_not_found() -> None:
    # A limit: what shuffling gives away beyond Poisson sampling (Chua et al. 2024, arXiv
    # 2403.17673) shows in coordinates that many examples share, and canaries have their own.
    assert num_violations(10, default_plan(), shuffled) == 0


# ---- The bound -------------------------------------------------------------------------------


def test_figures_of_the_theorem() -> None:
    # Without delta it is a binomial tail; all of 100 right refute q = 0.05^(1/100).
    assert p_value(
        num_canaries=900, num_guesses=50, num_correct=40, epsilon=1.0, delta=0.0
    ) == pytest.approx(scipy.stats.binom.sf(39, 50, np.e / (1 + np.e)))
    of: dict[str, Any] = {"num_canaries": 1000, "error": 0.05}
    q = 0.05 ** (1 / 100)
    whole = epsilon_refuted(num_guesses=100, num_correct=100, delta=0.0, **of)
    assert whole == pytest.approx(np.log(q / (1 - q)), abs=1e-3)
    # alpha by hand, for 3 guesses of which 2 are right, at q = 1/2: max(3/8, 4/8 / 2) = 3/8.
    value = p_value(num_canaries=10, num_guesses=3, num_correct=2, epsilon=0.0, delta=1e-3)
    assert value == pytest.approx(1 / 2 + 2 * 10 * 1e-3 * 3 / 8)
    with_delta = epsilon_refuted(num_guesses=100, num_correct=100, delta=1e-5, **of)
    assert whole - 0.2 < with_delta < whole
    assert epsilon_refuted(num_guesses=100, num_correct=52, delta=0.0, **of) == 0.0


def randomized_response(rng: np.random.Generator, epsilon: float) -> tuple[Scores, Coins]:
    """What it says of 1000 coins; equal answers are told apart at random."""
    coins = rng.random(1000) < 0.5
    is_true = rng.random(1000) < 1 / (1 + np.exp(-epsilon))
    return (coins == is_true) + 0.5 * rng.random(1000), coins


def test_bound_holds_as_often_as_it_says_and_can_fail() -> None:
    rng, above = np.random.default_rng(4), {1.0: 0, 2.0: 0}
    for _ in range(80):
        scores, coins = randomized_response(rng, 1.0)
        found = lower_bound(scores, coins, delta=0.0, confidence=0.9)
        above = {claim: n + (found.epsilon > claim) for claim, n in above.items()}
        scores, coins = randomized_response(rng, 2.0)
        assert lower_bound(scores, coins, delta=0.0, confidence=0.9).epsilon > 0.9
    assert above[1.0] <= scipy.stats.binom.ppf(0.999, 80, 0.1) and above[2.0] == 0


# ---- Canaries --------------------------------------------------------------------------------


@pytest.mark.parametrize("losses", [gradient_losses, label_losses])
def test_a_canary_has_its_row_alone_and_one_that_is_out_nothing(losses: Any) -> None:
    model, coins = CanaryModel(7), torch.tensor([True, False, True, True, False, False, True])
    for i, row in enumerate(rows_of(coins)):
        model.zero_grad()
        losses(model, collate([row])).sum().backward()
        whole = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        table = model.get_parameter(TABLE).grad
        assert table is not None
        if not coins[i]:
            assert whole == 0
            continue
        assert table[i].norm() > 0.98 * whole and table.norm() == table[i].norm()
        if losses is gradient_losses:
            assert table[i, 0] > (1 - 1e-4) * whole


# ---- The command -----------------------------------------------------------------------------

SMALL = ["audit", "--num_canaries", "1500", "--max_steps", "2", "--noise_multiplier", "2"]


def test_table_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(SMALL) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "\u2026" not in shown
    assert f"{plan().epsilon():.4g}" in shown and "no violation found" in shown
    with noise_times(0.0):
        assert main([*SMALL, "--json", "--access", "loss", "--confidence", "0.9"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_violation"] and report["audited_epsilon"] > report["claimed_epsilon"]
    assert (report["access"], report["confidence"], report["settings"]) == ("loss", 0.9, [])


def test_a_violation_is_an_exit_code_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    with noise_times(0.0):
        assert main(SMALL) == 1
    assert "VIOLATION" in capsys.readouterr().out


def test_picture_of_five_claims(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "audit.png"
    words = ["audit", "--num_canaries", "300", "--max_steps", "1", "--secure_noise"]
    assert main([*words, "--plot", str(path), "--json"]) == 0
    assert path.stat().st_size > 5000
    settings = json.loads(capsys.readouterr().out)["settings"]
    claims = [setting["claimed_epsilon"] for setting in settings]
    assert claims == pytest.approx([0.5, 1, 2, 4, 8], rel=1e-2)
    assert all(setting["audited_epsilon"] <= setting["claimed_epsilon"] for setting in settings)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num_canaries", "99"], "`num_canaries` must be at least 100, got 99"),
        (["--access", "weights"], "`access` must be one of ('gradients', 'loss'), got 'weights'"),
        (["--confidence", "1"], "`confidence` must be between 0 and 1, got 1.0"),
        (["--noise_multiplier", "1", "--target_epsilon", "1"], "got both"),
    ],
)
def test_wrong_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["audit", *words]) == 2
    assert sentence in capsys.readouterr().err
