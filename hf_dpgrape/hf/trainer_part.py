"""What the parts of a private Trainer inherit from.

To the type checker that is transformers' Trainer, whose methods they extend. In fact it is nothing,
so that they can stand before any Trainer: `class PrivateTrainer(DPGrapeMixin, SomeTrainer)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer

    TrainerPart = Trainer
else:
    TrainerPart = object
