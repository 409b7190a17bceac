"""Rules that run a layer's own forward again: embedding subclasses and everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode

from hf_dpgrape.gradients.forms import Dense
from hf_dpgrape.gradients.rules import Call, Found, embedding_gradient

#: Elements of per-sample gradients that the generic rule may hold in full at a time.
_CHUNK_ELEMENTS = 2**22


class _Lookups(TorchFunctionMode):
    """Replaces the rows that `F.embedding` reads from one weight by leaves, and remembers them."""

    def __init__(self, weight: Tensor, batch_size: int) -> None:
        super().__init__()
        self.weight = weight
        self.batch_size = batch_size
        self.ids: list[Tensor] = []
        self.rows: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Intercepts lookups in the captured weight; everything else passes."""
        # By identity: a subclass may look up other tables, whose gradients are not asked for.
        out = func(*args, **(kwargs or {}))
        if func is F.embedding and args[1] is self.weight:
            if out.shape[0] == 1:
                out = out.expand(self.batch_size, *out.shape[1:])
            out = out.detach().requires_grad_()
            self.ids.append(args[0])
            self.rows.append(out)
        return out


class EmbeddingSubclassRule:
    """Subclasses of `nn.Embedding` that shift ids before, or scale rows after, the lookup.

    Backward runs the module's own forward once more around its lookup; the gradient that reaches
    the rows read is then an ordinary embedding gradient.
    """

    def save(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All input tensors."""
        return tuple(inputs)

    def gradients(self, call: Call, saved: Sequence[Tensor], grad: Tensor) -> Found:
        """The weight."""
        args, kwargs = call.restore(saved)
        weight = call.module.weight
        assert isinstance(weight, Tensor)
        lookups = _Lookups(weight, call.batch_size)
        with torch.enable_grad(), call.autocast(grad.device), lookups:
            out = call.module.forward(*args, **kwargs)
        if not lookups.rows:  # it reads its weight by other means, as a slice of positions
            yield from GenericRule().gradients(call, saved, grad)
            return
        for ids, rows_grad in zip(
            lookups.ids, torch.autograd.grad(out, lookups.rows, grad), strict=True
        ):
            ids = call.per_sample(ids, event_dims=0)
            yield "weight", embedding_gradient(call, ids, call.per_sample(rows_grad))


def _vmap(function: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """`vmap`, with a sentence for layers that cannot be run again sample by sample."""

    def mapped(*args: Any) -> Any:
        try:
            return vmap(function)(*args)
        except RuntimeError as error:
            tensors = ", ".join(f"`{name}`" for name in call.slots)
            raise RuntimeError(
                f"{type(call.module).__name__} cannot be run again sample by sample for the "
                f"gradient of {tensors} (it may use dropout or a data-dependent branch); freeze "
                "these tensors with `requires_grad_(False)`."
            ) from error

    return mapped


class GenericRule:
    """Any layer: one vector-Jacobian product per sample of the layer's own forward, under vmap.

    A sample sees exactly what it would see alone. The gradient of a few samples at a time is
    formed in full before it is projected.

    Args:
        method: the method that was called.
    """

    def __init__(self, method: str = "forward") -> None:
        self._method = method

    def save(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All input tensors."""
        return tuple(inputs)

    def gradients(self, call: Call, saved: Sequence[Tensor], grad: Tensor) -> Found:
        """All captured tensors of the layer."""
        params = {name: call.module.get_parameter(name).detach() for name in call.slots}

        def one_sample(own: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
            mine = iter(own)
            tensors = [
                next(mine) if batched else tensor
                for batched, tensor in zip(call.batched, saved, strict=True)
            ]
            args, kwargs = call.restore(tensors)

            def forward(values: dict[str, Tensor]) -> Any:
                with _reparametrize_module(call.module, values, tie_weights=False):
                    return getattr(call.module, self._method)(*args, **kwargs)

            out, pull = vjp(forward, params)[:2]
            if len(out) > len(grad):  # made for the whole batch of nothing but shared inputs
                grad = F.pad(grad, (0, 0) * (grad.ndim - 1) + (0, len(out) - len(grad)))
            found: dict[str, Tensor] = pull(grad)[0]
            return found

        own = [
            tensor.reshape(call.batch_size, -1, *tensor.shape[1:])
            for batched, tensor in zip(call.batched, saved, strict=True)
            if batched
        ]
        grad = grad.reshape(call.batch_size, -1, *grad.shape[1:])
        # Full gradients of a few samples at a time: memory is that of a chunk, not of the batch.
        size = max(1, _CHUNK_ELEMENTS // max(p.numel() for p in params.values()))
        chunks: dict[str, list[Tensor]] = {name: [] for name in params}
        for start in range(0, call.batch_size, size):
            some = slice(start, start + size)
            with call.autocast(grad.device):
                found = _vmap(one_sample, call)([tensor[some] for tensor in own], grad[some])
            for name, values in found.items():
                chunks[name].append(call.slots[name].on_gradient(values))
        for name, parts in chunks.items():
            yield name, Dense(torch.cat(parts))
