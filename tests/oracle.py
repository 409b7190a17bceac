"""The oracle: per-sample gradients by one ordinary backward pass per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.forms import Form, PerSampleGradients
from hf_dpgrape.gradients.observation import observe_layouts
from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.mechanism.tensors import make_projections, sites_or_problems
from hf_dpgrape.subspace.projection import Projection


def select(inputs: Mapping[str, Tensor], samples: list[int]) -> dict[str, Tensor]:
    """The inputs of some samples."""
    return {key: value[samples] for key, value in inputs.items()}


def batch_size(inputs: Mapping[str, Tensor]) -> int:
    """Number of samples."""
    return len(next(iter(inputs.values())))


def head_of(model: nn.Module) -> nn.Module:
    """The model with the task head, inside a PEFT model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def enable_checkpointing(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Gradient checkpointing, under the name that this release of transformers has for it."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)(kwargs)


def make_recorder(
    model: nn.Module, inputs: Mapping[str, Tensor], *, rank: int, form: Form = "auto"
) -> tuple[Recorder, dict[str, Projection]]:
    """A recorder of all trainable tensors of a model."""
    projections = make_projections(model, rank=rank, scale="1/sqrt(r)", seed=7, head=frozenset())
    sites, problems = sites_or_problems(model)
    assert not problems, problems
    loss = PerSampleLoss(head_of(model))
    layouts = observe_layouts(model, sites, lambda i: loss(model, select(inputs, i)))
    return Recorder(model, sites, projections, layouts, form=form), projections


def recorded(
    recorder: Recorder, model: nn.Module, inputs: Mapping[str, Tensor]
) -> PerSampleGradients:
    """Per-sample gradients by one forward and backward of the whole batch."""
    with recorder.record(batch_size(inputs)) as gradients:
        PerSampleLoss(head_of(model))(model, inputs).sum().backward()
    return gradients


def alone(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Full gradients of every sample, from a forward of that sample alone."""
    found = []
    for i in range(batch_size(inputs)):
        model.zero_grad()
        PerSampleLoss(head_of(model))(model, select(inputs, [i])).sum().backward()
        found.append(_gradients(model))
    model.zero_grad()
    return found


def in_batch(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Full gradients of every sample's loss within one forward of the batch (for dropout)."""
    losses = PerSampleLoss(head_of(model))(model, inputs)
    found = []
    for loss in losses:
        model.zero_grad()
        loss.backward(retain_graph=True)
        found.append(_gradients(model))
    model.zero_grad()
    return found


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def worst_error(
    gradients: PerSampleGradients,
    full: list[dict[str, Tensor]],
    projections: Mapping[str, Projection],
) -> tuple[float, str]:
    """Largest deviation from the oracle, relative to the sample's total gradient norm."""
    worst: tuple[float, Any] = (0.0, "")
    for i, expected in enumerate(full):
        total = torch.stack([g.norm() for g in expected.values()]).norm()
        assert total > 0
        for name, g in expected.items():
            want = projections[name].on_gradient(g)
            held = gradients.dense(name)
            got = torch.zeros_like(want) if held is None else held[i].view_as(want)
            worst = max(worst, (((got - want).norm() / total).item(), name))
    return worst
