"""The arguments that say by which method a run trains."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_dpgrape.hf.methods import (
    DEFAULT_LORA_RANK,
    DEFAULT_NUM_DIRECTIONS,
    DEFAULT_PERTURBATION,
    DEFAULT_RANK,
    METHODS,
    NON_PRIVATE,
)


@dataclass
class MethodArguments:
    """The method, and the numbers that belong to one."""

    method: str = field(
        default="dp-grape",
        metadata={
            "help": "What is trained, released and stepped with: "
            + "; ".join(f"{name}: {row.says}" for name, row in METHODS.items())
            + f". {NON_PRIVATE} is refused: it is no private training.",
            "choices": [*METHODS, NON_PRIVATE],
        },
    )
    rank: int = field(  # type: ignore[assignment]  # the method fills it in
        default=None,
        metadata={
            "help": "Rank of the gradient projection; 0 trains in the full space. Default: "
            f"{DEFAULT_RANK}, or 0 where the method trains in the full space."
        },
    )
    lora_rank: int | None = field(
        default=None,
        metadata={
            "help": "With `method=dp-lora`, rank of the adapters, whose alpha is twice that. "
            f"Default: {DEFAULT_LORA_RANK}."
        },
    )
    num_directions: int = field(
        default=DEFAULT_NUM_DIRECTIONS,
        metadata={
            "help": "With `method=dpzero`, random directions of a step, each two forward passes; 1 "
            "is the published method."
        },
    )
    perturbation_scale: float = field(
        default=DEFAULT_PERTURBATION,
        metadata={"help": "With `method=dpzero`, how far along a direction the loss is looked at."},
    )
