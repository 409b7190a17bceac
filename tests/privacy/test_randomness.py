"""Secret randomness: never the public seed, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hf_dpgrape.privacy.randomness import (
    ExampleSeeds,
    SecretSource,
    reseed_cpu_,
    reseed_global_,
    secret_global_randomness,
)

PUBLIC_SEED = 42

DRAWS: dict[str, Callable[[], Any]] = {
    "python": lambda: random.random(),
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand((), dtype=torch.float64)),
}


def seed_publicly() -> None:
    random.seed(PUBLIC_SEED)
    np.random.seed(PUBLIC_SEED)
    torch.manual_seed(PUBLIC_SEED)


@pytest.fixture(autouse=True)
def _keep_global_generators() -> Any:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.parametrize("name", DRAWS)
def test_states_come_back(name: str) -> None:
    seed_publicly()
    expected = [DRAWS[name]() for _ in range(3)]
    seed_publicly()
    before = DRAWS[name]()
    with secret_global_randomness(SecretSource()):
        inside = [DRAWS[name]() for _ in range(3)]
    assert [before, DRAWS[name](), DRAWS[name]()] == expected
    assert not set(inside) & set(expected)


@pytest.mark.parametrize("name", DRAWS)
def test_states_come_back_after_an_error(name: str) -> None:
    seed_publicly()
    expected = DRAWS[name]()
    seed_publicly()
    with pytest.raises(KeyError), secret_global_randomness(SecretSource()):
        DRAWS[name]()
        raise KeyError
    assert DRAWS[name]() == expected


@pytest.mark.parametrize("name", DRAWS)
def test_blocks_differ_unless_a_test_fixes_the_seed(name: str) -> None:
    def inside(source: SecretSource) -> Any:
        seed_publicly()
        with secret_global_randomness(source):
            return DRAWS[name]()

    assert inside(SecretSource()) != inside(SecretSource())
    source = SecretSource()
    assert inside(source) != inside(source)
    assert inside(SecretSource(unsafe_seed=5)) == inside(SecretSource(unsafe_seed=5))
    assert inside(SecretSource(unsafe_seed=5)) != inside(SecretSource(unsafe_seed=6))


def test_secret_seeds_ignore_the_global_generators() -> None:
    seeds = set()
    for _ in range(20):
        seed_publicly()
        seeds.add(SecretSource().seed())
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_says_whether_it_is_secret() -> None:
    assert SecretSource().is_secret
    assert not SecretSource(unsafe_seed=0).is_secret


def test_one_fixed_source_gives_different_generators() -> None:
    source = SecretSource(unsafe_seed=5)
    first, second = (torch.rand(3, generator=source.generator()) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("reseed_", [reseed_cpu_, reseed_global_])
def test_reseeding_forgets_a_public_seed(
    name: str, reseed_: Callable[[SecretSource], None]
) -> None:
    def drawn(source: SecretSource) -> Any:
        seed_publicly()
        reseed_(source)
        return DRAWS[name]()

    source = SecretSource()
    assert len({drawn(source) for _ in range(5)}) == 5
    fixed = SecretSource(unsafe_seed=5)
    first = drawn(fixed)
    assert drawn(fixed) != first == drawn(SecretSource(unsafe_seed=5))


def test_an_example_has_seeds_of_its_own() -> None:
    def seeds(key: bytes, index: int) -> list[int]:
        found = ExampleSeeds(key, index)
        return [found.seed() for _ in range(5)]

    key, other = (SecretSource().key() for _ in range(2))
    drawn = [seed for k in (key, other) for index in (0, 1, 2**40) for seed in seeds(k, index)]
    assert len(set(drawn)) == len(drawn) and all(0 <= seed < 2**63 for seed in drawn)
    assert max(drawn) > 2**61  # all bits are used
    assert seeds(key, 7) == seeds(key, 7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_reseeding_reaches_gpus() -> None:
    def drawn(source: SecretSource) -> float:
        torch.manual_seed(PUBLIC_SEED)
        reseed_global_(source)
        return float(torch.rand((), device="cuda"))

    states = torch.cuda.get_rng_state_all()
    source = SecretSource()
    assert len({drawn(source) for _ in range(5)}) == 5
    assert drawn(SecretSource(unsafe_seed=5)) == drawn(SecretSource(unsafe_seed=5))
    torch.cuda.set_rng_state_all(states)
