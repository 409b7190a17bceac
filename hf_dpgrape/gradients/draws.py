"""Random numbers that a model draws while it runs: who draws them, and whether samples share them.

Dropout keeps the guarantee because every sample has draws of its own (`docs/privacy.md`). A number
that is drawn once for a whole batch does not: which samples share it depends on who else is there.
Options of known models tell little, for they nest, change after building, and have many names. So
the operators themselves are watched: whatever draws from a generator of torch passes a dispatch
mode, and a draw that does not grow with the batch is shared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

#: What a draw is replaced by: nothing, its expectation, or one of its extremes.
Replacement = Literal["nothing", "mean", "low", "high"]

#: A normal number beyond which nobody draws within a run's length.
_FAR = 6.0


@dataclass(frozen=True)
class Draw:
    """One random operator in a forward pass.

    Attributes:
        module: qualified name of the innermost module that runs it.
        operator: its name.
        size: how many numbers it draws.
        is_own: whether the model handed it a generator of its own.
    """

    module: str
    operator: str
    size: int
    is_own: bool = False


def _argument(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The value of an operator's argument; None if it has no such argument."""
    if name in kwargs:
        return kwargs[name]
    for value, argument in zip(args, func._schema.arguments, strict=False):
        if argument.name == name:
            return value
    return next((a.default_value for a in func._schema.arguments if a.name == name), None)


def _constant(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> Any:
    """The mean or an extreme of what an operator draws; None if it is not one number."""
    pick = {"low": 0, "mean": 1, "high": 2}[what]
    name = func.overloadpacket.__name__.rstrip("_").removesuffix("_like")
    if name == "bernoulli":
        prob = _argument(func, args, kwargs, "p")
        return (
            0.0,
            args[0] if prob is None and name == func.overloadpacket.__name__ else prob,
            1.0,
        )[pick]
    if name in ("rand", "uniform"):
        low = _argument(func, args, kwargs, "from") or 0.0
        high = _argument(func, args, kwargs, "to")
        high = 1.0 if high is None else high
        return (low, (low + high) / 2, high - (high - low) * 2**-24)[pick]
    if name in ("randn", "normal"):
        mean, std = (_argument(func, args, kwargs, key) for key in ("mean", "std"))
        if not isinstance(mean, float | int | None) or not isinstance(std, float | int | None):
            return mean
        centre, spread = mean or 0.0, 1.0 if std is None else std
        return (centre - _FAR * spread, centre, centre + _FAR * spread)[pick]
    if name == "exponential":
        return (2.0**-24, 1.0, 2.0**4)[pick]
    if name == "randint":
        low = _argument(func, args, kwargs, "low") or 0
        return (low, low, _argument(func, args, kwargs, "high") - 1)[pick]
    return None


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every random operator inside the block, and may replace what it draws.

    With their expectations in place of all draws, training mode is a deterministic function: a
    dropout mask of its mean keeps activations as they are.

    Args:
        model: whose modules are named in what is seen.
        replacement: what is put in place of draws.
        extremes: ordinals of draws that get this extreme instead.
    """

    def __init__(
        self,
        model: nn.Module,
        replacement: Replacement = "nothing",
        extremes: Mapping[int, Literal["low", "high"]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Draw] = []
        self._replacement = replacement
        self._extremes = extremes or {}
        self._path: list[str] = []
        self._model = model

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Notes a random operator; everything else passes."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not self._is_drawing(
            func, args, kwargs
        ):
            return func(*args, **kwargs)
        # Ordinals, not names: a module may draw several times, and each draw is tried alone.
        what = self._extremes.get(len(self.seen), self._replacement)
        is_own = _argument(func, args, kwargs, "generator") is not None
        if is_own:  # not replaced: it may be anything, as a projection's matrix
            what = "nothing"
        # A fused kernel's mask cannot be replaced by its mean, but switched off, which is the same.
        if what != "nothing":
            args, kwargs = _without_dropout(func, args, kwargs)
        out = func(*args, **kwargs)
        drawn = out[0] if isinstance(out, tuple | list) else out
        self.seen.append(
            Draw(
                module=self._path[-1] if self._path else "",
                operator=func.overloadpacket.__name__,
                size=drawn.numel(),
                is_own=is_own,
            )
        )
        if what == "nothing" or not isinstance(out, Tensor):
            return out
        constant = _constant(func, args, kwargs, what)
        if constant is None:
            return out
        return out.copy_(constant) if isinstance(constant, Tensor) else out.fill_(constant)

    @staticmethod
    def _is_drawing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a kernel that may drop out does."""
        prob = _argument(func, args, kwargs, "dropout_p")
        return prob is None or prob > 0

    @contextmanager
    def named(self) -> Iterator[Draws]:
        """Watches inside the block, and knows which module runs."""

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: self._path.append(name)

        def leave(*_: Any) -> None:
            self._path.pop()

        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()
            self._path.clear()


def _without_dropout(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a fused kernel with its dropout probability set to zero."""
    probabilities = {"dropout_p"} | ({"p"} if "dropout" in func.overloadpacket.__name__ else set())
    names = [argument.name for argument in func._schema.arguments]
    changed = tuple(0.0 if n in probabilities else v for v, n in zip(args, names, strict=False))
    return changed, {k: 0.0 if k in probabilities else v for k, v in kwargs.items()}


@dataclass(frozen=True)
class _States:
    """States of the generators that no dispatch mode sees."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=lambda: np.random.get_state()[1].tobytes())  # type: ignore[index]
    numpy_position: Any = field(default_factory=lambda: np.random.get_state()[2])  # type: ignore[index]


def foreign_draws(run: Callable[[], object]) -> dict[str, str]:
    """Whether a forward pass draws from generators that are not torch's; why that is refused."""
    before = _States()
    run()
    if before == _States():
        return {}
    return {
        "": "its forward pass draws from Python's or NumPy's generator, which serves all samples "
        "of a batch (SpecAugment does); turn that off in its configuration"
    }


def shared_draws(model: nn.Module, run: Callable[[int], Tensor]) -> dict[str, str]:
    """Modules that draw one random number for several samples, with what was seen.

    Args:
        model: the model, in training mode.
        run: passes that many samples of one shape forward (and backward); returns numbers that
            change when what the model computes does.
    """
    # As with layouts: what is drawn for each sample grows with their number, 2 : 3.
    views = []
    for num_samples in (2, 3):
        with Draws(model).named() as draws:
            run(num_samples)
        views.append(draws.seen)
    if [d.operator for d in views[0]] != [d.operator for d in views[1]]:
        return {"": "how often it draws random numbers depends on the number of samples"}
    own = {
        d.module: f"it hands `{d.operator}` a generator of its own, whose seed is not secret; "
        "leave the generator out"
        for d in views[0]
        if d.is_own
    }
    pairs = zip(*views, strict=True)
    shared = {i: two for i, (two, three) in enumerate(pairs) if two.size * 3 != three.size * 2}
    used = _used(model, run, shared)
    return own | {
        draw.module: f"`{draw.operator}` draws the same random numbers for all samples of a batch "
        "(as LayerDrop and masks on shared tables do), so one record would move others; set the "
        "option behind it to 0 before the model is built"
        for i, draw in shared.items()
        if i in used
    }


def _used(model: nn.Module, run: Callable[[int], Tensor], ordinals: Iterable[int]) -> set[int]:
    """Those of some draws that change what the model computes when they take their extremes.

    A model may draw a number and not use it, as decoders do whose LayerDrop is 0.
    """
    extremes: tuple[Literal["low", "high"], ...] = ("low", "high")
    ordinals = list(ordinals)
    if not ordinals:
        return set()
    with Draws(model, "mean"):
        plain = run(2)
    used = set()
    for i in ordinals:
        for extreme in extremes:
            with Draws(model, "mean", {i: extreme}):
                if not torch.equal(run(2), plain):
                    used.add(i)
    return used
