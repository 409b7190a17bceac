"""The private step of DP-GRAPE (arXiv 2506.15588, algorithm 1), on one page.

This is the whole mechanism. What leaves it is the noised gradient, and the noised loss if the plan
has a `private_loss_bound`. What an optimizer does afterwards, the lift onto the weights included,
is post-processing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from hf_dpgrape.gradients.forms import PerSampleGradients, WhenComplete
from hf_dpgrape.mechanism.estimators.base import Estimate, Estimator, Space
from hf_dpgrape.mechanism.unit_mean import UnitMean
from hf_dpgrape.privacy.cipher import CipherStream
from hf_dpgrape.privacy.clipping import clip_factors
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.noise import add_gaussian_noise_
from hf_dpgrape.privacy.plan import HEAD, PrivacyPlan
from hf_dpgrape.privacy.randomness import SecretSource, Seeds
from hf_dpgrape.privacy.secure_noise import add_secure_noise_


class PhysicalBatch(NamedTuple):
    """Part of a logical batch that passes through the model at once.

    Attributes:
        num_samples: number of examples, at least 1.
        inputs: what the model is run on.
        seeds: seeds of what the model draws for it (dropout); None for those of the step.
    """

    num_samples: int
    inputs: Any
    seeds: Seeds | None = None


class UnitBatch(NamedTuple):
    """The rows of one unit of privacy that a step takes; they are clipped together.

    Attributes:
        num_rows: number of rows, at least 1.
        parts: the physical batches that hold them, and no rows of another unit.
    """

    num_rows: int
    parts: Iterable[PhysicalBatch]


#: What a step draws: physical batches whose samples are clipped one by one, or units.
LogicalBatch = list[PhysicalBatch] | list[UnitBatch]


class StepLoss(NamedTuple):
    """The loss of a logical batch.

    Attributes:
        raw_sum: sum of the losses, NOT private: it must not be shown unless the user asks for it.
        private_mean: estimate of the mean loss, private, with noise of standard deviation
            `plan.private_loss_stddev`; None if the plan releases none.
    """

    raw_sum: Tensor
    private_mean: Tensor | None = None


class ClippedSum:
    """Clips each sample's gradients group by group and adds them up.

    A clip group is dealt with as soon as all its tensors are complete, in the middle of backward,
    and its per-sample gradients are freed: with a group per layer, memory for them does not add up
    over layers. Each group is added once per physical batch.

    Args:
        plan: the privacy plan.
        groups: clip group -> names of its tensors.
        clip_shares: clip group -> share of the clip norm.
        sums: tensor name -> what is added to, in place.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        groups: Mapping[str, list[str]],
        clip_shares: Mapping[str, float],
        sums: Mapping[str, Tensor],
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._clip_shares = clip_shares
        self._sums = sums
        self._group_of = {name: group for group, names in groups.items() for name in names}
        self._waiting = {group: set(names) for group, names in groups.items()}

    def __call__(self, gradients: PerSampleGradients, name: str) -> None:
        """Notes that a tensor is complete."""
        group = self._group_of[name]
        self._waiting[group].discard(name)
        if not self._waiting[group]:
            self._add_group_(gradients, group)

    def finish(self, gradients: PerSampleGradients) -> None:
        """Adds the groups of which some tensor was not used, or used less than expected."""
        for group in list(self._waiting):
            self._add_group_(gradients, group)

    @torch.no_grad()
    def _add_group_(self, gradients: PerSampleGradients, group: str) -> None:
        names = self._groups[group]
        total = self._sums[names[0]]
        factors = clip_factors(
            gradients.squared_norms(names, total),
            bound=self._plan.l2_clip_norm * self._clip_shares[group],
            clipping=self._plan.clipping,
            dtype=total.dtype,
        )
        for name in names:
            gradients.add_weighted_sum_(name, self._sums[name], factors)
            gradients.discard(name)
        del self._waiting[group]


class PrivateStep:
    """Turns a logical batch into the private gradient of the trainable tensors.

    Guarantees:
        A call is one Gaussian mechanism of noise multiplier `plan.noise_multiplier`: one example
        more or less moves the sum before noise by at most `plan.l2_clip_norm`, whatever its
        contents (where its gradient is not finite it contributes nothing), and noise of standard
        deviation `plan.noise_stddev` is added once, also for an empty batch (with
        `plan.secure_noise`, more by what its rounding adds to the sensitivity). The divisor
        is public. The call is counted in the ledger before anything is computed or drawn, so that
        one that is interrupted counts, too. How the batch is split into physical ones changes
        nothing but rounding.

        A released loss is one more coordinate of the same vector. An example's part in it is at
        most `l2_clip_norm * s` for its share s, whatever the loss (NaN counts as the bound). Its
        gradients, finite or not, add a vector of norm at most `l2_clip_norm * sqrt(1 - s**2)`. So
        both together have norm at most `l2_clip_norm`, and noise of one release covers them.

        Under a plan with a `privacy_unit_column` all of this holds for units in place of examples:
        the model runs on rows of one unit at a time, and what is clipped is the mean of their
        vectors, and of their losses. A plan for units takes nothing but units, and one for
        examples none.

    Args:
        ledger: counts the releases, and has the plan.
        estimator: gives each sample a vector; which one it is changes nothing here.
        space: names the parts of the vector, and takes the private gradient.
        clip_groups: clip group of each part, by name; one of the plan's.
        head: canonical names of the tensors that are trained alone in the plan's first
            `head_only_steps` steps.
        source: secret randomness for the noise.
    """

    def __init__(
        self,
        *,
        ledger: RunLedger,
        estimator: Estimator,
        space: Space,
        clip_groups: Mapping[str, str],
        head: frozenset[str] = frozenset(),
        source: SecretSource,
    ) -> None:
        self.ledger = ledger
        self._estimator = estimator
        self._space = space
        self._clip_groups = clip_groups
        self._head = head
        self._source = source

    def __call__(
        self,
        logical_batch: Iterable[PhysicalBatch | UnitBatch],
        per_sample_losses: Callable[[Any], Tensor],
    ) -> StepLoss:
        """Sets the stand-ins' `.grad` to the private gradient of the next step.

        Args:
            logical_batch: this process's share of the examples, or units, drawn.
            per_sample_losses: maps a physical batch's inputs to one loss per sample, (B,); loss i
                must depend on sample i alone.

        Raises:
            RuntimeError: the planned steps are used up.
            ValueError: the losses are not one per sample, or units came where examples are
                planned, or the other way round.
        """
        step, plan = self.ledger.count_release(), self.ledger.plan
        self._space.set_gradients({})  # the last step's are not needed beside this one's
        groups = self._groups_at(step)
        names = frozenset(name for group in groups.values() for name in group)
        sums = self._space.zero_sums(names)
        raw_sum = loss_sum = torch.zeros((), dtype=torch.float64)

        for drawn in logical_batch:
            _refuse_other_kind(drawn, plan)
            clipped = ClippedSum(plan, groups, plan.shares_at(step), sums)
            losses, vectors = self._estimated(drawn, per_sample_losses, names, clipped)
            clipped.finish(vectors)
            raw_losses = losses.detach().cpu().double()
            raw_sum = raw_sum + raw_losses.sum()
            loss_sum = loss_sum + clamped(raw_losses, plan.private_loss_bound or 0.0).sum()

        scale, released = plan.private_loss_scale, [*sums.values()]
        if scale:
            released.append((scale * loss_sum).to(released[0]))
        self._add_noise_once_(released)
        for total in released:
            total.div_(plan.expected_batch_size)
        self._space.set_gradients(sums)
        return StepLoss(raw_sum.float(), released[-1] / scale if scale else None)

    def _estimated(
        self,
        drawn: PhysicalBatch | UnitBatch,
        per_sample_losses: Callable[[Any], Tensor],
        names: frozenset[str],
        when_complete: WhenComplete,
    ) -> Estimate:
        """Loss and vector of each that is clipped: of every sample, or of the one unit."""
        if isinstance(drawn, UnitBatch):
            unit = UnitMean(drawn.num_rows, self._space.zero_sums(names))
            for part in drawn.parts:
                unit.add(self._estimated(part, per_sample_losses, names, unit))
            return unit.estimate()
        return self._estimator(
            drawn.num_samples,
            drawn.inputs,
            functools.partial(_checked, per_sample_losses, drawn),
            names=names,
            when_complete=when_complete,
        )

    def _groups_at(self, step: int) -> dict[str, list[str]]:
        """The tensors of each clip group that is trained at a step."""
        plan = self.ledger.plan
        groups: dict[str, list[str]] = {group: [] for group in plan.shares_at(step)}
        for name in self._space:
            if step >= plan.head_only_steps:
                groups[self._clip_groups[name]].append(name)
            elif name in self._head:
                groups[HEAD].append(name)
        return {group: names for group, names in groups.items() if names}

    def _add_noise_once_(self, sums: Sequence[Tensor]) -> None:
        """Adds the noise of this step and the sums of the other processes.

        The first process adds the noise to its own share; the sum over processes then carries it
        exactly once, and all processes see the same private gradient.
        """
        parallel = distributed.is_available() and distributed.is_initialized()
        is_first = not parallel or distributed.get_rank() == 0
        if self.ledger.plan.secure_noise:
            add_secure_noise_(
                sums,
                noise_multiplier=self.ledger.plan.noise_multiplier,
                l2_clip_norm=self.ledger.plan.l2_clip_norm,
                stream=CipherStream(self._source.key()) if is_first else None,
                sum_=distributed.all_reduce if parallel else None,
            )
            return
        if is_first:
            generators: dict[torch.device, torch.Generator] = {}
            for total in sums:
                if total.device not in generators:
                    generators[total.device] = self._source.generator(total.device)
                add_gaussian_noise_(
                    [total],
                    noise_stddev=self.ledger.plan.noise_stddev,
                    generator=generators[total.device],
                )
        if parallel:
            for total in sums:
                distributed.all_reduce(total)


def _refuse_other_kind(drawn: PhysicalBatch | UnitBatch, plan: PrivacyPlan) -> None:
    """Refuses rows to be clipped one by one under a plan for units, and the other way round."""
    if isinstance(drawn, UnitBatch) != (plan.privacy_unit_column is not None):
        raise ValueError(
            f"Expected a logical batch of {plan.drawn}, as `privacy_unit_column` of the plan is "
            f"{plan.privacy_unit_column!r}, got a {type(drawn).__name__}; give `PrivateTraining` "
            "the `units` that the plan is for."
        )


def _checked(per_sample_losses: Callable[[Any], Tensor], batch: PhysicalBatch) -> Tensor:
    """The losses of a physical batch, one per sample."""
    losses = per_sample_losses(batch.inputs)
    check_losses(losses, batch.num_samples)
    return losses


def clamped(losses: Tensor, bound: float) -> Tensor:
    """Losses between -bound and bound; NaN counts as the bound, so that it shows."""
    return losses.nan_to_num(nan=bound).clamp(-bound, bound)


def check_losses(losses: Tensor, num_samples: int) -> None:
    """Refuses anything that is not one loss per sample."""
    if losses.shape != (num_samples,):
        raise ValueError(
            "The loss must be one value per sample, a vector as long as the batch, got a tensor of "
            f"{losses.ndim} dimension(s) that is not: compute it with `reduction='none'` and "
            "average within samples."
        )
