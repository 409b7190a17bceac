"""Naive DP-GaLore: full gradients are made private, and projected afterwards.

GaLore (Zhao et al. 2024, arXiv 2403.03507) projects a gradient on its own leading singular vectors.
Computed from a private gradient they are post-processing, but the mechanism has then clipped and
noised the full gradient: per-sample gradients of full size, noise in every direction, and singular
vectors that follow the noise where it dominates. It is the counter-example of the DP-GRAPE paper
(arXiv 2506.15588); the optimizer's state is small, nothing else is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpgrape.mechanism.estimators.backward import Backward
from hf_dpgrape.mechanism.estimators.base import Made, Setup
from hf_dpgrape.subspace.parameters import Moments, Subspace
from hf_dpgrape.subspace.projection import Projection, matrix_shape

#: Where the optimizer's state of a stand-in keeps its singular vectors, which no seed gives back.
STATE_KEY = "singular_vectors"


class SingularProjection(Projection):
    """P has the leading singular vectors of a private gradient as its columns."""

    def take_from_(self, gradient: Tensor) -> None:
        """Takes the singular vectors of the side that shrinks.

        Args:
            gradient: a private gradient, of the full shape.
        """
        left, _, right = torch.linalg.svd(
            gradient.view(matrix_shape(self.full_shape)), full_matrices=False
        )
        vectors = right.mT if self.side == "right" else left
        self.hold_(vectors[:, : self.rank].contiguous())

    def hold_(self, vectors: Tensor) -> None:
        """Uses these singular vectors, which an earlier private gradient gave."""
        self._matrix = vectors

    def matrix_at(self, refresh_index: int) -> Tensor:
        """None is a function of public numbers."""
        raise ValueError(f"`{self.name}` has had no private gradient to take its projection from.")


class GaloreSpace(Subspace):
    """Releases full gradients, and gives stand-ins what is left of them in the leading directions.

    Guarantees:
        Singular vectors are computed from released gradients alone.

    Args:
        weights: canonical name -> weight.
        projections: canonical name -> projection, for the same names.
        update_proj_gap: steps between new singular vectors; 0 for those of the first step.
        moments: see `Subspace`.
        seed: public seed of the stochastic rounding of 16-bit weights.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        projections: Mapping[str, SingularProjection],
        *,
        update_proj_gap: int,
        moments: Moments,
        seed: int,
    ) -> None:
        super().__init__(weights, projections, moments=moments, seed=seed)
        self._gap = update_proj_gap
        self._is_due = True
        self._optimizer: torch.optim.Optimizer | None = None
        self._singular = {n: p for n, p in projections.items() if p.side is not None}

    def zero_sums(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Zero accumulators of the full shapes, in at least float32."""
        return {
            name: tensor.stand_in.new_zeros(tensor.weight.shape)
            for name, tensor in self.tensors.items()
            if name in names
        }

    def start_at_(self, step: int) -> None:
        """Nothing: the optimizer's state, which is loaded later, has the singular vectors."""

    def refresh_(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Notes whether the gradient of this step gives new singular vectors."""
        self._is_due = step % self._gap == 0 if self._gap else step == 0

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Projects the private gradients."""
        super().set_gradients({n: self._projected(n, g) for n, g in gradients.items()})

    def _projected(self, name: str, gradient: Tensor) -> Tensor:
        projection = self._singular.get(name)
        if projection is None:
            return gradient
        state = {} if self._optimizer is None else self._optimizer.state
        held = state.get(self.tensors[name].stand_in, {}).get(STATE_KEY)
        if held is None or self._is_due:
            projection.take_from_(gradient)
            if held is not None and self._moments == "reset":
                del state[self.tensors[name].stand_in]
        else:
            projection.hold_(held)
        return projection.on_gradient(gradient)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """As `Subspace.adopt`; the singular vectors are saved with the optimizer's state."""
        super().adopt(optimizer)
        self._optimizer = optimizer

        def keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for name, projection in self._singular.items():
                stand_in = self.tensors[name].stand_in
                if stand_in.grad is not None:
                    optimizer.state[stand_in][STATE_KEY] = projection.matrix

        optimizer.register_step_post_hook(keep)


def galore(setup: Setup) -> Made:
    """Full gradients, released as they are and projected on their singular vectors."""
    arguments, whole = setup.arguments, setup.projections(0)
    projections = {
        name: SingularProjection(name, p.full_shape, rank=p.rank, device=p.device)
        for name, p in setup.projections(arguments.rank).items()
    }
    return Made(
        space=GaloreSpace(
            setup.weights,
            projections,
            update_proj_gap=arguments.update_proj_gap,
            moments=arguments.refresh_moments,
            seed=arguments.seed,
        ),
        clip_groups=setup.clip_groups,
        rehearsed=whole,
        projections=projections,
        estimator=Backward,
    )
