"""Sampling: each test of a distribution also shows that it can fail.

Covers: privacy/sampling/base.py, privacy/sampling/poisson.py, privacy/sampling/sampler.py,
privacy/sampling/table.py, privacy/sampling/truncated_poisson.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray

from hf_dpgrape.privacy.sampling.base import Sampling
from hf_dpgrape.privacy.sampling.poisson import Poisson
from hf_dpgrape.privacy.sampling.sampler import LogicalBatchSampler
from hf_dpgrape.privacy.sampling.table import SAMPLINGS, sampling_of
from hf_dpgrape.privacy.sampling.truncated_poisson import TruncatedPoisson

NUM_EXAMPLES, NUM_BATCHES, PROB = 61, 8000, 0.13

Inclusions = NDArray[np.bool_]


def sampler(
    prob: float = PROB, seed: int = 3, sampling: Sampling | None = None, **changes: int
) -> LogicalBatchSampler:
    return LogicalBatchSampler(
        sampling or Poisson(sampling_prob=prob),
        num_examples=changes.pop("num_examples", NUM_EXAMPLES),
        num_batches=changes.pop("num_batches", NUM_BATCHES),
        generator=torch.Generator().manual_seed(seed),
        **changes,
    )


def inclusions(
    batches: LogicalBatchSampler | list[list[int]], num_examples: int = NUM_EXAMPLES
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


# ---- Every way of sampling: one row here for each of the table ---------------------------------

Sizes = NDArray[np.float64]


def binomial(num_examples: int, prob: float) -> Sizes:
    """Probabilities of the sizes 0, 1, ... of a Poisson sample."""
    found: Sizes = scipy.stats.binom.pmf(np.arange(num_examples + 1), num_examples, prob)
    return found


def cut(sizes: Sizes, bound: int) -> Sizes:
    """The same, where all that is above the bound is at the bound."""
    return np.append(sizes[:bound], sizes[bound:].sum())


#: By the class's name: sampling with a coin's probability -> itself, and the law of its sizes.
LAWS: dict[str, Callable[[float], tuple[Sampling, Sizes]]] = {
    "Poisson": lambda prob: (Poisson(sampling_prob=prob), binomial(NUM_EXAMPLES, prob)),
    "TruncatedPoisson": lambda prob: (
        TruncatedPoisson(sampling_prob=prob, num_examples=NUM_EXAMPLES, max_logical_batch_size=9),
        cut(binomial(NUM_EXAMPLES, prob), 9),
    ),
}


def law_p_value(found: Inclusions, law: Sizes) -> float:
    """Chi-square test of the sizes of batches; rare sizes count as one."""
    counts = np.bincount(found.sum(axis=1), minlength=len(law)).astype(float)
    if counts[len(law) :].any():
        return 0.0
    expected = law * len(found)
    common = expected >= 5
    counts, expected = (
        np.append(values[common], values[~common].sum()) for values in (counts, expected)
    )
    if expected[-1] < 5:  # join them with the rarest of the others
        least = expected[:-1].argmin()
        for values in (counts, expected):
            values[least] += values[-1]
        counts, expected = counts[:-1], expected[:-1]
    return float(scipy.stats.chisquare(counts, expected).pvalue)


def subset_p_value(found: Inclusions) -> float:
    """Whether, given the sizes of batches, all subsets of a size are alike: inclusion counts."""
    n = found.shape[1]
    sizes = found.sum(axis=1)
    variance = (sizes * (n - sizes)).sum() / n / (n - 1)  # of a count; they sum to a constant
    statistic = ((found.sum(axis=0) - sizes.sum() / n) ** 2).sum() / variance * (n - 1) / n
    return float(scipy.stats.chi2.sf(statistic, n - 1))


def test_every_way_of_sampling_has_a_law_here() -> None:
    assert set(LAWS) == {kind.__name__ for kind in SAMPLINGS.values()}


@pytest.mark.parametrize("name", LAWS)
def test_sizes_and_subsets_have_their_law(name: str) -> None:
    sampling, law = LAWS[name](PROB)
    found = inclusions(sampler(sampling=sampling))
    assert law_p_value(found, law) > 1e-3
    assert subset_p_value(found) > 1e-3


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("name", LAWS)
def test_a_law_ten_percent_off_is_rejected(name: str, factor: float) -> None:
    found = inclusions(sampler(sampling=LAWS[name](PROB)[0]))
    assert law_p_value(found, LAWS[name](PROB * factor)[1]) < 1e-9


def test_cutting_off_the_last_is_rejected() -> None:
    batches = [batch[:9] for batch in sampler()]
    assert law_p_value(inclusions(batches), LAWS["TruncatedPoisson"](PROB)[1]) > 1e-3
    assert subset_p_value(inclusions(batches)) < 1e-9


@pytest.mark.parametrize("name", LAWS)
def test_numbers_make_the_same_sampling(name: str) -> None:
    sampling, _ = LAWS[name](PROB)
    assert sampling_of(json.loads(json.dumps(sampling.numbers()))) == sampling
    assert hash(sampling) == hash(LAWS[name](PROB)[0])


@pytest.mark.parametrize("prob", [0.0, 1.2, float("nan")])
@pytest.mark.parametrize("name", LAWS)
def test_refuses_what_is_no_probability(name: str, prob: float) -> None:
    with pytest.raises(ValueError, match="`sampling_prob` must be above 0 and at most 1, got "):
        LAWS[name](prob)


def test_a_bound_below_the_mean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`max_logical_batch_size` must be .*, got 8 for a mean"):
        TruncatedPoisson(sampling_prob=0.1, num_examples=90, max_logical_batch_size=8)


def test_truncation_over_processes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected one process .*, got 2; leave `max_logical_b"):
        sampler(sampling=LAWS["TruncatedPoisson"](PROB)[0], num_processes=2)
