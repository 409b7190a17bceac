"""A model's own loss of one example, `model(**example).loss`, where none of ours is known.

It may average, compare or balance over a batch. With one example in it, that is the example's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

#: Arguments by which heads take labels.
LABELS = ("labels", "start_positions", "end_positions")


def own_loss_of_one(head: Any, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """The model's own loss of one example, (1,)."""
    rows = {len(inputs[k]) for k in ("labels", "input_ids") if _has_rows(inputs.get(k))}
    if rows - {1}:
        raise ValueError(
            "Expected one example, whose loss is the model's own, got a batch of several; set "
            '`capture="single"`.'
        )
    with named_outputs(head.config), kept_problem_type(head.config):
        outputs = model(**inputs)
    loss = getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"Expected `{type(head).__name__}` to return a `loss` of one number for one "
            "example, got none or several; name the columns that its forward takes, or pass "
            "`compute_loss_func`."
        )
    return loss.reshape(1), outputs


def takes_labels(head: nn.Module) -> bool:
    """Whether a head's forward has an argument for labels, under some name."""
    names = inspect.signature(head.forward).parameters
    return any("label" in name or name in LABELS for name in names)


@contextmanager
def named_outputs(config: Any) -> Iterator[None]:
    """Lets a model name its outputs although its configuration asks for tuples."""
    wanted = getattr(config, "return_dict", True)
    if wanted is True:  # the usual case leaves the configuration alone
        yield
        return
    config.return_dict = True  # as an argument, it would not reach the models inside
    try:
        yield
    finally:
        config.return_dict = wanted


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations of a model and of those inside it, which may be copies."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


@contextmanager
def without_caches(configs: Iterable[Any]) -> Iterator[None]:
    """Lets no part of a model fill a cache, which training never reads.

    Some models cannot even make theirs outside of generation.
    """
    filling = [config for config in configs if getattr(config, "use_cache", False) is True]
    for config in filling:
        config.use_cache = False
    try:
        yield
    finally:
        for config in filling:
            config.use_cache = True


@contextmanager
def kept_problem_type(config: Any) -> Iterator[None]:
    """Forgets what a model notes down of the labels that it saw first."""
    problem_type = getattr(config, "problem_type", None)
    try:
        yield
    finally:
        if getattr(config, "problem_type", None) != problem_type:
            config.problem_type = problem_type


def _has_rows(value: Any) -> bool:
    """Whether a value is a tensor, or a list, of one row per sample."""
    return (isinstance(value, Tensor) and value.ndim > 0) or isinstance(value, list)
