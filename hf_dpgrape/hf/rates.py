"""The optimizer that arguments ask for, and the learning rate of every tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.dpmup import WidthTransfer, optimizer_kind
from hf_dpgrape.optim.groups import regroup
from hf_dpgrape.optim.muon import MuonWithAdamW, muon_scale
from hf_dpgrape.optim.table import OPTIMIZERS, Setting
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.subspace.projection import Projection
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
    projections: Mapping[str, Projection],
    head: frozenset[str],
    width_transfer: WidthTransfer | None,
) -> bool:
    """Gives each weight the rate that head, Muon and the width ask for, before the first step.

    Args:
        args: the arguments.
        optimizer: on the weights themselves.
        model: whose weights they are.
        projections: of every trainable tensor.
        head: tensors with the head's rate.
        width_transfer: DP-muP's rules, if any.

    Returns:
        Whether anything was changed, so that a schedule made before does not fit.

    Raises:
        ValueError: the optimizer holds parameters that are not the model's, or not all that are
            to be trained, or DP-muP has another rule for it than for `optim`.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    is_muon = isinstance(optimizer, MuonWithAdamW)
    hidden = hidden_matrices(model) - head if is_muon else frozenset()
    layers = layers_of(model, hidden=hidden)
    shapes = {name: layer.shape for layer in layers.values() for name in layer.tensors}

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
            scale = muon_scale(tuple(projections[name].shape), shape.n_out, shape.n_in)
            rate = (args.muon_learning_rate or base) * scale
        if width_transfer is not None:
            rate *= width_transfer.rate_ratio(name)
        found = {} if rate == base else {"lr": rate, "initial_lr": rate}
        return {**found, "use_muon": True} if name in hidden else found

    _check_optimizer(optimizer, names, projections, width_transfer)
    pairs = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    was_set = any(settings(p, group) for p, group in pairs)
    regroup(optimizer, settings)
    return was_set


def _check_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    trained: Collection[str],
    width_transfer: WidthTransfer | None,
) -> None:
    """Refuses an optimizer of another model or a part, or one that DP-muP has another rule for."""
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if not all(parameter in names for parameter in held):
        raise ValueError(
            "The optimizer in `optimizers` holds parameters that are not the model's; build it on "
            "`model.parameters()` of the model that the trainer gets."
        )
    if missing := sorted(set(trained) - {names[parameter] for parameter in held}):
        raise ValueError(
            f"The optimizer lacks {len(missing)} of {len(trained)} trainable tensors, as "
            f"`{missing[-1]}`, which would never move: give it all of them, or freeze these with "
            "`requires_grad_(False)`."
        )
    used = type(optimizer).__name__
    if width_transfer is not None and optimizer_kind(used) != width_transfer.optimizer:
        raise ValueError(
            f"The optimizer that was passed is {used}, but DP-muP's rates are for "
            f"{width_transfer.optimizer}, as `optim` says; set `optim` to what is used."
        )
