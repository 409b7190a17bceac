"""Per-sample clip factors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_dpgrape.privacy.plan import Clipping

#: Stability constant of automatic clipping (Bu et al. 2023, arXiv 2206.07136, eq. 4.1).
_AUTOMATIC_GAMMA = 0.01

#: Clip slightly below the bound, so that float32 rounding of a norm cannot exceed it.
_ROUNDING_MARGIN = 1e-6


def clip_factors(
    squared_norms: Mapping[str, Tensor],
    *,
    l2_clip_norm: float,
    clip_shares: Mapping[str, float],
    clipping: Clipping,
) -> dict[str, Tensor]:
    """Factors by which each sample's gradient is multiplied, one vector (B,) per clip group.

    Guarantees:
        For group g, `factor * norm <= l2_clip_norm * clip_shares[g]` for every sample; over all
        groups together a sample contributes at most `l2_clip_norm`, as the shares' squares sum
        to 1. A sample with any non-finite norm gets the factor 0 in *every* group: the caller
        must then leave its gradient out, since 0 times infinity is not 0.

    Args:
        squared_norms: squared gradient norms (B,) per clip group, float32 or float64.
        l2_clip_norm: bound for the whole vector.
        clip_shares: share of the bound per group.
        clipping: "flat" or "automatic".
    """
    finite = torch.stack([norms.isfinite() for norms in squared_norms.values()]).all(dim=0)
    factors = {}
    for group, squared in squared_norms.items():
        bound = l2_clip_norm * clip_shares[group] * (1 - _ROUNDING_MARGIN)
        norms = squared.clamp(min=0).sqrt()
        if clipping == "automatic":
            factor = bound / (norms + _AUTOMATIC_GAMMA)
        else:
            factor = (bound / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
        factors[group] = torch.where(finite, factor, 0.0)
    return factors
