"""What takes per-sample gradients, whichever way it does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from hf_dpgrape.gradients.forms import PerSampleGradients, WhenComplete

#: How gradients are taken: batched where that is exact and else single, or always the same way.
AUTO, BATCHED, SINGLE = CAPTURES = ("auto", "batched", "single")


class Records(Protocol):
    """Records the per-sample projected gradients of physical batches."""

    def record(
        self,
        batch_size: int,
        names: frozenset[str] | None = None,
        when_complete: WhenComplete | None = None,
        *,
        inputs: Any = None,
    ) -> AbstractContextManager[PerSampleGradients]:
        """Records one forward and backward of `batch_size` samples inside the block."""
        ...
