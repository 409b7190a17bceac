"""The recorder: taps on layers while one physical batch passes forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dpgrape.gradients.forms import Dense, Form, PerSampleGradients, WhenComplete
from hf_dpgrape.gradients.layout import Layout, Layouts
from hf_dpgrape.gradients.rules import TENSOR, Call, Projector
from hf_dpgrape.gradients.sites import Site

#: What is done to a call's output: (args, kwargs, output) -> the output to go on with.
OnOutput = Callable[[Any, Any, Any], Any]

#: Layouts for a batch with these inputs.
LayoutsOf = Callable[[Any], Layouts]


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
        # Not the input itself: that would be a view, which models may not modify in place.
        return output.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        site, call, gradients = ctx.tap
        assert site.rule is not None
        saved = ctx.saved_tensors
        if call.batch_size == 0:  # nobody's gradient
            return grad, None, None, *(None for _ in saved)
        # Layers below get the whole gradient; only the rule's copy is cut into samples.
        own = grad
        if call.broadcast > 1:
            own = grad.reshape(call.batch_size, call.broadcast, *grad.shape[1:]).sum(1)
        for local, part in site.rule.gradients(call, saved, own):
            gradients.add(site.tensors[local], part)
        # Also for a tensor that the rule gave nothing: its group waits for every use.
        for local in call.slots:
            gradients.use_is_done(site.tensors[local])
        return grad, None, None, *(None for _ in saved)


class Recorder:
    """Takes the per-sample projected gradients of some of a model's tensors.

    Args:
        model: the model.
        sites: where its tensors live (see `find_sites`).
        projectors: how each tensor is projected, by canonical name. Tensors without a projector
            are not recorded.
        layouts: how each site sees the batch (see `observe_layouts`), or a function that tells it
            of a batch's inputs, as it may depend on their shapes.
        form: form of the gradients, for tests.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        projectors: Mapping[str, Projector],
        layouts: Layouts | LayoutsOf,
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
        self,
        batch_size: int,
        names: frozenset[str] | None = None,
        when_complete: WhenComplete | None = None,
        *,
        inputs: Any = None,
    ) -> Iterator[PerSampleGradients]:
        """Records one forward and backward of `batch_size` samples.

        Inside the block no parameter requires grad, so that autograd never forms a gradient of
        full size; the taps and the flags are gone after it, whatever happens.

        Args:
            batch_size: number of samples in the batch.
            names: tensors to record; None for all.
            when_complete: see `PerSampleGradients`. Bare tensors are complete only after the
                block.
            inputs: what the model is given, for layouts that depend on its shapes.
        """
        if self._recording:
            raise RuntimeError("A recording is on already; recordings do not nest.")
        layouts = self._layouts if isinstance(self._layouts, Mapping) else self._layouts(inputs)
        gradients = PerSampleGradients(
            batch_size,
            form=self._form,
            num_uses=self._num_uses(layouts),
            when_complete=when_complete,
        )
        anchors: dict[torch.device, Tensor] = {}
        leaves: list[tuple[str, Tensor]] = []
        self._recording = True
        try:
            with ExitStack() as stack:
                stack.enter_context(frozen(self._model))
                stack.enter_context(unmoved_buffers(self._model))
                for site in self._sites:
                    tensors = {
                        local: self._projectors[name]
                        for local, name in site.tensors.items()
                        if name in self._projectors and (names is None or name in names)
                    }
                    if tensors and site.rule is None:
                        leaves += stack.enter_context(expanded(site, batch_size))
                    elif tensors:
                        tap = self._tap(site, tensors, gradients, anchors, layouts)
                        stack.enter_context(intercepted(site, tap))
                yield gradients
                # Leaves collect over all uses, so a bare tensor is known after the block alone.
                for name, leaf in leaves:
                    if leaf.grad is not None:
                        grad = leaf.grad.reshape(batch_size, *self._projectors[name].full_shape)
                        gradients.add(name, Dense(self._projectors[name].on_gradient(grad)))
        finally:
            self._recording = False

    def _num_uses(self, layouts: Layouts) -> dict[str, int]:
        """How often each tensor is used in a forward pass."""
        uses: dict[str, int] = {}
        for site in self._sites:
            for name in site.tensors.values():
                calls = layouts[site.key].calls if site.key in layouts else 0
                uses[name] = uses.get(name, 0) + calls
        return uses

    def _tap(
        self,
        site: Site,
        tensors: Mapping[str, Projector],
        gradients: PerSampleGradients,
        anchors: dict[torch.device, Tensor],
        layouts: Layouts,
    ) -> OnOutput:
        """What is done to the outputs of one site."""

        def tap(args: Any, kwargs: Any, output: Any) -> Any:
            if _in_functorch():  # the rule itself runs the layer again, and would tap its own call
                return output
            leaves, spec = pytree.tree_flatten((args, kwargs))
            inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            layout = checked(site, layouts, inputs, output, gradients.batch_size)
            output = with_batch(output, layout, gradients.batch_size)
            if not torch.is_grad_enabled():  # a checkpointed forward; it runs again in backward
                return output
            assert site.rule is not None
            device = output.device.type
            autocast = torch.is_autocast_enabled(device)
            call = Call(
                module=site.module,
                slots=tensors,
                batch_size=gradients.batch_size,
                broadcast=1 if layout.output else layout.broadcast,
                batched=tuple(rows > 0 for rows in layout.inputs),
                arguments=tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves),
                spec=spec,
                autocast_dtype=torch.get_autocast_dtype(device) if autocast else None,
            )
            # Detached: what is saved must not keep the graph of the layers before alive.
            with torch.no_grad():
                saved = site.rule.save(call, [tensor.detach() for tensor in inputs])
            if output.device not in anchors:
                anchors[output.device] = torch.zeros((), device=output.device, requires_grad=True)
            anchor = anchors[output.device]
            return _Tap.apply(output, anchor, (site, call, gradients), *saved)  # type: ignore[no-untyped-call]

        return tap


def with_batch(output: Tensor, layout: Layout, batch_size: int) -> Tensor:
    """An output that is broadcast over the batch, expanded so that each sample has its own."""
    if layout.output:
        return output
    return output.expand(batch_size * layout.broadcast, *output.shape[1:])


def checked(
    site: Site, layouts: Layouts, inputs: Sequence[Tensor], output: Any, batch_size: int
) -> Layout:
    """The site's layout, if this call sees the batch as it did when layouts were observed."""
    label = f"`{site.key}` ({type(site.module).__name__})"
    layout = layouts.get(site.key)
    if layout is None:
        raise RuntimeError(
            f"{label} is called in training but was not when the model was inspected; "
            "freeze it with `requires_grad_(False)`."
        )
    if layout.problem:
        raise RuntimeError(f"{label}: {layout.problem}; freeze it with `requires_grad_(False)`.")
    tensors = [*zip(inputs, layout.inputs, strict=True), (output, layout.output)]
    for tensor, rows in tensors:
        if not _fits(tensor, rows, batch_size):
            raise RuntimeError(
                f"{label}: expected {rows} row(s) per sample, as when the model was inspected, got "
                "another number; per-sample gradients cannot be told apart."
            )
    return layout


def _fits(tensor: Tensor, rows: int, batch_size: int) -> bool:
    """Whether a tensor has exactly the rows per sample that were observed at this shape."""
    return rows == 0 or (tensor.ndim > 0 and tensor.shape[0] == rows * batch_size)


def rows_of(layout: Layout) -> int:
    """Rows per sample of an output, after it was expanded if it is broadcast."""
    return layout.output or layout.broadcast


def _in_functorch() -> bool:
    """Whether the generic rule is running a layer again under vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
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
def unmoved_buffers(model: nn.Module) -> Iterator[None]:
    """Refuses a forward and backward that changes a buffer.

    It would carry something from one physical batch to the next, and into the saved weights. No
    value is read: a buffer is another object, or counts its changes.

    Raises:
        RuntimeError: naming the buffer.
    """

    def states() -> dict[str, tuple[int, int]]:
        return {n: (id(b), b._version) for n, b in model.named_buffers() if not b.is_inference()}

    # Not in a `finally`: after an error in the block there is nothing left to protect.
    before = states()
    yield
    after = states()
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            raise RuntimeError(
                f"The buffer `{name}` changed in a forward pass of training, so one batch would "
                "influence the next (as running statistics and dynamic position scaling do); "
                "switch that off, or cut examples to the length that the model was made for."
            )


def intercepted(site: Site, on_output: OnOutput) -> AbstractContextManager[None]:
    """Passes every output of a site's module or method through `on_output` inside the block."""
    return _hooked(site, on_output) if site.method == "forward" else _wrapped(site, on_output)


@contextmanager
def _hooked(site: Site, on_output: OnOutput) -> Iterator[None]:
    handle = site.module.register_forward_hook(
        lambda _, args, kwargs, output: on_output(args, kwargs, output), with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _wrapped(site: Site, on_output: OnOutput) -> Iterator[None]:
    original = getattr(site.module, site.method)

    def method(*args: Any, **kwargs: Any) -> Any:
        return on_output(args, kwargs, original(*args, **kwargs))

    setattr(site.module, site.method, method)
    try:
        yield
    finally:
        delattr(site.module, site.method)


@contextmanager
def expanded(
    site: Site, batch_size: int, values: Mapping[str, Tensor] | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Bare tensors of a site become one leaf per sample inside the block.

    Args:
        site: a site without a rule.
        batch_size: number of samples.
        values: one value per sample (B, *shape) by local name; None for the tensors' own.

    Yields:
        Canonical names and leaves.
    """
    originals = {local: site.module.get_parameter(local) for local in site.tensors}
    leaves = []
    try:
        for local, original in originals.items():
            own = original.detach()
            each = own.expand(batch_size, *own.shape) if values is None else values[local]
            # Some modules read such a tensor as a table with rows, others scale activations by it:
            # the samples go in front of the rows, or in front of the positions.
            if site.scale_dims is None:
                leaf = each.flatten(0, 1).requires_grad_()
            else:
                leaf = each[(slice(None), *(None,) * site.scale_dims)].detach().requires_grad_()
            site.module._parameters[local] = leaf  # type: ignore[assignment]
            leaves.append((site.tensors[local], leaf))
        yield leaves
    finally:
        site.module._parameters.update(originals)
