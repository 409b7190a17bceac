"""What a plan needs to know of data, model and arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from hf_dpgrape.gradients.recording import BATCHED
from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.dpmup import WidthTransfer, resolve
from hf_dpgrape.hf.task_losses import head_of, task_name_of
from hf_dpgrape.hf.trainers_losses import losses_of
from hf_dpgrape.hf.units import units_of
from hf_dpgrape.mechanism.checks import checked_sites, refuse, refuse_in_any_capture
from hf_dpgrape.mechanism.tensors import matching, newly_initialized, require_matches
from hf_dpgrape.mechanism.units import Units
from hf_dpgrape.privacy.plan import BODY, HEAD, PrivacyPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run's plan, and what it was derived from.

    Attributes:
        plan: the privacy plan.
        units: whose rows are drawn and clipped together; None if every row is drawn by itself.
        width_transfer: DP-muP's rules; None without them.
    """

    plan: PrivacyPlan
    units: Units | None
    width_transfer: WidthTransfer | None


def planned(
    args: DPGrapeTrainingArguments,
    model: nn.Module,
    train_dataset: Any,
    compute_loss_func: Callable[..., Tensor] | None,
    proxy: Callable[[str], nn.Module],
) -> Planned:
    """Checks model and data, and derives the plan from the arguments.

    Args:
        args: the arguments.
        model: the model.
        train_dataset: of which only the length is looked at, and the `privacy_unit_column`.
        compute_loss_func: the user's own loss of one example, if any.
        proxy: makes DP-muP's narrow model of `dpmup_base_model`.

    Raises:
        ValueError: the model cannot be trained privately, or model, data and arguments do not fit.
    """
    num_rows, units = length_of(train_dataset), units_of(args, train_dataset)
    refuse_in_any_capture(model)
    loss = losses_of(args, model, compute_loss_func)
    _refuse_idle_weights(args, model)
    if args.capture == BATCHED:
        checked_sites(model)
        refuse(model, {"": loss.why_single} if loss.why_single else {})
    head = head_tensors(model, args.head_modules)
    width = None
    if args.dpmup_base_model is not None:
        width = resolve(args, model, proxy(args.dpmup_base_model), head)
    own = set() if args.head_clip_share is None else {HEAD}
    plan = args.make_plan(
        num_rows if units is None else len(units),
        has_head=bool(head),
        layers=sorted(set(clip_groups(args, model, head, width).values()) - own),
        clip_shares=None if width is None else width.rules.clip_shares,
    )
    return Planned(plan=plan, units=units, width_transfer=width)


def say_processes(args: DPGrapeTrainingArguments) -> None:
    """Says how many processes train: `accelerate launch` may start fewer than it was asked for."""
    logger.info(
        "Training in %d process(es), which draw an expected batch of %d%s together.",
        args.world_size,
        args.expected_batch_size,
        "" if args.privacy_unit_column is None else f" units of `{args.privacy_unit_column}`",
    )


def _refuse_idle_weights(args: DPGrapeTrainingArguments, model: nn.Module) -> None:
    """Refuses class weights that clipping undoes: those of an example with one label."""
    by_token = task_name_of(head_of(model)) == "token-classification"
    if args.class_weights is not None and args.clipping == "automatic" and not by_token:
        raise ValueError(
            "`class_weights` change nothing under `clipping=automatic`, which gives every "
            "example's gradient the same length; set `clipping=flat`, or leave them out."
        )


def refuse_other_arguments(args: TrainingArguments) -> None:
    """Refuses a trainer's arguments that hold no privacy budget.

    Raises:
        TypeError: they are transformers' own.
    """
    if not isinstance(args, DPGrapeTrainingArguments):
        raise TypeError(
            "`args` must be DPGrapeTrainingArguments (they hold the privacy budget), got "
            f"{type(args).__name__}."
        )


def length_of(train_dataset: Any) -> int:
    """Number of training examples, which is public.

    Raises:
        ValueError: there are several data sets, or it has no length.
    """
    if isinstance(train_dataset, dict):
        raise ValueError(
            "`train_dataset` must be one data set, got a dictionary of "
            f"{len(train_dataset)} splits; pass the one to train on, as "
            '`train_dataset["train"]`.'
        )
    is_iterable = isinstance(train_dataset, torch.utils.data.IterableDataset)
    if is_iterable or not has_length(train_dataset):
        raise ValueError(
            "`train_dataset` must have a length and indexed access, got "
            f"{type(train_dataset).__name__}: Poisson sampling draws each example with a "
            "known probability. Load it as a map-style dataset."
        )
    return len(train_dataset)


def head_tensors(model: nn.Module, head_modules: list[str] | None) -> frozenset[str]:
    """Canonical names of the head's tensors.

    Args:
        model: the model.
        head_modules: parts of their names; None for those that a checkpoint did not have.

    Raises:
        ValueError: one of the parts is in no name.
    """
    if head_modules is None:
        return newly_initialized(model)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    require_matches(names, "head_modules", head_modules)
    return matching(names, head_modules)


def clip_groups(
    args: DPGrapeTrainingArguments,
    model: nn.Module,
    head: frozenset[str],
    width_transfer: WidthTransfer | None,
) -> dict[str, str]:
    """The clip group of every trainable tensor: the head's own, and the body's one or many."""
    if width_transfer is not None:
        return width_transfer.clip_groups
    own = head if args.head_clip_share is not None else frozenset()
    per_layer = args.clip_grouping == "layer"
    return {
        name: HEAD if name in own else name.rpartition(".")[0] if per_layer else BODY
        for name, p in model.named_parameters()
        if p.requires_grad
    }
