"""A rehearsal of the capture on synthetic examples, before anything private is read.

How a model treats a batch decides whether per-sample gradients exist at all, and whether ours are
right. That is found out on examples that are made up: nothing about the data decides, and no
degenerate row can hide a fault. The model runs as in training, in training mode, with every random
draw replaced by its expectation, which makes it a deterministic function. Tensors that are zero
throughout (a fresh head, an adapter) get values for the time, lest they hide what lies behind them.

For each of some shapes:

1. *Layouts.* What grows with the number of samples, by equality of sizes (`observation`).
2. *Hidden uses.* Inside a site's own call its tensors stand detached. A gradient that reaches them
   nevertheless comes from a use elsewhere; the tensor is then taken by the smallest module around
   all its uses.
3. *Neighbors.* Backward of one sample's loss must leave gradients of exactly zero in all other
   samples' rows, at every layer; no tolerance is involved. And a sample's loss and gradients must
   stay what they are when other samples stand beside it, which also shows what has no derivative,
   as a choice of the largest losses.
4. *Oracle.* Per-sample gradients must be those that autograd takes of each sample alone.
5. *Draws, buffers, memory.* No random number is shared by samples (`draws`), no buffer moves, and a
   batch that comes back after others gives what it gave before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.draws import Draws, foreign_draws, shared_draws
from hf_dpgrape.gradients.forms import PerSampleGradients
from hf_dpgrape.gradients.isolation import own_tensors_detached, watched_rows
from hf_dpgrape.gradients.layout import Layout, Layouts
from hf_dpgrape.gradients.observation import observe_layouts
from hf_dpgrape.gradients.recorder import Recorder, expanded, frozen
from hf_dpgrape.gradients.rules import Projector
from hf_dpgrape.gradients.single import single_gradients
from hf_dpgrape.gradients.sites import Site, widened
from hf_dpgrape.gradients.stage import undisturbed

#: Inputs of the synthetic samples of these numbers, as one batch. A number always names the same
#: sample: from 0 ordinary ones, from `PADDED` such as end in padding, from `CONSTANT` such as
#: repeat one token.
Batch = Callable[[Sequence[int]], Any]
PADDED, CONSTANT = 10, 20

#: Runs the model on inputs; one loss per sample.
Losses = Callable[[Any], Tensor]

#: Relative deviation from the oracle that rounding explains, in gradients of 16, 32 and 64 bits.
_ORACLE_TOLERANCES = {torch.float32: 2e-3, torch.float64: 1e-7}
#: The same where a batch of the same shape has other neighbors, and mostly no bit differs.
_NEIGHBOR_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
_TOLERANCE_OF_16_BITS = {True: 0.1, False: 1e-2}

_NEIGHBORS = (
    "the loss or the gradient of an example changes with the examples beside it (layers or losses "
    "that look across the batch, an expert's capacity)"
)

#: The batch of which most is asked, and the places in it that are compared with other batches.
_TOGETHER = (1, 0, PADDED, 2, CONSTANT)
_COMPARED = (1, 2, 4)
#: Batches in which the sample at a place of `_TOGETHER` has none of its neighbors; all of them hold
#: some padding, since kernels may be others where there is none.
_OTHERS = {
    1: (3, 0, PADDED + 1, 4, CONSTANT + 1),
    2: (PADDED + 1, PADDED + 3, PADDED, PADDED + 2, PADDED + 1),
}
_THREE = (0, PADDED, 1)
#: Batches that layouts are observed on, and those of the other checks.
_FOR_LAYOUTS = ((0,), (0, PADDED), (0, 1), _THREE)
_FOR_CHECKS = (_TOGETHER, *_OTHERS.values(), *((i,) for i in _TOGETHER), (0, 1, 2))


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    Attributes:
        sites: where tensors are taken, widened where they are used around their layer.
        layouts: how every site sees the batch.
        problems: module or tensor name ("" for the model) -> why it cannot be trained; empty if
            the capture is exact.
        errors: tensor name -> largest deviation from the oracle, relative to the norm of the
            sample's whole gradient.
    """

    sites: list[Site]
    layouts: Layouts = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """Losses of one batch, and the gradients of the samples at some of its places."""

    losses: Tensor
    gradients: Mapping[int, Mapping[str, Tensor]]

    def distance(self, other: Taken, place: int) -> float:
        """How far a sample is from itself in another batch, relative to its gradient's norm."""
        errors = deviations(self.gradients[place], other.gradients[place])
        moved = abs(float(self.losses[place] - other.losses[place]))
        scale = max(abs(float(self.losses[place])), 1.0)
        return max([*errors.values(), 0.0 if moved == 0 else moved / scale])


def deviations(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Deviation per tensor, relative to the norm of the whole gradient that is wanted."""
    # One difference exists at a time; all norms are read at once.
    names = list({**got, **want})
    norms = [_norm(want[name]) for name in want] + [_gap(got, want, name) for name in names]
    if not norms:
        return {}
    sizes = torch.stack(norms).tolist()
    total = max(math.hypot(*sizes[: len(want)]), 1e-30)
    gaps = zip(names, sizes[len(want) :], strict=True)
    return {name: gap / total if gap == gap else math.inf for name, gap in gaps}


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor.float())
    return norm


def _gap(got: Mapping[str, Tensor], want: Mapping[str, Tensor], name: str) -> Tensor:
    """Norm of one tensor's difference; what is missing counts as zero."""
    if name in got and name in want:
        return _norm(got[name].float() - want[name].float().view_as(got[name]))
    return _norm(got[name] if name in got else want[name])


def prepared(make: Batch, batches: Iterable[Sequence[int]]) -> Batch:
    """The same batches, made beforehand: what makes them may draw random numbers of its own."""
    made = {tuple(samples): make(samples) for samples in batches}
    return lambda samples: made[tuple(samples)]


class Rehearser:
    """Rehearses one model.

    Args:
        model: the model.
        sites: sites of the tensors to train.
        projectors: how each tensor is projected, by canonical name.
        losses: runs the model on inputs; one loss per sample.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        projectors: Mapping[str, Projector],
        losses: Losses,
    ) -> None:
        self._model = model
        self._sites = list(sites)
        self._projectors = projectors
        self._losses = losses
        self._errors: dict[str, float] = {}
        self._dtype = coarsest_dtype(model)

    def __call__(self, batches: Sequence[Batch]) -> Rehearsal:
        """Rehearses the model on batches of several shapes.

        Raises:
            RuntimeError, ValueError, ...: whatever the model raises on a batch.
        """
        layouts: dict[str, Layout] = {}
        for projector in self._projectors.values():
            projector.prepare()  # lest its random matrix be taken for a draw of the model
        with undisturbed(self._model) as moved_buffers:
            first: tuple[Taken, Layouts] | None = None
            for make in batches:
                batch = prepared(make, (*_FOR_LAYOUTS, *_FOR_CHECKS))
                problems = foreign_draws(functools.partial(self._losses, batch([0])))
                if not problems:
                    layouts, problems = self.layouts_for(batch)
                if not problems:
                    together, problems = self._compared(batch, layouts, is_first=first is None)
                if problems:
                    return Rehearsal(self._sites, layouts, problems, self._errors)
                first = first or (together, layouts)
                del together  # gradients of large models, of one shape at a time
            assert first is not None
            problems = self._memory(prepared(batches[0], [_TOGETHER]), *first) or moved_buffers()
        return Rehearsal(self._sites, layouts, problems, self._errors)

    def _compared(
        self, batch: Batch, layouts: Layouts, *, is_first: bool
    ) -> tuple[Taken, dict[str, str]]:
        """What one shape's batch gives, and what is wrong with it."""
        together = self._batched(batch, _TOGETHER, layouts, places=_COMPARED)
        problems = self._between_samples(batch, together, layouts) if is_first else {}
        return together, problems or self._differences(batch, together, layouts)

    def layouts_at(self, batch: Batch) -> tuple[dict[str, Layout], dict[str, str]]:
        """Layouts at one more shape, and what cannot be trained at it."""
        with undisturbed(self._model):
            return self.layouts_for(batch)

    def layouts_for(self, batch: Batch) -> tuple[dict[str, Layout], dict[str, str]]:
        """Layouts at one shape, and what cannot be trained; sites are widened on the way."""
        batch = prepared(batch, _FOR_LAYOUTS)
        with Draws(self._model, "mean"):
            while True:
                layouts = observe_layouts(
                    self._model,
                    self._sites,
                    lambda places: self._losses(batch([_THREE[i] for i in places])),
                )
                problems = {key: lay.problem for key, lay in layouts.items() if lay.problem}
                hidden = {} if problems else self._hidden_uses(batch)
                if not hidden:
                    return layouts, problems
                sites = widened(self._model, self._sites, hidden)
                if sites is None:
                    reason = "it is used otherwise than by calling the layer that owns it"
                    return layouts, dict.fromkeys(hidden, reason)
                self._sites = sites

    def _hidden_uses(self, batch: Batch) -> set[str]:
        """Tensors that a gradient reaches although their sites' own calls are cut off from them."""
        with single_gradients(self._model, self._projectors) as found, ExitStack() as stack:
            for site in self._sites:
                context = expanded(site, 1) if site.rule is None else own_tensors_detached(site)
                stack.enter_context(context)
            losses = self._losses(batch([0]))
            if losses.requires_grad:
                losses.sum().backward()  # type: ignore[no-untyped-call]
        return set(found)

    def _between_samples(self, batch: Batch, together: Taken, layouts: Layouts) -> dict[str, str]:
        """What one sample has to do with others; the first kind that is found."""
        problems = shared_draws(self._model, lambda n: self._fingerprint(batch, n, layouts))
        return (
            problems
            or self._mixing(batch, layouts)
            or self._moved_by_others(batch, together, layouts)
        )

    def _batched(
        self, batch: Batch, samples: Sequence[int], layouts: Layouts, *, places: Iterable[int]
    ) -> Taken:
        """Losses of these samples, and gradients of those at some places, by the recorder."""
        with Draws(self._model, "mean"):
            losses, gradients = self._recorded(batch, samples, layouts)
        names = list(gradients)
        # Kept as precisely as the model computes, which is half of float32 where that counts.
        taken = {
            i: {name: gradients.of_sample(name, i).to(self._dtype) for name in names}
            for i in places
        }
        return Taken(losses, taken)

    def _recorded(
        self, batch: Batch, samples: Sequence[int], layouts: Layouts
    ) -> tuple[Tensor, PerSampleGradients]:
        recorder = Recorder(self._model, self._sites, self._projectors, layouts)
        with recorder.record(len(samples)) as gradients:
            losses = self._losses(batch(samples))
            if losses.requires_grad:
                losses.sum().backward()  # type: ignore[no-untyped-call]
        return losses.detach(), gradients

    def _fingerprint(self, batch: Batch, num_samples: int, layouts: Layouts) -> Tensor:
        """Losses, and the norms of the samples' joint gradients."""
        losses, gradients = self._recorded(batch, range(num_samples), layouts)
        norms = gradients.squared_norms(list(gradients), torch.zeros((), device=losses.device))
        return torch.stack([losses.double(), norms])

    def _mixing(self, batch: Batch, layouts: Layouts) -> dict[str, str]:
        """Modules at which one sample's loss depends on other samples' rows."""
        place, size = 1, len(_TOGETHER)
        found: dict[str, str] = {}

        def note(label: str) -> None:
            found.setdefault(
                label,
                "what is computed of it for one sample depends on the other samples of the batch",
            )

        with (
            Draws(self._model, "mean"),
            frozen(self._model),
            watched_rows(self._model, self._sites, layouts, place, size, note),
        ):
            losses = self._losses(batch(_TOGETHER))
            if losses.requires_grad:
                losses[place].backward()  # type: ignore[no-untyped-call]
        # Backward passes from the losses to the inputs: the first that was seen is the nearest to
        # the layer that mixes.
        return dict(list(found.items())[:1])

    def _moved_by_others(self, batch: Batch, together: Taken, layouts: Layouts) -> dict[str, str]:
        """Whether losses or gradients of a sample change with the samples beside it."""
        allowed = self._tolerance(_NEIGHBOR_TOLERANCES)
        if all(
            together.distance(self._batched(batch, others, layouts, places=[place]), place)
            <= allowed
            for place, others in _OTHERS.items()
        ):
            return {}
        return {"": _NEIGHBORS}

    def _differences(self, batch: Batch, together: Taken, layouts: Layouts) -> dict[str, str]:
        """Tensors whose gradients are not those of one backward per sample."""
        by_one: dict[str, float] = {}
        in_batch: dict[str, float] = {}
        for place in _COMPARED:
            sample = _TOGETHER[place]
            alone = self._alone(batch, sample)
            single = self._batched(batch, [sample], layouts, places=[0]).gradients[0]
            for worst, got in ((by_one, single), (in_batch, together.gradients[place])):
                for name, error in deviations(got, alone).items():
                    worst[name] = max(worst.get(name, 0.0), error)
                    self._errors[name] = max(self._errors.get(name, 0.0), error)
        allowed = self._tolerance(_ORACLE_TOLERANCES)
        if max(by_one.values(), default=0) <= allowed < max(in_batch.values(), default=0):
            return {"": _NEIGHBORS}
        return {
            name: "its per-sample gradient is not that of one backward pass per sample"
            for name, error in by_one.items()
            if error > allowed
        }

    def _alone(self, batch: Batch, sample: int) -> dict[str, Tensor]:
        """Gradients of one sample by autograd."""
        draws = Draws(self._model, "mean")
        with draws, single_gradients(self._model, self._projectors) as alone:
            losses = self._losses(batch([sample]))
            if losses.requires_grad:
                losses.sum().backward()  # type: ignore[no-untyped-call]
        return alone

    def _memory(self, batch: Batch, first: Taken, layouts: Layouts) -> dict[str, str]:
        """Whether a batch gives something else when it comes back after others."""
        again = self._batched(batch, _TOGETHER, layouts, places=_COMPARED)
        allowed = self._tolerance(_NEIGHBOR_TOLERANCES)
        if max(first.distance(again, place) for place in _COMPARED) <= allowed:
            return {}
        return {"": "what it computes of a batch depends on the batches before"}

    def _tolerance(self, by_dtype: Mapping[torch.dtype, float]) -> float:
        return by_dtype.get(self._dtype) or _TOLERANCE_OF_16_BITS[by_dtype is _ORACLE_TOLERANCES]


def coarsest_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of 16 bits that some tensor of a model has, or else the first tensor's."""
    dtypes = {p.dtype for p in model.parameters()} & {torch.bfloat16, torch.float16}
    return next(iter(dtypes), next(model.parameters()).dtype)


def repetition_tolerance(model: nn.Module) -> float:
    """Relative deviation that rounding explains where the same is computed again."""
    return _NEIGHBOR_TOLERANCES.get(coarsest_dtype(model)) or _TOLERANCE_OF_16_BITS[False]
