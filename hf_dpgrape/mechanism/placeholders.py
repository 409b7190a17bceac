"""Tokens that stand for an image: how many of them a model wants, by the shape of its features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dpgrape.gradients.stage import undisturbed

_IMAGE, _TOKEN = "pixel_values", ("image_token_id", "image_token_index")


def image_token(config: Any) -> int | None:
    """The token that a model's configuration has for images."""
    found = (getattr(config, name, None) for name in _TOKEN)
    return next((token for token in found if isinstance(token, int)), None)


def num_image_tokens(model: nn.Module, structure: Mapping[str, Any]) -> int:
    """How many of an example's tokens an image like its own takes the place of.

    The model runs on an image of zeros. Of the example, only names and shapes are used.

    Args:
        model: the model.
        structure: one collated example.

    Returns:
        Their number; 0 where there is no image, or the model does not tell.
    """
    features_of: Any = getattr(model, "get_image_features", None)
    image = structure.get(_IMAGE)
    if features_of is None or image is None or image_token(getattr(model, "config", None)) is None:
        return 0
    weight = next(model.parameters())
    zeros = torch.zeros(image.shape, dtype=weight.dtype, device=weight.device)
    with torch.no_grad(), undisturbed(model):
        try:
            features = features_of(pixel_values=zeros)
        except Exception:  # it wants more than the image; the rehearsal then says so
            return 0
    features = getattr(features, "pooler_output", features)
    leaves = pytree.tree_leaves(features)
    return sum(math.prod(leaf.shape[:-1]) for leaf in leaves if isinstance(leaf, Tensor))
