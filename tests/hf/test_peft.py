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
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpgrape.artifacts.record import read_record
from hf_dpgrape.gradients.single import SingleRecorder
from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.hf.task_losses import head_of, labels_are_tokens
from hf_dpgrape.mechanism.checks import Preflight
from hf_dpgrape.mechanism.synthetic import SyntheticExamples
from hf_dpgrape.mechanism.tensors import make_projections

# Remarks of peft's about itself or transformers 5; none is about a private run.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
    # Of torch, at SHiRA's sparse weights.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
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


LINEAR = {"roberta": ["query", "output.dense"], "llama": ["q_proj", "up_proj"]}
OTHERS: dict[str, tuple[Any, str]] = {
    # Norms of a sum of weights, products of factors: made once for a whole batch.
    "dora": (lambda task, names: lora(task, names, use_dora=True), "single"),
    "loha": (
        lambda task, names: peft.LoHaConfig(task_type=task, r=3, target_modules=names),
        "single",
    ),
    "lokr": (
        lambda task, names: peft.LoKrConfig(task_type=task, r=3, target_modules=names),
        "single",
    ),
    "shira": (
        lambda task, names: peft.ShiraConfig(task_type=task, r=3, target_modules=names),
        "single",
    ),
    "vera": (
        lambda task, names: peft.VeraConfig(task_type=task, r=5, target_modules=names),
        "batched",
    ),
}


def lora(task: str, names: list[str], **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(task_type=task, r=3, target_modules=names, **options)


class DequantizedLinear(nn.Linear):
    """Weights of eight bits, and one scale per row, as libraries for quantization keep them."""

    @classmethod
    def of(cls, layer: nn.Linear) -> DequantizedLinear:
        new = cls(layer.in_features, layer.out_features, layer.bias is not None)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        whole = (layer.weight.detach() / scale).round().to(torch.int8)
        new.weight = nn.Parameter(whole, requires_grad=False)
        new.register_buffer("scale", scale)
        new.bias = layer.bias
        return new

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype) * self.scale, self.bias)


def dequantizing(family: str, head: str) -> nn.Module:
    model = make_model(family, head).requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name.endswith(tuple(LINEAR[family])):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, DequantizedLinear.of(layer))
    return model


def error_of_the_chosen_capture(model: nn.Module, family: str, head: str) -> tuple[str, float]:
    """How `capture="auto"` takes the gradients, and how far they are from autograd's."""
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7)))
    inputs = make_inputs(family, head)
    projections = make_projections(model, rank=2, scale="1/sqrt(r)", seed=7, head=frozenset())
    loss = PerSampleLoss(head_of(model))
    examples = SyntheticExamples(model, inputs, labels_are_tokens=labels_are_tokens(head_of(model)))
    recorder, is_single = Preflight(
        model=model,
        projections=projections,
        examples=examples,
        losses=lambda made: loss(model, made),
        settle=lambda made: loss.settle(model, made),
        take_own_loss_=loss.take_own_,
    ).recorder("auto")
    assert is_single == isinstance(recorder, SingleRecorder)
    want = alone(model, inputs)
    batches = [[i] for i in range(len(want))] if is_single else [list(range(len(want)))]
    worst = 0.0
    for rows in batches:
        batch = {k: v[rows] for k, v in inputs.items()}
        with recorder.record(len(rows), inputs=batch) as gradients:
            loss(model, batch).sum().backward()
        worst = max(worst, worst_error(gradients, [want[i] for i in rows], projections)[0])
    return "single" if is_single else "batched", worst


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_adapters_are_exact(kind: str, family: str) -> None:
    head = CLASSIFY if family == "roberta" else CAUSAL
    task = "SEQ_CLS" if head == CLASSIFY else "CAUSAL_LM"
    make, way = OTHERS[kind]
    model = (
        peft.get_peft_model(make_model(family, head), make(task, LINEAR[family])).double().eval()
    )
    found, error = error_of_the_chosen_capture(model, family, head)
    assert (found, error < 1e-10) == (way, True), error


@pytest.mark.parametrize("family", LINEAR)
def test_adapters_around_a_base_that_dequantizes(family: str) -> None:
    head = CLASSIFY if family == "roberta" else CAUSAL
    task = "SEQ_CLS" if head == CLASSIFY else "CAUSAL_LM"
    model = peft.get_peft_model(dequantizing(family, head), lora(task, LINEAR[family]))
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.double()
    model.eval()
    assert any(p.dtype == torch.int8 for p in model.parameters())
    found, error = error_of_the_chosen_capture(model, family, head)
    assert (found, error < 1e-10) == ("batched", True), error


@pytest.mark.parametrize("capture", ["auto", "batched", "single"])
def test_adalora_is_refused_by_name(make_trainer: MakeTrainer, capture: str) -> None:
    config = peft.AdaLoraConfig(
        task_type="SEQ_CLS", target_modules=LINEAR["roberta"], total_step=9, tinit=1, tfinal=2
    )
    model = peft.get_peft_model(make_model("roberta", CLASSIFY).float(), config)
    with pytest.raises(ValueError, match="AdaLoRA moves its budget of ranks by raw gradients"):
        make_trainer(model=model, capture=capture)


def test_a_merged_model_is_saved_with_the_record(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """What a model saves by itself has none, so the trainer puts it there."""
    trainer = make_trainer(model=adapted("lora", "roberta", CLASSIFY), max_steps=1)
    with pytest.raises(ValueError, match=r"call `train\(\)` first"):
        trainer.save_privacy_record(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapters"))
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert not (tmp_path / "merged" / "privacy.json").exists()
    trainer.save_privacy_record(tmp_path / "merged")
    assert read_record(tmp_path / "merged") == read_record(tmp_path / "adapters")
    assert read_record(tmp_path / "merged")["steps_done"] == 1
