"""Clip groups: which tensors are clipped together, and that the plan has a share for each group."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hf_dpgrape.privacy.plan import BODY, HEAD, LOSS, PrivacyPlan


def default_groups(model: nn.Module, plan: PrivacyPlan, head: frozenset[str]) -> dict[str, str]:
    """The head's group, if the plan has one, and the body's."""
    return {
        name: HEAD if HEAD in plan.clip_shares and name in head else BODY
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def refuse_unplanned_groups(groups: Mapping[str, str], plan: PrivacyPlan) -> None:
    """Refuses clip groups that have no share of the clip norm."""
    of_the_loss = set() if plan.private_loss_bound is None else {LOSS}
    planned = set(plan.clip_shares) - of_the_loss
    if unknown := sorted(set(groups.values()) - planned):
        raise ValueError(
            f"Expected clip groups that the plan's `clip_shares` have, {sorted(planned)}, got "
            f"`{unknown[0]}` and {len(unknown) - 1} more; plan a share for each."
        )
