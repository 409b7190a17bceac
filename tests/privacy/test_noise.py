"""The noise: its scale, its dtype and its independence."""

from __future__ import annotations

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
