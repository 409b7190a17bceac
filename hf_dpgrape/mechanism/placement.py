"""Where inputs and weights are: on the model's device, and the same in every process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree


def moved(inputs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The inputs on the model's device."""
    device = next(model.parameters()).device

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return {name: pytree.tree_map_only(Tensor, move, value) for name, value in inputs.items()}


def broadcast_(model: nn.Module) -> None:
    """Gives all processes the first one's weights."""
    if distributed.is_available() and distributed.is_initialized():
        for parameter in model.parameters():
            distributed.broadcast(parameter.data, src=0)
