"""Layer rules: how a layer's input and output gradient become per-sample projected gradients.

A rule says what to keep of a forward call (`save`) and what the output gradient then means for the
layer's tensors (`gradients`). Projection happens on the factors, before their product: for a
linear layer with inputs X (B, T, n) and output gradients D (B, T, m) it is `D.T @ (X P)` or
`(D P).T @ X`, so no m x n gradient exists. When the right side is projected, `X P` is all that has
to be kept of the input, which is also where most activation memory goes away.

Rules are chosen by exact type: a subclass may compute something else (OPT's position embedding
adds an offset). Everything without a rule of its own takes the generic one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from hf_dpgrape.gradients.forms import Dense, Gradient, Outer, Scatter


class Projector(Protocol):
    """How one tensor, seen as a matrix of m rows and n columns, is projected."""

    full_shape: torch.Size

    def prepare(self) -> None:
        """Makes what projecting needs, which is otherwise made when it is first needed."""

    def on_rows(self, factor: Tensor) -> Tensor:
        """Projects a left factor (..., m), or returns it as it is."""

    def on_columns(self, factor: Tensor) -> Tensor:
        """Projects a right factor (..., n), or returns it as it is."""

    def rows_at(self, ids: Tensor) -> Tensor | None:
        """Projected one-hot rows (..., r) of these row ids; None if rows are not projected."""

    def on_gradient(self, gradient: Tensor) -> Tensor:
        """Projects gradients (B, *shape) that were formed in full."""


#: Stands for a tensor among a call's flattened arguments.
TENSOR: Final = object()

Slots = Mapping[str, Projector]
Found = Iterator[tuple[str, Gradient]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One forward call of a layer, without its tensors (autograd keeps those, see `Rule.save`).

    Attributes:
        module: the layer.
        slots: the captured tensors' projectors, by their local name in the module.
        batch_size: number of samples B.
        broadcast: rows per sample that a broadcast output was expanded to.
        batched: for each input tensor, whether its first dimension runs over samples.
        arguments: the call's flattened arguments, with `TENSOR` where a tensor was.
        spec: how to unflatten them.
        autocast_dtype: the dtype of the autocast region the call was made in, if any.
    """

    module: nn.Module
    slots: Slots
    batch_size: int
    broadcast: int
    batched: tuple[bool, ...]
    arguments: tuple[Any, ...]
    spec: pytree.TreeSpec
    autocast_dtype: torch.dtype | None

    def restore(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's (args, kwargs) with these input tensors."""
        queue = iter(tensors)
        leaves = [next(queue) if leaf is TENSOR else leaf for leaf in self.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The forward call's autocast region, for rules that run the layer again."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)

    def per_sample(self, tensor: Tensor, event_dims: int = 1) -> Tensor:
        """Reshapes (B or B * k or 1, ..., event) to (B, T, event)."""
        if tensor.shape[0] == 1 and self.batch_size != 1:
            tensor = tensor.expand(self.batch_size, *tensor.shape[1:])
        event = tensor.shape[tensor.ndim - event_dims :]
        return tensor.reshape(self.batch_size, -1, *event)


class Rule(Protocol):
    """One kind of layer."""

    def save(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors to keep until backward."""

    def gradients(self, call: Call, saved: Sequence[Tensor], grad: Tensor) -> Found:
        """Contributions to the captured tensors, by local name."""


class LinearRule:
    """`nn.Linear`: weight (out, in) has gradient D.T X, the bias the sum of D."""

    def save(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The input, projected if its side is."""
        weight = call.slots.get("weight")
        return () if weight is None else (weight.on_columns(inputs[0]),)

    def gradients(self, call: Call, saved: Sequence[Tensor], grad: Tensor) -> Found:
        """Weight and bias."""
        grad = call.per_sample(grad)
        if weight := call.slots.get("weight"):
            yield "weight", Outer(weight.on_rows(grad), call.per_sample(saved[0]))
        if "bias" in call.slots:
            yield "bias", Dense(grad.sum(1))


class Conv1DRule:
    """The transformers library's `Conv1D`: a linear layer whose weight is stored (in, out)."""

    def save(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The input, projected if its side is."""
        weight = call.slots.get("weight")
        return () if weight is None else (weight.on_rows(inputs[0]),)

    def gradients(self, call: Call, saved: Sequence[Tensor], grad: Tensor) -> Found:
        """Weight and bias."""
        grad = call.per_sample(grad)
        if weight := call.slots.get("weight"):
            yield "weight", Outer(call.per_sample(saved[0]), weight.on_columns(grad))
        if "bias" in call.slots:
            yield "bias", Dense(grad.sum(1))


def embedding_gradient(call: Call, ids: Tensor, grad: Tensor) -> Gradient:
    """Gradient of an embedding's weight from its row ids (B, T) and output gradient (B, T, n)."""
    module, projector = call.module, call.slots["weight"]
    if (padding_idx := getattr(module, "padding_idx", None)) is not None:
        grad = grad.masked_fill((ids == padding_idx)[..., None], 0.0)
    if (rows := projector.rows_at(ids)) is not None:
        return Outer(rows.to(grad.dtype), grad)
    num_rows: int = module.weight.shape[0]  # type: ignore[assignment,index]
    return Scatter(ids, projector.on_columns(grad), num_rows)


class EmbeddingRule:
    """`nn.Embedding`: output gradients are scattered to the rows that were read."""

    def save(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The row ids."""
        return (inputs[0],)

    def gradients(self, call: Call, saved: Sequence[Tensor], grad: Tensor) -> Found:
        """The weight."""
        ids = call.per_sample(saved[0], event_dims=0)
        yield "weight", embedding_gradient(call, ids, call.per_sample(grad))


class LayerNormRule:
    """`nn.LayerNorm`: the scale's gradient is the sum of D times the normalized input."""

    def save(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The input, which autograd keeps anyway."""
        return (inputs[0],) if "weight" in call.slots else ()

    def gradients(self, call: Call, saved: Sequence[Tensor], grad: Tensor) -> Found:
        """Weight and bias."""
        module = call.module
        assert isinstance(module, nn.LayerNorm)
        dims = len(module.normalized_shape)
        if "weight" in call.slots:
            normalized = F.layer_norm(saved[0], module.normalized_shape, eps=module.eps)
            yield "weight", Dense(call.per_sample(grad * normalized, dims).sum(1))
        if "bias" in call.slots:
            yield "bias", Dense(call.per_sample(grad, dims).sum(1))


class Conv2dRule:
    """`nn.Conv2d` without groups: a linear layer on unfolded patches."""

    @staticmethod
    def _patches(call: Call, images: Tensor) -> Tensor:
        """Unfolded input (B * k, positions, in * kh * kw)."""
        conv = call.module
        assert isinstance(conv, nn.Conv2d) and not isinstance(conv.padding, str)
        return F.unfold(
            images, conv.kernel_size, conv.dilation, conv.padding, conv.stride
        ).transpose(1, 2)

    def save(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The patches, projected if their side is; else the smaller input itself."""
        weight = call.slots.get("weight")
        if weight is None:
            return ()
        patches = self._patches(call, inputs[0])
        projected = weight.on_columns(patches)
        return (projected if projected is not patches else inputs[0],)

    def gradients(self, call: Call, saved: Sequence[Tensor], grad: Tensor) -> Found:
        """Weight and bias."""
        grad = call.per_sample(grad.flatten(2).transpose(1, 2))
        if weight := call.slots.get("weight"):
            columns = saved[0] if saved[0].ndim == 3 else self._patches(call, saved[0])
            yield "weight", Outer(weight.on_rows(grad), call.per_sample(columns))
        if "bias" in call.slots:
            yield "bias", Dense(grad.sum(1))
