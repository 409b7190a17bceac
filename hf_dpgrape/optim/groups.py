"""Groups of parameters with settings of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def regroup(
    optimizer: torch.optim.Optimizer,
    settings_of: Callable[[nn.Parameter, Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Splits groups so that each parameter is in one with its own settings.

    Args:
        optimizer: its groups are replaced in place, before its first step.
        settings_of: parameter and its group -> settings that differ from the group's. A group
            whose parameters agree stays whole.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for p in group["params"]:
            parts.setdefault(tuple(sorted(settings_of(p, group).items())), []).append(p)
        if len(parts) <= 1:
            for key in parts:
                group.update(key)
            groups.append(group)
        else:
            groups += [{**group, "params": params, **dict(key)} for key, params in parts.items()]
    optimizer.param_groups[:] = groups
