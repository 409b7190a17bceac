"""What is checked on a model and its data before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpgrape.capture.layout import Layouts
from hf_dpgrape.capture.observation import observe_layouts
from hf_dpgrape.capture.sites import Site
from hf_dpgrape.engine.private_step import check_losses
from hf_dpgrape.engine.tensors import sites_or_problems

#: Examples among which the shortest and the longest are looked for.
_NUM_CANDIDATES = 256

#: Relative deviation of a loss that kernels for different shapes explain, in 16 and in 32 bits.
_LOSS_TOLERANCES = {torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-6}

#: Options of models that draw one random number for all samples of a batch. Which samples share it
#: would depend on who else was drawn, so masks could not be coupled record by record.
_SHARED_RANDOMNESS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment")

#: Runs the model on collated inputs; one loss per example.
Losses = Callable[[Any], Tensor]


def refuse(model: nn.Module, problems: Mapping[str, str]) -> None:
    """Raises a ValueError that names all problems, if there are any."""
    if problems:
        raise ValueError(
            f"`{type(model).__name__}` cannot be trained privately as it is: "
            + "; ".join(f"`{name}`: {reason}" for name, reason in problems.items())
            + ". Freeze what cannot be trained with `requires_grad_(False)`."
        )


def checked_sites(model: nn.Module) -> list[Site]:
    """Sites of all trainable tensors.

    Raises:
        ValueError: a tensor or module cannot be trained exactly, the weights are float16, or the
            model draws random numbers that samples share.
    """
    halves = [n for n, p in model.named_parameters() if p.dtype == torch.float16]
    if halves:
        raise ValueError(
            f"Expected weights in float32 or bfloat16, got float16 (`{halves[0]}` and "
            f"{len(halves) - 1} more); load the model with `dtype=torch.float32`."
        )
    config = getattr(model, "config", None)
    for option in _SHARED_RANDOMNESS:
        if getattr(config, option, None):
            raise ValueError(
                f"Expected `config.{option}` off, got {getattr(config, option)}: it draws one "
                "random number for all samples of a batch, so one record would move others; set "
                "it to 0 before building the model."
            )
    sites, problems = sites_or_problems(model)
    refuse(model, problems)
    return sites


def three_examples(dataset: Any, length: Callable[[Any], int]) -> list[Any]:
    """The shortest, the longest and the first of the first few examples."""
    some = [dataset[i] for i in range(min(len(dataset), _NUM_CANDIDATES))]
    ordered = sorted(some, key=length)
    return [ordered[0], ordered[-1], some[0]]


def checked_layouts(
    model: nn.Module,
    sites: list[Site],
    examples: list[Any],
    collate: Callable[[list[Any]], Any],
    losses: Losses,
) -> Layouts:
    """How the model's layers see the batch, observed on three examples.

    Raises:
        ValueError: per-sample gradients cannot be told apart in some layer, or an example's loss
            depends on the examples beside it.
    """
    inputs = collate(examples)

    def forward(samples: list[int]) -> Tensor:
        found = losses(_select(inputs, samples))
        check_losses(found, len(samples))
        return found

    layouts = observe_layouts(model, sites, forward)
    refuse(model, {key: layout.problem for key, layout in layouts.items() if layout.problem})
    if _same(inputs, collate(examples)):  # a collator that draws masks cannot be compared
        _refuse_neighbors(model, examples, collate, losses, forward)
    return layouts


def _refuse_neighbors(
    model: nn.Module,
    examples: list[Any],
    collate: Callable[[list[Any]], Any],
    losses: Losses,
    forward: Callable[[list[int]], Tensor],
) -> None:
    """Refuses losses that move when an example is padded to the length of others."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            together = forward([0, 1, 2])
            alone = torch.cat([losses(collate([example])) for example in examples])
    finally:
        for module, mode in modes.items():
            module.training = mode
    tolerance = _LOSS_TOLERANCES[next(model.parameters()).dtype]
    if not torch.allclose(together, alone, rtol=tolerance, atol=1e-5, equal_nan=True):
        raise ValueError(
            "The loss of a training example changes with the examples beside it, so one record "
            "would move the gradients of others: padding is not masked. Make the collator return "
            "an `attention_mask`, or bring all examples to one length."
        )


def _select(inputs: Mapping[str, Any], samples: list[int]) -> dict[str, Any]:
    """Some of three examples."""
    return {
        key: value[samples]
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == 3
        else value
        for key, value in inputs.items()
    }


def _same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two collated batches hold the same tensors."""
    return all(
        torch.equal(value, second[key]) for key, value in first.items() if isinstance(value, Tensor)
    )
