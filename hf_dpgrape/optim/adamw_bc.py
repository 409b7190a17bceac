"""DP-AdamBC: AdamW that subtracts the known variance of the noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Second moments are not corrected below this share of the noise's variance.
DEFAULT_FLOOR = 0.01


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
                f"`adamw_bc` needs noise to subtract and a positive floor, got a variance of "
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
