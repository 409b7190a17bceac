"""DP-Muon: Muon for hidden matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the groups with `use_muon`, `torch.optim.AdamW` for the others.

    Muon orthogonalizes the momentum of a matrix (Jordan et al. 2024); vectors, embeddings and the
    output layer have no use for that. Settings that both have, as `lr`, are the group's own.

    Args:
        params: parameters or groups, as for any optimizer.
        lr: learning rate.
        betas: decay rates of AdamW's moments.
        eps: added to AdamW's denominator.
        weight_decay: decoupled decay, of both.
        momentum: decay rate of Muon's Nesterov momentum.
        ns_steps: Newton-Schulz iterations.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        ns_steps: int = 5,
    ) -> None:
        nothing = [nn.Parameter(torch.zeros(1, 1))]
        self._muon = torch.optim.Muon(nothing, momentum=momentum, ns_steps=ns_steps)
        self._adamw = torch.optim.AdamW(nothing, betas=betas, eps=eps)
        own = {"lr": lr, "weight_decay": weight_decay, "use_muon": False, "eps": eps}
        super().__init__(params, {**self._muon.defaults, **self._adamw.defaults, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both; state and groups are this optimizer's."""
        loss = None if closure is None else closure()
        for inner, is_muon in ((self._muon, True), (self._adamw, False)):
            inner.param_groups = [g for g in self.param_groups if g["use_muon"] == is_muon]
            inner.state = self.state
            inner.step()  # type: ignore[no-untyped-call]
        return loss


def muon_scale(stand_in: tuple[int, ...], n_out: int, n_in: int) -> float:
    """What makes torch's scale of a Muon step, which follows the stand-in's shape, that of a layer.

    The scale is sqrt(max(1, n_out / n_in)); torch computes it for the tensor it steps on, which
    may be projected, or hold the layer's weight turned.
    """
    wanted = max(1.0, n_out / n_in)
    return math.sqrt(wanted / max(1.0, stand_in[0] / stand_in[1]))
