"""Which dimension of each layer's tensors runs over samples: observed, not guessed.

Sizes alone cannot tell: a (T, T) table of relative positions looks like a batch when B == T, and
a router may hand a layer a number of rows that happens to be a multiple of B. So before training
the model is run without gradients on two, on two others and on three examples. What grows with
the number of examples is batched; a sample's values must not depend on the other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

#: Relative deviation of a sample's values that different kernels for the same shapes explain.
_ISOLATION_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Layout:
    """How one layer sees the batch.

    Attributes:
        inputs: rows per sample of each input tensor's first dimension; 0 if it is not batched.
        output: the same for the output; 0 means a first dimension of 1, broadcast to all samples.
        problem: why per-sample gradients cannot be told apart here; empty if they can.
    """

    inputs: tuple[int, ...] = ()
    output: int = 1
    problem: str = ""


Layouts = Mapping[str, Layout]


@dataclass(frozen=True)
class _Seen:
    """What one run showed of one call."""

    inputs: tuple[torch.Size, ...]
    output: torch.Size | None
    first_sample: float


def _rows(two: int, three: int) -> int | None:
    """Rows per sample of a dimension that has these sizes for 2 and 3 samples; None if neither."""
    if two == three:
        return 0
    return two // 2 if two % 2 == 0 and three == two // 2 * 3 else None


def _observe(
    modules: Mapping[str, nn.Module], run: Callable[[], Any], num_samples: int
) -> dict[str, list[_Seen]]:
    """Runs the model once and notes, per module, the shapes of every call."""
    seen: dict[str, list[_Seen]] = {name: [] for name in modules}

    def note(name: str, args: Any, kwargs: Any, output: Any) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
        if not isinstance(output, Tensor) or output.ndim == 0:
            seen[name].append(_Seen(shapes, None, 0.0))
            return
        rows = output[: max(1, output.shape[0] // num_samples)].double()
        weights = torch.linspace(1, 2, rows.numel(), dtype=torch.float64, device=rows.device)
        fingerprint = float((rows.flatten() * weights).abs().sum())
        seen[name].append(_Seen(shapes, output.shape, fingerprint))

    handles = [
        module.register_forward_hook(
            lambda _, args, kwargs, output, name=name: note(name, args, kwargs, output),
            with_kwargs=True,
        )
        for name, module in modules.items()
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _layout(pair: _Seen, other: _Seen, triple: _Seen) -> Layout:
    """The layout that three views of one call agree on."""
    if pair.output is None or triple.output is None:
        return Layout(problem="its output is not a single tensor")
    if len(pair.inputs) != len(triple.inputs):
        return Layout(problem="it takes different arguments in different calls")
    inputs = [
        _rows(two[0], three[0]) if two and three else 0
        for two, three in zip(pair.inputs, triple.inputs, strict=True)
    ]
    output = _rows(pair.output[0], triple.output[0])
    if output is None or None in inputs:
        return Layout(problem="the number of rows it sees is not a multiple of the batch size")
    if output == 0 and pair.output[0] != 1:
        return Layout(problem=f"its output {tuple(pair.output)} has no batch dimension in front")
    scale = abs(pair.first_sample) + 1e-12
    if output and abs(pair.first_sample - other.first_sample) > _ISOLATION_TOLERANCE * scale:
        return Layout(problem="what it computes for one sample depends on the other samples")
    return Layout(inputs=tuple(i or 0 for i in inputs), output=output)


def observe_layouts(
    model: nn.Module, names: Iterable[str], forward: Callable[[list[int]], Any]
) -> dict[str, Layout]:
    """Layouts of the modules `names`; a module that is never called has none.

    Args:
        model: the model, put into evaluation mode for the time of the observation.
        names: qualified names of modules.
        forward: runs the model on the examples at these positions of a public or private batch of
            three; only shapes and a yes or no about isolation are kept.
    """
    modules = {name: model.get_submodule(name) for name in names}
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        pair = _observe(modules, lambda: forward([0, 1]), 2)
        other = _observe(modules, lambda: forward([0, 2]), 2)
        triple = _observe(modules, lambda: forward([0, 1, 2]), 3)
    finally:
        for module, mode in training.items():
            module.training = mode
    layouts = {}
    for name in modules:
        if not len(pair[name]) == len(other[name]) == len(triple[name]):
            layouts[name] = Layout(problem="how often it is called depends on the batch")
            continue
        found = {
            _layout(*views) for views in zip(pair[name], other[name], triple[name], strict=True)
        }
        if len(found) == 1:
            layouts[name] = found.pop()
        elif found:
            problems = [layout.problem for layout in found if layout.problem]
            reason = problems[0] if problems else "its calls see the batch in different ways"
            layouts[name] = Layout(problem=reason)
    return layouts
