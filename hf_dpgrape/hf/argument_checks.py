"""Checks of the values of our own arguments, one sentence each."""

from __future__ import annotations

import math
from dataclasses import fields

from transformers import TrainingArguments

from hf_dpgrape.optim.table import MUON


def refuse_unknown_words(args: TrainingArguments) -> None:
    """Refuses a word that is not on the list of its argument, where the argument is ours."""
    theirs = {f.name for f in fields(TrainingArguments)}
    for f in fields(args):
        choices = None if f.name in theirs else f.metadata.get("choices")
        if choices and getattr(args, f.name) not in choices:
            raise ValueError(f"`{f.name}` must be one of {choices}, got {getattr(args, f.name)!r}.")


def refuse_negative(**numbers: tuple[int | None, str]) -> None:
    """Refuses numbers below 0.

    Args:
        numbers: value and meaning of 0 of each argument.
    """
    for name, (number, meaning) in numbers.items():
        if (number or 0) < 0:
            raise ValueError(f"`{name}` must be 0 ({meaning}) or positive, got {number}.")


def refuse_no_privacy(
    noise_multiplier: float | None, target_delta: float | None, *, allow_zero_noise: bool
) -> None:
    """Refuses a run without noise that is not asked for, and one without a delta."""
    if noise_multiplier == 0 and not allow_zero_noise:
        raise ValueError(
            "`noise_multiplier=0` gives no privacy at all; pass `allow_zero_noise=True` if "
            "this is a debugging run."
        )
    if target_delta is None:
        raise ValueError(
            "Expected `target_delta`, the delta of the (epsilon, delta) guarantee; choose it "
            "below 1 / num_examples, for instance 1e-5 for 60,000 examples."
        )


def refuse_impossible_shares(
    head_clip_share: float | None, private_loss_share: float, private_loss_bound: float
) -> None:
    """Refuses shares of the clip norm that leave nothing, and a loss without a bound."""
    if head_clip_share is not None and not 0 < head_clip_share < 1:
        raise ValueError(f"`head_clip_share` must be between 0 and 1, got {head_clip_share}.")
    if not 0 <= private_loss_share < 1:
        raise ValueError(
            "`private_loss_share` must be 0 (no loss is released) or between 0 and 1, got "
            f"{private_loss_share}."
        )
    if not (private_loss_bound > 0 and math.isfinite(private_loss_bound)):
        raise ValueError(
            f"`private_loss_bound` must be positive and finite, got {private_loss_bound}."
        )


def refuse_unused_muon_rate(muon_learning_rate: float | None, optim: str) -> None:
    """Refuses Muon's learning rate where another optimizer is asked for."""
    if muon_learning_rate is not None and optim != MUON:
        raise ValueError(
            f"`muon_learning_rate` needs `optim={MUON}`, got `optim={optim}`; use `learning_rate`."
        )


def refuse_cut_over_processes(max_logical_batch_size: int | None, num_processes: int) -> None:
    """Refuses to cut a step that several processes draw."""
    if max_logical_batch_size is not None and num_processes > 1:
        raise ValueError(
            "`max_logical_batch_size` needs one process, as whether a step is cut depends on "
            f"what all have drawn, got {num_processes}; leave it out or train in one process."
        )


def refuse_uneven_grid(length_grid: int) -> None:
    """Steps that do not divide the coarser ones."""
    if length_grid < 0 or length_grid.bit_count() > 1:
        raise ValueError(
            f"`length_grid` must be a power of two, or 0 (exact lengths), got {length_grid}."
        )


def refuse_against_dpmup(clipping: str, head_clip_share: float | None) -> None:
    """What the derivation of DP-muP's rules takes for granted."""
    if clipping != "automatic":
        raise ValueError(
            "`dpmup_base_model` needs `clipping=automatic`, at the proxy too: its rules hold a "
            f"layer's signal at its share of the clip norm, got `clipping={clipping}`."
        )
    if head_clip_share is not None:
        raise ValueError(
            "`dpmup_base_model` sets every layer's share of the clip norm; leave out "
            f"`head_clip_share`, got {head_clip_share}."
        )
