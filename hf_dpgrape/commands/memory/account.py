"""Predicts and accounts for the peak memory of one training step."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from hf_dpgrape.commands.memory.methods import (
    Method,
    OrdinaryMethod,
    PrivateMethod,
    state_tensors,
    with_lora,
)
from hf_dpgrape.commands.memory.setting import Setting, make_model
from hf_dpgrape.commands.memory.tracking import LiveBytes, Parts, replace_meta_tensors_, world

#: Methods by name, as they are called in tables.
METHODS = {
    "dp-grape": "DP-GRAPE",
    "dp-adam": "DP, full per-sample gradients",
    "adamw": "not private",
    "lora": "LoRA, not private",
}

#: What all is for that is not held between layers.
ACTIVATIONS = "activations and temporaries"

PHASES = ("forward", "backward", "optimizer step")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the memory of one training step goes, in bytes.

    Attributes:
        method: one of `METHODS`.
        peak: the most that tensors take at any moment of the step.
        parts: what they are for at that moment; the parts sum to `peak`.
        phases: the most in each phase; backward includes clipping and noise.
        activations: what forward leaves for backward to use.
    """

    method: str
    peak: int
    parts: Parts
    phases: Parts
    activations: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def available_methods() -> list[str]:
    """Names of the methods that the installed packages allow."""
    has_peft = importlib.util.find_spec("peft") is not None
    return [name for name in METHODS if name != "lora" or has_peft]


def predict(
    config: Any,
    setting: Setting,
    *,
    task: str = "auto",
    methods: Sequence[str] | None = None,
    without_storage: bool = True,
) -> list[Account]:
    """One account per method.

    The methods' own code runs, from the private step to torch's optimizers, on tensors that have
    shapes but no memory behind them (`torch._subclasses.FakeTensorMode`). What is counted is the
    bytes of tensors. A device needs more: its context and libraries (about half a GiB on a GPU),
    workspace inside kernels, and what the allocator cannot give back.

    Args:
        config: a configuration of transformers.
        setting: how it is trained.
        task: the task head, as for `build_model`.
        methods: which of `METHODS`; None for all that are available.
        without_storage: False runs on real memory of the CPU instead, to check a prediction.

    Raises:
        ValueError: the model cannot be built or trained so.
    """
    accounts = []
    for name in available_methods() if methods is None else methods:
        device = "meta" if without_storage else "cpu"
        model = make_model(copy.deepcopy(config), task, setting, device=device)
        if name == "lora":
            model = with_lora(model, setting)
        with world(without_storage=without_storage, gpu_kernels=setting.device == "gpu"):
            if without_storage:
                replace_meta_tensors_(model)
            accounts.append(account_of(name, _method(name, model, setting)))
    return accounts


def _method(name: str, model: nn.Module, setting: Setting) -> Method:
    if name in ("dp-grape", "dp-adam"):
        return PrivateMethod(model, setting, full_space=name == "dp-adam")
    return OrdinaryMethod(model, setting)


def account_of(name: str, method: Method) -> Account:
    """Runs one step of a method and accounts for it.

    The optimizer steps first, on gradients of zero, so that its state exists in forward and
    backward as it does in every step of a run but the first.
    """
    method.zero_gradients()
    live = LiveBytes([*method.tensors(), *state_tensors(method.optimizer)], method.parts)
    after_forward = 0

    def forward_is_done() -> None:
        nonlocal after_forward
        after_forward = live.now
        live.start("backward")

    with live:
        live.start("optimizer step")
        method.optimizer.step()
        method.after_step()
        live.start("forward")
        before = live.now
        method.forward_backward(forward_is_done)
    phases = {phase: live.peaks[phase].total for phase in PHASES}
    highest = live.peaks[max(phases, key=lambda phase: phases[phase])]
    held = {part: size for part, size in highest.parts.items() if size}
    rest = highest.total - sum(held.values())
    return Account(
        method=name,
        peak=highest.total,
        parts={**held, ACTIVATIONS: rest},
        phases=phases,
        activations=after_forward - before,
    )
