"""Optimizers that transformers does not offer by name, one row each.

An optimizer sees noised gradients only, so whatever it does is post-processing. It steps on
stand-ins that are zero, so its step must depend on gradients alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hf_dpgrape.optim.adamw_bc import AdamWBC
from hf_dpgrape.optim.muon import MuonWithAdamW

#: Names of values of `optim`.
MUON = "muon"
ADAMW_BC = "adamw_bc"

#: How an optimizer's step follows the gradient's scale, by which DP-muP sets its rates.
WidthRule = Literal["sgd", "adam", "muon"]
#: What a run tells an optimizer.
Setting = Literal["lr", "betas", "eps", "noise_variance"]


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """One optimizer.

    Attributes:
        make: its class; the first argument is for the parameters.
        width_rule: DP-muP's rule for its rates.
        settings: arguments that follow from the run; `noise_variance` is that of the noise on one
            coordinate of the gradient.
        options: arguments that `optim_args` may set, each with what makes its value of a number.
    """

    make: type[torch.optim.Optimizer]
    width_rule: WidthRule
    settings: tuple[Setting, ...] = ("lr", "betas", "eps")
    options: Mapping[str, Callable[[float], float]] = field(default_factory=dict)

    def arguments(self, settings: Mapping[Setting, Any], optim_args: str | None) -> dict[str, Any]:
        """Arguments of the class.

        Args:
            settings: of the run, all of them.
            optim_args: as `floor=0.1`.

        Raises:
            ValueError: an option is unknown or no number.
        """
        options = float_options(optim_args, self.options)
        return {
            **{name: settings[name] for name in self.settings},
            **{name: self.options[name](value) for name, value in options.items()},
        }


#: By value of `optim`.
OPTIMIZERS: dict[str, OptimizerRow] = {
    MUON: OptimizerRow(
        make=MuonWithAdamW, width_rule="muon", options={"momentum": float, "ns_steps": int}
    ),
    ADAMW_BC: OptimizerRow(
        make=AdamWBC,
        width_rule="adam",
        settings=("lr", "betas", "noise_variance"),
        options={"floor": float},
    ),
}


def register_optimizer(name: str, row: OptimizerRow) -> None:
    """Makes an optimizer known as a value of `optim`, before the arguments are made.

    Args:
        name: the value; it wins over transformers' own of that name.
        row: the optimizer. Its step must depend on gradients alone, not on the weights, whose
            stand-ins are zero.

    Raises:
        ValueError: the name is taken.
    """
    if name in OPTIMIZERS:
        raise ValueError(
            f"Expected a new name for an optimizer, got {name!r}, which is that of "
            f"{OPTIMIZERS[name].make.__name__}; choose another."
        )
    OPTIMIZERS[name] = row


def float_options(text: str | None, allowed: Iterable[str]) -> dict[str, float]:
    """`optim_args`, as `floor=0.1`, for the optimizers of the table.

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
