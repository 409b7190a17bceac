"""Gaussian noise of a cryptographic generator, without the attacks on floating-point noise.

Floating-point noise has gaps, and the sum of a number and noise has others: which outputs are
possible tells of the number (Mironov 2012; Jin et al. 2022, arXiv 2112.05307; Holohan and Braghin
2021, arXiv 2107.10138). Here the sum is rounded to a grid first, and the noise is a whole number of
grid steps, drawn without any error.

**The mechanism.** With grid step g and k bits, for the sum f of d coordinates:

1. m = f / g, rounded to integers;
2. M = m + floor(2^k N), for d independent standard normal numbers N, drawn by `exact_normal`;
3. the release is (M + 1/2) g, rounded to the sum's dtype.

**Proof.** m is an integer, so m + floor(2^k N) = floor(m + 2^k N): step 2 is a function of
m + 2^k N alone, and step 3 one of step 2. So the release is post-processing of the Gaussian
mechanism on the *real numbers* m, with noise of standard deviation 2^k in units of g. Its noise
multiplier is 2^k g over the L2 sensitivity of g m. Whatever accounts for a Gaussian mechanism (PLD,
Renyi, any sampling) accounts for this one, at every delta, and no property of a discrete Gaussian
is needed (Canonne, Kamath and Steinke 2020, arXiv 2004.00010, prove concentrated DP of theirs,
which is less than PLD accounting takes for granted).

**The sensitivity of rounding.** Let one example move f by at most C. Each coordinate of g m is off
f by less than g: half a step of rounding, a quarter of the division in float64 (|m| <= 2^51). So
one example moves g m by less than C + 2 g sqrt(d), and step 2 needs

    2^k g >= sigma (C + 2 g sqrt(d)),   that is   2^k g = sigma C / (1 - 2 sigma sqrt(d) / 2^k).

k is 32 + log2(sigma), rounded up: at d = 7e6 the noise is wider than sigma C by at most 1.3e-6 of
it.

**What is not covered.** f itself is a sum in float32 of clipped gradients, and how it rounds
depends on who is in it: by up to about n^2 C / 2^23 for n examples drawn, beyond the C that is
counted. The sampler's coins and dropout are drawn by torch's generators, from secret seeds. Time is
not constant. AES is assumed to be a pseudorandom permutation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dpgrape.privacy.exact_normal import MOST_BITS, WordStream, floored_normals
from hf_dpgrape.privacy.noise import require_wide

#: Bits of a noise multiplier of 1, and the fewest.
_BITS, _LEAST_BITS = 32, 16

#: Largest number of steps that a sum is rounded to; its quarter of a step is 2^-53 of it.
_MOST_STEPS = 2.0**51

#: Covers the roundings of the formula for the noise itself.
_ROUNDING_MARGIN = 2.0**-40

#: Numbers drawn at a time.
_CHUNK = 2**20


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where sum and noise lie; a function of public numbers.

    Attributes:
        num_bits: bits of the noise after the binary point, in standard deviations.
        stddev: of the noise; `noise_multiplier` times the sensitivity of the rounded sum.
    """

    num_bits: int
    stddev: float

    @property
    def step(self) -> float:
        """Distance of two neighbors on the grid, without rounding."""
        return math.ldexp(self.stddev, -self.num_bits)

    def sensitivity(self, l2_clip_norm: float, num_coordinates: int) -> float:
        """By how much one example moves the rounded sum, at most."""
        return l2_clip_norm + 2 * self.step * math.sqrt(num_coordinates)


def grid_of(*, noise_multiplier: float, l2_clip_norm: float, num_coordinates: int) -> Grid:
    """The grid of a release.

    Guarantees:
        `stddev >= noise_multiplier * sensitivity(...)`, the rounding included, and never below
        `noise_multiplier * l2_clip_norm`.

    Args:
        noise_multiplier: of the accountant; positive.
        l2_clip_norm: bound on one example's part in the sum before it is rounded.
        num_coordinates: of all tensors of the release together.

    Raises:
        ValueError: noise is zero, or so much that rounding would be coarse beside the sensitivity.

    >>> grid = grid_of(noise_multiplier=1.0, l2_clip_norm=1.0, num_coordinates=7_000_000)
    >>> round(grid.stddev - 1, 9)
    1.232e-06
    """
    if not noise_multiplier > 0:
        raise ValueError(
            f"`secure_noise` needs noise, got `noise_multiplier`={noise_multiplier}; leave it out."
        )
    wanted = _BITS + math.ceil(math.log2(noise_multiplier))
    num_bits = min(max(wanted, _LEAST_BITS), MOST_BITS)
    rounding = math.ldexp(2 * noise_multiplier * math.sqrt(num_coordinates), -num_bits)
    if rounding > 0.5:
        raise ValueError(
            f"`noise_multiplier`={noise_multiplier:g} is more than `secure_noise` can draw for "
            f"{num_coordinates:,} coordinates; take fewer steps or larger batches."
        )
    stddev = noise_multiplier * l2_clip_norm / (1 - rounding) * (1 + _ROUNDING_MARGIN)
    return Grid(num_bits=num_bits, stddev=stddev)


def add_secure_noise_(
    tensors: Sequence[Tensor],
    *,
    noise_multiplier: float,
    l2_clip_norm: float,
    stream: WordStream | None,
    sum_: Callable[[Tensor], object] | None = None,
) -> None:
    """Rounds a release to its grid, and adds the noise, in place.

    Integers of several processes are added up without rounding, so the noise of one of them covers
    all: an example is in the share of one process alone, and moves one rounding.

    Guarantees:
        The result is a function of a Gaussian mechanism of `noise_multiplier` on real numbers, of
        which one example moves the input by at most what the noise was scaled to.

    Args:
        tensors: all parts of the summed, clipped gradient of one release.
        noise_multiplier: of the accountant; positive.
        l2_clip_norm: bound on one example's part in all of them together.
        stream: uniform words for the noise of this release alone, a `CipherStream` of a fresh key;
            None adds none, for a process that is not the first.
        sum_: adds up a tensor over processes, in place; None for one process.

    Raises:
        TypeError: a tensor has a 16-bit dtype.
        ValueError: see `grid_of`.
    """
    grid = grid_of(
        noise_multiplier=noise_multiplier,
        l2_clip_norm=l2_clip_norm,
        num_coordinates=sum(tensor.numel() for tensor in tensors),
    )
    for tensor in tensors:
        require_wide(tensor)
        flat = tensor.reshape(-1)
        for chunk in torch.split(flat, _CHUNK):
            steps = rounded(chunk, grid)
            if stream is not None:
                noise = floored_normals(len(chunk), grid.num_bits, stream)
                steps += torch.from_numpy(noise).to(chunk.device)
            if sum_ is not None:
                sum_(steps)
            chunk.copy_(steps.double().add_(0.5).mul_(grid.step))
        tensor.copy_(flat.view_as(tensor))  # where the sum was not contiguous, flat is a copy


def rounded(values: Tensor, grid: Grid) -> Tensor:
    """Values in whole steps of the grid, each off by less than one."""
    steps = values.double().div_(grid.step) if values.dtype != torch.float64 else values / grid.step
    return steps.clamp_(-_MOST_STEPS, _MOST_STEPS).round_().long()
