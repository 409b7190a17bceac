"""Per-sample losses as a Trainer computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from hf_dpgrape.hf.losses import PerSampleLoss


class TrainersLosses:
    """A Trainer's per-sample losses: under its precision, on the inputs that it prepares.

    Args:
        own: the losses.
        precision: what the Trainer computes a loss in.
        prepare: what the Trainer does to the inputs of a batch.
    """

    def __init__(
        self,
        own: PerSampleLoss,
        precision: Callable[[], AbstractContextManager[Any]],
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._own = own
        self._precision = precision
        self._prepare = prepare

    @property
    def labels_are_tokens(self) -> bool:
        """As `PerSampleLoss`."""
        return self._own.labels_are_tokens

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """One loss per sample (B,)."""
        with self._precision():
            return self._own(model, self._prepare(dict(inputs)))

    def settle(self, model: nn.Module, inputs: Mapping[str, Any]) -> str:
        """Why the losses are not the model's own of this synthetic example; nothing if so."""
        with self._precision():
            return self._own.settle(model, self._prepare(dict(inputs)))

    def take_own_(self) -> None:
        """As `PerSampleLoss`."""
        self._own.take_own_()
