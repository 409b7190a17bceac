"""What is in memory while real code runs, on tensors with or without storage.

`torch.distributed._tools.mem_tracker.MemTracker` follows the same storages and is what the tests
compare with. It is not used here because it visits every module of the model after every operation
(four minutes for one step of OPT-6.7B) and cannot track a model with frozen parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: Bytes by what they are for.
Parts = Mapping[str, int]

#: A peak's parts are counted again when it has grown by this share.
_RECOUNT_GROWTH = 1.001


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    storages = {
        storage._cdata: storage.nbytes()
        for tensor in tensors
        if tensor is not None
        for storage in (tensor.untyped_storage(),)
    }
    return sum(storages.values())


@dataclass
class Peak:
    """The most that was in memory during one phase, in bytes."""

    total: int = 0
    parts: Parts = field(default_factory=dict)
    counted_at: int = 0


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of all tensors that exist, and their peak by phase.

    An operation's results are counted while its arguments still exist. What a kernel uses inside
    itself is not seen, nor what an allocator keeps.

    Args:
        tensors: what exists already; anything else made before is not counted.
        parts: counts what is held at the moment, by purpose.
    """

    def __init__(
        self, tensors: Iterable[Tensor | None], parts: Callable[[], Parts] = lambda: {}
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.phase = ""
        self.peaks: dict[str, Peak] = {}
        self._parts = parts
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            if tensor is not None:
                self._follow(tensor)

    def start(self, phase: str) -> None:
        """Begins a phase."""
        self.phase = phase
        self._note_peak()

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._live:
            return

        def forget(_: Any) -> None:
            del self._live[key]
            self.now -= size

        self._live[key] = weakref.ref(storage, forget)
        self.now += size

    def _note_peak(self) -> None:
        peak = self.peaks.setdefault(self.phase, Peak())
        if self.now <= peak.total:
            return
        peak.total = self.now
        if self.now > _RECOUNT_GROWTH * peak.counted_at:
            peak.parts, peak.counted_at = self._parts(), self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation and counts its results."""
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        self._note_peak()
        return out


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers code that reads a value of a tensor without storage.

    The answer is yes, or one: all gradients are finite, runs agree with each other, a counter is
    at its start. What memory a step takes does not depend on values otherwise.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Intercepts reads; everything else passes."""
        if func is torch.ops.aten.allclose.default:
            return True
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


def _gpu_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout that keeps one byte per element, and not a factor in the element's own dtype."""
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


@contextmanager
def _gpu_kernels() -> Iterator[None]:
    """Dropout and attention keep for backward what they keep on a GPU.

    There, attention with dropout keeps no probabilities. A CPU's attention does not either if
    there is no dropout, so it stands for the GPU's.
    """
    # Attributes and not a `TorchFunctionMode`, which is off while backward runs layers again.
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def gpu_attention(*args: Any, **kwargs: Any) -> Tensor:
        return attention(*args[:4], **{**kwargs, "dropout_p": 0.0})

    F.dropout, F.scaled_dot_product_attention = _gpu_dropout, gpu_attention
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = dropout, attention


@contextmanager
def world(*, without_storage: bool, gpu_kernels: bool) -> Iterator[None]:
    """The conditions under which a model is built and trained for a measurement.

    Args:
        without_storage: tensors have shapes, and storages have sizes, but no memory behind them.
        gpu_kernels: dropout and attention keep what they keep on a GPU.
    """
    with ExitStack() as stack:
        if without_storage:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(_Answers())  # type: ignore[no-untyped-call]
        if gpu_kernels:
            stack.enter_context(_gpu_kernels())
        yield


def replace_meta_tensors_(model: nn.Module) -> None:
    """Replaces a model's tensors on the meta device by ones on the CPU, of this world.

    Models are built and changed on the meta device, since modules cannot convert tensors without
    storage in place.
    """
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # with the originals, so that ids stay taken
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in replaced:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    replaced[id(old)] = (old, new)
                tensors[name] = replaced[id(old)][1]  # type: ignore[assignment]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have this dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
