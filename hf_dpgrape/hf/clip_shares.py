"""Shares of the clip norm, whose squares sum to 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hf_dpgrape.privacy.plan import HEAD, LOSS


def equal_shares(layers: Sequence[str], head_share: float) -> dict[str, float]:
    """The head's share, and equal ones for the body.

    Args:
        layers: names of the body's clip groups.
        head_share: of the head's own group; 0 if it has none.
    """
    shares = dict.fromkeys(layers, math.sqrt((1 - head_share**2) / len(layers)))
    if head_share:
        shares[HEAD] = head_share
    return shares


def with_loss(shares: Mapping[str, float], loss_share: float) -> Mapping[str, float]:
    """The shares when the loss takes some of the clip norm.

    Args:
        shares: of the gradients.
        loss_share: of the loss; 0 if none is released.

    Raises:
        ValueError: a clip group has the name that the loss needs.
    """
    if not loss_share:
        return shares
    if LOSS in shares:
        raise ValueError(
            f"`private_loss_share` needs the name {LOSS!r} for its clip group, but the model "
            "has a layer of that name; use `clip_grouping=joint` or rename the layer."
        )
    left = math.sqrt(1 - loss_share**2)
    return {**{name: share * left for name, share in shares.items()}, LOSS: loss_share}
