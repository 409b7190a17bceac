"""The privacy plan: one frozen object that sampler, clipping, noise and epsilon all read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from hf_dpgrape.privacy import accounting
from hf_dpgrape.privacy.sampling.base import Accountant, Sampling
from hf_dpgrape.privacy.sampling.table import sampling_of
from hf_dpgrape.privacy.unit import drawn_by, require_unit

Clipping = Literal["flat", "automatic"]

#: The one clip group of ordinary (flat) clipping: all tensors together.
BODY = "body"
#: The clip group of newly initialized tensors, when they are given a share of their own.
HEAD = "head"
#: The clip group of the training loss, when it is released as one more coordinate.
LOSS = "loss"

#: Bounds of a clip group for which float32 arithmetic is sound. Squares of a gradient's entries
#: underflow below 2^-126, so the norm of 2^33 entries is known up to 2^-46 or 1e-14, which must be
#: little beside the bound. Sums over a logical batch and their squares must not overflow at 3e38.
CLIP_NORMS = (1e-12, 1e12)
#: Epsilon above which a warning is due: the bound on odds is then beyond 4e8 to 1.
_MOST_MEANINGFUL_EPSILON = 20.0


def require_one_budget(target_epsilon: float | None, noise_multiplier: float | None) -> None:
    """Refuses both or neither of epsilon and sigma."""
    if (target_epsilon is None) == (noise_multiplier is None):
        came = "both" if target_epsilon is not None else "neither"
        raise ValueError(
            "Expected exactly one of `target_epsilon` (the noise is calibrated to it) and "
            f"`noise_multiplier`, got {came}."
        )


def steps_per_epoch(
    num_examples: int, expected_batch_size: int, drawn: str = "training examples"
) -> int:
    """Optimizer steps after which every example (or unit) was drawn about once.

    Args:
        num_examples: size of the training set, in what is drawn.
        expected_batch_size: mean number of them in a step.
        drawn: what is drawn, for the error text.

    >>> steps_per_epoch(67349, 256)
    264
    """
    if not 1 <= expected_batch_size <= num_examples:
        raise ValueError(
            f"`expected_batch_size` must be between 1 and the {num_examples} {drawn}, got "
            f"{expected_batch_size}."
        )
    return math.ceil(num_examples / expected_batch_size)


def planned_steps(
    num_examples: int,
    expected_batch_size: int,
    *,
    num_train_epochs: float,
    max_steps: int = -1,
    drawn: str = "training examples",
) -> int:
    """Optimizer steps of a whole run; a positive `max_steps` wins over `num_train_epochs`.

    >>> planned_steps(67349, 256, num_train_epochs=3)
    792
    """
    per_epoch = steps_per_epoch(num_examples, expected_batch_size, drawn)
    if max_steps > 0:
        return max_steps
    if not num_train_epochs > 0 or math.isinf(num_train_epochs * per_epoch):
        raise ValueError(
            f"`num_train_epochs` must be positive and finite, got {num_train_epochs}; or set "
            "`max_steps`."
        )
    return math.ceil(num_train_epochs * per_epoch)


def budget_warnings(*, epsilon: float, target_delta: float, num_examples: int) -> tuple[str, ...]:
    """One sentence for each way in which an (epsilon, delta) says little about a training set.

    >>> budget_warnings(epsilon=3.0, target_delta=1e-5, num_examples=60_000)
    ()
    """
    found = []
    if epsilon > _MOST_MEANINGFUL_EPSILON:
        found.append(
            f"Epsilon {epsilon:.4g} is above {_MOST_MEANINGFUL_EPSILON:g}, a bound so loose that "
            "it promises next to nothing."
        )
    if target_delta >= 1 / num_examples:
        found.append(
            f"Delta {target_delta:g} is not below 1 / num_examples = {1 / num_examples:.2g}; at "
            "that size, publishing one random record outright would qualify."
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Everything that the guarantee of a run depends on; every field is public information.

    The mechanism: at each of `num_steps` steps examples are drawn as `sampling` does, every one
    independently with probability `sampling_prob` if nothing else is said; each drawn example's
    gradient is cut into clip groups, group g is clipped to `l2_clip_norm * share_g` with
    `sum(share_g ** 2) == 1`, the results are summed, and Gaussian noise of standard deviation
    `noise_stddev` is added to every coordinate. With a `private_loss_bound` the example's loss is
    one of these coordinates, a clip group of its own.

    With a `privacy_unit_column` units stand in the place of examples throughout: a unit is all rows
    with one value of that column, its gradient is the mean over those of its rows that a step
    takes, its loss likewise, and numbers of examples are numbers of units.

    Guarantees:
        The whole clipped vector of one example has norm at most `l2_clip_norm`, so a step is one
        Gaussian mechanism of noise multiplier `noise_multiplier` on a sample drawn by `sampling`.
        The run is (`epsilon(num_steps)`, `target_delta`)-DP under add-or-remove-one neighbors.

    Attributes:
        num_examples: size of the training set (treated as public); with a `privacy_unit_column`
            the number of its units.
        expected_batch_size: mean number of examples in a logical batch; the only divisor.
        num_steps: optimizer steps of the whole run.
        noise_multiplier: noise standard deviation over sensitivity.
        l2_clip_norm: bound on one example's contribution to the sum of a step.
        target_delta: delta at which epsilon is stated.
        target_epsilon: what the noise was calibrated for; None when sigma was given.
        clipping: "flat" scales down what exceeds the bound; "automatic" scales every example
            to just below it (Bu et al. 2023, arXiv 2206.07136).
        clip_shares: share of the clip norm per clip group.
        head_only_steps: during that many first steps only the HEAD group is trained, and has the
            whole clip norm, or what the loss leaves of it.
        private_loss_bound: the loss is clamped to between minus this and this, and released with
            the gradients, with the LOSS group's share; None if it is not released.
        max_logical_batch_size: a Poisson sample with more examples is cut to a uniformly random
            subset of that size; None for no bound.
        accountant: "pld" or "rdp".
        privacy_unit_column: column whose values are the units that are drawn, clipped, and added or
            removed between neighbors as a whole; None if every row is one by itself.
        max_rows_per_unit: most rows of a unit that one step takes; with a column only.
        secure_noise: whether the noise is drawn without error from a cryptographic generator, on a
            grid that the sum is rounded to; it is then wider by what rounding adds to the
            sensitivity (`privacy/secure_noise.py`). Epsilon is the same.
    """

    num_examples: int
    expected_batch_size: int
    num_steps: int
    noise_multiplier: float
    l2_clip_norm: float
    target_delta: float
    target_epsilon: float | None = None
    clipping: Clipping = "flat"
    clip_shares: Mapping[str, float] = field(default_factory=lambda: {BODY: 1.0})
    head_only_steps: int = 0
    private_loss_bound: float | None = None
    max_logical_batch_size: int | None = None
    accountant: Accountant = "pld"
    secure_noise: bool = False
    neighboring_relation: str = "add_or_remove_one"
    privacy_unit_column: str | None = None
    max_rows_per_unit: int | None = None

    def __post_init__(self) -> None:
        """Reject plans whose numbers do not describe the mechanism above."""
        if self.num_examples < 1 or self.num_steps < 1:
            raise ValueError(
                "A plan needs at least one example and one step, got "
                f"`num_examples`={self.num_examples}, `num_steps`={self.num_steps}."
            )
        # Refuses a wrong batch size.
        steps_per_epoch(self.num_examples, self.expected_batch_size, f"training {self.drawn}")
        if not self.l2_clip_norm > 0 or math.isinf(self.l2_clip_norm):
            raise ValueError(
                f"`l2_clip_norm` must be positive and finite, got {self.l2_clip_norm}."
            )
        if not self.noise_multiplier >= 0 or math.isinf(self.noise_multiplier):
            raise ValueError(
                f"`noise_multiplier` must be zero or more and finite, got {self.noise_multiplier}."
            )
        if self.secure_noise and not self.noise_multiplier:
            raise ValueError(
                "`secure_noise` needs noise, got `noise_multiplier`=0; leave one of them out."
            )
        if not 0 < self.target_delta < 1:
            raise ValueError(
                f"`target_delta` must be between 0 and 1, got {self.target_delta}; "
                "choose it below 1 / num_examples."
            )
        if self.clipping not in ("flat", "automatic"):
            raise ValueError(f"`clipping` must be 'flat' or 'automatic', got {self.clipping!r}.")
        accounting.require_known(self.sampling, self.num_steps, self.accountant)
        total = sum(share**2 for share in self.clip_shares.values())
        positive = all(share > 0 for share in self.clip_shares.values())
        if not (positive and abs(total - 1) <= 1e-9):  # written so that NaN is refused
            raise ValueError(
                "`clip_shares` must be positive with squares that sum to 1, got "
                f"{dict(self.clip_shares)} with sum {total:.6g}."
            )
        smallest = self.l2_clip_norm * min(self.clip_shares.values())
        if smallest < CLIP_NORMS[0] or self.l2_clip_norm > CLIP_NORMS[1]:
            raise ValueError(
                f"`l2_clip_norm` must be at most {CLIP_NORMS[1]:g} and, times the smallest of "
                f"`clip_shares`, at least {CLIP_NORMS[0]:g} (float32 arithmetic is sound between "
                f"them), got {self.l2_clip_norm} and {smallest:g}: rescale the loss."
            )
        bound = self.private_loss_bound
        if bound is not None and not (bound > 0 and math.isfinite(bound)):
            raise ValueError(f"`private_loss_bound` must be positive and finite, got {bound}.")
        if bound is not None and not (LOSS in self.clip_shares and len(self.clip_shares) > 1):
            raise ValueError(
                f"`private_loss_bound` needs a share named {LOSS!r} beside others in "
                f"`clip_shares`, got {dict(self.clip_shares)}."
            )
        if not 0 <= self.head_only_steps <= self.num_steps:
            raise ValueError(
                f"`head_only_steps` must be between 0 and the {self.num_steps} planned steps, "
                f"got {self.head_only_steps}."
            )
        if self.neighboring_relation != "add_or_remove_one":
            raise ValueError(
                "`neighboring_relation` must be 'add_or_remove_one', got "
                f"{self.neighboring_relation!r}: replacing a record has twice the sensitivity."
            )
        require_unit(self.privacy_unit_column, self.max_rows_per_unit)

    @classmethod
    def calibrated(
        cls,
        *,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        **numbers: Any,
    ) -> PrivacyPlan:
        """A plan from exactly one of epsilon, to which the noise is calibrated, and sigma.

        Args:
            target_epsilon: epsilon that the whole run may spend.
            noise_multiplier: noise standard deviation over sensitivity.
            numbers: the other fields.
        """
        require_one_budget(target_epsilon, noise_multiplier)
        if noise_multiplier is not None:
            return cls(noise_multiplier=noise_multiplier, **numbers)
        assert target_epsilon is not None
        # Any noise will do to have the other numbers checked before the search.
        plan = cls(noise_multiplier=1.0, target_epsilon=target_epsilon, **numbers)
        sigma = accounting.calibrate_noise_multiplier(
            target_epsilon=target_epsilon,
            sampling=plan.sampling,
            num_steps=plan.num_steps,
            delta=plan.target_delta,
            accountant=plan.accountant,
        )
        return replace(plan, noise_multiplier=sigma)

    @property
    def sampling_prob(self) -> float:
        """Probability with which each example enters a step."""
        return self.expected_batch_size / self.num_examples

    @property
    def sampling(self) -> Sampling:
        """How each step draws its examples."""
        return sampling_of({**vars(self), "sampling_prob": self.sampling_prob})

    @property
    def drawn(self) -> str:
        """What a step draws and clips as a whole: "examples", or "units" of several rows."""
        return drawn_by(self.privacy_unit_column)

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on each coordinate of the summed gradient."""
        return self.noise_multiplier * self.l2_clip_norm

    @property
    def private_loss_scale(self) -> float:
        """What a clamped loss is multiplied by to be a coordinate; 0 if it is not released.

        Smaller by 2^-22 than its share allows, which covers that the sum is rounded to float32.
        """
        if self.private_loss_bound is None:
            return 0.0
        share = self.clip_shares[LOSS] * (1 - 2**-22)
        return self.l2_clip_norm * share / self.private_loss_bound

    @property
    def private_loss_stddev(self) -> float:
        """Standard deviation of the noise on the mean loss of one step, if it is released.

        >>> shares = {BODY: 0.8, LOSS: 0.6}
        >>> plan = PrivacyPlan(
        ...     num_examples=100,
        ...     expected_batch_size=10,
        ...     num_steps=1,
        ...     l2_clip_norm=7.0,
        ...     noise_multiplier=1.5,
        ...     target_delta=1e-5,
        ...     clip_shares=shares,
        ...     private_loss_bound=4.0,
        ... )
        >>> round(plan.private_loss_stddev, 4)
        1.0
        """
        return self.noise_stddev / (self.private_loss_scale * self.expected_batch_size)

    def mean_private_loss(self, released: Sequence[float]) -> dict[str, float]:
        """For the logs: mean of the losses released at some steps, and how noisy it is.

        `private_loss_stderr` is the standard deviation of the noise in `private_loss`. That the
        examples of these steps were drawn at random adds an error that is not public.
        """
        return {
            "private_loss": statistics.fmean(released),
            "private_loss_stderr": self.private_loss_stddev / math.sqrt(len(released)),
        }

    def shares_at(self, step: int) -> Mapping[str, float]:
        """Clip groups of a step (counted from 0), with their shares; the squares sum to 1."""
        if step >= self.head_only_steps:
            return self.clip_shares
        if self.private_loss_bound is None:
            return {HEAD: 1.0}
        share = self.clip_shares[LOSS]
        return {HEAD: math.sqrt(1 - share**2), LOSS: share}

    def epsilon(self, steps_done: int | None = None, accountant: Accountant | None = None) -> float:
        """Epsilon at `target_delta` after `steps_done` steps (default: the whole run)."""
        return accounting.epsilon(
            noise_multiplier=self.noise_multiplier,
            sampling=self.sampling,
            num_steps=self.num_steps if steps_done is None else steps_done,
            delta=self.target_delta,
            accountant=accountant or self.accountant,
        )

    def unit_epsilon(self, examples_per_unit: int, num_steps: int | None = None) -> float:
        """Epsilon of whoever owns several examples, at `target_delta`, by PLD.

        Neighbors differ by all examples of one owner. The worst case is that all of them move the
        sum into one direction by the whole clip norm (Ganesh 2024, arXiv 2401.10294).

        Args:
            examples_per_unit: most examples that one owner has.
            num_steps: releases; None for all planned ones.

        Returns:
            An upper bound; infinite where it is not known (other sampling than Poisson, more than
            100,000 steps).

        Raises:
            ValueError: the number of examples is not between 1 and 256.
        """
        return accounting.unit_epsilon(
            noise_multiplier=self.noise_multiplier,
            sampling=self.sampling,
            num_steps=self.num_steps if num_steps is None else num_steps,
            delta=self.target_delta,
            examples_per_unit=examples_per_unit,
        )

    def warnings(self) -> tuple[str, ...]:
        """What makes the whole run's budget say little; nothing if it is a sound one."""
        return budget_warnings(
            epsilon=self.epsilon(),
            target_delta=self.target_delta,
            num_examples=self.num_examples,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as written into `privacy.json`."""
        return {**asdict(self), "clip_shares": dict(self.clip_shares)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrivacyPlan:
        """The plan that `to_dict` wrote; keys that are not fields are ignored."""
        names = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in names})

    def differences(self, other: PrivacyPlan) -> list[str]:
        """Names of the fields in which two plans differ, with both values, for error texts."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"`{key}` was {theirs[key]}, is now {mine[key]}"
            for key in mine
            if mine[key] != theirs[key]
        ]
