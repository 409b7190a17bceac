"""The recorder: hooks on layers while one physical batch passes forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dpgrape.capture.gradients import Dense, Form, PerSampleGradients
from hf_dpgrape.capture.layout import Layout, Layouts
from hf_dpgrape.capture.rules import TENSOR, Call, Projector
from hf_dpgrape.capture.sites import Site


class _Tap(torch.autograd.Function):
    """Identity on a layer's output whose backward applies the layer's rule.

    What the rule needs is kept by `save_for_backward`, so that gradient checkpointing frees and
    recomputes it like everything else. `anchor` requires grad, so that the first layer's output
    does, although its weights do not while a recording is on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        anchor: Tensor,
        tap: tuple[Site, Call, PerSampleGradients],
        *saved: Tensor,
    ) -> Tensor:
        ctx.tap = tap
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        site, call, gradients = ctx.tap
        assert site.rule is not None
        saved = ctx.saved_tensors
        for local, part in site.rule.gradients(call, saved, grad):
            gradients.add(site.tensors[local], part)
        return grad, None, None, *(None for _ in saved)


class Recorder:
    """Takes the per-sample projected gradients of some of a model's tensors.

    Args:
        model: the model.
        sites: where its tensors live (see `find_sites`).
        projectors: how each tensor is projected, by canonical name. Tensors without a projector
            are not recorded.
        layouts: how each site's module sees the batch (see `observe_layouts`).
        form: form of the gradients, for tests.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        projectors: Mapping[str, Projector],
        layouts: Layouts,
        *,
        form: Form = "auto",
    ) -> None:
        self._model = model
        self._sites = sites
        self._projectors = projectors
        self._layouts = layouts
        self._form = form
        self._recording = False

    @contextmanager
    def record(
        self, batch_size: int, names: frozenset[str] | None = None
    ) -> Iterator[PerSampleGradients]:
        """Records one forward and backward of `batch_size` samples.

        Inside the block no parameter requires grad, so that autograd never forms a gradient of
        full size; the hooks and the flags are gone after it, whatever happens.

        Args:
            batch_size: number of samples in the batch.
            names: tensors to record; None for all.
        """
        if self._recording:
            raise RuntimeError("A recording is on already; recordings do not nest.")
        gradients = PerSampleGradients(batch_size, form=self._form)
        anchors: dict[torch.device, Tensor] = {}
        leaves: list[tuple[str, Tensor]] = []
        self._recording = True
        try:
            with ExitStack() as stack:
                stack.enter_context(_frozen(self._model))
                for site in self._sites:
                    tensors = {
                        local: self._projectors[name]
                        for local, name in site.tensors.items()
                        if name in self._projectors and (names is None or name in names)
                    }
                    if tensors and site.rule is None:
                        leaves += stack.enter_context(_expanded(site, tensors, batch_size))
                    elif tensors:
                        hook = self._hook(site, tensors, gradients, anchors)
                        handle = site.module.register_forward_hook(hook, with_kwargs=True)
                        stack.callback(handle.remove)
                yield gradients
                for name, leaf in leaves:
                    if leaf.grad is not None:
                        projector = self._projectors[name]
                        gradients.add(name, Dense(projector.on_gradient(leaf.grad[:, None])))
        finally:
            self._recording = False

    def _hook(
        self,
        site: Site,
        tensors: Mapping[str, Projector],
        gradients: PerSampleGradients,
        anchors: dict[torch.device, Tensor],
    ) -> Any:
        """The forward hook of one site."""

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
            if not torch.is_grad_enabled() or _in_functorch():
                return None
            leaves, spec = pytree.tree_flatten((args, kwargs))
            inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            layout = self._layouts.get(site.name)
            _check(site, layout, inputs, output, gradients.batch_size)
            assert layout is not None and site.rule is not None
            device = output.device.type
            autocast = torch.is_autocast_enabled(device)
            call = Call(
                module=module,
                slots=tensors,
                batch_size=gradients.batch_size,
                batched=tuple(rows > 0 for rows in layout.inputs),
                arguments=tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves),
                spec=spec,
                autocast_dtype=torch.get_autocast_dtype(device) if autocast else None,
            )
            with torch.no_grad():
                saved = site.rule.save(call, [tensor.detach() for tensor in inputs])
            if layout.output == 0:
                output = output.expand(gradients.batch_size, *output.shape[1:])
            if output.device not in anchors:
                anchors[output.device] = torch.zeros((), device=output.device, requires_grad=True)
            tapped: Tensor = _Tap.apply(  # type: ignore[no-untyped-call]
                output, anchors[output.device], (site, call, gradients), *saved
            )
            return tapped

        return hook


def _check(
    site: Site, layout: Layout | None, inputs: Sequence[Tensor], output: Any, batch_size: int
) -> None:
    """Refuses a call that does not see the batch as it did when layouts were observed."""
    label = f"`{site.name}` ({type(site.module).__name__})"
    if layout is None:
        raise RuntimeError(
            f"{label} is called in training but was not when the model was inspected; "
            "freeze it with `requires_grad_(False)`."
        )
    if layout.problem:
        raise RuntimeError(f"{label}: {layout.problem}; freeze it with `requires_grad_(False)`.")
    rows = [t.shape[0] for t, r in zip(inputs, layout.inputs, strict=True) if r]
    expected = [r * batch_size for r in layout.inputs if r]
    if rows != expected or output.shape[0] != (layout.output * batch_size or 1):
        raise RuntimeError(
            f"{label}: expected {expected or [1]} rows for a batch of {batch_size}, got {rows} in "
            f"and {output.shape[0]} out; per-sample gradients cannot be told apart."
        )


def _in_functorch() -> bool:
    """Whether the generic rule is running a layer again under vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter of the model requires grad inside the block."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def _expanded(
    site: Site, tensors: Mapping[str, Projector], batch_size: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Bare tensors with a first dimension of 1 become one leaf per sample inside the block."""
    originals = {local: site.module._parameters[local] for local in tensors}
    leaves = []
    try:
        for local, original in originals.items():
            assert original is not None
            leaf = original.detach().expand(batch_size, *original.shape[1:]).requires_grad_()
            site.module._parameters[local] = leaf  # type: ignore[assignment]
            leaves.append((site.tensors[local], leaf))
        yield leaves
    finally:
        site.module._parameters.update(originals)
