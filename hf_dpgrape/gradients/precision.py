"""Full float32 products, whatever precision the rest of the training uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Settings of torch 2.9 and later, one per library that multiplies float32 matrices.
_LIBRARIES = ("cuda", "mkldnn")


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Matrix products inside run in the dtype of their operands, without autocast.

    What was set comes back after, on an exception too. Both of torch's generations of settings are
    switched: `set_float32_matmul_precision`, which is all there is before torch 2.9, and
    `torch.backends.*.matmul.fp32_precision`. Once someone has used the newer ones, the older one
    can be read only while these say "ieee", hence the order.

    Args:
        device: where the operands are.
    """
    newer = [
        settings
        for settings in (getattr(getattr(torch.backends, name), "matmul", 0) for name in _LIBRARIES)
        if hasattr(settings, "fp32_precision")
    ]
    before = [settings.fp32_precision for settings in newer]
    for settings in newer:
        settings.fp32_precision = "ieee"
    older = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(older)
        for settings, precision in zip(newer, before, strict=True):
            # Reading gives what is in force, which may come from a setting for all libraries.
            settings.fp32_precision = "none"
            if settings.fp32_precision != precision:
                settings.fp32_precision = precision
