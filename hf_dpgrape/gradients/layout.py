"""How one layer sees the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Which first dimensions of a layer's tensors run over samples.

    Attributes:
        inputs: rows per sample of each input tensor's first dimension; 0 if it is not batched.
        output: the same for the output; 0 means a first dimension of 1, broadcast to all samples.
        broadcast: to how many rows per sample a broadcast output goes.
        calls: how many times it is called in a forward pass.
        problem: why per-sample gradients cannot be told apart here; empty if they can.
    """

    inputs: tuple[int, ...] = ()
    output: int = 1
    broadcast: int = 1
    calls: int = 1
    problem: str = ""


#: By `Site.key`.
Layouts = Mapping[str, Layout]
