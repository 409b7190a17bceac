"""16-bit weights and activations: what is private stays in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest_trainer import MakeTrainer
from families import CAUSAL, CLASSIFY, SEQ2SEQ, make_inputs, make_model
from oracle import alone, make_recorder, recorded

CASES = [("roberta", CLASSIFY), ("gpt2", CAUSAL), ("llama", CAUSAL), ("t5", SEQ2SEQ)]


@pytest.mark.parametrize("kind", ["weights", "autocast"])
@pytest.mark.parametrize(("family", "head"), CASES)
def test_gradients_are_close_in_16_bits(family: str, head: str, kind: str) -> None:
    model, inputs = make_model(family, head), make_inputs(family, head)
    recorder, projections = make_recorder(model, inputs, rank=5)
    want = alone(model, inputs)
    model = model.to(torch.bfloat16) if kind == "weights" else model.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        gradients = recorded(recorder, model, inputs)
    like = torch.zeros((), dtype=torch.float32)
    norms = gradients.squared_norms(projections, like).sqrt()
    assert norms.dtype == torch.float64
    for i, sample in enumerate(want):
        full = {n: projections[n].on_gradient(g) for n, g in sample.items()}
        total = torch.stack([g.norm() for g in full.values()]).norm()
        error = torch.stack(
            [(gradients.dense(n)[i].view_as(g) - g).norm() for n, g in full.items()]
        )
        assert error.norm() / total < 0.1  # what bfloat16 forward and backward leave
        assert norms[i] == pytest.approx(float(total), rel=0.04)


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_16_bit_weights_train_with_32_bit_state(
    make_trainer: MakeTrainer, optim: str, rank: int
) -> None:
    trainer = make_trainer(bf16_weights=True, optim=optim, rank=rank, max_steps=2)
    trainer.train()
    assert all(p.dtype == torch.bfloat16 for p in trainer.model.parameters())
    for tensor in trainer.private_training.subspace.tensors.values():
        assert tensor.stand_in.dtype == torch.float32
        assert tensor.stand_in.grad.dtype == torch.float32
        state = trainer.optimizer.state.get(tensor.stand_in, {})
        held = [v for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
        assert all(v.dtype == torch.float32 for v in held)


def test_noise_of_16_bit_weights_has_the_planned_size(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        bf16_weights=True,
        expected_batch_size=1,
        noise_multiplier=50.0,
        max_steps=1,
        rank=0,
        optim="sgd",
        learning_rate=0.01,
    )
    before = {n: p.detach().float() for n, p in trainer.model.named_parameters()}
    trainer.train()
    moved = torch.cat(
        [(p.detach().float() - before[n]).flatten() for n, p in trainer.model.named_parameters()]
    )
    assert moved.std() == pytest.approx(0.01 * 50.0, rel=0.02)


@pytest.mark.parametrize("causal", [False, True])
def test_autocast(make_trainer: MakeTrainer, causal: bool) -> None:
    trainer = make_trainer(causal=causal, bf16=True, use_cpu=True, max_steps=2)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    after = list(trainer.model.parameters())
    assert all(p.dtype == torch.float32 for p in after)
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_model_loaded_in_the_stored_dtype(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    # transformers 5 loads a checkpoint in its own dtype unless told otherwise.
    from transformers import GPT2LMHeadModel

    make_model("gpt2", CAUSAL).to(torch.bfloat16).save_pretrained(tmp_path / "stored")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "stored")
    assert model.dtype == torch.bfloat16
    trainer = make_trainer(model=model, causal=True, max_steps=1)
    trainer.train()
    seen = [t.stand_in.grad.dtype for t in trainer.private_training.subspace.tensors.values()]
    assert set(seen) == {torch.float32}
