"""Which tensors are trained, how each is projected, and what cannot be trained exactly."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_dpgrape.gradients.sites import Site, find_sites, is_loaded, refusal
from hf_dpgrape.subspace.projection import Projection, Scale

#: Differing names that an error text shows.
_NUM_SHOWN = 3

TargetModules = str | list[str] | None


def refuse_other_tensors(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Refuses a model whose trainable tensors are no longer those that a run began with.

    Args:
        model: the model as it is now.
        weights: the tensors that the run trains, by canonical name.

    Raises:
        RuntimeError: a tensor was frozen, thawed, or exchanged for another.
    """
    now = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = sorted({*now, *weights})
    if changed := [f"`{n}`" for n in names if now.get(n) is not weights.get(n)]:
        more = f" and {len(changed) - _NUM_SHOWN} more" if len(changed) > _NUM_SHOWN else ""
        raise RuntimeError(
            "Expected the trainable tensors that the run began with, but some were frozen, thawed "
            f"or exchanged since ({', '.join(changed[:_NUM_SHOWN])}{more}): set `requires_grad` "
            "before `train()`, and leave it."
        )


def newly_initialized(model: nn.Module) -> frozenset[str]:
    """Trainable tensors that the checkpoint did not have, such as a fresh classification head.

    Empty for a model that was not loaded from a checkpoint at all: then no part of it is fresher
    than the rest.
    """
    loaded = loaded_tensors(model)
    if not loaded:
        return frozenset()
    return frozenset(n for n, p in model.named_parameters() if p.requires_grad and n not in loaded)


def loaded_tensors(model: nn.Module) -> frozenset[str]:
    """Tensors that came from a checkpoint; empty for a model made from a configuration."""
    loaded = frozenset(n for n, p in model.named_parameters() if is_loaded(p))
    return loaded | _resized_output(model) if loaded else loaded


def _resized_output(model: Any) -> frozenset[str]:
    """The output layer of a loaded model, if the checkpoint had one.

    Adding tokens exchanges it for another, with the checkpoint's rows and some new ones, that is
    not marked as loaded. Whether the checkpoint had one, the class tells that it is of.
    """
    base = getattr(model, "get_base_model", None)
    head = base() if callable(base) else model
    kinds = getattr(getattr(head, "config", None), "architectures", None) or []
    get = getattr(head, "get_output_embeddings", None)
    output = get() if callable(get) and type(head).__name__ in kinds else None
    own = {id(p) for p in output.parameters()} if isinstance(output, nn.Module) else set()
    return frozenset(n for n, p in model.named_parameters() if id(p) in own)


def matching(names: Collection[str], parts: list[str]) -> frozenset[str]:
    """Names with one of these parts between dots, as `head` in `model.head.weight`."""
    return frozenset(n for n in names if any(f".{part}." in f".{n}." for part in parts))


def _is_target(name: str, target_modules: TargetModules, head: frozenset[str]) -> bool:
    """Whether a tensor is to be projected, its shape permitting."""
    if target_modules is None or target_modules == "all-linear":
        return name not in head
    if isinstance(target_modules, str):
        return re.search(target_modules, name) is not None
    return bool(matching([name], target_modules))


def require_matches(names: Collection[str], argument: str, parts: TargetModules) -> None:
    """Refuses a pattern, or a part out of several, that names no tensor.

    Args:
        names: of the trainable tensors.
        argument: that has the patterns.
        parts: a regular expression or parts of names; None and `all-linear` name what they find.

    Raises:
        ValueError: nothing has such a name.
    """
    if parts is None or parts == "all-linear":
        return
    if isinstance(parts, str):
        unmatched = [] if any(re.search(parts, name) for name in names) else [parts]
    else:
        unmatched = [part for part in parts if not matching(names, [part])]
        unmatched = unmatched if parts else [""]
    if unmatched:
        ones = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
        shown = [*ones[:_NUM_SHOWN], *ones[-_NUM_SHOWN:]] if len(ones) > 2 * _NUM_SHOWN else ones
        raise ValueError(
            f"Expected `{argument}` to match trainable tensors, got "
            f"{', '.join(map(repr, unmatched))}, which matches none; name modules of the model, as "
            f"{', '.join(f'`{name}`' for name in shown)}."
        )


def make_projections(
    model: nn.Module,
    *,
    rank: int,
    scale: Scale,
    seed: int,
    head: frozenset[str],
    target_modules: TargetModules = None,
) -> dict[str, Projection]:
    """The projection of every trainable tensor, by canonical name.

    Args:
        model: the model; tied tensors appear once, under the first of their names.
        rank: r; 0 for full-space training.
        scale: standard deviation of the projections' entries.
        seed: public seed.
        head: tensors that are not projected by default.
        target_modules: which are projected: a regular expression or parts of names; None for all
            but the head.

    Raises:
        ValueError: something of `target_modules` matches nothing.
    """
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    require_matches(weights, "optim_target_modules", target_modules)
    return {
        name: Projection(
            name,
            p.shape,
            rank=rank if _is_target(name, target_modules, head) else 0,
            scale=scale,
            seed=seed,
            device=p.device,
        )
        for name, p in weights.items()
    }


def require_projected(projections: Mapping[str, Projection], target_modules: TargetModules) -> None:
    """Refuses a choice of tensors of which none can be projected.

    Args:
        projections: of all trainable tensors, with a rank above 0.
        target_modules: which tensors the user has chosen; None if they did not.

    Raises:
        ValueError: all that was chosen are vectors, or not larger than the rank.
    """
    if target_modules is None or any(p.side is not None for p in projections.values()):
        return
    raise ValueError(
        f"Expected `optim_target_modules`={target_modules!r} to choose matrices with both sides "
        "above `rank`, got none, so that nothing would be projected; choose others, lower `rank`, "
        "or set `rank=0` for full space."
    )


def projected_shapes(
    model: nn.Module, *, rank: int, head: frozenset[str], target_modules: TargetModules = None
) -> dict[str, tuple[int, ...]]:
    """The shape in which each trainable tensor's gradient is released, by canonical name."""
    projections = make_projections(
        model, rank=rank, scale="1/sqrt(r)", seed=0, head=head, target_modules=target_modules
    )
    return {name: tuple(projection.shape) for name, projection in projections.items()}


@dataclass(frozen=True)
class TensorReport:
    """What happens to one trainable tensor."""

    name: str
    shape: tuple[int, ...]
    projected_shape: tuple[int, ...]
    rule: str
    problem: str = ""


def sites_or_problems(model: nn.Module) -> tuple[list[Site], dict[str, str]]:
    """Sites of all trainable tensors, and the reasons why some tensors or modules are refused."""
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    sites, problems = find_sites(model, names)
    return sites, problems | refused_modules(model)


def refused_modules(model: nn.Module) -> dict[str, str]:
    """Modules that no way of capture can train privately, and why."""
    return {n: reason for n, module in model.named_modules() if (reason := refusal(module))}


def report_tensors(
    model: nn.Module, *, rank: int, head: frozenset[str], target_modules: TargetModules = None
) -> list[TensorReport]:
    """One row per trainable tensor, and one per module that is refused as a whole."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    require_matches(names, "optim_target_modules", target_modules)
    sites, problems = sites_or_problems(model)
    rules: dict[str, list[str]] = {}
    for site in sites:
        for name in site.tensors.values():
            rules.setdefault(name, []).append(site.rule_name)
    rows = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        wanted = rank if _is_target(name, target_modules, head) else 0
        projected = Projection(name, p.shape, rank=wanted).shape
        rule = " + ".join(dict.fromkeys(rules.get(name, [])))
        problem = problems.pop(name, "")
        rows.append(TensorReport(name, tuple(p.shape), tuple(projected), rule, problem))
    rows += [TensorReport(name, (), (), "", reason) for name, reason in problems.items()]
    return rows
