"""Finds out how each layer sees the batch, by running the model on three examples of one shape.

Sizes alone cannot tell: a (T, T) table of relative positions looks like a batch when B == T, and
a router may hand a layer a number of rows that happens to be a multiple of B. So the model is run
without gradients on two, on two others and on three examples. What grows with the number of
examples is batched, and does so equally whichever examples they are; what is broadcast over the
batch must bear being expanded to one copy per sample.

That a sample's values do not depend on the other samples is for the rehearsal to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dpgrape.gradients.draws import Draws
from hf_dpgrape.gradients.layout import Layout
from hf_dpgrape.gradients.recorder import expanded, intercepted, with_batch
from hf_dpgrape.gradients.sites import Site

#: Runs the model on the examples at these positions of a batch of three; one loss per example.
Forward = Callable[[list[int]], Tensor]

#: Relative deviation of a loss that kernels for tables and for copies of them explain.
_EXPANSION_TOLERANCE = 1e-3


@dataclass(frozen=True)
class _Seen:
    """What one run showed of one call."""

    inputs: tuple[torch.Size, ...]
    output: torch.Size | None


def _rows(two: int, three: int) -> int | None:
    """Rows per sample of a dimension that has these sizes for 2 and 3 samples; None if neither."""
    if two == three:
        return 0
    # Two samples have 2 k rows and three have 3 k; anything else does not follow the samples.
    return two // 2 if two % 2 == 0 and three == two // 2 * 3 else None


def _observe(
    sites: Mapping[str, Site], forward: Forward, samples: list[int]
) -> dict[str, list[_Seen]]:
    """Runs the model once and notes, per site, what every call looked like."""
    seen: dict[str, list[_Seen]] = {key: [] for key in sites}

    def note(key: str, args: Any, kwargs: Any, output: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
        plain = isinstance(output, Tensor) and output.ndim > 0
        seen[key].append(_Seen(shapes, output.shape if plain else None))
        return output

    with torch.no_grad(), ExitStack() as stack:
        for key, site in sites.items():
            on_output = lambda args, kwargs, out, key=key: note(key, args, kwargs, out)  # noqa: E731
            stack.enter_context(intercepted(site, on_output))
        forward(samples)
    return seen


def _layout(pair: _Seen, other: _Seen, triple: _Seen) -> Layout:
    """The layout that three views of one call agree on."""
    if pair.output is None or triple.output is None:
        return Layout(problem="its output is not a single tensor")
    if len(pair.inputs) != len(triple.inputs):
        return Layout(problem="it takes different arguments in different calls")
    if pair != other:
        return Layout(problem="the number of rows it sees depends on what the examples hold")
    inputs = [
        _rows(two[0], three[0]) if two and three else 0
        for two, three in zip(pair.inputs, triple.inputs, strict=True)
    ]
    output = _rows(pair.output[0], triple.output[0])
    if output is None or None in inputs:
        return Layout(problem="the number of rows it sees is not a multiple of the batch size")
    # A table made once has a first dimension of 1, which can be expanded; another size is its own.
    if output == 0 and pair.output[0] != 1:
        return Layout(problem=f"its output {tuple(pair.output)} has no batch dimension in front")
    return Layout(inputs=tuple(i or 0 for i in inputs), output=output)


def _agree(views: Sequence[Sequence[_Seen]]) -> Layout | None:
    """The layout of a site from the calls of three runs; None if it was never called."""
    if len({len(calls) for calls in views}) != 1:
        return Layout(problem="how often it is called depends on the batch")
    found = {_layout(*calls) for calls in zip(*views, strict=True)}
    if len(found) <= 1:
        return found.pop() if found else None
    problems = [layout.problem for layout in found if layout.problem]
    return Layout(problem=problems[0] if problems else "its calls see the batch in different ways")


def observe_layouts(model: nn.Module, sites: Sequence[Site], forward: Forward) -> dict[str, Layout]:
    """Layouts of all sites, by `Site.key`; a site that is never called has none.

    Args:
        model: the model; its random draws are replaced by their expectations.
        sites: sites of the tensors to train.
        forward: runs the model on some of three examples.
    """
    watched = {site.key: site for site in sites if site.rule is not None}
    # A layer that works on a table sees no sample. How many rows each sample has at this place in
    # the model, which its expanded output then needs, is seen at the module around it.
    parents = {
        site.key: Site(name, model.get_submodule(name))
        for site in watched.values()
        if (name := site.name.rpartition(".")[0])
    }
    all_watched = {**watched, **{f"parent of {key}": site for key, site in parents.items()}}
    with Draws(model, "mean"):
        return _observed(sites, watched, all_watched, forward)


def _observed(
    sites: Sequence[Site],
    watched: Mapping[str, Site],
    all_watched: Mapping[str, Site],
    forward: Forward,
) -> dict[str, Layout]:
    """Layouts where the model is deterministic."""
    # The second pair differs from the first in what its examples hold, and in nothing else.
    runs = [_observe(all_watched, forward, samples) for samples in ([0, 1], [0, 2], [0, 1, 2])]
    layouts: dict[str, Layout] = {}
    for key in watched:
        if (layout := _agree([run[key] for run in runs])) is not None:
            layouts[key] = replace(
                layout,
                broadcast=_first_rows(runs[0], runs[2], f"parent of {key}"),
                calls=len(runs[0][key]),
            )
    _rehearse_expansion(watched, layouts, forward)
    for site in sites:
        if site.rule is None:
            layouts[site.key] = Layout(problem=_bare_problem(site, forward))
    return layouts


def _first_rows(
    pair: Mapping[str, list[_Seen]], triple: Mapping[str, list[_Seen]], key: str
) -> int:
    """Rows per sample of the first batched input of a module; 1 if unknown."""
    if not pair.get(key) or not triple.get(key):
        return 1
    for two, three in zip(pair[key][0].inputs, triple[key][0].inputs, strict=False):
        if two and three and (rows := _rows(two[0], three[0])):
            return rows
    return 1


def _rehearse_expansion(
    sites: Mapping[str, Site], layouts: dict[str, Layout], forward: Forward
) -> None:
    """Marks broadcast outputs of which the model does not take one copy per sample."""
    with torch.no_grad():
        plain = forward([0, 1])
        for key, site in sites.items():
            layout = layouts.get(key, Layout())
            if layout.problem or layout.output:
                continue
            on_output = lambda _, __, out, layout=layout: with_batch(out, layout, 2)  # noqa: E731
            with intercepted(site, on_output):
                if not _same(plain, forward):
                    problem = "its output is shared by the samples in a way that is not broadcast"
                    layouts[key] = Layout(problem=problem)


def _same(plain: Tensor, forward: Forward) -> bool:
    """Whether the losses of examples 0 and 1 are still these."""
    try:
        return torch.allclose(forward([0, 1]), plain, rtol=_EXPANSION_TOLERANCE)
    except (RuntimeError, ValueError):  # shapes that do not fit
        return False


def _bare_problem(site: Site, forward: Forward) -> str:
    """Why the bare tensors of a site cannot have one value per sample; empty if they can.

    With a shifted value for the second sample alone, the first sample's loss must stay what it
    was and the second's must become what it is when the tensor itself is shifted.
    """
    own = {local: site.module.get_parameter(local).detach() for local in site.tensors}
    # By 1, not by little: what is compared are losses, with a tolerance.
    shifted = {local: value + 1 for local, value in own.items()}
    with torch.no_grad():
        plain = forward([0, 1])
        with _values(site, shifted):
            everywhere = forward([0, 1])
        mixed = {local: torch.stack([own[local], shifted[local]]) for local in own}
        with expanded(site, 2, mixed):
            want = torch.stack([plain[0], everywhere[1]])
            if _same(want, forward):
                return ""
    return "it is used in a way that does not let every sample have its own copy"


@contextmanager
def _values(site: Site, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values for a site's own tensors inside the block."""
    originals = {local: site.module._parameters[local] for local in values}
    try:
        for local, value in values.items():
            site.module._parameters[local] = nn.Parameter(value, requires_grad=False)
        yield
    finally:
        site.module._parameters.update(originals)
