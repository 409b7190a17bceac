"""Where a model is rehearsed: in training mode, and as if nothing had happened afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Callable[[], dict[str, str]]]:
    """Training mode inside; modes, generators, buffers and zero tensors come back after it."""
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (name, module, local, buffer, buffer.clone())
        for path, module in model.named_modules()
        for local, buffer in module._buffers.items()
        if buffer is not None
        for name in [f"{path}.{local}".lstrip(".")]
    ]

    def moved() -> dict[str, str]:
        return {
            name: "a forward pass in training changes this buffer, which would hold numbers "
            "of private activations without noise; switch its running statistics off"
            for name, module, local, _, value in buffers
            if not _is_same(module._buffers.get(local), value)
        }

    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), _filled(model):
        torch.manual_seed(0)
        model.train()
        try:
            yield moved
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            for module, mode in modes.items():
                module.training = mode
            for _, module, local, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[local] = buffer


def _is_same(now: Tensor | None, before: Tensor) -> bool:
    return now is not None and now.shape == before.shape and bool(torch.equal(now, before))


@contextmanager
def _filled(model: nn.Module) -> Iterator[None]:
    """Tensors that are zero throughout have small random values inside the block."""
    with torch.no_grad():
        zeros = [p for p in model.parameters() if p.numel() and not p.any()]
        for p in zeros:
            p.normal_(0.0, 0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()
