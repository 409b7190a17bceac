"""The privacy plan of a run, from words of a command line, without data or model."""

from __future__ import annotations

import argparse
from typing import Any

from hf_dpgrape.privacy.plan import PrivacyPlan, planned_steps


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `plan_of` reads."""
    add = parser.add_argument
    add("--num_examples", type=int, required=True, help="size of the training set")
    add("--expected_batch_size", type=int, required=True, help="mean examples per step")
    add("--max_logical_batch_size", type=int, help="most examples per step (default: no bound)")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--num_train_epochs", type=float, help="length of the run in epochs")
    length.add_argument("--max_steps", type=int, help="length of the run in steps")
    add("--target_epsilon", type=float, help="epsilon of the whole run, or:")
    add("--noise_multiplier", type=float, help="noise standard deviation over clip norm")
    add("--target_delta", type=float, required=True, help="delta; below 1 / num_examples")


def plan_of(arguments: argparse.Namespace, **numbers: Any) -> PrivacyPlan:
    """The calibrated plan.

    Args:
        arguments: what the parser found.
        numbers: other fields of the plan.

    Raises:
        ValueError: the numbers describe no private run.
    """
    a = arguments
    if a.max_steps is not None and a.max_steps < 1:
        raise ValueError(f"`max_steps` must be one or more, got {a.max_steps}.")
    if a.noise_multiplier is not None and 0 <= a.noise_multiplier < 0.01:
        raise ValueError(
            f"`noise_multiplier`={a.noise_multiplier} gives no privacy to speak of: expected at "
            "least 0.01; take more noise, or give `target_epsilon` instead."
        )
    return PrivacyPlan.calibrated(
        target_epsilon=a.target_epsilon,
        noise_multiplier=a.noise_multiplier,
        num_examples=a.num_examples,
        expected_batch_size=a.expected_batch_size,
        num_steps=planned_steps(
            a.num_examples,
            a.expected_batch_size,
            num_train_epochs=a.num_train_epochs or 0.0,
            max_steps=a.max_steps or -1,
        ),
        l2_clip_norm=1.0,
        target_delta=a.target_delta,
        max_logical_batch_size=a.max_logical_batch_size,
        **numbers,
    )
