"""Generators that collators and data sets hold are found, wherever they are; rows are not read.

Covers: mechanism/own_generators.py.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    default_data_collator,
)
from transformers.trainer_utils import RemoveColumnsCollator

from hf_dpgrape.mechanism.own_generators import refuse_own_generators

GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": torch.Generator,
    "numpy": lambda: np.random.default_rng(0),
    "numpy, old": lambda: np.random.RandomState(0),
    "numpy, bits": lambda: np.random.PCG64(0),
    "python": lambda: random.Random(0),
}


class Holder:
    """Holds something, and can be a collator, a transform or a data set."""

    def __init__(self, held: Any = None) -> None:
        self.held = held

    def __call__(self, batch: Any) -> Any:
        return batch

    def method(self, batch: Any) -> Any:
        return batch


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, batch: Any) -> Any:
        return batch


class Rows(torch.utils.data.Dataset[Any]):
    """A data set with a transform."""

    def __init__(self, transform: Any = None) -> None:
        self.rows, self.transform = [{"x": 1}] * 3, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a row was read")


GLOBAL = random.Random(0)
ELSEWHERE = types.ModuleType("elsewhere")
ELSEWHERE.GENERATOR = np.random.default_rng(0)  # type: ignore[attr-defined]


def from_global(batch: Any) -> Any:
    return [GLOBAL.random() for _ in batch]


def from_inside(batch: Any) -> Any:
    return (lambda: [GLOBAL.random() for _ in batch])()


def from_elsewhere(batch: Any) -> Any:
    return ELSEWHERE.GENERATOR.random()


def through_another(batch: Any) -> Any:
    return from_global(batch)


class InMethod:
    def __call__(self, batch: Any) -> Any:
        return from_global(batch)


class InClass:
    held = GLOBAL

    def __call__(self, batch: Any) -> Any:
        return batch


def closure(generator: Any) -> Any:
    def collate(batch: Any) -> Any:
        return generator, batch

    return collate


def default(generator: Any) -> Any:
    def collate(batch: Any, generator: Any = generator) -> Any:
        return generator, batch

    return collate


def keyword(generator: Any) -> Any:
    def collate(batch: Any, *, generator: Any = generator) -> Any:
        return generator, batch

    return collate


def cycle(generator: Any) -> Any:
    first, second = Holder(), Holder()
    first.held, second.held, second.generator = second, first, generator  # type: ignore[attr-defined]
    return first


WAYS: dict[str, Callable[[Any], Any]] = {
    "attribute": Holder,
    "slot": Slotted,
    "attribute of an attribute": lambda g: Holder(Holder(Holder(g))),
    "method": lambda g: Holder(g).method,
    "partial, argument": lambda g: functools.partial(default_data_collator, g),
    "partial, keyword": lambda g: functools.partial(default_data_collator, generator=g),
    "partial of a holder": lambda g: functools.partial(Holder(g)),
    "closure": closure,
    "default": default,
    "keyword default": keyword,
    "list": lambda g: Holder([Holder(), Holder(g)]),
    "tuple": lambda g: Holder((g,)),
    "dict": lambda g: Holder({"a": g}),
    "columns removed": lambda g: RemoveColumnsCollator(Holder(g), ["x"]),
    "cycle": cycle,
    "cached": lambda g: functools.lru_cache(closure(g)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_are_found_in_collators(kind: str, way: str) -> None:
    with pytest.raises(ValueError, match=r"Expected `data_collator` to draw .* got `data_collator"):
        refuse_own_generators(WAYS[way](GENERATORS[kind]()), Rows())


@pytest.mark.parametrize(
    "collator",
    [from_global, from_inside, from_elsewhere, through_another, InMethod(), InClass()],
    ids=lambda c: getattr(c, "__name__", type(c).__name__),
)
def test_generators_are_found_in_what_functions_refer_to(collator: Any) -> None:
    with pytest.raises(ValueError, match="Expected `data_collator` to draw"):
        refuse_own_generators(collator, Rows())


def transformed(function: Any) -> datasets.Dataset:
    found = datasets.Dataset.from_dict({"x": [1, 2]})
    found.set_transform(function)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_generators_are_found_in_data_sets(way: str) -> None:
    held = WAYS[way](np.random.default_rng(0))
    for dataset in (
        transformed(held),
        Rows(held),
        torch.utils.data.Subset(Rows(held), [0, 1]),
        torch.utils.data.ConcatDataset([Rows(), Rows(held)]),
    ):
        with pytest.raises(ValueError, match="Expected `train_dataset` to draw"):
            refuse_own_generators(default_data_collator, dataset)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(3000)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="w1",
        mask_token="w2",
    )


def wrapped(collator: Any) -> Iterator[Any]:
    yield collator
    yield functools.partial(collator)
    yield collator.torch_call
    yield RemoveColumnsCollator(collator, ["input_ids"])
    yield Holder(collator)


def test_seeds_of_collators_are_refused() -> None:
    for collator in wrapped(DataCollatorForLanguageModeling(tokenizer(), seed=0)):
        with pytest.raises(ValueError, match=r"got `data_collator[a-z._]*\.seed=0`"):
            refuse_own_generators(collator, Rows())
    for collator in wrapped(DataCollatorForLanguageModeling(tokenizer())):
        refuse_own_generators(collator, Rows())


def from_global_generators(batch: Any) -> Any:
    return shuffle(batch), rand(), torch.rand((), generator=torch.default_generator)


shuffle, rand = random.shuffle, np.random.rand


@pytest.mark.parametrize(
    "collator",
    [
        default_data_collator,
        DataCollatorWithPadding(tokenizer()),
        from_global_generators,
        random.shuffle,
        np.random.permutation,
        Holder(random.SystemRandom()),
        Holder(torch.default_generator),
        Holder(tokenizer()),
        Holder(torch.nn.Linear(2, 3)),
    ],
    ids=lambda c: type(c).__name__,
)
def test_ordinary_collators_pass(collator: Any) -> None:
    refuse_own_generators(collator, Rows(collator))
    refuse_own_generators(collator, transformed(collator))


class Touchy:
    """A row that must not be looked at."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # what `isinstance` asks for
            return object.__getattribute__(self, name)
        raise AssertionError(f"a row was read: {name}")


def test_rows_are_not_read() -> None:
    dataset = Rows()
    dataset.rows = [Touchy() for _ in range(5)]
    refuse_own_generators(default_data_collator, dataset)
    dataset.rows = [{"generator": random.Random(0)}]
    refuse_own_generators(default_data_collator, dataset)


def test_what_is_large_is_passed_over() -> None:
    chain: Any = Holder()
    for _ in range(50_000):
        chain = Holder(chain)
    refuse_own_generators(chain, Rows())
    refuse_own_generators(Holder([Holder() for _ in range(1000)]), Rows())


def test_no_code_is_run() -> None:
    class Lazy:
        @property
        def held(self) -> Any:
            raise AssertionError("a property was read")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"an attribute was asked for: {name}")

        def __call__(self, batch: Any) -> Any:
            raise AssertionError("a collator was called")

    refuse_own_generators(Lazy(), Rows(Lazy()))
