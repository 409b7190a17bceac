"""Gradients as autograd itself takes them, one tensor at a time.

With one sample in the batch, the batch's gradient is the sample's: nothing has to be known of the
model. Each tensor's gradient is projected as soon as it is complete, and freed, so that one
gradient of full size exists at a time. A tensor that is used several times is complete once.

Why a batch of one keeps the guarantee. A private step needs, for each sample, a vector that is a
(random) function of that sample, the weights and public numbers alone; its norm is then bounded.
Forward and backward of a batch of one see no other sample, so other samples could only reach it by
what is left behind from one batch to the next:

* *Parameters* change after the step only; `.grad` is emptied as it is taken, and comes back.
* *Buffers*: a recording refuses one that moves (`unmoved_buffers`), as does the rehearsal.
* *Other memory* (a tensor or number kept on a module): the rehearsal has a sample come back after
  others, and refuses if it gives anything else.
* *Generators*: those of torch, Python and NumPy are seeded anew before every sample, by a secret of
  the step and the sample's index in the training set. A sample draws the same whichever others were
  drawn. A generator of the model's own, whose seed is not secret, is memory, and refused.

Draws that a batch shares are one sample's own here, as is a loss that averages over the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.forms import Dense, PerSampleGradients, WhenComplete
from hf_dpgrape.gradients.recorder import unmoved_buffers
from hf_dpgrape.gradients.rules import Projector


@contextmanager
def single_gradients(
    model: nn.Module,
    projectors: Mapping[str, Projector],
    num_passes: dict[str, int] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Takes the projected gradients of one forward and backward of one sample inside the block.

    Args:
        model: the model.
        projectors: how each tensor is projected, by canonical name; others are frozen meanwhile.
        num_passes: counts, by name, how often backward comes to a tensor.

    Yields:
        Name -> projected gradient, filled while backward runs; tensors that the loss does not
        depend on are missing.
    """
    found: dict[str, Tensor] = {}

    def take(name: str, gradient: Tensor) -> None:
        found[name] = found[name] + gradient if name in found else gradient
        if num_passes is not None:
            num_passes[name] = num_passes.get(name, 0) + 1

    with _taken(model, projectors, take):
        yield found


class SingleRecorder:
    """Takes the projected gradients of batches of one sample, of any model whatever.

    Guarantees:
        A recording of any other number of samples than one is refused before the model runs.

    Args:
        model: the model.
        projectors: how each tensor is projected, by canonical name; others are frozen while a
            recording is on.
        num_passes: how often backward came to each tensor when the model was rehearsed: several
            times where checkpointed parts that share it run backward passes of their own. No
            tensor is then reported complete before the end of the block.
    """

    def __init__(
        self,
        model: nn.Module,
        projectors: Mapping[str, Projector],
        num_passes: Mapping[str, int] | None = None,
    ) -> None:
        self._model = model
        self._projectors = projectors
        self._completes_early = max((num_passes or {}).values(), default=1) <= 1
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
        """Records one forward and backward of one sample.

        Args:
            batch_size: must be 1.
            names: tensors to record; None for all.
            when_complete: see `PerSampleGradients`.
            inputs: not needed.

        Raises:
            ValueError: the batch holds another number of samples.
        """
        if batch_size != 1:
            raise ValueError(
                f"Expected physical batches of one example in single capture, got {batch_size}; "
                "split them."
            )
        if self._recording:
            raise RuntimeError("A recording is on already; recordings do not nest.")
        projectors = {n: p for n, p in self._projectors.items() if names is None or n in names}
        gradients = PerSampleGradients(
            1, num_uses=dict.fromkeys(projectors, 1), when_complete=when_complete
        )

        def take(name: str, gradient: Tensor) -> None:
            gradients.add(name, Dense(gradient[None]))
            if self._completes_early:
                gradients.use_is_done(name)

        self._recording = True
        try:
            with unmoved_buffers(self._model), _taken(self._model, projectors, take):
                yield gradients
        finally:
            self._recording = False


@contextmanager
def _taken(
    model: nn.Module, projectors: Mapping[str, Projector], take: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Hands each tensor's projected gradient on when backward completes it, and frees it."""

    # Called once all uses of a tensor in this backward pass are summed up by autograd.
    def on_complete(name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        take(name, projectors[name].on_gradient(gradient[None])[0])

    flags = [(name, p, p.requires_grad, p.grad) for name, p in model.named_parameters()]
    try:
        with ExitStack() as stack:
            for name, parameter, _, _ in flags:
                parameter.requires_grad_(name in projectors)
                parameter.grad = None
                if name in projectors:
                    hook = functools.partial(on_complete, name)
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            # One thread, so that what watches this one also sees backward, and no two tensors are
            # taken at once.
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                yield
    finally:
        for _, parameter, flag, grad in flags:
            parameter.requires_grad_(flag)
            parameter.grad = grad
