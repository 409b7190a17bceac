"""The rehearsal of single capture on synthetic examples: what can go wrong with batches of one.

Nothing has to be found out about how a model treats a batch. What remains is whether one batch can
leave something behind for the next (buffers, generators, other memory; see `autograd`), and
whether there is anything to train: a loss over pairs of samples is constant for one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpgrape.gradients.draws import Draws
from hf_dpgrape.gradients.recorder import unmoved_buffers
from hf_dpgrape.gradients.rehearsal import (
    CONSTANT,
    PADDED,
    Batch,
    Losses,
    Taken,
    prepared,
    repetition_tolerance,
)
from hf_dpgrape.gradients.rules import Projector
from hf_dpgrape.gradients.single import single_gradients
from hf_dpgrape.gradients.stage import undisturbed

#: The samples that pass, each alone; the first comes back after the others.
_SAMPLES = (0, PADDED, 1, CONSTANT)


@dataclass(frozen=True)
class SingleRehearsal:
    """What a rehearsal found.

    Attributes:
        problems: module or tensor name ("" for the model) -> why it cannot be trained.
        num_passes: tensor name -> how often one backward came to it.
    """

    problems: Mapping[str, str] = field(default_factory=dict)
    num_passes: Mapping[str, int] = field(default_factory=dict)


class SingleRehearser:
    """Rehearses one model.

    Args:
        model: the model.
        projectors: how each tensor is projected, by canonical name.
        losses: runs the model on inputs; one loss per sample.
    """

    def __init__(
        self, model: nn.Module, projectors: Mapping[str, Projector], losses: Losses
    ) -> None:
        self._model = model
        self._projectors = projectors
        self._losses = losses
        self._num_passes: dict[str, int] = {}

    def __call__(self, batches: Sequence[Batch]) -> SingleRehearsal:
        """Rehearses the model on samples of several shapes.

        Raises:
            RuntimeError, ValueError, ...: whatever the model raises on a sample.
        """
        for projector in self._projectors.values():
            projector.prepare()  # lest its random matrix be taken for a draw of the model
        with undisturbed(self._model) as moved_buffers:
            made = [prepared(make, [(number,) for number in _SAMPLES]) for make in batches]
            problems = self._own_generators(made[0]([0])) or self._state(made) or moved_buffers()
        return SingleRehearsal(problems, self._num_passes)

    def _own_generators(self, inputs: Any) -> dict[str, str]:
        """Modules that draw from a generator of their own."""
        with Draws(self._model).named() as draws:
            self._taken(inputs)
        return {
            draw.module: f"it hands `{draw.operator}` a generator of its own, whose seed is not "
            "secret; leave the generator out"
            for draw in draws.seen
            if draw.is_own
        }

    def _state(self, made: Sequence[Batch]) -> dict[str, str]:
        """Whether a sample that comes back gives something else, and whether any gives anything."""
        first: Taken | None = None
        has_gradient = False
        for batch in made:
            for number in _SAMPLES:
                taken = self._taken(batch([number]))
                has_gradient |= any(bool(g.any()) for g in taken.gradients[0].values())
                first = first or taken
                del taken  # gradients of large models, of one sample at a time
        if not has_gradient:
            return {
                "": "its loss has no gradient for one example alone (a loss over pairs of "
                "examples, as contrastive ones, has none)"
            }
        again = self._taken(made[0]([_SAMPLES[0]]))
        assert first is not None
        if first.distance(again, 0) <= repetition_tolerance(self._model):
            return {}
        return {"": "what it computes of an example depends on the examples before"}

    def _taken(self, inputs: Any) -> Taken:
        """Loss and gradients of one sample, always from the same state of the generators."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        passes: dict[str, int] = {}
        with (
            unmoved_buffers(self._model),
            single_gradients(self._model, self._projectors, passes) as found,
        ):
            losses = self._losses(inputs)
            if losses.requires_grad:
                losses.sum().backward()  # type: ignore[no-untyped-call]
        for name, number in passes.items():
            self._num_passes[name] = max(number, self._num_passes.get(name, 0))
        return Taken(losses.detach(), {0: found})
