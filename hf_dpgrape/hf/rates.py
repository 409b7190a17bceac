"""The optimizer that arguments ask for, and the learning rate of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.dpmup import WidthTransfer, optimizer_kind
from hf_dpgrape.mechanism.checks import refuse_other_optimizer
from hf_dpgrape.mechanism.tensors import projected_shapes
from hf_dpgrape.optim.groups import regroup
from hf_dpgrape.optim.muon import MuonWithAdamW, muon_scale
from hf_dpgrape.optim.table import OPTIMIZERS, Setting
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.width.shapes import hidden_matrices, layers_of


def own_optimizer(
    args: DPGrapeTrainingArguments, plan: PrivacyPlan
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Class and arguments of an optimizer of this package; None for those of transformers."""
    row = OPTIMIZERS.get(args.optim_name)
    if row is None:
        return None
    settings: dict[Setting, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "noise_variance": (plan.noise_stddev / plan.expected_batch_size) ** 2,
    }
    return row.make, row.arguments(settings, args.optim_args)


def set_rates(
    args: DPGrapeTrainingArguments,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    head: frozenset[str],
    width_transfer: WidthTransfer | None,
) -> bool:
    """Gives each weight the rate that head, Muon and the width ask for, before the first step.

    Args:
        args: the arguments.
        optimizer: on the weights themselves.
        model: whose weights they are.
        head: tensors with the head's rate.
        width_transfer: DP-muP's rules, if any.

    Returns:
        Whether anything was changed, so that a schedule made before does not fit.

    Raises:
        ValueError: the optimizer holds parameters that are not the model's, or not all that are
            to be trained, or DP-muP has another rule for it than for `optim`.
    """
    refuse_other_optimizer(optimizer, model)
    if width_transfer is not None:
        _refuse_other_rule(optimizer, width_transfer)
    names = {id(p): name for name, p in model.named_parameters()}
    is_muon = isinstance(optimizer, MuonWithAdamW)
    hidden = hidden_matrices(model) - head if is_muon else frozenset()
    layers = layers_of(model, hidden=hidden)
    shapes = {name: layer.shape for layer in layers.values() for name in layer.tensors}
    projected = projected_shapes(
        model, rank=args.rank, head=head, target_modules=args.optim_target_modules
    )

    def settings(parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
        name = names[id(parameter)]
        if not parameter.requires_grad:  # an own optimizer may hold these too
            return {}
        # A schedule that exists already has set "lr" to that of its first step.
        base = rate = group.get("initial_lr", group["lr"])
        if name in head and args.head_learning_rate is not None:
            rate = args.head_learning_rate
        if name in hidden:
            shape = shapes[name]
            scale = muon_scale(projected[name], shape.n_out, shape.n_in)
            rate = (args.muon_learning_rate or base) * scale
        if width_transfer is not None:
            rate *= width_transfer.rate_ratio(name)
        found = {} if rate == base else {"lr": rate, "initial_lr": rate}
        return {**found, "use_muon": True} if name in hidden else found

    pairs = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    was_set = any(settings(p, group) for p, group in pairs)
    regroup(optimizer, settings)
    return was_set


def _refuse_other_rule(optimizer: torch.optim.Optimizer, width_transfer: WidthTransfer) -> None:
    """Refuses an optimizer that DP-muP has another rule for."""
    used = type(optimizer).__name__
    if optimizer_kind(used) != width_transfer.optimizer:
        raise ValueError(
            f"The optimizer that was passed is {used}, but DP-muP's rates are for "
            f"{width_transfer.optimizer}, as `optim` says; set `optim` to what is used."
        )
