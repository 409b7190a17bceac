"""Models of published shapes with random weights, and what one training step on them is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification
from transformers import AutoModelForSequenceClassification as AutoClassifier

from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.mechanism.private_step import PhysicalBatch
from hf_dpgrape.mechanism.private_training import PrivateTraining
from hf_dpgrape.privacy.plan import PrivacyPlan


@dataclass(frozen=True)
class Shape:
    """A published architecture by its configuration."""

    model_type: str
    auto: Any
    config: dict[str, Any]


_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_OPT = {"vocab_size": 50272, "max_position_embeddings": 2048}
_MOE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}

SHAPES = {
    "roberta-base": Shape("roberta", AutoClassifier, _ROBERTA),
    "roberta-large": Shape(
        "roberta",
        AutoClassifier,
        {
            **_ROBERTA,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "roberta-tiny": Shape(
        "roberta",
        AutoClassifier,
        {
            "vocab_size": 100,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 40,
        },
    ),
    "gpt2": Shape("gpt2", AutoModelForCausalLM, {}),
    "opt-125m": Shape(
        "opt",
        AutoModelForCausalLM,
        {
            **_OPT,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "word_embed_proj_dim": 768,
        },
    ),
    "opt-1.3b": Shape(
        "opt",
        AutoModelForCausalLM,
        {
            **_OPT,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "ffn_dim": 8192,
            "word_embed_proj_dim": 2048,
        },
    ),
    "opt-2.7b": Shape(
        "opt",
        AutoModelForCausalLM,
        {
            **_OPT,
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "ffn_dim": 10240,
            "word_embed_proj_dim": 2560,
        },
    ),
    "opt-6.7b": Shape(
        "opt",
        AutoModelForCausalLM,
        {
            **_OPT,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "ffn_dim": 16384,
            "word_embed_proj_dim": 4096,
        },
    ),
    "vit-base": Shape("vit", AutoModelForImageClassification, {}),
    # Layers of published proportions (experts, of which two and eight take a token), but fewer.
    "mixtral-small": Shape("mixtral", AutoModelForCausalLM, {**_MOE, "num_local_experts": 8}),
    "qwen3-moe-small": Shape(
        "qwen3_moe",
        AutoModelForCausalLM,
        {
            **_MOE,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 192,
            "head_dim": 32,
        },
    ),
}


def make_model(shape: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A model of this shape, in training mode; `changes` go over its configuration."""
    spec = SHAPES[shape]
    config = AutoConfig.for_model(spec.model_type, **{**spec.config, **changes})
    torch.manual_seed(0)
    model: nn.Module = spec.auto.from_config(config, dtype=dtype)
    return model.train()


def make_inputs(model: Any, batch_size: int, length: int) -> dict[str, Tensor]:
    """A random batch with labels; for language models the labels are the inputs."""
    if hasattr(model.config, "image_size"):
        size = model.config.image_size
        pixels = torch.randn(batch_size, 3, size, size, dtype=model.dtype)
        return {"pixel_values": pixels, "labels": torch.randint(2, (batch_size,))}
    ids = torch.randint(3, model.config.vocab_size, (batch_size, length))
    classifies = "SequenceClassification" in type(model).__name__
    labels = torch.randint(2, (batch_size,)) if classifies else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def private_training_step(
    model: nn.Module,
    inputs: dict[str, Tensor],
    *,
    rank: int,
    lr: float = 1e-5,
    capture: str = "batched",
    update_proj_gap: int = 0,
) -> Callable[[], None]:
    """One whole private step on this batch, AdamW in the subspace.

    The batch is a single physical one, or as many as it has examples with `capture="single"`.
    """
    size = len(inputs["labels"])
    plan = PrivacyPlan(
        num_examples=1000,
        expected_batch_size=size,
        num_steps=10**6,
        noise_multiplier=1.0,
        l2_clip_norm=1.0,
        target_delta=1e-5,
    )
    training = PrivateTraining(
        model,
        torch.optim.AdamW(model.parameters(), lr=lr),
        plan,
        PerSampleLoss(model),
        examples=range(plan.num_examples),
        collate=lambda _: make_inputs(model, 1, 8),
        capture=capture,
        rank=rank,
        head=frozenset(),
        update_proj_gap=update_proj_gap,
        seed=0,
    )

    batch = [PhysicalBatch(size, inputs)]
    if capture == "single":
        rows = ({k: v[i : i + 1] for k, v in inputs.items()} for i in range(size))
        batch = [PhysicalBatch(1, row) for row in rows]

    def run() -> None:
        training.step(batch)

    return run


def ordinary_training_step(
    model: nn.Module, inputs: dict[str, Tensor], *, lr: float = 1e-5
) -> Callable[[], None]:
    """One whole step of ordinary full fine-tuning with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def run() -> None:
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    return run


def opacus_hooks_step(
    model: nn.Module, inputs: dict[str, Tensor], *, lr: float = 1e-5
) -> Callable[[], None]:
    """One whole step of Opacus with AdamW, per-sample gradients of full size by its hooks.

    Raises:
        ImportError: it is not installed.
    """
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.AdamW(model.parameters(), lr=lr),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=len(inputs["labels"]),
    )

    def run() -> None:
        optimizer.zero_grad()
        wrapped(**inputs).loss.backward()
        optimizer.step()

    return run


def opacus_ghost_step(
    model: nn.Module, inputs: dict[str, Tensor], *, lr: float = 1e-5
) -> Callable[[], None]:
    """One whole step of Opacus with AdamW and ghost clipping: norms alone, then a second backward.

    Raises:
        ImportError: it is not installed.
    """
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.AdamW(model.parameters(), lr=lr),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=len(inputs["labels"]),
    )
    loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
    features = {name: value for name, value in inputs.items() if name != "labels"}

    def run() -> None:
        optimizer.zero_grad()
        logits, labels = wrapped(**features).logits, inputs["labels"]
        if logits.ndim == 2:
            loss(logits, labels).backward()
        else:  # a language model: position t tells token t + 1
            logits, labels = logits[:, :-1], labels[:, 1:]
            flat = logits.flatten(0, 1)
            loss(flat, labels.flatten(), shape=logits.shape).backward()
        optimizer.step()

    return run
