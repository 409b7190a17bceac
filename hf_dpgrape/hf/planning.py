"""What a plan needs to know of data, model and arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import has_length

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.dpmup import WidthTransfer
from hf_dpgrape.mechanism.tensors import matching, newly_initialized
from hf_dpgrape.privacy.plan import BODY, HEAD


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
        ValueError: no tensor has such a name.
    """
    if head_modules is None:
        return newly_initialized(model)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    head = matching(names, head_modules)
    if not head:
        raise ValueError(
            f"`head_modules`={head_modules} matches no trainable tensor; the last "
            f"ones are {names[-3:]}."
        )
    return head


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
