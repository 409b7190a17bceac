"""Training arguments that start from suggested settings instead of from defaults."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from hf_dpgrape.hf.suggestions import DEFAULT_MAX_EPOCHS, suggest
from hf_dpgrape.mechanism.tensors import matching, newly_initialized


class SuggestedArguments:
    """The way to make arguments by `suggest`."""

    @classmethod
    def suggested(
        cls,
        *,
        num_examples: int,
        target_epsilon: float,
        target_delta: float,
        model: nn.Module | None = None,
        max_epochs: float = DEFAULT_MAX_EPOCHS,
        **overrides: Any,
    ) -> Self:
        """Arguments to start with, which cost no epsilon: nothing private is looked at.

            args = DPGrapeTrainingArguments.suggested(
                num_examples=len(train_dataset),
                target_epsilon=3.0,
                target_delta=1e-5,
                model=model,
                output_dir="runs/first",
            )

        Args:
            num_examples: size of the training set; with a `privacy_unit_column` among the
                overrides, number of its units.
            target_epsilon: of the whole run.
            target_delta: delta.
            model: what is trained, of which it is only asked whether it has a new head. None for
                a classifier whose head the checkpoint did not have.
            max_epochs: how often an example may be drawn on average, which is the computing.
            overrides: arguments that win over what is suggested.

        Raises:
            ValueError: the numbers allow no run.
        """
        has_head, has_body = _parts_of(model, overrides.get("head_modules"))
        found = suggest(
            num_examples=num_examples,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            max_epochs=max_epochs,
            has_head=has_head,
            has_body=has_body,
        )
        own = {"target_epsilon": target_epsilon, "target_delta": target_delta}
        return cls(**{**found.arguments(), **own, **overrides})


def _parts_of(model: nn.Module | None, head_modules: list[str] | None) -> tuple[bool, bool]:
    """Whether a new head is trained, and whether anything else is."""
    if model is None:
        return True, True
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    head = newly_initialized(model) if head_modules is None else matching(names, head_modules)
    return bool(head & names), bool(names - head)
