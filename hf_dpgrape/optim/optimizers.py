"""Optimizers that transformers does not offer by name: DP-Muon and DP-AdamBC; groups of parameters.

An optimizer sees noised gradients only, so whatever it does is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: Values of `optim` beside those of transformers.
MUON = "muon"
ADAMW_BC = "adamw_bc"
OWN_OPTIMIZERS = (MUON, ADAMW_BC)

#: Second moments are not corrected below this share of the noise's variance.
DEFAULT_FLOOR = 0.01


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


class AdamWBC(torch.optim.Optimizer):
    """AdamW on noised gradients whose second moment is freed of the noise's known variance.

    DP-AdamBC (Tang et al. 2024, arXiv 2312.14334): noise of variance v adds v to the second moment,
    which makes Adam's step that of signed momentum; v is public, so it can be subtracted.

    Args:
        params: parameters or groups, as for any optimizer.
        lr: learning rate.
        noise_variance: variance of the noise on each coordinate, (sigma C / B) ** 2.
        betas: decay rates of the moments.
        weight_decay: decoupled decay.
        floor: least second moment, as a share of `noise_variance`, so that the step's size does
            not depend on the gradient's scale.

    Raises:
        ValueError: there is no noise to subtract, or the floor is not positive.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        noise_variance: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        floor: float = DEFAULT_FLOOR,
    ) -> None:
        if not noise_variance > 0 or not floor > 0:
            raise ValueError(
                f"`{ADAMW_BC}` needs noise to subtract and a positive floor, got a variance of "
                f"{noise_variance:g} and `floor={floor:g}`; without noise use `adamw_torch`."
            )
        self._noise_variance = noise_variance
        self._floor = floor * noise_variance
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_(p, p.grad, group)
        return loss

    def _step_(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """The step of one parameter, in place."""
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
        first = state["exp_avg"] / (1 - beta1 ** state["step"])
        second = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
        second = second.sub_(self._noise_variance).clamp_(min=self._floor)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(first, second.sqrt_(), value=-group["lr"])


def muon_scale(stand_in: tuple[int, ...], n_out: int, n_in: int) -> float:
    """What makes torch's scale of a Muon step, which follows the stand-in's shape, that of a layer.

    The scale is sqrt(max(1, n_out / n_in)); torch computes it for the tensor it steps on, which
    may be projected, or hold the layer's weight turned.
    """
    wanted = max(1.0, n_out / n_in)
    return math.sqrt(wanted / max(1.0, stand_in[0] / stand_in[1]))


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


def float_options(text: str | None, allowed: Iterable[str]) -> dict[str, float]:
    """`optim_args`, as `floor=0.1`, for the optimizers of this module.

    Raises:
        ValueError: an option is unknown or no number.
    """
    options: dict[str, float] = {}
    for item in (text or "").replace(" ", "").split(","):
        name, _, value = item.partition("=")
        try:
            if item:
                options[name] = float(value)
        except ValueError:
            name = ""
        if item and name not in allowed:
            raise ValueError(
                f"Expected `optim_args` of the form name=number out of {sorted(allowed)}, got "
                f"{item!r}."
            )
    return options
