"""What the gradients of transformers' and PEFT's own modules need, as one table by class names.

Most families need nothing: the rules for torch's layers and the generic rule are exact for them.
Names in place of classes, so that no model has to be imported. The rooms below work without the
table, and are told it when `hf_dpgrape.hf` is imported.
"""

from __future__ import annotations

from hf_dpgrape.gradients.rules import Conv1DRule, LinearRule
from hf_dpgrape.gradients.sites import Families

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
    loaded_flag="_is_hf_initialized",
    refused={
        "peft.tuners.adalora.layer.AdaLoraLayer": (
            "AdaLoRA moves its budget of ranks by raw gradients of private examples; use another "
            "adapter, as LoRA"
        ),
    },
)
