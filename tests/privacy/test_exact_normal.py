"""Exact normal numbers on a grid: their law, their tails, and what few bits do not decide.

Covers: privacy/cipher.py.
"""

from __future__ import annotations

import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest
import scipy.stats

from hf_dpgrape.privacy.cipher import CipherStream, Words, require_cipher
from hf_dpgrape.privacy.exact_normal import (
    LazyUniform,
    are_kept,
    cell_bounds,
    draw_cells,
    exact_cell,
    exact_is_kept,
    floored_normals,
)

#: Cells of one standard deviation.
CELLS = 16


def stream(seed: int = 3) -> CipherStream:
    return CipherStream(seed.to_bytes(32, "big"))


class Scripted:
    """Words of a list, then one word for ever."""

    def __init__(self, *words: int, then: int = 0) -> None:
        self._words, self._then = list(words), then

    def words(self, count: int) -> Words:
        found = [self._words.pop(0) if self._words else self._then for _ in range(count)]
        return np.array(found, dtype=np.uint64)


# ---- The cipher ----------------------------------------------------------------------------


def test_the_stream_is_that_of_the_standard() -> None:
    # NIST SP 800-38A, F.5.5 (CTR-AES256.Encrypt): output blocks 1 to 4.
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    blocks = (
        "0bdf7df1591716335e9a8b15c860c502",
        "5a6e699d536119065433863c8f657b94",
        "1bc12c9c01610d5d0d8bd6a3378eca62",
        "2956e1c8693536b1bee99c73a31576b6",
    )
    assert CipherStream(key, counter).bytes(64).hex() == "".join(blocks)


def test_no_byte_comes_twice_and_words_are_bytes() -> None:
    whole, parts = stream(), stream()
    want = np.frombuffer(whole.bytes(800), "<u8")
    assert np.array_equal(np.concatenate([parts.words(n) for n in (1, 60, 39)]), want)
    assert len(set(want.tolist())) == 100
    assert stream(4).bytes(32) != stream(5).bytes(32)


def test_without_the_library_there_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    for attempt in (require_cipher, stream):
        with pytest.raises(ValueError, match=r"not installed; install `hf-dpgrape\[secure\]`"):
            attempt()


# ---- The law -------------------------------------------------------------------------------


def pvalue(found: np.ndarray, num_bits: int, stddev: float = 1.0) -> float:
    """Of a chi-square test for the law of floor(N * 2**num_bits), N of that deviation."""
    edge = 4 * 2**num_bits
    bounds = np.arange(-edge, edge + 1) / 2**num_bits / stddev
    cdf = np.concatenate([[0.0], scipy.stats.norm.cdf(bounds), [1.0]])
    counts = np.bincount(np.clip(found, -edge - 1, edge) + edge + 1, minlength=len(cdf) - 1)
    return float(scipy.stats.chisquare(counts, len(found) * np.diff(cdf)).pvalue)


@pytest.mark.parametrize("num_bits", [4, 5, 7])
def test_law_on_a_small_grid(num_bits: int) -> None:
    found = floored_normals(600_000, num_bits, stream())
    assert pvalue(found, num_bits) > 1e-3
    for off in (0.98, 1.02):  # the test can fail
        assert pvalue(found, num_bits, stddev=off) < 1e-9
    assert pvalue(np.where(found < 0, found + 1, found), num_bits) < 1e-9  # towards zero


def test_law_on_a_fine_grid() -> None:
    steps = floored_normals(400_000, 32, stream())
    found = (steps + 0.5) / 2**32
    assert scipy.stats.kstest(found, "norm").pvalue > 1e-3
    for off in (0.98, 1.02):
        assert scipy.stats.kstest(found, "norm", (0, off)).pvalue < 1e-6
    moments = [(found**power).mean() for power in (1, 2, 3, 4)]
    errors = np.sqrt([1, 2, 15, 96]) / len(found) ** 0.5
    assert (np.abs(np.subtract(moments, [0, 1, 0, 3])) < 4.5 * errors).all()
    for low in (steps & 15, steps >> 8 & 15):  # bits far below a standard deviation are coins
        assert scipy.stats.chisquare(np.bincount(low)).pvalue > 1e-3


def test_draws_are_independent_and_a_key_repeats_them() -> None:
    found = floored_normals(300_000, 32, stream())
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 4 / len(found) ** 0.5
    assert np.array_equal(found, floored_normals(300_000, 32, stream()))
    assert not np.array_equal(found[:50], floored_normals(50, 32, stream(4)))


@pytest.mark.parametrize("num_bits", [3, 53])
def test_refuses_grids_that_it_has_no_bits_for(num_bits: int) -> None:
    with pytest.raises(ValueError, match="`num_bits` must be from 4 to 52"):
        floored_normals(1, num_bits, stream())


# ---- Tails ---------------------------------------------------------------------------------


class Extreme:
    """Words that are among the largest 2**(64 - bits)."""

    def __init__(self, bits: int) -> None:
        self._mask = np.uint64((2**bits - 1) << (64 - bits))
        self._stream = stream()

    def words(self, count: int) -> Words:
        return self._stream.words(count) | self._mask


@pytest.mark.parametrize("bits", [20, 26, 32, 40])
def test_far_cells_have_their_law(bits: int) -> None:
    cells = draw_cells(100_000, Extreme(bits))
    weights = np.exp(-((np.arange(400) / CELLS) ** 2) / 2)
    above = np.append(np.cumsum(weights[::-1])[::-1] / weights.sum(), 0.0)  # sums of small numbers
    law = -np.diff(np.minimum(above, 2.0**-bits)) * 2.0**bits
    kept = law > 1e-4
    counts = np.bincount(cells, minlength=400)
    expected = np.append(law[kept], law[~kept].sum()) * len(cells)
    found = np.append(counts[kept], counts[~kept].sum())
    assert scipy.stats.chisquare(found, expected).pvalue > 1e-3
    if bits > 30:  # 5.77 is where float32 draws end
        assert cells.min() / CELLS > 5.77


def test_no_draw_is_cut_off() -> None:
    ones = 2**64 - 1
    reach = []
    for more in (0, 3, 8):
        coin = LazyUniform(ones, 64, Scripted(*[ones] * more, then=0))
        reach.append(exact_cell(coin) / CELLS)
    # Beyond y a normal number lies with probability about exp(-y^2 / 2), here 2^-64 (1 + more).
    want = [np.sqrt(2 * 64 * (1 + more) * np.log(2)) for more in (0, 3, 8)]
    assert np.allclose(reach, want, rtol=0.05) and reach[0] > 8.57


# ---- Where few bits do not decide ----------------------------------------------------------


def test_bounds_are_sure() -> None:
    bounds = cell_bounds()
    assert (np.diff(bounds.astype(object)) > 0).all() and int(bounds[-1]) == 2**64 - 1
    with localcontext(prec=60):
        weights = [(-Decimal(j * j) / (2 * CELLS**2)).exp() for j in range(400)]
        total, so_far = sum(weights), Decimal(0)
        for weight, bound in zip(weights, bounds[:-1].tolist(), strict=False):
            so_far += weight
            exact = so_far / total * 2**64
            assert bound == int(exact) and 1e-9 < exact - bound < 1 - 1e-9


def test_quick_answers_are_the_exact_ones() -> None:
    words = stream()
    cells = draw_cells(1500, words)
    places, coins = words.words(1500) >> np.uint64(1), words.words(1500)
    kept = are_kept(cells, places, coins, Scripted())
    assert 0 < (~kept).sum() < 100
    for j, x, u, answer in zip(cells.tolist(), places.tolist(), coins.tolist(), kept, strict=True):
        place, coin = LazyUniform(x, 63, Scripted()), LazyUniform(u, 64, Scripted())
        assert exact_is_kept(j, place, coin) == answer
    coins = words.words(300)
    quick = draw_cells(300, Scripted(*coins.tolist()))
    assert quick.tolist() == [exact_cell(LazyUniform(u, 64, stream())) for u in coins.tolist()]


@pytest.mark.parametrize("cell", [1, 20, 60])
def test_a_coin_at_the_edge_is_decided_by_its_further_bits(cell: int) -> None:
    with localcontext(prec=60):  # x = 1/2
        exact = (-(2 * cell + Decimal("0.5")) / (4 * CELLS**2)).exp() * 2**64
    below, place = int(exact), np.array([2**62], dtype=np.uint64)
    for coin, want in ((below, True), (below + 1, False)):
        found = are_kept(np.array([cell]), place, np.array([coin], np.uint64), Scripted())
        assert found.tolist() == [want]
    # All further bits of the coin 1: it is then above, if it was the last word below.
    assert not exact_is_kept(
        cell, LazyUniform(2**62, 63, Scripted()), LazyUniform(below, 64, Scripted(then=2**64 - 1))
    )


@pytest.mark.parametrize("cell", [0, 7, 100])
def test_a_word_that_equals_a_bound_is_decided_by_its_further_bits(cell: int) -> None:
    bound = int(cell_bounds()[cell])
    assert draw_cells(1, Scripted(bound, then=0)).tolist() == [cell]
    assert draw_cells(1, Scripted(bound, then=2**64 - 1)).tolist() == [cell + 1]
    assert draw_cells(2, Scripted(bound - 1, bound + 1)).tolist() == [cell, cell + 1]
