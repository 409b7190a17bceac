"""What the gradients of transformers' and PEFT's own modules need, as one table by class names.

Most families need nothing: the rules for torch's layers and the generic rule are exact for them.
Names in place of classes, so that no model has to be imported. The rooms below work without the
table, and are told it when `hf_dpgrape.hf` is imported.
"""

from __future__ import annotations

from torch import nn

from hf_dpgrape.gradients.rules import Conv1DRule, LinearRule
from hf_dpgrape.gradients.sites import Families

#: Set by transformers on the tensors that a checkpoint did have.
_LOADED_FLAG = "_is_hf_initialized"

FAMILIES = Families(
    rules={
        "transformers.pytorch_utils.Conv1D": Conv1DRule,
        "transformers.models.falcon.modeling_falcon.FalconLinear": LinearRule,
    },
    methods=(
        ("T5Attention", "T5Attention", "compute_bias"),
        ("MPNetEncoder", "MPNetEncoder", "compute_position_bias"),
        ("PromptEmbedding|PromptEncoder", "PeftModel.*", "get_prompt"),
    ),
    scale_dims={"BeitLayer": 1, "ConvNextLayer": 2},
)


def newly_initialized(model: nn.Module) -> frozenset[str]:
    """Trainable tensors that the checkpoint did not have, such as a fresh classification head.

    Empty for a model that was not loaded from a checkpoint at all: then no part of it is fresher
    than the rest.
    """
    loaded = loaded_tensors(model)
    if not loaded:
        return frozenset()
    return frozenset(n for n, p in model.named_parameters() if p.requires_grad and n not in loaded)


def loaded_tensors(model: nn.Module) -> frozenset[str]:
    """Tensors that came from a checkpoint; empty for a model made from a configuration."""
    return frozenset(n for n, p in model.named_parameters() if getattr(p, _LOADED_FLAG, False))
