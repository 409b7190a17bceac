"""Secure noise: rounding counts in the sensitivity, and the release is a function of it alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dpgrape.privacy.cipher import CipherStream
from hf_dpgrape.privacy.secure_noise import Grid, add_secure_noise_, grid_of, rounded

SIGMA, CLIP = 1.3, 0.4


def stream(seed: int = 7) -> CipherStream:
    return CipherStream(seed.to_bytes(32, "big"))


def noisy(sums: torch.Tensor, seed: int = 7, sigma: float = SIGMA) -> torch.Tensor:
    """What is released about these sums."""
    found = sums.clone()
    add_secure_noise_([found], noise_multiplier=sigma, l2_clip_norm=CLIP, stream=stream(seed))
    return found


def grid(num_coordinates: int, sigma: float = SIGMA) -> Grid:
    return grid_of(noise_multiplier=sigma, l2_clip_norm=CLIP, num_coordinates=num_coordinates)


# ---- The sensitivity of rounding -----------------------------------------------------------


@given(
    sigma=st.floats(0.01, 2.0**20),
    clip=st.floats(1e-6, 1e6),
    num_coordinates=st.integers(1, 10**10),
)
def test_noise_covers_the_rounding_and_is_never_below_the_plans(
    sigma: float, clip: float, num_coordinates: int
) -> None:
    found = grid_of(noise_multiplier=sigma, l2_clip_norm=clip, num_coordinates=num_coordinates)
    assert found.stddev >= sigma * clip
    assert found.stddev >= sigma * found.sensitivity(clip, num_coordinates)
    assert found.stddev <= sigma * clip * (1 + 1.2 * num_coordinates**0.5 * 2.0**-30)
    assert found.step == found.stddev / 2**found.num_bits


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1, 10, 3000]), scale=st.floats(1e-9, 1e3))
def test_an_example_moves_the_rounded_sum_by_at_most_what_is_counted(
    seed: int, size: int, scale: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    sums = torch.randn(size, generator=g, dtype=torch.float64) * scale
    part = torch.randn(size, generator=g, dtype=torch.float64)
    part *= CLIP / part.norm()
    found = grid(size)
    moved = (rounded(sums + part, found) - rounded(sums, found)).double() * found.step
    # The sum itself is rounded to float64, by 2^-53 of it.
    slack = 2.0**-50 * float(sums.abs().max()) * size**0.5
    assert float(moved.norm()) <= found.sensitivity(CLIP, size) + slack


def test_rounding_moves_a_sum_further_than_the_example_does() -> None:
    # Every coordinate crosses the middle between two steps: what is counted is needed.
    size = 10_000
    found = grid(size)
    sums = torch.full((size,), 0.499 * found.step, dtype=torch.float64)
    part = torch.full((size,), 0.002 * found.step, dtype=torch.float64)
    moved = (rounded(sums + part, found) - rounded(sums, found)).double() * found.step
    assert float(moved.norm()) > 400 * float(part.norm())
    assert float(moved.norm()) <= found.sensitivity(float(part.norm()), size)


@pytest.mark.parametrize("sigma", [0.01, 0.6, 1.0, 30.0, 2.0**20])
def test_room_for_large_sums(sigma: float) -> None:
    found = grid(1000, sigma)
    far = torch.tensor([2.0**18, 2.0**17 + 0.5, -(2.0**18)], dtype=torch.float64) * CLIP
    assert torch.allclose(rounded(far, found).double() * found.step, far, rtol=1e-9, atol=0)
    beyond = rounded(torch.tensor([1e30, -1e30]), found)  # is cut, and moves by no more
    assert beyond.tolist() == [2**51, -(2**51)]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="`secure_noise` needs noise, got `noise_multiplier`=0"):
        grid(10, 0.0)
    with pytest.raises(ValueError, match="is more than `secure_noise` can draw for 1,000,000"):
        grid(10**6, 2.0**45)
    with pytest.raises(TypeError, match="float32 or float64 sum, got torch"):
        noisy(torch.zeros(3, dtype=torch.bfloat16))


# ---- The release ---------------------------------------------------------------------------


def test_the_release_is_a_function_of_steps_and_noise_alone() -> None:
    size = 5000
    found = grid(size)
    g = torch.Generator().manual_seed(1)
    steps = torch.randint(-(2**40), 2**40, (size,), generator=g).double()
    base, shifted, between, next_ = (
        noisy(where * found.step) for where in (0 * steps, steps, steps + 0.3, steps + 0.7)
    )
    in_steps = base / found.step - 0.5
    assert torch.equal(base, (in_steps.round() + 0.5) * found.step)
    assert torch.equal(shifted, (in_steps.round() + steps + 0.5) * found.step)
    # What lies between two steps decides by rounding, and leaves no other trace.
    assert torch.equal(between, shifted)
    assert torch.equal(next_, (in_steps.round() + steps + 1.5) * found.step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma", [0.05, SIGMA, 50.0])
def test_scale(dtype: torch.dtype, sigma: float) -> None:
    sums = torch.linspace(-1, 1, 40_000, dtype=dtype).view(200, 200).T  # not contiguous
    noise = (noisy(sums, sigma=sigma).double() - sums.double()).flatten()
    noise /= sigma * CLIP
    assert scipy.stats.kstest(noise.numpy(), "norm").pvalue > 1e-3
    for off in (0.9, 1.1):  # the test can fail
        assert scipy.stats.kstest(noise.numpy(), "norm", (0, off)).pvalue < 1e-6
    assert abs(np.corrcoef(noise, sums.flatten())[0, 1]) < 4 / len(noise) ** 0.5
    assert abs(float(noise.mean())) < 4 / len(noise) ** 0.5


def test_tensors_of_a_release_have_noise_of_their_own() -> None:
    pair = [torch.zeros(20_000), torch.zeros(20_000)]
    add_secure_noise_(pair, noise_multiplier=SIGMA, l2_clip_norm=CLIP, stream=stream())
    assert abs(np.corrcoef(*pair)[0, 1]) < 4 / math.sqrt(20_000)
    assert not torch.equal(noisy(torch.zeros(50)), noisy(torch.zeros(50), seed=8))
    assert torch.equal(noisy(torch.zeros(50)), noisy(torch.zeros(50)))


def test_a_process_without_a_stream_adds_its_steps_alone() -> None:
    sums, seen = torch.tensor([0.25, -3.0], dtype=torch.float64), []
    add_secure_noise_(
        [sums], noise_multiplier=SIGMA, l2_clip_norm=CLIP, stream=None, sum_=seen.append
    )
    assert torch.equal(seen[0], rounded(torch.tensor([0.25, -3.0]), grid(2)))
