"""Refuses collators and data sets that hold random generators of their own.

How far such a generator has advanced when it reaches an example depends on which examples were
drawn before, and its seed is often public. The global generators, by contrast, are seeded anew
and secretly for every example.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch

#: How far references are followed, and in how large containers.
_MAX_DEPTH, _MAX_OBJECTS, _MAX_ITEMS = 8, 10_000, 256

_GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    random.Random,
)

#: Not looked into: they draw nothing, or are rows.
_CLOSED = (
    torch.Tensor,
    np.ndarray,
    np.generic,
    str,
    bytes,
    int,
    float,
    type(None),
)
#: The same by package and name, which need not be installed.
_CLOSED_BY_NAME = frozenset(
    ("transformers", name)
    for name in (
        "PreTrainedConfig",
        "PreTrainedModel",
        "PreTrainedTokenizerBase",
        "Trainer",
        "TrainingArguments",
    )
)
#: A table of rows with a transform.
_TABLE_WITH_TRANSFORM = frozenset({("datasets", "Dataset")})

#: Packages whose code and tables hold no generator. Their objects may: attributes are looked at.
_KNOWN_CODE = frozenset(sys.stdlib_module_names) | {
    *("accelerate", "datasets", "numpy", "peft", "tokenizers", "torch", "torchvision"),
    *("transformers", "trl"),
}
_TABLES = frozenset({"PIL", "h5py", "pandas", "polars", "pyarrow", "tokenizers"})

#: What is held, and by which path.
Part = tuple[str, Any]


def refuse_own_generators(data_collator: Any, train_dataset: Any) -> None:
    """Refuses generators that collator or data set hold, and seeds that a collator has.

    Attributes are followed, and what functions refer to: closures, defaults, globals. Rows are
    never looked at, nor is anything called.

    Args:
        data_collator: makes model inputs of a list of examples.
        train_dataset: the training set, with its transform if it has one.

    Raises:
        ValueError: one sentence that names the attribute.
    """
    for argument, root in (("data_collator", data_collator), ("train_dataset", train_dataset)):
        for path, held in _reachable(argument, root):
            if isinstance(held, _GENERATORS):
                raise ValueError(
                    f"Expected `{argument}` to draw from the global generators of Python, NumPy or "
                    f"torch, which are seeded secretly, got `{path}`, a {type(held).__name__} of "
                    "its own: its numbers for one example would depend on who was drawn before; "
                    "remove it."
                )
            seed = getattr(held, "__dict__", {}).get("seed")
            if argument == "data_collator" and callable(held) and seed is not None:
                raise ValueError(
                    f"Expected `{argument}` without a seed, got `{path}.seed={seed!r}`: its "
                    "numbers for one example would be public and depend on who was drawn before; "
                    "leave it at None."
                )


def _reachable(path: str, root: Any) -> Iterator[Part]:
    """What an object holds, itself first, nearest first, each thing once."""
    waiting: deque[tuple[str, Any, int]] = deque([(path, root, 0)])
    seen: dict[int, Any] = {}  # keeps them alive, so that no number is given again
    while waiting and len(seen) < _MAX_OBJECTS:
        path, held, depth = waiting.popleft()
        if id(held) in seen or _is_closed(held) or _is_global(held):
            continue
        seen[id(held)] = held
        yield path, held
        if depth < _MAX_DEPTH and not isinstance(held, _GENERATORS):
            waiting.extend((path + suffix, part, depth + 1) for suffix, part in _parts(held))


def _is_closed(held: Any) -> bool:
    """Whether nothing is looked for inside."""
    return isinstance(held, _CLOSED) or _is_named(held, _CLOSED_BY_NAME)


def _is_named(held: Any, names: frozenset[tuple[str, str]]) -> bool:
    """Whether a class of the object is one of these, each a package and a name."""
    kinds = ((str(k.__module__).partition(".")[0], k.__name__) for k in type(held).__mro__)
    return not names.isdisjoint(kinds)


def _is_global(held: Any) -> bool:
    """Whether this is one of the global generators, or draws from the operating system."""
    return (
        held is random._inst
        or held is np.random.mtrand._rand
        or held is np.random.mtrand._rand._bit_generator
        or held is torch.default_generator
        or isinstance(held, random.SystemRandom)
    )


def _parts(held: Any) -> Iterator[Part]:
    """What is directly held."""
    if isinstance(held, FunctionType):
        yield from _of_function(held)
    elif isinstance(held, MethodType):
        yield from ((".__self__", held.__self__), ("", held.__func__))
    elif isinstance(held, BuiltinMethodType):
        if not isinstance(held.__self__, ModuleType):
            yield ".__self__", held.__self__
    elif isinstance(held, functools.partial):
        yield ".func", held.func
        yield from ((f".args[{i}]", value) for i, value in enumerate(held.args))
        yield from ((f".keywords[{name!r}]", value) for name, value in held.keywords.items())
    elif isinstance(held, Mapping):
        yield from _machinery(held.items() if len(held) <= _MAX_ITEMS else ())
    elif isinstance(held, list | tuple | set | frozenset | deque):
        yield from _machinery(enumerate(held) if len(held) <= _MAX_ITEMS else ())
    elif _is_named(held, _TABLE_WITH_TRANSFORM):  # its transform; the rest are tables
        yield ".format", held._format_kwargs
    elif isinstance(held, type):
        yield from _of_class(held)
    elif not isinstance(held, ModuleType):
        yield from _of_object(held)


def _machinery(items: Any) -> Iterator[Part]:
    """Elements that can draw: generators, whatever can be called, data sets. Rows are neither."""
    kinds = (*_GENERATORS, torch.utils.data.Dataset)
    for key, value in items:
        is_table = _is_named(value, _TABLE_WITH_TRANSFORM)
        if callable(value) or is_table or isinstance(value, kinds):
            yield f"[{key!r}]", value


def _of_object(held: Any) -> Iterator[Part]:
    """Attributes of an object, and its class."""
    if type(held).__module__.partition(".")[0] in _TABLES:
        return
    yield from ((f".{name}", value) for name, value in list(getattr(held, "__dict__", {}).items()))
    for base in type(held).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType):  # a slot
                yield f".{name}", getattr(held, name, None)
    yield "", type(held)


def _of_class(held: type) -> Iterator[Part]:
    """Attributes and methods of a class and its bases, where these are the user's."""
    for base in held.__mro__:
        if not _is_known(base):
            for name, member in vars(base).items():
                if isinstance(member, staticmethod | classmethod):
                    yield f".{name}", member.__func__
                elif isinstance(member, property):
                    yield f".{name}", member.fget
                elif not isinstance(member, MemberDescriptorType | GetSetDescriptorType):
                    yield f".{name}", member


def _of_function(held: FunctionType) -> Iterator[Part]:
    """What a function refers to."""
    yield from ((f".{name}", value) for name, value in vars(held).items())
    for name, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from ((".__defaults__", value) for value in held.__defaults__ or ())
    yield from ((f".{name}", value) for name, value in (held.__kwdefaults__ or {}).items())
    if _is_known(held):
        return
    names = set(_names(held.__code__))
    for name in sorted(names & held.__globals__.keys()):
        value = held.__globals__[name]
        if not isinstance(value, ModuleType):
            yield f".{name}", value
        elif value.__name__.partition(".")[0] not in _KNOWN_CODE:
            inside = sorted(names & vars(value).keys())
            yield from ((f".{name}.{own}", vars(value)[own]) for own in inside)


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function's code and in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_known(held: type | Callable[..., Any]) -> bool:
    """Whether code comes from a package that is known to hold no generators."""
    return (held.__module__ or "").partition(".")[0] in _KNOWN_CODE
