"""What separates samples and layers while a model is rehearsed: watched rows, detached tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dpgrape.gradients.layout import Layout, Layouts
from hf_dpgrape.gradients.recorder import intercepted, rows_of, with_batch
from hf_dpgrape.gradients.sites import Site, own_tensors


@contextmanager
def own_tensors_detached(site: Site) -> Iterator[None]:
    """During its own calls, the tensors of a site are cut off from the parameters themselves."""
    owners = own_tensors(site)
    originals = [owner._parameters[local] for owner, local in owners]

    def detach() -> None:
        for (owner, local), original in zip(owners, originals, strict=True):
            assert original is not None
            owner._parameters[local] = original.detach()  # type: ignore[assignment]

    def restore() -> None:
        for (owner, local), original in zip(owners, originals, strict=True):
            owner._parameters[local] = original

    if site.method == "forward":
        # Before other hooks, which may read the tensors (as weight normalization), and restored
        # even if the call fails: then the parameters themselves must be back.
        before = site.module.register_forward_pre_hook(lambda *_: detach(), prepend=True)
        after = site.module.register_forward_hook(lambda *_: restore(), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            restore()
        return
    original = getattr(site.module, site.method)

    def method(*args: Any, **kwargs: Any) -> Any:
        detach()
        try:
            return original(*args, **kwargs)
        finally:
            restore()

    setattr(site.module, site.method, method)
    try:
        yield
    finally:
        delattr(site.module, site.method)


class _OwnRows(torch.autograd.Function):
    """Identity whose backward notes a gradient that is not zero outside some rows."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, anchor: Tensor, rows: slice, note: Callable[[], None]
    ) -> Tensor:
        ctx.rows, ctx.note = rows, note
        return output.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Exactly zero, without a tolerance: no kernel adds up numbers of samples that do not meet.
        rows = ctx.rows
        if bool(grad[: rows.start].any()) or bool(grad[rows.stop :].any()):
            ctx.note()
        return grad, None, None, None


@contextmanager
def watched_rows(
    model: nn.Module,
    sites: Sequence[Site],
    layouts: Layouts,
    place: int,
    size: int,
    note: Callable[[str], None],
) -> Iterator[None]:
    """Notes where a gradient reaches other samples' rows than those of the one at `place`."""
    anchor = torch.zeros((), requires_grad=True)

    def watch(output: Any, rows: int, label: str) -> Any:
        def one(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim):
                return value
            if value.shape[0] != rows * size or not torch.is_grad_enabled():
                return value
            own = slice(place * rows, (place + 1) * rows)
            there = anchor.to(value.device)
            return _OwnRows.apply(value, there, own, lambda: note(label))  # type: ignore[no-untyped-call]

        return pytree.tree_map(one, output)

    with ExitStack() as stack:
        taken = set()
        for site in sites:
            layout = layouts.get(site.key)
            if site.rule is None or layout is None:
                continue
            taken.add(site.name if site.method == "forward" else "")

            def on_output(
                _: Any, __: Any, out: Any, site: Site = site, lay: Layout = layout
            ) -> Any:
                return watch(with_batch(out, lay, size), rows_of(lay), site.key)

            stack.enter_context(intercepted(site, on_output))
        # Leaves without trained tensors too: activations, poolings and losses can mix samples.
        for name, module in model.named_modules():
            if name not in taken and not any(True for _ in module.children()):
                leaf = Site(name, module)
                stack.enter_context(
                    intercepted(leaf, lambda _, __, out, name=name: watch(out, 1, name))  # type: ignore[misc]
                )
        yield
