"""Each sample's projected gradient, taken in one backward pass (DP-GRAPE, arXiv 2506.15588)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_dpgrape.gradients.forms import WhenComplete
from hf_dpgrape.gradients.recording import Records
from hf_dpgrape.mechanism.estimators.base import Estimate, Made, Setup
from hf_dpgrape.subspace.parameters import Subspace


class Backward:
    """Takes gradients in one backward pass of the physical batch.

    Args:
        recorder: takes the per-sample projected gradients.
    """

    def __init__(self, recorder: Records) -> None:
        self._recorder = recorder

    def __call__(
        self,
        num_samples: int,
        inputs: Any,
        losses_of: Callable[[], Tensor],
        *,
        names: frozenset[str],
        when_complete: WhenComplete,
    ) -> Estimate:
        """Each sample's loss and projected gradient; see `Estimator`."""
        record = self._recorder.record(num_samples, names, when_complete, inputs=inputs)
        with record as gradients:
            losses = losses_of()
            if losses.requires_grad:
                losses.sum().backward()  # type: ignore[no-untyped-call]
        return Estimate(losses.detach(), gradients)


def backward(setup: Setup) -> Made:
    """Projected gradients, released in the subspace; in the weights' own with rank 0."""
    arguments = setup.arguments
    projections = setup.projections(arguments.rank)
    space = Subspace(
        setup.weights,
        projections,
        update_proj_gap=arguments.update_proj_gap,
        moments=arguments.refresh_moments,
        seed=arguments.seed,
    )
    return Made(
        space=space,
        clip_groups=setup.clip_groups,
        rehearsed=projections,
        projections=projections,
        estimator=Backward,
    )
