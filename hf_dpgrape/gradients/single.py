"""Gradients as autograd itself takes them, one tensor at a time.

With one sample in the batch, the batch's gradient is the sample's: nothing has to be known of the
model. Each tensor's gradient is projected as soon as it is complete, and freed, so that one
gradient of full size exists at a time. A tensor that is used several times is complete once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.rules import Projector


@contextmanager
def single_gradients(
    model: nn.Module, projectors: Mapping[str, Projector]
) -> Iterator[dict[str, Tensor]]:
    """Takes the projected gradients of one forward and backward of one sample inside the block.

    Args:
        model: the model.
        projectors: how each tensor is projected, by canonical name; others are frozen meanwhile.

    Yields:
        Name -> projected gradient, filled while backward runs; tensors that the loss does not
        depend on are missing.
    """
    found: dict[str, Tensor] = {}

    def take(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = projectors[name].on_gradient(parameter.grad[None])[0]
        found[name] = found[name] + gradient if name in found else gradient
        parameter.grad = None

    flags = [(name, p, p.requires_grad, p.grad) for name, p in model.named_parameters()]
    try:
        with ExitStack() as stack:
            for name, parameter, _, _ in flags:
                parameter.requires_grad_(name in projectors)
                parameter.grad = None
                if name in projectors:
                    hook = functools.partial(take, name)
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            # One thread, so that what watches this one also sees backward.
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                yield found
    finally:
        for _, parameter, flag, grad in flags:
            parameter.requires_grad_(flag)
            parameter.grad = grad
