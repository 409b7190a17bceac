"""The Gaussian noise of one release."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def add_gaussian_noise_(
    tensors: Iterable[Tensor], *, noise_stddev: float, generator: torch.Generator
) -> None:
    """Adds independent N(0, noise_stddev**2) to every coordinate, in place.

    Guarantees:
        The noise is drawn in the tensors' own dtype, which must be float32 or float64.

    Args:
        tensors: the parts of the summed, clipped gradient.
        noise_stddev: noise multiplier times clip norm, the same for all parts: they are one
            release of one sensitivity, however the clip norm was shared out among them.
        generator: secret generator on the tensors' device.

    Raises:
        TypeError: a tensor has a 16-bit dtype, in which noise would be rounded away.
    """
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"Noise needs a float32 or float64 sum, got {tensor.dtype}.")
        if noise_stddev > 0:
            noise = torch.empty_like(tensor).normal_(0.0, noise_stddev, generator=generator)
            tensor.add_(noise)
