"""Settings to start a private run with, from public numbers and public knowledge."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_dpgrape.hf.methods import DEFAULT_RANK
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.signal import LEAST_SIGNAL, MOST_PROB, best_batch, signal_to_noise

#: How often an example is drawn at most, where nobody says how much computing is to be had.
DEFAULT_MAX_EPOCHS = 30.0

#: AdamW's learning rates at rank 16: of pretrained weights, and of a new head.
BODY_RATE, HEAD_RATE = 5e-4, 1e-2

#: Share of the steps in which a new head is trained alone, and its share of the clip norm after.
HEAD_ONLY, HEAD_CLIP_SHARE = 0.8, 0.7


@dataclass(frozen=True, kw_only=True)
class TrainedSizes:
    """Floats of one example's projected gradient.

    Attributes:
        head: those of the new head; 0 if the checkpoint had all tensors.
        body: the others.
    """

    head: int
    body: int


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Settings, and why.

    Attributes:
        method: as the arguments of these names, as are those that follow.
        expected_batch_size: mean examples per step.
        max_steps: optimizer steps.
        clipping: of each example.
        rank: of the projections.
        update_proj_gap: steps between new projections.
        learning_rate: of AdamW; of everything but a new head.
        lr_scheduler_type: the schedule.
        head_learning_rate: of a new head; None without one.
        head_clip_share: of a new head.
        head_only_steps: first steps in which only a new head is trained.
        num_epochs: how often an example is drawn on average.
        noise_multiplier: by the accountant, for the epsilon that was asked for.
        signal_to_noise: see `hf_dpgrape.privacy.signal`.
        reasons: one sentence each.
        warnings: what to expect if it is little.
    """

    method: str = "dp-grape"
    expected_batch_size: int
    max_steps: int
    clipping: str = "automatic"
    rank: int = DEFAULT_RANK
    update_proj_gap: int
    learning_rate: float = BODY_RATE
    lr_scheduler_type: str = "linear"
    head_learning_rate: float | None
    head_clip_share: float | None
    head_only_steps: int
    num_epochs: float
    noise_multiplier: float
    signal_to_noise: float
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """The training arguments among these; those that need a head only if there is one."""
        told = ("num_epochs", "noise_multiplier", "signal_to_noise", "reasons", "warnings")
        return {k: v for k, v in asdict(self).items() if k not in told and v not in (None, 0)}


def suggest(
    *,
    num_examples: int,
    target_epsilon: float,
    target_delta: float,
    max_epochs: float = DEFAULT_MAX_EPOCHS,
    has_head: bool = True,
    has_body: bool = True,
    sizes: TrainedSizes | None = None,
) -> Suggestion:
    """Settings to start with. Nothing private is looked at, so they cost no epsilon.

    Args:
        num_examples: size of the training set.
        target_epsilon: of the whole run.
        target_delta: delta.
        max_epochs: how often an example may be drawn on average, which is the computing.
        has_head: whether the model has a new head, as classifiers mostly have.
        has_body: whether anything else is trained.
        sizes: floats of one example's gradient, for what is said about the noise.

    Raises:
        ValueError: the numbers allow no run.
    """
    batch, num_steps = best_batch(
        num_examples=num_examples,
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        max_epochs=max_epochs,
    )
    plan = PrivacyPlan.calibrated(
        target_epsilon=target_epsilon,
        num_examples=num_examples,
        expected_batch_size=batch,
        num_steps=num_steps,
        l2_clip_norm=1.0,
        target_delta=target_delta,
    )
    signal = signal_of(plan)
    return Suggestion(
        expected_batch_size=batch,
        max_steps=num_steps,
        update_proj_gap=max(1, min(100, num_steps // 10)),
        head_learning_rate=HEAD_RATE if has_head else None,
        head_clip_share=HEAD_CLIP_SHARE if has_head and has_body else None,
        head_only_steps=int(HEAD_ONLY * num_steps) if has_head and has_body else 0,
        num_epochs=num_steps * batch / num_examples,
        noise_multiplier=plan.noise_multiplier,
        signal_to_noise=signal,
        reasons=(
            *_why_this_batch(plan, max_epochs),
            *_why_these_rates(has_head, has_body),
            *_noise(plan, sizes),
        ),
        warnings=(*plan.warnings(), *_too_little(plan, signal)),
    )


def signal_of(plan: PrivacyPlan) -> float:
    """`signal_to_noise` of a plan."""
    return signal_to_noise(
        num_steps=plan.num_steps,
        expected_batch_size=plan.expected_batch_size,
        noise_multiplier=plan.noise_multiplier,
    )


def _too_little(plan: PrivacyPlan, signal: float) -> tuple[str, ...]:
    """What to expect of a signal that is next to nothing."""
    if signal >= LEAST_SIGNAL:
        return ()
    return (
        f"Expect the majority class: {plan.num_examples:,} examples at epsilon "
        f"{plan.target_epsilon:g} leave a signal of at most {signal:.3g} times the noise, where "
        f"small runs needed {LEAST_SIGNAL:g}; take more examples or a larger epsilon.",
    )


def _why_this_batch(plan: PrivacyPlan, max_epochs: float) -> tuple[str, ...]:
    """Batch, steps and clipping."""
    drawn = plan.sampling_prob * plan.num_steps
    is_cheap = drawn < 0.95 * max_epochs or plan.sampling_prob >= 0.95 * MOST_PROB
    more = (
        f"{max_epochs:g} would have little more signal"
        if is_cheap
        else "which is all the computing that is allowed, and more would have more signal"
    )
    return (
        f"Large batches have less noise per weight at the same epsilon (arXiv 2204.13650): each "
        f"step draws {plan.sampling_prob:.3g} of the examples, and the run {drawn:.3g} times all "
        f"of them; {more}.",
        f"The noise on one weight's mean gradient is {noise_per_weight(plan):.2g} times the clip "
        f"norm; what all examples agree on is over the run at most {signal_of(plan):,.0f} times "
        "the noise.",
        "Automatic clipping needs no clip norm to be tuned, which would cost an epsilon of its own "
        "(arXiv 2206.07136).",
    )


def noise_per_weight(plan: PrivacyPlan) -> float:
    """Standard deviation of the noise on the mean gradient, over the clip norm."""
    return plan.noise_multiplier / plan.expected_batch_size


def _why_these_rates(has_head: bool, has_body: bool) -> tuple[str, ...]:
    """Learning rates, and what is trained when."""
    body = (
        f"AdamW's step is mostly noise, of the size of its rate: {BODY_RATE:g} is what pretrained "
        "weights survive."
    )
    alone = (
        ", alone at first, as the pretrained weights' gradients would crowd it out, then with "
        f"{HEAD_CLIP_SHARE:g} of the clip norm to itself"
    )
    head = f"A new head starts from nothing: a rate of {HEAD_RATE:g}{alone if has_body else ''}."
    return (*([body] if has_body else []), *([head] if has_head else []))


def _noise(plan: PrivacyPlan, sizes: TrainedSizes | None) -> tuple[str, ...]:
    """How long the noise of a step is in all weights together."""
    if sizes is None:
        return ()
    head, everything = (
        noise_per_weight(plan) * number**0.5 for number in (sizes.head, sizes.head + sizes.body)
    )
    alone = f" ({head:.3g} with the head alone)" if sizes.head else ""
    return (
        f"A step's noise has {everything:.3g} times the length of the largest signal{alone}: a "
        "smaller rank, or fewer trained weights, has less.",
    )
