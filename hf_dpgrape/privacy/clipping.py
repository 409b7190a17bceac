"""Per-sample clip factors."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dpgrape.privacy.plan import Clipping

#: Stability constant of automatic clipping (Bu et al. 2023, arXiv 2206.07136, eq. 4.1).
_AUTOMATIC_GAMMA = 0.01

#: Clip slightly below the bound. This pays for what is too small to be followed term by term: the
#: roundings of a few float64 operations here and in the norms, the absolute errors of numbers that
#: underflow (2^-70 a tensor, so 2^-60 for a million of them, against bounds of at least 1e-12), and
#: clip shares whose squares sum to 1 within 1e-9. The factor itself is rounded down.
_ROUNDING_MARGIN = 1e-6


def clip_factors(
    squared_norms: Tensor,
    *,
    bound: float,
    clipping: Clipping,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Factors (B,) by which each sample's gradient of one clip group is multiplied.

    Guarantees:
        `factor * norm <= bound * (1 - 9e-7)` for every sample, as real numbers. Where the norm is
        not finite the factor is 0: the caller must then leave the sample out, since 0 times
        infinity is not 0. No factor is subnormal; where it would be, it is 0.

    Args:
        squared_norms: squared gradient norms (B,) of the group, at least the true ones.
        bound: the group's bound, `l2_clip_norm` times its share.
        clipping: "flat" or "automatic".
        dtype: float32 or float64, the precision in which the factors will be applied.
    """
    bound *= 1 - _ROUNDING_MARGIN
    norms = squared_norms.double().sqrt()
    factors = bound / (norms + _AUTOMATIC_GAMMA if clipping == "automatic" else norms)
    info = torch.finfo(dtype)
    # Less by one spacing, which is more than rounding to the nearest can add.
    factors = (factors * (1 - info.eps)).to(dtype)
    if clipping == "flat":
        factors = factors.clamp(max=1.0)
    return torch.where(norms.isfinite() & (factors >= info.tiny), factors, 0.0)
