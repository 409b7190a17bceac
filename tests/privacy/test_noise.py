"""The noise: its scale, its dtype and its independence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from hf_dpgrape.privacy.noise import add_gaussian_noise_
from hf_dpgrape.privacy.randomness import SecretSource

STDDEV, SIZE = 0.37, 20_000


def draw(
    source: SecretSource, stddev: float = STDDEV, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Noise on two zero tensors of one release."""
    tensors = [torch.zeros(SIZE // 50, 50, dtype=dtype), torch.zeros(SIZE, dtype=dtype)]
    add_gaussian_noise_(tensors, noise_stddev=stddev, generator=source.generator())
    return [tensor.flatten() for tensor in tensors]


def fixed(seed: int = 11) -> SecretSource:
    return SecretSource(unsafe_seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scale(dtype: torch.dtype) -> None:
    for noise in draw(fixed(), dtype=dtype):
        assert scipy.stats.kstest(noise.numpy(), "norm", (0, STDDEV)).pvalue > 1e-3


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_scale_ten_percent_off_is_rejected(factor: float) -> None:
    for noise in draw(fixed(), STDDEV * factor):
        assert scipy.stats.kstest(noise.numpy(), "norm", (0, STDDEV)).pvalue < 1e-6


def test_noise_is_added_to_the_sum() -> None:
    base = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    noisy = base.clone()
    generator = fixed().generator()
    add_gaussian_noise_([noisy], noise_stddev=STDDEV, generator=generator)
    assert scipy.stats.kstest((noisy - base).numpy(), "norm", (0, STDDEV)).pvalue > 1e-3
    assert abs(np.corrcoef(base, noisy - base)[0, 1]) < 4 / SIZE**0.5


def test_zero_noise_leaves_the_sum() -> None:
    for noise in draw(fixed(), 0.0):
        assert not noise.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_refuses_16_bits(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="float32 or float64 sum, got torch"):
        draw(fixed(), dtype=dtype)


def fractions(noise: Tensor) -> np.ndarray:
    """For the largest draws, where in between two multiples of 2^-24 their uniform number lies.

    torch makes draws j and j + 8 of every 16 from one radius `sqrt(-2 log(v))`, v uniform. Only a v
    below 2^-10 is recovered well enough from float32.
    """
    pairs = noise.double().view(-1, 2, 8)
    uniform = np.exp(-pairs.square().sum(1).numpy().ravel() / 2)
    return uniform[uniform < 2**-10] * 2**24 % 1


def test_draws_have_more_than_24_bits() -> None:
    # A uniform number of 24 bits is a multiple of 2^-24: no radius beyond sqrt(48 log 2) = 5.77.
    total = torch.zeros(2**22)
    add_gaussian_noise_([total], noise_stddev=1.0, generator=fixed().generator())
    found = fractions(total)
    assert len(found) > 1800  # 2^21 pairs, 2^-10 of them
    assert scipy.stats.kstest(found, "uniform").pvalue > 1e-3
    # The test can fail: draws in float32 are all near multiples.
    short = fractions(torch.empty(2**22).normal_(generator=fixed().generator()))
    assert len(short) > 1800
    assert scipy.stats.kstest(short, "uniform").pvalue < 1e-100
    assert np.abs(short - np.round(short)).max() < 0.1


@pytest.mark.parametrize("shape", [(), (3,), (17, 3), (2**20 + 5,)])
def test_noise_is_drawn_in_float64_and_rounded_once(shape: tuple[int, ...]) -> None:
    start = torch.linspace(-1, 1, math.prod(shape)).view(shape)
    total, source = start.clone(), fixed()
    add_gaussian_noise_([total], noise_stddev=STDDEV, generator=source.generator())
    generator = fixed().generator()
    want = torch.cat(
        [
            torch.empty(len(part), dtype=torch.float64).normal_(0, STDDEV, generator=generator)
            for part in torch.empty(start.numel()).split(2**20)
        ]
    )
    assert torch.equal(total, (start.double() + want.view(shape)).float())


def test_noise_reaches_a_sum_that_is_not_contiguous() -> None:
    total = torch.zeros(200, 100).T
    add_gaussian_noise_([total], noise_stddev=STDDEV, generator=fixed().generator())
    assert scipy.stats.kstest(total.flatten().numpy(), "norm", (0, STDDEV)).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tail_beyond_what_float32_reaches() -> None:
    # 2^31 draws: 17.0 are expected beyond 5.77 standard deviations, none if drawn in float32.
    limit, generator, total = 5.77, fixed().generator(), torch.zeros(2**22)
    beyond = 0
    for _ in range(2**9):
        add_gaussian_noise_([total.zero_()], noise_stddev=1.0, generator=generator)
        beyond += int((total.abs() > limit).sum())
    expected = 2**31 * 2 * scipy.stats.norm.sf(limit)
    assert expected == pytest.approx(17.0, abs=0.05)
    # Poisson: outside with probability 1e-4; 0 has probability 4e-8.
    assert scipy.stats.poisson.ppf(5e-5, expected) <= beyond
    assert beyond <= scipy.stats.poisson.ppf(1 - 5e-5, expected)


def correlation(a: Tensor, b: Tensor) -> float:
    return abs(float(np.corrcoef(a, b)[0, 1]))


def test_draws_are_independent() -> None:
    source = fixed()
    (first, other), (second, _) = draw(source), draw(source)
    bound = 4 / SIZE**0.5
    assert correlation(first, other) < bound  # two tensors of one release
    assert correlation(first, second) < bound  # two releases of one run
    assert correlation(first[1:], first[:-1]) < bound
    assert correlation(first, draw(fixed())[0]) > 0.999  # the test can fail


def test_only_a_fixed_seed_repeats() -> None:
    assert torch.equal(draw(fixed())[0], draw(fixed())[0])
    assert not torch.equal(draw(fixed())[0], draw(fixed(12))[0])
    torch.manual_seed(0)
    first = draw(SecretSource())[0]
    torch.manual_seed(0)
    assert not torch.equal(first, draw(SecretSource())[0])
