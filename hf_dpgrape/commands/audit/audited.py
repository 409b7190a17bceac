"""One audited run: the library's own private training on canaries, and what it gives away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hf_dpgrape.commands.audit.bound import GUESSES, Bound, Coins, Scores, lower_bound
from hf_dpgrape.commands.audit.canaries import (
    PROJECTED,
    TABLE,
    CanaryModel,
    collate,
    gradient_losses,
    label_losses,
    rows_of,
)
from hf_dpgrape.mechanism.private_training import PrivateTraining
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.randomness import SecretSource

#: gradients: whoever looks sees every release; loss: only the trained model.
Access = Literal["gradients", "loss"]

#: Learning rate of the runs; releases do not depend on it, losses do.
_LEARNING_RATE = 0.5


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A plan and how it is attacked.

    Attributes:
        plan: of the audited run; every example is a canary.
        access: "gradients" or "loss".
        confidence: with which a lower bound holds.
        guesses: shares of the canaries that are guessed in and out; see `lower_bound`.
        rank: of the projections of the classifier.
        physical_batch_size: most examples in one forward pass.
        unsafe_seed: for tests: fixes coins, sample and noise.
    """

    plan: PrivacyPlan
    access: Access = "gradients"
    confidence: float = 0.95
    guesses: tuple[tuple[float, float], ...] = GUESSES
    rank: int = 4
    physical_batch_size: int = 256
    unsafe_seed: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no confidence, or no access."""
        if self.access not in get_args(Access):
            raise ValueError(f"`access` must be one of {get_args(Access)}, got {self.access!r}.")
        if not 0 < self.confidence < 1:
            raise ValueError(
                f"`confidence` must be between 0 and 1, got {self.confidence}; 0.95 is usual."
            )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an audit found.

    Attributes:
        claimed: epsilon of the plan.
        bound: lower bound on the true one.
    """

    claimed: float
    bound: Bound

    @property
    def is_violation(self) -> bool:
        """Whether the run gave away more than it claims."""
        return self.bound.epsilon > self.claimed


def audit(of: Audit) -> Outcome:
    """Runs private training once on canaries, and bounds epsilon from below.

    Guarantees:
        If the training is as private as its plan says, a violation is found with probability at
        most 1 - `confidence`.
    """
    scores, coins = scores_and_coins(of)
    bound = lower_bound(
        scores,
        coins,
        delta=of.plan.target_delta,
        confidence=of.confidence,
        guesses=of.guesses,
    )
    return Outcome(claimed=of.plan.epsilon(), bound=bound)


def scores_and_coins(of: Audit) -> tuple[Scores, Coins]:
    """A score for every canary, higher where it is more likely in; and whether it was."""
    source = SecretSource(unsafe_seed=of.unsafe_seed)
    num_canaries = of.plan.num_examples
    coins = torch.rand(num_canaries, generator=source.generator()) < 0.5
    model = CanaryModel(num_canaries)
    by_gradient = of.access == "gradients"
    training = PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE),
        of.plan,
        gradient_losses if by_gradient else label_losses,
        examples=rows_of(coins),
        collate=collate,
        physical_batch_size=of.physical_batch_size,
        rank=of.rank,
        target_modules=PROJECTED,
        head=frozenset(),
        source=source,
    )
    scores = _by_gradient(training) if by_gradient else _by_loss(training, model)
    return scores.double().numpy(), coins.numpy()


def _by_gradient(training: PrivateTraining) -> Tensor:
    """Inner product of every canary's gradient with what is released, summed over the steps."""
    seen = torch.zeros(training.ledger.plan.num_examples)
    for batch in training.batches():
        training.take_gradient(batch)
        released = training.subspace.stand_ins[TABLE].grad
        assert released is not None
        seen += released[:-1, 0]
        training.optimizer.step()
    return seen


def _by_loss(training: PrivateTraining, model: CanaryModel) -> Tensor:
    """By how much the trained model's loss of a canary is below that of the initial one."""

    def losses() -> Tensor:
        with torch.no_grad():
            return label_losses(model, {"row": torch.arange(model.nobody)})

    before = losses()
    for batch in training.batches():
        training.step(batch)
    return before - losses()
