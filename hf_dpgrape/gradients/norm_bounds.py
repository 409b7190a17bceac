"""Norms of per-sample gradients, rounded up: bounds that floating point cannot get past.

Clipping multiplies sample i's gradient G_i by a factor c_i and adds the result to a sum. What
counts for privacy is the norm of what is *added*, roundings included, so the norm must not be below
it. Here are bounds that provably are not.

Numbers. u is the unit roundoff of the precision in force (2^-24 in float32), eta the smallest
normal number (2^-126): a result that underflows is off by at most eta, also where subnormal numbers
are flushed to zero, as inputs or as results. A sum of n products, in any order, with or without
fused operations, is off by at most gamma_n = n u / (1 - n u) times the sum of absolute values
(Higham 2002, Accuracy and Stability of Numerical Algorithms, sections 3.1 and 4.2), plus 2 n eta.
Sums over many terms are therefore taken in blocks of at most `BLOCK` = 256 terms, and blocks are
added in float64, whose own roundings enter in the same way with u = 2^-53.

A vector's square. Norms of blocks are taken in the vector's precision (256 products, 255 additions
and a root, squared again in float64), their squares are added in float64 to Q. All terms are
positive, so the true square is at most (Q + 2 N eta) (1 + gamma_260) for N entries (`squares`).

Factors. G = sum over t of d_t x_t^T, with m entries in d_t and n in x_t. With S = sum |d_t| |x_t|,
D = sum |d_t| and X = sum |x_t|, sums and norms rounded up:

* |G| <= S. With one position this is an equality.
* The Gram form N = sum over t, s of (d_t . d_s)(x_t . x_s) is the square of |G|. Its inner products
  are off by at most gamma |d_t||d_s| + 2 m eta and gamma |x_t||x_s| + 2 n eta (gamma_256, as blocks
  are added in float64), so N by at most (2 gamma + gamma^2) S^2 + 8 eta (m X^2 + n D^2), plus
  float64's share. When terms cancel, N may be far below S^2 and the error is all there is: it is
  added to N, not neglected.
* What is added is sum of (c d_t) x_t^T, rounded: off by at most gamma_(T+1) c S, and one rounding
  more for each time that something is added to the sum; and by eta (sqrt(m) X + 2 T sqrt(m n)) for
  underflow, which the factor c does not shrink. A sample in which the latter exceeds 2^-70 gets the
  bound infinity; in any other it is less than what clipping leaves free, see `PrivacyPlan`.

So what is added has at most the norm c (min(S, sqrt(N + error)) + gamma S) + 2^-70. Factors of
several uses of one tensor are one longer list of positions: S, D, X and T add up. Everything is per
sample. For T positions of about the same size and direction at random, S^2 is about T |G|^2, so the
bound lies above the norm by about T gamma_256: 0.2 % at T = 128, 0.8 % at T = 512.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: Terms that are added up in the operands' own precision.
BLOCK = 256

#: What may be added on top of a bound, in absolute terms, because numbers underflow.
_NEGLIGIBLE = 2.0**-70


def gamma(terms: int, unit: float) -> float:
    """Higham's gamma_n, the relative error of `terms` roundings; infinite if it is no bound."""
    return terms * unit / (1 - terms * unit) if terms * unit < 1 else math.inf


class Arithmetic(NamedTuple):
    """Precision in force: the unit roundoff and the smallest normal number."""

    unit: float
    smallest: float

    @classmethod
    def of(cls, *tensors: Tensor) -> Arithmetic:
        """That of the least precise of these tensors, none of which counts as less than float32."""
        wide = all(tensor.dtype == torch.float64 for tensor in tensors)
        info = torch.finfo(torch.float64 if wide else torch.float32)
        return cls(info.eps / 2, info.tiny)


_FLOAT64 = torch.finfo(torch.float64).eps / 2


def squares(vectors: Tensor) -> Tensor:
    """Upper bounds (...) in float64 of the squared norms of vectors (..., N)."""
    size, (unit, smallest) = vectors.shape[-1], Arithmetic.of(vectors)
    whole = size - size % BLOCK
    blocks = vectors[..., :whole].reshape(*vectors.shape[:-1], -1, BLOCK)
    total: Tensor = torch.linalg.vector_norm(blocks, dim=-1).double().square().sum(-1)
    total += torch.linalg.vector_norm(vectors[..., whole:], dim=-1).double().square()
    up = (1 + gamma(BLOCK + 4, unit)) * (1 + gamma(size // BLOCK + 8, _FLOAT64))
    bounds: Tensor = (total + 2 * size * smallest) * up
    return bounds


def gram(a: Tensor, b: Tensor) -> Tensor:
    """Inner products (B, T, S) in float64 of a's vectors (B, T, k) with b's (B, S, k)."""
    blocks = zip(torch.split(a, BLOCK, -1), torch.split(b, BLOCK, -1), strict=True)
    first = next(blocks)
    total = torch.bmm(first[0], first[1].mT).double()
    for left, right in blocks:
        total += torch.bmm(left, right.mT)
    return total


class Sizes(NamedTuple):
    """How large the factors of a gradient are: the sums S, D and X (B,) of above, rounded up."""

    both: Tensor
    left: Tensor
    right: Tensor
    num_positions: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, left: Tensor, right: Tensor, shape: tuple[int, int]) -> Sizes:
        """From the squared norms (B, T) of the two factors."""
        d, x = left.sqrt(), right.sqrt()
        return cls((d * x).sum(1), d.sum(1), x.sum(1), d.shape[1], shape)

    def __add__(self, other: Sizes) -> Sizes:  # type: ignore[override]
        """Those of all positions of both."""
        both, left, right = (a + b for a, b in zip(self[:3], other[:3], strict=True))
        return Sizes(both, left, right, self.num_positions + other.num_positions, self.shape)


def dense_bound(values: Tensor, like: Tensor) -> Tensor:
    """Bounds (B,) on what gradients (B, N) add to a sum, over the weight."""
    return squares(values).sqrt() * (1 + gamma(4, Arithmetic.of(values, like).unit))


def factors_bound(gram_form: Tensor, sizes: Sizes, num_parts: int, precision: Arithmetic) -> Tensor:
    """Bounds (B,) on what a gradient in factors adds to a sum, over the weight.

    Args:
        gram_form: its squared norms (B,) from Gram matrices, in float64.
        sizes: those of all its parts together.
        num_parts: how many parts are added to the sum one by one.
        precision: of the factors, their products and the sum.
    """
    (unit, smallest), (m, n) = precision, sizes.shape
    positions = sizes.num_positions
    roundings = 2 * positions**2 + max(m, n) // BLOCK + num_parts**2 + 16
    in_float64 = gamma(roundings, _FLOAT64)
    total = sizes.both * (1 + in_float64)
    block = gamma(BLOCK, unit)
    error = (2 * block + block**2 + in_float64) * total.square()
    error += 8 * smallest * (m * sizes.right.square() + n * sizes.left.square())
    # Where the Gram form is not a number, S is a bound all the same.
    exact = (gram_form + error).sqrt().nan_to_num(nan=math.inf, posinf=math.inf)
    bound = torch.minimum(total, exact) + gamma(positions + num_parts + 2, unit) * total
    lost = smallest * (math.sqrt(m) * sizes.right + 2 * positions * math.sqrt(m * n))
    return bound.where(lost <= _NEGLIGIBLE, math.inf)
