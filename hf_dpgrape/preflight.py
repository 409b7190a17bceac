"""What is checked on a model before anything is trained; nothing here reads training data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_dpgrape.capture.autograd import SingleRecorder
from hf_dpgrape.capture.capture import Recorder
from hf_dpgrape.capture.layout import Layouts
from hf_dpgrape.capture.recording import BATCHED, SINGLE, Records
from hf_dpgrape.capture.rehearsal import Batch, Losses, Rehearsal, Rehearser
from hf_dpgrape.capture.single_rehearsal import SingleRehearsal, SingleRehearser
from hf_dpgrape.capture.sites import Site
from hf_dpgrape.engine.tensors import refused_modules, sites_or_problems
from hf_dpgrape.refusals import refuse_compiled
from hf_dpgrape.subspace.projection import Projection
from hf_dpgrape.synthetic import SyntheticExamples

logger = logging.getLogger(__name__)


class RefusedModelError(ValueError):
    """A model that cannot be trained privately as it is.

    Args:
        model: the model.
        problems: module or tensor name -> why.
        way_out: what to do.
    """

    def __init__(self, model: nn.Module, problems: Mapping[str, str], way_out: str) -> None:
        super().__init__(
            f"`{type(model).__name__}` cannot be trained privately as it is: "
            + "; ".join(f"`{name}`: {reason}" for name, reason in problems.items())
            + f". {way_out}."
        )
        self.problems = problems


_FREEZE = "Freeze what cannot be trained with `requires_grad_(False)`"
_OR_SINGLE = f'{_FREEZE}, or set `capture="single"`'


def refuse(model: nn.Module, problems: Mapping[str, str], way_out: str = _FREEZE) -> None:
    """Raises a `RefusedModelError` that names all problems, if there are any."""
    if problems:
        named = {name or type(model).__name__: why for name, why in problems.items()}
        raise RefusedModelError(model, named, way_out)


def refuse_in_any_capture(model: nn.Module) -> None:
    """Refuses what can be trained privately neither in batches nor one example at a time.

    Raises:
        ValueError: a module mixes samples or keeps something of them, or weights are float16.
    """
    halves = [n for n, p in model.named_parameters() if p.dtype == torch.float16]
    if halves:
        raise ValueError(
            f"Expected weights in float32 or bfloat16, got float16 (`{halves[0]}` and "
            f"{len(halves) - 1} more); load the model with `dtype=torch.float32`."
        )
    refuse(model, refused_modules(model))


def checked_sites(model: nn.Module) -> list[Site]:
    """Sites of all trainable tensors, for batched capture.

    Raises:
        ValueError: a tensor or module cannot be trained exactly, or the weights are float16, or
            layers are compiled.
    """
    refuse_in_any_capture(model)
    refuse_compiled(model)
    sites, problems = sites_or_problems(model)
    refuse(model, problems, _OR_SINGLE)
    return sites


class LayoutsByShape:
    """Layouts of the sites for every shape that comes, as a recorder asks for them.

    Where layers see one row per sample, that holds at every length. Where they see several, as
    positions or windows folded into the first dimension, their number is a function of the shape:
    the model then runs on synthetic examples of each shape that is new.

    Args:
        rehearser: rehearses the model.
        known: layouts of the shapes that were rehearsed.
        examples: makes synthetic examples.
    """

    def __init__(self, rehearser: Rehearser, known: Layouts, examples: SyntheticExamples) -> None:
        self._rehearser = rehearser
        self._known = known
        self._examples = examples
        self._by_shape: dict[tuple[tuple[str, torch.Size], ...], Layouts] = {}
        self._is_folded = any(
            rows > 1 for lay in known.values() for rows in (*lay.inputs, lay.output, lay.broadcast)
        )

    def __call__(self, inputs: Mapping[str, Any]) -> Layouts:
        """Layouts for inputs of this shape.

        Raises:
            RuntimeError: per-sample gradients cannot be told apart at this shape.
        """
        if not self._is_folded:
            return self._known
        shapes = ((k, v.shape[1:]) for k, v in inputs.items() if isinstance(v, Tensor))
        key = tuple(sorted(shapes))
        if key not in self._by_shape:
            layouts, problems = self._rehearser.layouts_at(self._examples.like(inputs))
            for name, problem in problems.items():
                raise RuntimeError(f"`{name}`: {problem}, at a length that was not met before.")
            self._by_shape[key] = layouts
        return self._by_shape[key]


_Found = TypeVar("_Found", Rehearsal, SingleRehearsal)


def rehearsed(
    model: nn.Module,
    rehearser: Callable[[Sequence[Batch]], _Found],
    examples: SyntheticExamples,
    settle: Callable[[Mapping[str, Any]], str],
    way_out: str = _FREEZE,
) -> _Found:
    """The outcome of a rehearsal that found nothing wrong.

    Args:
        model: the model.
        rehearser: rehearses it.
        examples: synthetic examples.
        settle: compares the per-sample loss with the model's own on one of them; tells why they
            differ, or nothing.
        way_out: what to do if the rehearsal finds something.

    Raises:
        ValueError: the model cannot be trained privately, or takes no synthetic examples.
    """
    failure: Exception | None = None
    for batches in examples.choices():
        try:
            if differs := settle(batches[0]([0])):
                refuse(model, {"": differs}, way_out)
            found = rehearser(batches)
        except RefusedModelError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
            failure = failure or error
            continue
        refuse(model, found.problems, way_out)
        return found
    assert failure is not None
    raise ValueError(
        f"`{type(model).__name__}` could not be rehearsed on synthetic examples "
        f"({_first_line(failure)}); if it needs inputs of a special kind, override "
        "`synthetic_examples` of the trainer."
    ) from failure


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Decides how a model's per-sample gradients are taken.

    Guarantees:
        What is decided depends on the model, the arguments and synthetic examples alone.

    Args:
        model: the model.
        projections: how each trainable tensor is projected, by canonical name.
        examples: synthetic examples.
        losses: runs the model on inputs; one loss per sample.
        settle: see `rehearsed`.
        take_own_loss_: makes the loss the model's own, of one example at a time.
    """

    model: nn.Module
    projections: Mapping[str, Projection]
    examples: SyntheticExamples
    losses: Losses
    settle: Callable[[Mapping[str, Any]], str]
    take_own_loss_: Callable[[], None]

    def recorder(self, capture: str, *, why_alone: str = "") -> tuple[Records, bool]:
        """What takes the gradients, and whether it does so one example at a time.

        Args:
            capture: one of `CAPTURES`.
            why_alone: why examples cannot share a physical batch, if they cannot.

        Raises:
            ValueError: the model cannot be trained privately.
        """
        if capture == SINGLE:
            return self._single(), True
        try:
            refuse(self.model, {"": why_alone} if why_alone else {}, _OR_SINGLE)
            return self._batched(), False
        except Exception as error:  # whatever it is: taken one by one, none of it may matter
            if capture == BATCHED:
                raise
            recorder = self._single()
            logger.warning(
                "Gradients are taken one example at a time, which takes about 1.5 to 2.5 times as "
                "long as whole batches would, because of %s.",
                _cause(self.model, error),
            )
            return recorder, True

    def _batched(self) -> Recorder:
        """From whole physical batches, if the rehearsal proves that exact."""
        sites = checked_sites(self.model)
        rehearser = Rehearser(self.model, sites, self.projections, self.losses)
        found = rehearsed(self.model, rehearser, self.examples, self.settle, _OR_SINGLE)
        layouts = LayoutsByShape(rehearser, found.layouts, self.examples)
        return Recorder(self.model, found.sites, self.projections, layouts)

    def _single(self) -> SingleRecorder:
        """One example at a time, if nothing passes from one to the next."""
        refuse_in_any_capture(self.model)
        rehearser = SingleRehearser(self.model, self.projections, self.losses)
        found = rehearsed(self.model, rehearser, self.examples, self._settle_alone)
        return SingleRecorder(self.model, self.projections, found.num_passes)

    def _settle_alone(self, inputs: Mapping[str, Any]) -> str:
        """Takes the model's own loss where no per-sample loss is the same."""
        if self.settle(inputs):
            self.take_own_loss_()
        return ""


def _cause(model: nn.Module, error: Exception) -> str:
    """The first thing that speaks against whole batches, with its name."""
    problems = error.problems if isinstance(error, RefusedModelError) else {}
    name, why = next(iter(problems.items()), (type(model).__name__, _first_line(error)))
    return f"`{name}`: {why.partition('; ')[0]}".rstrip(".")  # what to do follows there


def _first_line(error: Exception) -> str:
    """The first line of an exception, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
