"""What is checked on a model before anything is trained; nothing here reads training data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.layout import Layouts
from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.gradients.recording import BATCHED, SINGLE, Records
from hf_dpgrape.gradients.rehearsal import Batch, Losses, Rehearsal, Rehearser
from hf_dpgrape.gradients.single import SingleRecorder
from hf_dpgrape.gradients.single_rehearsal import SingleRehearsal, SingleRehearser
from hf_dpgrape.gradients.sites import Site
from hf_dpgrape.mechanism.synthetic import SyntheticExamples
from hf_dpgrape.mechanism.tensors import refused_modules, sites_or_problems
from hf_dpgrape.subspace.projection import Projection

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
        ValueError: a module mixes samples or keeps something of them, nothing is trained, or the
            model is wrapped or in float16.
    """
    _refuse_wrapped(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "Expected a model with trainable tensors, got one that is frozen as a whole; set "
            "`requires_grad_(True)` on those to train."
        )
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
    _refuse_compiled(model)
    sites, problems = sites_or_problems(model)
    refuse(model, problems, _OR_SINGLE)
    return sites


def _refuse_compiled(model: nn.Module) -> None:
    """Refuses a model whose layers run compiled: hooks would not see what passes through them."""
    for name, module in model.named_modules():
        # `Module.compile` keeps a compiled call; `torch.compile(module)` wraps the module.
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise ValueError(
                f"Expected a model that is not compiled, got `{name or type(model).__name__}` "
                "compiled: the hooks that take per-sample gradients of whole batches need eager "
                'mode; pass the model as it was before `compile`, or set `capture="single"`.'
            )


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuses a model inside a wrapper that waits for gradients of full size."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(
            f"Expected the model itself, got it inside `{type(model).__name__}`, which waits for "
            "gradients that are never formed; pass the model as it was before (processes add up "
            "their private sums by themselves)."
        )


def refuse_other_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer of another model, or of a part of what is to be trained.

    Args:
        optimizer: on the weights themselves.
        model: whose weights they are to be.

    Raises:
        ValueError: it holds parameters that are not the model's, or lacks some.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held - {id(p) for p in model.parameters()}:
        raise ValueError(
            "The optimizer that was passed holds parameters that are not the model's; build it on "
            "`model.parameters()` of the model that is trained."
        )
    trained = {name: id(p) for name, p in model.named_parameters() if p.requires_grad}
    if missing := sorted(name for name, parameter in trained.items() if parameter not in held):
        raise ValueError(
            f"The optimizer lacks {len(missing)} of {len(trained)} trainable tensors, as "
            f"`{missing[-1]}`, which would never move: give it all of them, or freeze these with "
            "`requires_grad_(False)`."
        )


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
        "`synthetic_examples` of the trainer, or pass `synthetic` to `PrivateTraining`."
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
        take_own_loss_: makes the loss the model's own, of one example at a time; None if it cannot
            be.
    """

    model: nn.Module
    projections: Mapping[str, Projection]
    examples: SyntheticExamples
    losses: Losses
    settle: Callable[[Mapping[str, Any]], str]
    take_own_loss_: Callable[[], None] | None

    def recorder(self, capture: str, *, why_alone: str = "") -> tuple[Records, bool]:
        """What takes the gradients, and whether it does so one example at a time.

        Args:
            capture: one of `CAPTURES`.
            why_alone: why examples cannot share a physical batch, if they cannot.

        Raises:
            ValueError: the model cannot be trained privately.
        """
        if capture == SINGLE:
            return self.single(), True
        try:
            refuse(self.model, {"": why_alone} if why_alone else {}, _OR_SINGLE)
            rehearser, found = self.rehearsed_in_batches()
        except Exception as error:  # whatever it is: taken one by one, none of it may matter
            if capture == BATCHED:
                raise
            recorder = self.single()
            logger.warning(
                "Gradients are taken one example at a time, at about the time of an ordinary step "
                "where a device holds one long row (measured: 1.09 of it for OPT-125m at 1,024 "
                "tokens, 0.81 from batches) and up to three times that where it holds several "
                "short ones (1.5 for a small Mixtral), because of %s.",
                cause_of(self.model, error),
            )
            return recorder, True
        layouts = LayoutsByShape(rehearser, found.layouts, self.examples)
        return Recorder(self.model, found.sites, self.projections, layouts), False

    def rehearsed_in_batches(self) -> tuple[Rehearser, Rehearsal]:
        """A rehearsal that proves gradients from whole physical batches exact.

        Raises:
            Exception: they are not, or the model raised something on a synthetic batch.
        """
        sites = checked_sites(self.model)
        rehearser = Rehearser(self.model, sites, self.projections, self.losses)
        return rehearser, rehearsed(self.model, rehearser, self.examples, self.settle, _OR_SINGLE)

    def single(self) -> SingleRecorder:
        """Takes the gradients of one example at a time, if nothing passes from one to the next.

        Raises:
            ValueError: the model cannot be trained privately.
        """
        refuse_in_any_capture(self.model)
        rehearser = SingleRehearser(self.model, self.projections, self.losses)
        found = rehearsed(self.model, rehearser, self.examples, self._settle_alone)
        return SingleRecorder(self.model, self.projections, found.num_passes)

    def _settle_alone(self, inputs: Mapping[str, Any]) -> str:
        """Takes the model's own loss where no per-sample loss is the same."""
        differs = self.settle(inputs)
        if not differs or self.take_own_loss_ is None:
            return differs
        self.take_own_loss_()
        return ""


def cause_of(model: nn.Module, error: Exception) -> str:
    """The first thing that speaks against whole batches, with its name."""
    problems = error.problems if isinstance(error, RefusedModelError) else {}
    name, why = next(iter(problems.items()), (type(model).__name__, _first_line(error)))
    return f"`{name}`: {why.partition('; ')[0]}".rstrip(".")  # what to do follows there


def _first_line(error: Exception) -> str:
    """The first line of an exception, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
