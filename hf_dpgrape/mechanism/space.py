"""The subspace of a run, made from the arguments that determine it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from hf_dpgrape.mechanism.tensors import TargetModules, make_projections
from hf_dpgrape.subspace.parameters import Moments, Subspace
from hf_dpgrape.subspace.projection import Projection, Scale


@dataclass(frozen=True)
class Space:
    """The arguments that determine every projection of a run, and what becomes of moments."""

    rank: int
    projection_scale: Scale
    update_proj_gap: int
    refresh_moments: Moments
    seed: int

    def projections(
        self, model: nn.Module, head: frozenset[str], target_modules: TargetModules
    ) -> dict[str, Projection]:
        """The projection of every trainable tensor, by canonical name."""
        return make_projections(
            model,
            rank=self.rank,
            scale=self.projection_scale,
            seed=self.seed,
            head=head,
            target_modules=target_modules,
        )

    def subspace(self, model: nn.Module, projections: Mapping[str, Projection]) -> Subspace:
        """The trainable tensors with their stand-ins."""
        return Subspace(
            {name: p for name, p in model.named_parameters() if p.requires_grad},
            projections,
            update_proj_gap=self.update_proj_gap,
            moments=self.refresh_moments,
            seed=self.seed,
        )
