"""A warning before a run in which noise or a small learning rate leaves nothing to be learned."""

from __future__ import annotations

import logging
import math
from typing import Any

from hf_dpgrape.hf.methods import method_of
from hf_dpgrape.hf.suggestions import DEFAULT_MAX_EPOCHS, HEAD_RATE, signal_of
from hf_dpgrape.mechanism.estimators.table import ZEROTH_ORDER
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.signal import (
    LEAST_REACH,
    LEAST_SIGNAL,
    best_batch,
    reach,
    rough_noise_multiplier,
    signal_to_noise,
)

logger = logging.getLogger(__name__)

#: Schedules that go down to zero: their rates are on average about half the first.
_FALLING = ("linear", "cosine", "polynomial")


def warn_of_little_signal(plan: PrivacyPlan, args: Any, *, has_head: bool) -> None:
    """Says before training that next to nothing will be learned, and what to change.

    Only public numbers decide: those of the plan and the learning rates.

    Args:
        plan: of the run.
        args: the training arguments.
        has_head: whether the model has a new head, which has to be learned from nothing.
    """
    if method_of(args).estimator == ZEROTH_ORDER:
        return  # another mechanism, whose signal is another number
    causes = [*_of_noise(plan), *(_of_rate(plan, args) if has_head else [])]
    if causes:
        logger.warning(
            "Expect the majority class, or a model that has learned next to nothing: %s. %s",
            ", and ".join(causes),
            _way_out(plan, args, has_head=has_head),
        )


def _of_noise(plan: PrivacyPlan) -> list[str]:
    """What is wrong with the plan."""
    signal = signal_of(plan)
    if signal >= LEAST_SIGNAL:
        return []
    return [
        f"`expected_batch_size={plan.expected_batch_size}` over {plan.num_steps} steps leaves a "
        f"signal of at most {signal:.3g} times the noise, where small runs needed {LEAST_SIGNAL:g}"
    ]


def _of_rate(plan: PrivacyPlan, args: Any) -> list[str]:
    """What is wrong with the learning rate of a new head; other optimizers than Adam may do."""
    rate = args.head_learning_rate or args.learning_rate
    if "adam" not in args.optim_name:
        return []
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    falls = 0.5 if schedule in _FALLING else 1.0
    found = reach(
        sum_of_rates=falls * rate * plan.num_steps,
        expected_batch_size=plan.expected_batch_size,
        noise_multiplier=plan.noise_multiplier,
    )
    if found >= LEAST_REACH:
        return []
    name = "learning_rate" if args.head_learning_rate is None else "head_learning_rate"
    return [
        f"`{name}={rate:g}` takes the new head at most {found:.2g} far in {plan.num_steps} steps "
        f"of so much noise, where small runs needed {LEAST_REACH:g}"
    ]


def _way_out(plan: PrivacyPlan, args: Any, *, has_head: bool) -> str:
    """What to set instead, at the same epsilon."""
    epsilon = plan.target_epsilon or plan.epsilon()
    if not 0 < epsilon < math.inf:
        return "`hf-dpgrape suggest` gives settings with more signal."
    batch, num_steps = best_batch(
        num_examples=plan.num_examples,
        target_epsilon=epsilon,
        target_delta=plan.target_delta,
        max_epochs=DEFAULT_MAX_EPOCHS,
    )
    sigma = rough_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=plan.target_delta,
        sampling_prob=batch / plan.num_examples,
        num_steps=num_steps,
    )
    best = signal_to_noise(num_steps=num_steps, expected_batch_size=batch, noise_multiplier=sigma)
    if best < LEAST_SIGNAL:
        return (
            f"No settings will do with {plan.num_examples:,} {plan.drawn} at epsilon "
            f"{epsilon:.3g}: take more {plan.drawn} or a larger epsilon."
        )
    head = f", `head_learning_rate={HEAD_RATE:g}`" if has_head else ""
    return (
        f"At epsilon {epsilon:.3g}, `expected_batch_size={batch}` and `max_steps={num_steps}`{head}"
        f" would have a signal of about {best:,.0f}; `hf-dpgrape suggest` tells why."
    )
