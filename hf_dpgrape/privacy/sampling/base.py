"""What a way of sampling is: how a step draws, and which event that is for the accountant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import dp_accounting

if TYPE_CHECKING:  # epsilon is computed without torch
    import torch
    from torch import Tensor

Accountant = Literal["pld", "rdp"]


@dataclass(frozen=True, kw_only=True)
class Sampling(ABC):
    """How each step of a run draws its examples; public numbers, independent over steps.

    Attributes:
        sampling_prob: probability of each example's coin.
        accountants: those that know its event.
        over_processes: whether processes may draw, each among its own examples, on their own.
    """

    sampling_prob: float

    accountants: ClassVar[tuple[Accountant, ...]]
    over_processes: ClassVar[bool]

    def __post_init__(self) -> None:
        """Refuses what is no probability, or never draws."""
        if not 0 < self.sampling_prob <= 1:
            raise ValueError(
                f"`sampling_prob` must be above 0 and at most 1, got {self.sampling_prob}."
            )

    @abstractmethod
    def draw(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        """One step's examples.

        Args:
            indices: of the data set, or those of one process; increasing.
            generator: secret CPU generator.

        Returns:
            Some of the indices, increasing; none is possible.
        """

    @abstractmethod
    def events(self, noise_multiplier: float) -> tuple[dp_accounting.DpEvent, ...]:
        """What one step is for dp-accounting, in each case that has to be covered.

        One case holds for all steps of a run and of other runs on the same data, as the neighbors
        are the same, so epsilon is the largest over the cases.
        """

    def unit_event(self, noise_multiplier: float, examples: int) -> dp_accounting.DpEvent | None:
        """What one step is for somebody who owns that many examples; None where it is not known."""
        del noise_multiplier, examples
        return None

    @abstractmethod
    def losses(self, noise_multiplier: float) -> tuple[tuple[float, float], ...]:
        """Noise multipliers and probabilities between which a step's privacy loss varies.

        The grid of the accountant is laid out for them. The first is that of most steps.
        """

    @abstractmethod
    def describe(self, drawn: str = "examples") -> str:
        """For the record and the card.

        Args:
            drawn: what a step draws, in the plural.
        """

    def numbers(self) -> dict[str, Any]:
        """Plain data, from which `table.sampling_of` makes it again."""
        return asdict(self)
