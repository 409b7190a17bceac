"""Gradients as autograd itself takes them, one tensor at a time.

With one sample in the batch, the batch's gradient is the sample's: nothing has to be known of the
model. Each tensor's gradient is projected as soon as it is complete, and freed, so that one
gradient of full size exists at a time. A tensor that is used several times is complete once. A tied
tensor has a leaf of its own at each of its places, lest autograd sum them up in full size.

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.forms import Dense, PerSampleGradients, WhenComplete
from hf_dpgrape.gradients.recorder import unmoved_buffers
from hf_dpgrape.gradients.rules import Projector

#: A tensor's canonical name, and at which of the places where it hangs.
Leaf = tuple[str, int]


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
        num_passes: counts, by name, how often backward comes to a tensor at one of its places.

    Yields:
        Name -> projected gradient, filled while backward runs; tensors that the loss does not
        depend on are missing.
    """
    found: dict[str, Tensor] = {}
    passes: Counter[Leaf] = Counter()

    def take(leaf: Leaf, gradient: Tensor) -> None:
        name, _ = leaf
        found[name] = found[name] + gradient if name in found else gradient
        passes[leaf] += 1
        if num_passes is not None:
            num_passes[name] = max(passes[leaf], num_passes.get(name, 0))

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
        num_passes: how often backward came to each tensor at one place when the model was
            rehearsed: several times where checkpointed parts that share it run backward passes of
            their own. No tensor is then reported complete before the end of the block.
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
        places = _places(self._model)
        gradients = PerSampleGradients(
            1,
            num_uses={name: len(places[name]) for name in projectors},
            when_complete=when_complete,
        )

        def take(leaf: Leaf, gradient: Tensor) -> None:
            name, _ = leaf
            gradients.add(name, Dense(gradient[None]))
            if self._completes_early:
                gradients.use_is_done(name)

        self._recording = True
        try:
            with unmoved_buffers(self._model), _taken(self._model, projectors, take):
                yield gradients
        finally:
            self._recording = False


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where each tensor hangs: canonical name -> module and local name, the first place first."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[names[parameter]].append((module, local))
    return places


@contextmanager
def _own_leaf(module: nn.Module, local: str, parameter: nn.Parameter) -> Iterator[nn.Parameter]:
    """Hangs a leaf with the same memory in this place of a tied tensor."""
    leaf = nn.Parameter(parameter.detach())
    setattr(module, local, leaf)
    try:
        yield leaf
    finally:
        setattr(module, local, parameter)


@contextmanager
def _taken(
    model: nn.Module, projectors: Mapping[str, Projector], take: Callable[[Leaf, Tensor], None]
) -> Iterator[None]:
    """Hands each leaf's projected gradient on when backward completes it, and frees it."""

    # Called once all uses of a leaf in this backward pass are summed up by autograd.
    def on_complete(leaf: Leaf, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        take(leaf, projectors[leaf[0]].on_gradient(gradient[None])[0])

    flags = [(name, p, p.requires_grad, p.grad) for name, p in model.named_parameters()]
    places = _places(model)
    try:
        with ExitStack() as stack:
            for name, parameter, _, _ in flags:
                parameter.requires_grad_(name in projectors)
                parameter.grad = None
                if name not in projectors:
                    continue
                ties = [_own_leaf(*place, parameter) for place in places[name][1:]]
                for i, leaf in enumerate([parameter, *map(stack.enter_context, ties)]):
                    hook = functools.partial(on_complete, (name, i))
                    handle = leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            # One thread, so that what watches this one also sees backward, and no two tensors are
            # taken at once.
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                yield
    finally:
        for _, parameter, flag, grad in flags:
            parameter.requires_grad_(flag)
            parameter.grad = grad
