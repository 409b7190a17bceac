"""Per-sample clip factors."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dpgrape.privacy.plan import Clipping

#: Stability constant of automatic clipping (Bu et al. 2023, arXiv 2206.07136, eq. 4.1).
_AUTOMATIC_GAMMA = 0.01

#: Clip slightly below the bound, so that float32 rounding of a norm cannot exceed it.
_ROUNDING_MARGIN = 1e-6


def clip_factors(squared_norms: Tensor, *, bound: float, clipping: Clipping) -> Tensor:
    """Factors (B,) by which each sample's gradient of one clip group is multiplied.

    Guarantees:
        `factor * norm <= bound` for every sample. Where the norm is not finite the factor is 0:
        the caller must then leave the sample out, since 0 times infinity is not 0.

    Args:
        squared_norms: squared gradient norms (B,) of the group, float32 or float64.
        bound: the group's bound, `l2_clip_norm` times its share.
        clipping: "flat" or "automatic".
    """
    bound *= 1 - _ROUNDING_MARGIN
    norms = squared_norms.clamp(min=0).sqrt()
    if clipping == "automatic":
        factors = bound / (norms + _AUTOMATIC_GAMMA)
    else:
        factors = (bound / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    return torch.where(norms.isfinite(), factors, 0.0)
