"""Normal numbers without rounding errors, rounded down to a grid.

A standard normal number N is its sign, a cell of width w = 1/16 and a place x in [0, 1) within it:
|N| = (j + x) w. By rejection (von Neumann 1951; with lazy bits Karney 2016, arXiv 1303.6257):

1. j is drawn with probability proportional to exp(-(j w)^2 / 2), the largest density in the cell;
2. x is uniform, and kept with probability exp(-x (2 j + x) w^2 / 2), the density at its place over
   the largest; else j and x are drawn anew.

What is kept has density proportional to exp(-((j + x) w)^2 / 2), so it *is* half-normal: as real
numbers, without any error, if "with probability p" is. That is a comparison of a uniform number U
with p. U and x are given by their first 64 (63) bits, p by float64 with a known error. Where these
decide, on either side, the answer is that of the real numbers. Where they do not, about once in
2^39 draws, further bits of U and x are drawn and p is computed to more digits until they do. The
first bits of a kept x are not touched by that, so `floor(N 2^k)` needs the first k - 4 of them.

No draw is cut off: j has no largest value.
"""

from __future__ import annotations

import functools
from decimal import Context, Decimal, localcontext
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hf_dpgrape.privacy.cipher import Words

Integers = npt.NDArray[np.int64]

#: Cells of one standard deviation: 2**4. One draw in 41 is rejected.
_CELL_BITS = 4
_WIDTH = 2.0**-_CELL_BITS

#: Bits of x, beside the sign in one word.
_PLACE_BITS = 63

#: Largest number of bits after the binary point that are asked for.
MOST_BITS = 52

#: Error of a float64 probability, and of 64-bit numbers rounded to float64: 2^-50 would do for
#: exponentials that are wrong by 4 units in the last place.
_MARGIN = 2.0**-40

#: Candidates drawn at a time: bounds memory.
_MOST_AT_ONCE = 2**17


class WordStream(Protocol):
    """Independent uniform numbers of 64 bits."""

    def words(self, count: int) -> Words:
        """The next numbers."""


class LazyUniform:
    """A uniform number in [0, 1), whose bits are drawn when they are asked for.

    Args:
        first: its first bits, as an integer.
        num_bits: how many these are.
        stream: gives further ones.
    """

    def __init__(self, first: int, num_bits: int, stream: WordStream) -> None:
        self._value, self._num_bits, self._stream = first, num_bits, stream

    def between(self, num_bits: int) -> tuple[Decimal, Decimal]:
        """Bounds that differ by 2^-num_bits or less, in the present context."""
        while self._num_bits < num_bits:
            self._value = (self._value << 64) | int(self._stream.words(1)[0])
            self._num_bits += 64
        scale = Decimal(2) ** self._num_bits
        return Decimal(self._value) / scale, Decimal(self._value + 1) / scale


def floored_normals(count: int, num_bits: int, stream: WordStream) -> Integers:
    """`floor(N * 2**num_bits)` for independent standard normal numbers N.

    Guarantees:
        The law is exactly that of the formula, if the words are independent and uniform.

    Args:
        count: how many.
        num_bits: bits after the binary point, from 4 to 52.
        stream: where the randomness comes from.
    """
    if not _CELL_BITS <= num_bits <= MOST_BITS:
        raise ValueError(f"`num_bits` must be from {_CELL_BITS} to {MOST_BITS}, got {num_bits}.")
    found, missing = [np.empty(0, np.int64)], count
    while missing:
        kept = _candidates(min(_MOST_AT_ONCE, missing + missing // 32 + 8), num_bits, stream)
        found.append(kept[:missing])
        missing -= len(found[-1])
    return np.concatenate(found)


def _candidates(count: int, num_bits: int, stream: WordStream) -> Integers:
    """Some of `count` draws, those that are kept."""
    cells, places, coins = draw_cells(count, stream), stream.words(count), stream.words(count)
    negative = (places >> np.uint64(_PLACE_BITS)).astype(bool)
    places = places & np.uint64(2**_PLACE_BITS - 1)
    kept = are_kept(cells, places, coins, stream)
    cells, places, negative = cells[kept], places[kept], negative[kept]
    below = num_bits - _CELL_BITS
    magnitude = (cells << below) + (places >> np.uint64(_PLACE_BITS - below)).astype(np.int64)
    # Minus a number that is no integer lies above -magnitude - 1, which is ~magnitude.
    return np.where(negative, ~magnitude, magnitude)


def draw_cells(count: int, stream: WordStream) -> Integers:
    """Draws of j."""
    bounds, coins = cell_bounds(), stream.words(count)
    cells = np.searchsorted(bounds, coins)
    for i in np.flatnonzero(bounds[cells] == coins):  # the 64 bits do not decide
        cells[i] = exact_cell(LazyUniform(int(coins[i]), 64, stream))
    return cells.astype(np.int64, copy=False)


def are_kept(
    cells: Integers, places: Words, coins: Words, stream: WordStream
) -> npt.NDArray[np.bool_]:
    """Whether x is kept, for each draw."""
    coin = coins.astype(np.float64) * 2.0**-64
    # Most are kept whatever x is: exp(-h) >= 1 - h, and h is largest at x = 1.
    most = (cells + 0.5) * _WIDTH**2
    kept = coin < 1 - most - _MARGIN
    rest = np.flatnonzero(~kept)
    place = places[rest].astype(np.float64) * 2.0**-_PLACE_BITS
    gap = np.exp(-place * (cells[rest] + place / 2) * _WIDTH**2) - coin[rest]
    kept[rest] = gap > 0
    for i in rest[np.abs(gap) <= _MARGIN]:  # float64 does not decide
        coin_, place_ = (
            LazyUniform(int(coins[i]), 64, stream),
            LazyUniform(int(places[i]), _PLACE_BITS, stream),
        )
        kept[i] = exact_is_kept(int(cells[i]), place_, coin_)
    return kept


# ---- Where the first bits do not decide ----------------------------------------------------


def exact_cell(coin: LazyUniform) -> int:
    """The j whose part of [0, 1) the uniform number lies in, to as many bits as that takes."""
    num_bits = 64
    while True:
        num_bits *= 2
        with localcontext(_context(num_bits)):
            low, high = coin.between(num_bits)
            error = Decimal(2) ** -num_bits
            for j, bound in enumerate(_cumulated(num_bits)):
                if high < bound - error:
                    return j
                if low <= bound + error:
                    break  # not decided


def exact_is_kept(cell: int, place: LazyUniform, coin: LazyUniform) -> bool:
    """Whether the coin is below exp(-x (2 j + x) w^2 / 2), to as many bits as that takes."""
    num_bits = 64
    while True:
        num_bits *= 2
        with localcontext(_context(num_bits)):
            error = Decimal(2) ** -num_bits
            least, most = (
                (-x * (2 * cell + x) / (2 * 4**_CELL_BITS)).exp()
                for x in reversed(place.between(num_bits))
            )
            low, high = coin.between(num_bits)
            if high < least - error:
                return True
            if low > most + error:
                return False


def _context(num_bits: int) -> Context:
    """Arithmetic whose errors, some thousand roundings together, are far below 2^-num_bits."""
    return Context(prec=num_bits // 3 + 30)


@functools.lru_cache(maxsize=8)
def _cumulated(num_bits: int) -> tuple[Decimal, ...]:
    """Probabilities of a cell up to the j-th; those left out have less than 2^-num_bits / 2.

    Each is wrong by less than 2^-num_bits.
    """
    with localcontext(_context(num_bits)):
        end, weights = Decimal(2) ** (-num_bits - 16), [Decimal(1)]
        while weights[-1] > end:  # what follows falls faster than by exp(-w j w) each
            weights.append((-Decimal(len(weights) ** 2) / (2 * 4**_CELL_BITS)).exp())
        total = sum(weights)
        sums, so_far = [], Decimal(0)
        for weight in weights:
            so_far += weight
            sums.append(so_far / total)
        return tuple(sums[:-1])


@functools.lru_cache(maxsize=1)
def cell_bounds() -> Words:
    """Integer parts of 2^64 times the cumulated probabilities; the last is the largest word.

    A word below a bound is below the probability whatever bits follow, one above it is above; one
    that equals it does not decide. So the largest word never decides, and j may be any number.
    """
    with localcontext(_context(256)):
        floors = [int(c * 2**64) for c in _cumulated(256)]
    below = [f for f in floors if f < 2**64 - 1]
    return np.array([*below, 2**64 - 1], dtype=np.uint64)
