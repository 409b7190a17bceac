"""The Gaussian noise of one release."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Numbers drawn at a time: bounds the memory that noise takes beside the sum.
_CHUNK = 2**20


def add_gaussian_noise_(
    tensors: Iterable[Tensor], *, noise_stddev: float, generator: torch.Generator
) -> None:
    """Adds independent N(0, noise_stddev**2) to every coordinate, in place.

    The noise is drawn in float64, whatever the sums are, and rounded once, when it is added. torch
    draws pairs of normal numbers by the method of Box and Muller: their radius is `sqrt(-2 log(v))`
    for a uniform v, so no pair goes further than the smallest v allows. In float32 that is 2^-24 on
    a CPU, hence 5.77 standard deviations, within reach of a run's draws. In float64 it is 2^-53 (on
    CUDA 2^-54), hence 8.57: what an output beyond tells is bounded in docs/privacy.md. The noise of
    `secure_noise` ends nowhere (see `exact_normal`).

    Guarantees:
        Draws are float64 and pass 5.77 standard deviations as often as a normal distribution does.

    Args:
        tensors: the parts of the summed, clipped gradient.
        noise_stddev: noise multiplier times clip norm, the same for all parts: they are one
            release of one sensitivity, however the clip norm was shared out among them.
        generator: secret generator on the tensors' device.

    Raises:
        TypeError: a tensor has a 16-bit dtype, in which noise would be rounded away.
    """
    for tensor in tensors:
        require_wide(tensor)
        if noise_stddev > 0:
            flat = tensor.reshape(-1)
            for chunk in torch.split(flat, _CHUNK):
                noise = torch.empty(chunk.shape, dtype=torch.float64, device=chunk.device)
                chunk.add_(noise.normal_(0.0, noise_stddev, generator=generator))
            tensor.copy_(flat.view_as(tensor))  # where the sum was not contiguous, flat is a copy


def require_wide(tensor: Tensor) -> None:
    """Refuses a sum of a 16-bit dtype, in which noise would be rounded away."""
    if tensor.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"Noise needs a float32 or float64 sum, got {tensor.dtype}.")
