"""An estimator in two halves: each sample's vector, and the space in which a step is released.

The private step clips, sums, noises and divides whatever vectors an estimator gives. So an
estimator is right for privacy if sample i's vector is a function of sample i, the weights and
randomness alone; how good an estimate it is of anything costs utility, never the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.forms import PerSampleGradients, WhenComplete
from hf_dpgrape.gradients.recording import Records
from hf_dpgrape.mechanism.tensors import TargetModules, make_projections, require_projected
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.subspace.parameters import Moments
from hf_dpgrape.subspace.projection import Projection, Scale


class Estimate(NamedTuple):
    """What an estimator found for a physical batch.

    Attributes:
        losses: one loss per sample (B,).
        vectors: each sample's vector, by the names of its space.
    """

    losses: Tensor
    vectors: PerSampleGradients


class Estimator(Protocol):
    """Gives each sample of a physical batch a vector, by running the model on the batch."""

    def __call__(
        self,
        num_samples: int,
        inputs: Any,
        losses_of: Callable[[], Tensor],
        *,
        names: frozenset[str],
        when_complete: WhenComplete,
    ) -> Estimate:
        """Each sample's loss and vector.

        Args:
            num_samples: number of samples B.
            inputs: what `losses_of` runs the model on.
            losses_of: runs the model on the batch; one loss per sample (B,).
            names: parts of the vector that are asked for.
            when_complete: may be told that a part is complete, so that it is freed early.
        """
        ...


class Space(Protocol):
    """Where a step is released: the parts of its vector, and how their mean moves the weights.

    All that it does comes after the noise, or is public.
    """

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        """The trained tensors, by canonical name."""

    @property
    def stand_ins(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer steps on, by name."""

    def __iter__(self) -> Iterator[str]:
        """Names of the parts of the vector."""

    def zero_sums(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Zero accumulators of these parts, in at least float32."""

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Gives the stand-ins the private gradient; parts that are not named have none."""

    def start_at_(self, step: int) -> None:
        """Returns to what the step before `step` used; for a resumed run."""

    def refresh_(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Moves on to what a step uses, counted from 0."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer that was built on the weights step on their stand-ins."""


@dataclass(frozen=True, kw_only=True)
class SpaceArguments:
    """Public numbers that determine a run's space, and what becomes of moments in it.

    Attributes:
        estimator: a name in `ESTIMATORS`.
        rank: r of projections; 0 for full space.
        projection_scale: standard deviation of random projections' entries.
        update_proj_gap: steps between new projections; 0 for never.
        refresh_moments: what becomes of the optimizer's moments then.
        seed: public seed of projections, directions and rounding.
        num_directions: random directions of a step of zeroth order.
        perturbation_scale: how far along each of them the loss is looked at.
    """

    estimator: str
    rank: int
    projection_scale: Scale
    update_proj_gap: int
    refresh_moments: Moments
    seed: int
    num_directions: int
    perturbation_scale: float


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an estimator is made for.

    Attributes:
        model: the model.
        plan: the privacy plan.
        arguments: of its space.
        head: canonical names of the head's tensors.
        clip_groups: clip group of each trainable tensor.
        target_modules: which tensors are projected; None for all but the head.
    """

    model: nn.Module
    plan: PrivacyPlan
    arguments: SpaceArguments
    head: frozenset[str]
    clip_groups: Mapping[str, str]
    target_modules: TargetModules

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The trainable tensors, by canonical name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def projections(self, rank: int) -> dict[str, Projection]:
        """Random projections of that rank for every trainable tensor, by canonical name."""
        projections = make_projections(
            self.model,
            rank=rank,
            scale=self.arguments.projection_scale,
            seed=self.arguments.seed,
            head=self.head,
            target_modules=self.target_modules,
        )
        if rank:
            require_projected(projections, self.target_modules)
        return projections


@dataclass(frozen=True, kw_only=True)
class Made:
    """An estimator for one model.

    Attributes:
        space: where a step is released.
        clip_groups: clip group of each part of the vector, by the space's names.
        rehearsed: how the gradients of the rehearsal, and of a recorder, are projected.
        projections: those of the space, for the record.
        estimator: of what takes per-sample gradients, the estimator.
    """

    space: Space
    clip_groups: Mapping[str, str]
    rehearsed: Mapping[str, Projection]
    projections: Mapping[str, Projection]
    estimator: Callable[[Records], Estimator]
