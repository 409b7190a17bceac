"""Per-sample gradients of one tensor, in three forms behind one small interface.

Shapes: B samples, T positions inside a sample, a tensor seen as a matrix of m rows and n columns
(either side already projected). Norms are rounded up, see `norm_bounds`.

* `Dense`: the gradients themselves, (B, *shape).
* `Outer`: two factors per sample, `rows` (B, T, m) and `columns` (B, T, n); gradient i is
  `rows[i].T @ columns[i]`. Norms need only Gram matrices of size T x T (Goodfellow 2015,
  arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679) and the sum only one matmul
  (Bu et al. 2023, arXiv 2210.00038).
* `Scatter`: an embedding's factors, of which the left one is one-hot: `ids` (B, T) and `values`
  (B, T, n); gradient i is the sum over t of `values[i, t]` in row `ids[i, t]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_dpgrape.gradients.norm_bounds import (
    Arithmetic,
    Sizes,
    dense_bound,
    factors_bound,
    gram,
    squares,
)
from hf_dpgrape.gradients.precision import full_float32

Form = Literal["auto", "dense", "factors"]


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in at least float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Weight times value, in the wider of both dtypes: a weight is never rounded, maybe up."""
    wide = torch.promote_types(_wide(values).dtype, weights.dtype)
    return values.to(wide) * weights.to(wide).view(-1, *[1] * (values.ndim - 1))


@dataclass(frozen=True)
class Dense:
    """Materialized per-sample gradients."""

    values: Tensor  # (B, *shape)

    def dense(self) -> Dense:
        """Itself, in at least float32."""
        return Dense(_wide(self.values))

    def select(self, samples: Tensor) -> Dense:
        """The gradients of the samples at these indices."""
        return Dense(self.values[samples])

    def dense_is_smaller(self) -> bool:
        """Always: it is dense already."""
        return True

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum over samples of weight times gradient, (*shape)."""
        wide = torch.promote_types(_wide(self.values).dtype, weights.dtype)
        return torch.einsum("b,b...->...", weights.to(wide), self.values.to(wide))


@dataclass(frozen=True)
class Outer:
    """Per-sample gradients `rows[i].T @ columns[i]`."""

    rows: Tensor  # (B, T, m)
    columns: Tensor  # (B, T, n)

    def dense(self) -> Dense:
        """The product, in at least float32."""
        rows, columns = self.rows, self.columns.to(self.rows.dtype)
        return Dense(_wide(torch.bmm(rows.mT, columns)))

    def select(self, samples: Tensor) -> Outer:
        """The gradients of the samples at these indices."""
        return Outer(self.rows[samples], self.columns[samples])

    def dense_is_smaller(self) -> bool:
        """Whether the product takes at most as much memory as the factors."""
        m, n = self.rows.shape[2], self.columns.shape[2]
        return m * n <= self.rows.shape[1] * (m + n)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum over samples of weight times gradient, (m, n)."""
        rows = _weighted(self.rows, weights)
        return rows.flatten(0, 1).T @ self.columns.to(rows.dtype).flatten(0, 1)

    def sizes(self) -> Sizes:
        """How large the factors are."""
        rows, columns = squares(_wide(self.rows)), squares(_wide(self.columns))
        return Sizes.of(rows, columns, (self.rows.shape[2], self.columns.shape[2]))


@dataclass(frozen=True)
class Scatter:
    """Per-sample gradients of an embedding: `values[i, t]` added to row `ids[i, t]`."""

    ids: Tensor  # (B, T)
    values: Tensor  # (B, T, n)
    num_rows: int

    def dense(self) -> Dense:
        """The scattered rows, in at least float32."""
        batch, _, width = self.values.shape
        values = _wide(self.values)
        out = values.new_zeros(batch * self.num_rows, width)
        # All samples in one table, each with rows of its own, so that one `index_add_` does.
        start = torch.arange(batch, device=self.ids.device)[:, None] * self.num_rows
        out.index_add_(0, (self.ids + start).flatten(), values.flatten(0, 1))
        return Dense(out.view(batch, self.num_rows, width))

    def select(self, samples: Tensor) -> Scatter:
        """The gradients of the samples at these indices."""
        return Scatter(self.ids[samples], self.values[samples], self.num_rows)

    def dense_is_smaller(self) -> bool:
        """Whether there are no more rows than positions."""
        return self.num_rows <= self.ids.shape[1]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum over samples of weight times gradient, (num_rows, n)."""
        values = _weighted(self.values, weights)
        out = values.new_zeros(self.num_rows, values.shape[2])
        return out.index_add_(0, self.ids.flatten(), values.flatten(0, 1))

    def sizes(self) -> Sizes:
        """How large the factors are; the left one is one-hot."""
        values = squares(_wide(self.values))
        return Sizes.of(torch.ones_like(values), values, (self.num_rows, self.values.shape[2]))


Gradient = Dense | Outer | Scatter


def _same(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in the wider of their dtypes, at least float32."""
    wide = torch.promote_types(_wide(a).dtype, _wide(b).dtype)
    return a.to(wide), b.to(wide)


def _factor_inner(a: Outer | Scatter, b: Outer | Scatter) -> Tensor:
    """Per-sample inner products (B,) in float64 of two gradients in factor form."""
    if isinstance(a, Outer) and isinstance(b, Scatter):
        a, b = b, a
    if isinstance(a, Scatter):
        right = gram(*_same(a.values, b.values if isinstance(b, Scatter) else b.columns))
        if isinstance(b, Scatter):
            return (right * (a.ids[:, :, None] == b.ids[:, None, :])).sum((1, 2))
        # left[i, t, s] is b's row factor at position s, read in the row that a's position t hits.
        index = a.ids[:, None, :].expand(-1, b.rows.shape[1], -1)
        return (right * b.rows.gather(2, index).double().mT).sum((1, 2))
    assert isinstance(b, Outer)
    return gram(*_same(a.rows, b.rows)).mul_(gram(*_same(a.columns, b.columns))).sum((1, 2))


def _bound_of_factors(parts: Sequence[Outer | Scatter], like: Tensor) -> Tensor:
    """Bounds (B,) on what the total of some parts adds to a sum, over the weight."""
    # |sum of parts|^2 has all cross terms: a tied tensor's uses may cancel, or add up.
    total, sizes = torch.zeros((), dtype=torch.float64, device=like.device), parts[0].sizes()
    for i, a in enumerate(parts):
        sizes = sizes if i == 0 else sizes + a.sizes()
        total = total + _factor_inner(a, a)
        for b in parts[i + 1 :]:
            total = total + 2 * _factor_inner(a, b)
    floats = [part.columns if isinstance(part, Outer) else part.values for part in parts]
    floats += [part.rows for part in parts if isinstance(part, Outer)]
    return factors_bound(total, sizes, len(parts), Arithmetic.of(like, *floats))


WhenComplete = Callable[["PerSampleGradients", str], None]


class PerSampleGradients:
    """All contributions to all tensors' per-sample gradients of one physical batch.

    A tensor that is used several times (tied or repeated layers) collects several contributions;
    norms and sums are those of their total, cross terms included.

    Args:
        batch_size: number of samples B.
        form: "auto" keeps the smaller of product and factors; the others force one (for tests).
        num_uses: how many times each tensor is used in a forward pass, as observed.
        when_complete: called with these gradients and the name of a tensor, once all its uses
            have contributed; the earliest moment at which its norm is known.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        form: Form = "auto",
        num_uses: Mapping[str, int] | None = None,
        when_complete: WhenComplete | None = None,
    ) -> None:
        self.batch_size = batch_size
        self._form = form
        self._parts: dict[str, list[Gradient]] = {}
        self._uses_left = dict(num_uses or {})
        self._when_complete = when_complete
        self._taken: set[str] = set()

    def use_is_done(self, name: str) -> None:
        """Notes that one use of the tensor has contributed."""
        self._uses_left[name] = self._uses_left.get(name, 0) - 1
        if self._uses_left[name] == 0 and self._when_complete is not None:
            self._when_complete(self, name)

    def discard(self, name: str) -> None:
        """Frees the gradients of a tensor that have been summed; more must not come."""
        self._parts.pop(name, None)
        self._taken.add(name)

    def add(self, name: str, part: Gradient) -> None:
        """Adds a contribution to the gradients of the tensor `name`."""
        if name in self._taken:
            raise RuntimeError(
                f"`{name}` is used more often in training than when the model was inspected, so "
                "its gradient was clipped before it was complete; freeze it."
            )
        parts = self._parts.setdefault(name, [])
        held_dense = bool(parts) and isinstance(parts[0], Dense)
        wants_dense = self._form == "dense" or (self._form == "auto" and part.dense_is_smaller())
        if not (held_dense or wants_dense or isinstance(part, Dense)):
            parts.append(part)
            return
        # One dense part makes all dense: cross terms of factors with it need the product anyway.
        total = part.dense().values
        for held in parts:
            total = held.dense().values.add_(total)
        self._parts[name] = [Dense(total)]

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors that received a gradient."""
        return iter(self._parts)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold the gradients at the moment."""
        for parts in self._parts.values():
            for part in parts:
                yield from (value for value in vars(part).values() if isinstance(value, Tensor))

    def squared_norms(self, names: Iterable[str], like: Tensor) -> Tensor:
        """Squared norms (B,) in float64 of the joint gradients of some tensors, rounded up.

        Guarantees:
            What one sample adds in `add_weighted_sum_` to sums of zero has at most its weight
            times the root of this as its norm, up to 2^-70 for each tensor and the roundings of a
            few float64 operations. A sample's value does not depend on the other samples.

        Args:
            names: the tensors; absent ones count as zero.
            like: a tensor of the device and dtype of the sums.
        """
        total = torch.zeros(self.batch_size, dtype=torch.float64, device=like.device)
        with full_float32(like.device):
            for name in names:
                if self._parts.get(name):
                    total += self._bound(name, like).square()
        return total

    def _bound(self, name: str, like: Tensor) -> Tensor:
        parts = self._parts[name]
        if isinstance(parts[0], Dense):
            return dense_bound(_wide(parts[0].values).flatten(1), like)
        factors = [part for part in parts if not isinstance(part, Dense)]
        return _bound_of_factors(factors, like)

    def dense(self, name: str) -> Tensor | None:
        """The materialized per-sample gradients (B, *shape) of one tensor, or None if absent."""
        parts = self._parts.get(name)
        return None if not parts else sum(part.dense().values for part in parts)  # type: ignore[return-value]

    def of_sample(self, name: str, sample: int) -> Tensor:
        """The materialized gradient (*shape) of one sample, for a tensor that has one."""
        index = torch.tensor([sample], device=next(self.tensors()).device)
        return sum(part.select(index).dense().values[0] for part in self._parts[name])  # type: ignore[return-value]

    def add_weighted_sum_(self, name: str, out: Tensor, weights: Tensor) -> None:
        """Adds the sum over samples of weight times gradient to `out`, in place.

        Samples whose weight is exactly 0 are left out, so that a non-finite gradient (which gets
        weight 0) cannot turn the sum into NaN.
        """
        # Left out, not multiplied by 0, which keeps infinity and NaN.
        keep = weights != 0
        with full_float32(out.device):
            for part in self._parts.get(name, []):
                if keep.all():
                    out += part.weighted_sum(weights).view_as(out)
                else:
                    samples = keep.nonzero().squeeze(1)
                    out += part.select(samples).weighted_sum(weights[samples]).view_as(out)
