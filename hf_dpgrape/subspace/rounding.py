"""Stochastic rounding to bfloat16, without which small updates vanish.

A bfloat16 weight has 8 bits of precision: an update below half a unit in the last place is rounded
away by ordinary rounding, every time. Rounding up with a probability equal to the fraction lost
keeps the expected value (Gupta et al. 2015, arXiv 1502.02551).
"""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_bfloat16(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Rounds float32 values to bfloat16, each up or down with a mean of the value itself.

    Guarantees:
        The expectation is the value; a value that bfloat16 represents stays as it is; infinities
        and NaN stay.

    Args:
        values: float32 values.
        generator: may be public, as rounding acts on what is private already, and must be in the
            same state in all processes, or their weights drift apart. None for the global one.
    """
    bits = values.contiguous().view(torch.int32)
    # bfloat16 is the upper half of float32: a random lower half carries over with probability
    # equal to the fraction that truncation would lose.
    carry = torch.randint(
        0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    rounded = ((bits + carry) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()
