"""Poisson sampling: each test of a distribution also shows that it can fail."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray

from hf_dpgrape.privacy.sampling import PoissonSampler

NUM_EXAMPLES, NUM_BATCHES, PROB = 61, 8000, 0.13

Inclusions = NDArray[np.bool_]


def sampler(prob: float = PROB, seed: int = 3, **changes: int) -> PoissonSampler:
    return PoissonSampler(
        num_examples=changes.pop("num_examples", NUM_EXAMPLES),
        sampling_prob=prob,
        num_batches=changes.pop("num_batches", NUM_BATCHES),
        generator=torch.Generator().manual_seed(seed),
        **changes,
    )


def inclusions(
    batches: PoissonSampler | list[list[int]], num_examples: int = NUM_EXAMPLES
) -> Inclusions:
    """Which example (column) is in which batch (row)."""
    found = np.zeros((NUM_BATCHES, num_examples), dtype=bool)
    for row, batch in zip(found, batches, strict=True):
        assert len(set(batch)) == len(batch)
        row[batch] = True
    return found


def rate_p_value(found: Inclusions, prob: float) -> float:
    """Chi-square test of the examples' inclusion counts against Binomial(batches, prob)."""
    counts = found.sum(axis=0)
    statistic = ((counts - len(found) * prob) ** 2).sum() / (len(found) * prob * (1 - prob))
    return 2 * min(
        f(statistic, found.shape[1]) for f in (scipy.stats.chi2.cdf, scipy.stats.chi2.sf)
    )


def size_p_value(found: Inclusions, prob: float) -> float:
    """Test of the variance of batch sizes, which independent coins make binomial."""
    sizes, dof = found.sum(axis=1), len(found) - 1
    statistic = dof * sizes.var(ddof=1) / (found.shape[1] * prob * (1 - prob))
    return 2 * min(f(statistic, dof) for f in (scipy.stats.chi2.cdf, scipy.stats.chi2.sf))


def shuffled(size: int) -> list[list[int]]:
    """Batches of fixed size out of shuffled epochs, as an ordinary loader makes them."""
    rng = np.random.default_rng(4)
    per_epoch = NUM_EXAMPLES // size
    epochs = (rng.permutation(NUM_EXAMPLES) for _ in range(NUM_BATCHES // per_epoch + 1))
    batches = [e[i * size : (i + 1) * size].tolist() for e in epochs for i in range(per_epoch)]
    return batches[:NUM_BATCHES]


def test_inclusion_rate() -> None:
    found = inclusions(sampler())
    assert rate_p_value(found, PROB) > 1e-3
    assert size_p_value(found, PROB) > 1e-3


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_rate_ten_percent_off_is_rejected(factor: float) -> None:
    assert rate_p_value(inclusions(sampler(PROB * factor)), PROB) < 1e-9


def test_shuffled_batches_are_rejected() -> None:
    size = 8
    assert size_p_value(inclusions(shuffled(size)), size / NUM_EXAMPLES) < 1e-9


def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return abs(float(np.corrcoef(a, b)[0, 1]))


def test_examples_and_steps_are_independent() -> None:
    found = inclusions(sampler()).astype(float)
    bound = 4 / np.sqrt(NUM_BATCHES)
    assert correlation(found[:, 5], found[:, 6]) < bound
    assert correlation(found[1:, 5], found[:-1, 5]) < bound
    assert correlation(found[1:].sum(1), found[:-1].sum(1)) < bound


def shard_inclusions(seeds: tuple[int, int], num_examples: int) -> list[Inclusions]:
    return [
        inclusions(
            sampler(seed=seed, rank=rank, num_processes=2, num_examples=num_examples), num_examples
        )
        for rank, seed in enumerate(seeds)
    ]


def test_two_processes_make_one_poisson_sample() -> None:
    first, second = shard_inclusions((3, 8), NUM_EXAMPLES)
    assert first[:, 0::2].any(axis=0).all() and not first[:, 1::2].any()
    assert second[:, 1::2].any(axis=0).all() and not second[:, 0::2].any()
    assert rate_p_value(first | second, PROB) > 1e-3
    assert size_p_value(first | second, PROB) > 1e-3
    sizes = [part.sum(axis=1).astype(float) for part in (first, second)]
    assert correlation(*sizes) < 4 / np.sqrt(NUM_BATCHES)


def test_processes_with_the_same_generator_are_rejected() -> None:
    first, second = shard_inclusions((3, 3), 62)
    assert size_p_value(first | second, PROB) < 1e-9


def test_empty_batches_occur_as_often_as_they_should() -> None:
    few = sampler(0.04, num_examples=17)
    empty = sum(not batch for batch in few)
    assert scipy.stats.binomtest(empty, NUM_BATCHES, (1 - 0.04) ** 17).pvalue > 1e-3


def test_length_and_order() -> None:
    few = sampler(num_batches=29)
    batches = list(few)
    assert len(batches) == len(few) == 29
    assert all(batch == sorted(batch) for batch in batches)
    assert batches != list(few)  # the next epoch draws anew


def test_probability_one_takes_everything() -> None:
    assert list(sampler(1.0, num_batches=2)) == [list(range(NUM_EXAMPLES))] * 2


def rare_p_value(num_drawn: int, num_coins: int, prob: float) -> float:
    return float(scipy.stats.binomtest(num_drawn, num_coins, prob).pvalue)


def test_rare_inclusions_have_their_probability() -> None:
    # A uniform of 24 bits is 0 with probability 6e-8, and falls below 1e-9 no less often.
    num, batches, prob = 2**22, 24, 1e-9
    drawn = sum(map(len, sampler(prob, num_examples=num, num_batches=batches)))
    assert rare_p_value(drawn, num * batches, prob) > 1e-2
    g = torch.Generator().manual_seed(3)
    coarse = sum(int((torch.rand(num, generator=g) < prob).sum()) for _ in range(batches))
    assert rare_p_value(coarse, num * batches, prob) < 1e-4
