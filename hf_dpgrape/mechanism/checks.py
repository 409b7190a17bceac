"""What is checked on a model before anything is trained; nothing here reads training data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.layout import Layouts
from hf_dpgrape.gradients.rehearsal import Rehearsal, Rehearser
from hf_dpgrape.gradients.sites import Site
from hf_dpgrape.mechanism.synthetic import SyntheticExamples
from hf_dpgrape.mechanism.tensors import sites_or_problems


class RefusedModelError(ValueError):
    """A model that cannot be trained privately as it is.

    Attributes:
        problems: name of a tensor or module -> why it cannot be trained.
    """

    def __init__(self, message: str, problems: Mapping[str, str]) -> None:
        super().__init__(message)
        self.problems = dict(problems)


def refuse(model: nn.Module, problems: Mapping[str, str]) -> None:
    """Raises a `RefusedModelError` that names all problems, if there are any."""
    if problems:
        raise RefusedModelError(
            f"`{type(model).__name__}` cannot be trained privately as it is: "
            + "; ".join(f"`{name}`: {reason}" for name, reason in problems.items())
            + ". Freeze what cannot be trained with `requires_grad_(False)`.",
            problems,
        )


def checked_sites(model: nn.Module) -> list[Site]:
    """Sites of all trainable tensors.

    Raises:
        ValueError: a tensor or module cannot be trained exactly, nothing is trained, or the model
            is compiled, wrapped or in float16.
    """
    _refuse_wrapped(model)
    _refuse_compiled(model)
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
    sites, problems = sites_or_problems(model)
    refuse(model, problems)
    return sites


def _refuse_compiled(model: nn.Module) -> None:
    """Refuses a model whose layers run compiled: hooks would not see what passes through them."""
    for name, module in model.named_modules():
        # `Module.compile` keeps a compiled call; `torch.compile(module)` wraps the module.
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise ValueError(
                f"Expected a model that is not compiled, got `{name or type(model).__name__}` "
                "compiled: the hooks that take per-sample gradients need eager mode; pass the "
                "model as it was before `compile`."
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


def rehearsed(
    model: nn.Module,
    rehearser: Rehearser,
    examples: SyntheticExamples,
    settle: Callable[[Mapping[str, Any]], str],
) -> Rehearsal:
    """The outcome of a rehearsal that found nothing wrong.

    Args:
        model: the model.
        rehearser: rehearses it.
        examples: synthetic examples.
        settle: compares the per-sample loss with the model's own on one of them; tells why they
            differ, or nothing.

    Raises:
        ValueError: the model cannot be trained privately, or takes no synthetic examples.
    """
    failure: Exception | None = None
    for batches in examples.choices():
        try:
            if differs := settle(batches[0]([0])):
                refuse(model, {type(model).__name__: differs})
            found = rehearser(batches)
        except RefusedModelError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
            failure = failure or error
            continue
        refuse(model, {name or type(model).__name__: why for name, why in found.problems.items()})
        return found
    assert failure is not None
    reason = str(failure).strip().splitlines()[0] if str(failure) else type(failure).__name__
    raise ValueError(
        f"`{type(model).__name__}` could not be rehearsed on synthetic examples ({reason}); if it "
        "needs inputs of a special kind, override `synthetic_examples` of the trainer, or pass "
        "`synthetic` to `PrivateTraining`."
    ) from failure
