"""Secret randomness: generators seeded from the operating system, never logged nor saved.

A seed that an adversary knows voids the guarantee: known noise can be subtracted, a known sample
is not amplified. `set_seed(args.seed)` makes the global generators public, so nothing secret
may be drawn from them as they stand.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

#: Seeds of `torch.Generator` are 64-bit; the sign bit is left alone.
_SEED_BITS = 63


class Seeds(Protocol):
    """Gives seeds of 63 bits, one after the other."""

    def seed(self) -> int:
        """The next one."""


class SecretSource:
    """Hands out secret seeds; from OS entropy unless a test fixes them.

    Args:
        unsafe_seed: for tests only. With it the run is reproducible and therefore NOT private.
    """

    def __init__(self, *, unsafe_seed: int | None = None) -> None:
        self._unsafe = None if unsafe_seed is None else random.Random(unsafe_seed)

    @property
    def is_secret(self) -> bool:
        """False when a test fixed the seed."""
        return self._unsafe is None

    def seed(self) -> int:
        """A fresh seed of 63 bits."""
        if self._unsafe is not None:
            return self._unsafe.getrandbits(_SEED_BITS)
        return secrets.randbits(_SEED_BITS)

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator on `device`, seeded by a fresh secret seed."""
        generator = torch.Generator(device=device)
        generator.manual_seed(self.seed())
        return generator

    def key(self) -> bytes:
        """A fresh secret of 252 bits (32 bytes), for `ExampleSeeds` or a `CipherStream`."""
        return b"".join(self.seed().to_bytes(8, "big") for _ in range(4))


class ExampleSeeds:
    """Seeds for what is drawn for one example: a function of a secret and the example's index.

    For a unit of several rows it is the unit's index; each of its rows has seeds of its own, by its
    place among the unit's rows.

    So an example draws the same, whichever others are drawn beside it, before it or after it; who
    does not know the secret sees independent draws (keyed BLAKE2b, RFC 7693, is a pseudorandom
    function).

    Args:
        key: `SecretSource.key`, drawn anew for each logical batch.
        index: the example's, in the training set, or the unit's.
        place: a row's place among those of its unit; None for the example or unit itself.
    """

    def __init__(self, key: bytes, index: int, place: int | None = None) -> None:
        # Of 8 bytes or of 16, so no row has the seeds of a unit.
        path = (index,) if place is None else (index, place)
        message = b"".join(number.to_bytes(8, "big") for number in path)
        self._key = hashlib.blake2b(message, key=key).digest()
        self._count = 0

    def seed(self) -> int:
        """The next seed, of 63 bits."""
        self._count += 1
        found = hashlib.blake2b(self._count.to_bytes(8, "big"), key=self._key, digest_size=8)
        return int.from_bytes(found.digest(), "big") >> (64 - _SEED_BITS)


def reseed_cpu_(seeds: Seeds) -> None:
    """Seeds the global generators of the CPU (Python, NumPy, torch) anew, in microseconds.

    Args:
        seeds: gives the seeds.
    """
    random.seed(seeds.seed())
    high, low = divmod(seeds.seed(), 2**32)
    np.random.seed([high, low])  # one number would be cut to 32 bits
    torch.default_generator.manual_seed(seeds.seed())


def reseed_global_(seeds: Seeds) -> None:
    """Seeds the global generators (Python, NumPy, torch on all devices) anew.

    Whatever was drawn before, and whatever seed a callback or collator has set, tells nothing about
    what is drawn after. Also for worker processes, which have their own entropy from the OS.

    Args:
        seeds: gives the seeds.
    """
    reseed_cpu_(seeds)
    torch.manual_seed(seeds.seed())


@contextlib.contextmanager
def global_randomness_restored() -> Iterator[None]:
    """After the block, the global generators (Python, NumPy, torch) stand where they stood before.

    No secret state is then left to be saved.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextlib.contextmanager
def secret_global_randomness(source: SecretSource) -> Iterator[None]:
    """Runs a block with global generators (Python, NumPy, torch) that nobody outside can know.

    Dropout, masking collators and augmentations draw from them, and how far a generator has
    advanced when it reaches one example depends on which other examples were drawn. Under a
    public seed, adding one record would therefore change the *other* records' gradients, beyond
    the clip norm. With secret independent draws the output distribution is a mixture over masks
    that can be coupled record by record, and joint convexity carries the guarantee over.

    The previous states come back at the end, so that no secret state is left to be saved.
    """
    with global_randomness_restored():
        reseed_global_(source)
        yield
