"""What is to be trained, and how: the question that a prediction answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpgrape.commands.memory.tracking import default_dtype
from hf_dpgrape.hf.models import build_model
from hf_dpgrape.hf.task_losses import (
    causal_lm,
    loss_of,
    question_answering,
    seq2seq_lm,
    sequence_classification,
)

#: Optimizers by the Trainer's names.
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd")

DTYPES = ("float32", "bfloat16")

#: Kinds of device; they differ in what their kernels keep for backward.
DEVICES = ("gpu", "cpu")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training step.

    Attributes:
        batch_size: examples in the physical batch.
        seq_len: tokens per example; images have the size that the configuration says.
        rank: rank of DP-GRAPE's projection, and of LoRA.
        dtype: dtype of the weights and of the computation.
        gradient_checkpointing: whether layers are run again in backward.
        optim: name of the optimizer, as the Trainer's `optim`.
        clip_grouping: "joint" or "layer".
        device: kind of device, "gpu" or "cpu".
    """

    batch_size: int = 8
    seq_len: int = 128
    rank: int = 16
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    optim: str = "adamw_torch_fused"
    clip_grouping: str = "joint"
    device: str = "gpu"

    def __post_init__(self) -> None:
        """Refuses what is no training step."""
        for name, least in (("batch_size", 1), ("seq_len", 2), ("rank", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")
        choices = {
            "dtype": DTYPES,
            "optim": OPTIMIZERS,
            "clip_grouping": ("joint", "layer"),
            "device": DEVICES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}."
                )


def make_model(config: Any, task: str, setting: Setting, *, device: str) -> nn.Module:
    """The model in training mode.

    Raises:
        ValueError: it cannot be built, or its positions do not allow the setting.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < setting.seq_len:
        raise ValueError(
            f"`seq_len` must be at most {longest}, the model's `max_position_embeddings`, got "
            f"{setting.seq_len}."
        )
    config.dtype = getattr(torch, setting.dtype)
    with default_dtype(config.dtype):
        model = build_model(config, task, device=device)
    if setting.gradient_checkpointing:
        _enable_checkpointing(model)
    return model.train()


def _enable_checkpointing(model: Any) -> None:
    """Turns on gradient checkpointing under the name that the installed transformers has for it."""
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def make_batch(model: Any, setting: Setting, num_examples: int) -> dict[str, Tensor]:
    """A batch of that many examples with labels; the last position of one of them is padding.

    Raises:
        ValueError: the model takes something else than text or images.
    """
    config, name = model.config, model.main_input_name
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        pixels = torch.randn(num_examples, channels, height, width, dtype=model.dtype)
        return {"pixel_values": pixels, **_labels(model, setting, num_examples)}
    if name != "input_ids":
        raise ValueError(
            f"Expected a model of text or images, got {type(model).__name__}, which takes `{name}`."
        )
    ids = torch.randint(config.get_text_config().vocab_size, (num_examples, setting.seq_len))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # without padding, a model may leave its mask out
    return {"input_ids": ids, "attention_mask": mask, **_labels(model, setting, num_examples)}


def _labels(model: Any, setting: Setting, num_examples: int) -> dict[str, Tensor]:
    """Labels of the shape that the model's task head takes."""
    loss = loss_of(model)
    if loss is question_answering:
        place = torch.zeros(num_examples, dtype=torch.long)
        return {"start_positions": place, "end_positions": place.clone()}
    if loss is sequence_classification:
        return {"labels": torch.zeros(num_examples, dtype=torch.long)}
    highest = model.config.get_text_config().vocab_size if loss in (causal_lm, seq2seq_lm) else 2
    return {"labels": torch.randint(highest, (num_examples, setting.seq_len))}


def make_optimizer(parameters: Any, setting: Setting) -> torch.optim.Optimizer:
    """The optimizer that the Trainer would make."""
    if setting.optim == "sgd":
        return torch.optim.SGD(parameters, lr=1e-5)
    fused = setting.optim == "adamw_torch_fused"
    # On GPUs torch steps on all tensors at once unless it is fused, which takes a copy of them.
    foreach = setting.device == "gpu" and not fused
    return torch.optim.AdamW(parameters, lr=1e-5, fused=fused, foreach=foreach)
