"""PEFT models: every adapter kind trains privately, and is saved as PEFT saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest_trainer import MakeTrainer
from families import CAUSAL, CLASSIFY, make_inputs, make_model
from oracle import alone, make_recorder, recorded, worst_error
from torch import nn

# Remarks of peft's about itself or transformers 5; none is about a private run.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
]

NORMS = {"roberta": ["LayerNorm"], "gpt2": ["ln_1", "ln_2", "ln_f"], "llama": None}
SCALED = {"roberta": ["key", "value", "output.dense"], "gpt2": None, "llama": None}

ADAPTERS: dict[str, Any] = {
    "lora": lambda task, family: peft.LoraConfig(task_type=task, r=3, target_modules="all-linear"),
    "ia3": lambda task, family: peft.IA3Config(
        task_type=task,
        target_modules=SCALED[family],
        feedforward_modules=SCALED[family] and ["output.dense"],
    ),
    "prompt": lambda task, family: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=4),
    "prefix": lambda task, family: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=4),
    "ln": lambda task, family: peft.LNTuningConfig(task_type=task, target_modules=NORMS[family]),
}
CASES = [
    (kind, family, head)
    for kind in ADAPTERS
    for family, head in (("roberta", CLASSIFY), ("gpt2", CAUSAL), ("llama", CAUSAL))
    if (kind, family) != ("prefix", "roberta")  # peft has no prefixes for encoders
]


def adapted(kind: str, family: str, head: str) -> nn.Module:
    task = "SEQ_CLS" if head == CLASSIFY else "CAUSAL_LM"
    return peft.get_peft_model(make_model(family, head).float(), ADAPTERS[kind](task, family))


@pytest.mark.parametrize(("kind", "family", "head"), CASES)
def test_every_trainable_tensor_moves_by_the_noise(
    make_trainer: MakeTrainer, tmp_path: Path, kind: str, family: str, head: str
) -> None:
    model = adapted(kind, family, head)
    trainer = make_trainer(
        model=model,
        causal=head == CAUSAL,
        max_steps=1,
        rank=0,
        optim="sgd",
        learning_rate=0.1,
        noise_multiplier=2000.0,
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer.train()
    expected = 0.1 * 2000.0 * 1.0 / 10
    moved, total = [], 0
    for name, p in model.named_parameters():
        change = p.detach() - before[name]
        if not p.requires_grad:
            assert change.eq(0).all(), name
            continue
        total += 1
        assert change.ne(0).all(), name
        moved.append(change.flatten())
    assert total > 0
    values = torch.cat(moved)
    assert values.std() == pytest.approx(expected, rel=5 / values.numel() ** 0.5)
    trainer.save_model()
    loaded = peft.PeftModel.from_pretrained(make_model(family, head).float(), tmp_path / "out")
    saved = {n: p for n, p in loaded.named_parameters() if "default" in n}
    for name, p in model.named_parameters():
        if p.requires_grad and name in saved:
            assert torch.equal(saved[name], p), name


@pytest.mark.parametrize(("kind", "family", "head"), CASES)
def test_adapter_gradients_are_exact(kind: str, family: str, head: str) -> None:
    model = adapted(kind, family, head).double().eval()
    inputs = make_inputs(family, head)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # adapters start at zero or one, where half the gradient is zero
                p.add_(
                    0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
                )
    recorder, projections = make_recorder(model, inputs, rank=2)
    error, name = worst_error(recorded(recorder, model, inputs), alone(model, inputs), projections)
    assert error < 1e-10, name


@pytest.mark.parametrize("kind", list(ADAPTERS))
def test_order_of_device_and_adapter_does_not_matter(make_trainer: MakeTrainer, kind: str) -> None:
    runs = []
    for device_first in (True, False):
        torch.manual_seed(4)
        model = make_model("gpt2", CAUSAL).float()
        model = model.to("cpu") if device_first else model
        torch.manual_seed(5)
        model = peft.get_peft_model(model, ADAPTERS[kind]("CAUSAL_LM", "gpt2")).to("cpu")
        make_trainer(model=model, causal=True, max_steps=2).train()
        runs.append([p.detach() for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_adapter_switched_off_and_on(make_trainer: MakeTrainer) -> None:
    model = make_model("gpt2", CAUSAL).float()
    for on in ("attn", "mlp"):
        for name, p in model.named_parameters():
            p.requires_grad_(on in name)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        make_trainer(model=model, causal=True, max_steps=1).train()
        for name, p in model.named_parameters():
            assert p.requires_grad == (on in name)
            assert torch.equal(before[name], p) == (on not in name)
