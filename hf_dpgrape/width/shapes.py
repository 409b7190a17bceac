"""Shapes of a model's layers, as the width rules need them; weights may be on the meta device."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_dpgrape.width.rules import LayerShape


@dataclass(frozen=True)
class Layer:
    """The trainable tensors of one module, which share a clip group and a rate.

    Attributes:
        shape: shape of the largest of them; vectors beside a matrix, as biases, follow it.
        tensors: canonical names of all of them.
    """

    shape: LayerShape
    tensors: tuple[str, ...]


def layers_of(
    model: nn.Module,
    projected: Mapping[str, tuple[int, float]] | None = None,
    hidden: Collection[str] | None = None,
) -> dict[str, Layer]:
    """A model's layers, by the names of the modules that own trainable tensors.

    A tensor that two modules share belongs to the first. The first dimension of a tensor is the
    side of its output, except in lookups and in transformers' `Conv1D`.

    Args:
        model: the model; its weights may be on the meta device.
        projected: tensor -> rank and standard deviation of its projection's entries.
        hidden: names of tensors that Muon orthogonalizes; None for `hidden_matrices(model)`.
    """
    projected = projected or {}
    hidden = hidden_matrices(model) if hidden is None else hidden
    owners: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
    layers = {}
    for owner, names in owners.items():
        largest = max(names, key=lambda name: model.get_parameter(name).numel())
        rank, stddev = projected.get(largest, (0, None))
        shape = LayerShape(
            **_sides(model.get_submodule(owner), model.get_parameter(largest)),
            rank=rank,
            projection_stddev=stddev,
            is_hidden=largest in hidden,
        )
        layers[owner] = Layer(shape, tuple(names))
    return layers


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Trainable matrices that Muon takes: neither lookups nor the output layer."""
    outputs = output_layers(model)
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.requires_grad
        and p.ndim == 2
        and name.rpartition(".")[0] not in outputs
        and _sides(model.get_submodule(name.rpartition(".")[0]), p)["kind"] == "matrix"
    )


def output_layers(model: nn.Module) -> frozenset[str]:
    """Names of the modules that make logits.

    That is what transformers calls the output embeddings, or else the last linear layer. For a
    language model whose output embeddings are tied it is the embedding, which owns the weight.
    """
    get = getattr(model, "get_output_embeddings", None)
    output = get() if get is not None else None
    weight = getattr(output, "weight", None)
    if weight is not None:
        return frozenset(n.rpartition(".")[0] for n, p in model.named_parameters() if p is weight)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return frozenset(linear[-1:])


def _sides(module: nn.Module, weight: nn.Parameter) -> dict[str, Any]:
    """One tensor as a map from features to features."""
    shape = [size for size in weight.shape if size != 1] if weight.ndim != 2 else [*weight.shape]
    if isinstance(module, nn.Embedding) or (weight.ndim == 3 and weight.shape[0] == 1 < len(shape)):
        return {"n_out": weight.shape[-1], "n_in": 1, "kind": "lookup"}
    if len(shape) < 2:
        return {"n_out": weight.numel(), "n_in": 1, "kind": "vector"}
    sides = [weight.shape[0], math.prod(weight.shape[1:])]
    if type(module).__name__ == "Conv1D":  # transformers': a linear layer with its weight turned
        sides.reverse()
    return {"n_out": sides[0], "n_in": sides[1], "kind": "matrix"}
