"""Random projection of one tensor's gradient (DP-GRAPE, arXiv 2506.15588, algorithm 1)."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import torch
from torch import Tensor

Side = Literal["left", "right"]
Scale = Literal["1/sqrt(r)", "1/r"]


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix.

    Those are its first dimension and the rest; but of a stack of matrices, as the experts of a
    layer are kept, all their rows one below the other, so that they share P. A tensor of three
    dimensions is a stack if it is then closer to a square.

    >>> matrix_shape(torch.Size((64, 3, 7, 7))), matrix_shape(torch.Size((8, 96, 32)))
    ((64, 147), (768, 32))
    """
    if not shape:
        return 1, 1
    plain = shape[0], math.prod(shape[1:])
    if len(shape) == 3 and shape[0] > 1:
        stacked = shape[0] * shape[1], shape[2]
        return max(plain, stacked, key=min)
    return plain


def projected_side(shape: torch.Size, rank: int) -> Side | None:
    """The side of a tensor, seen as a matrix (see `matrix_shape`), that shrinks to `rank`.

    None (not projected) if the rank is 0, the tensor has one dimension, or a side is no larger
    than the rank.
    """
    if rank == 0 or len(shape) < 2:
        return None
    rows, columns = matrix_shape(shape)
    if min(rows, columns) <= rank:
        return None
    return "right" if rows >= columns else "left"


class Projection:
    """Projects the gradient G (m x n) of one tensor: to `G @ P` (m x r) or `P.T @ G` (r x n).

    P has independent entries of mean 0 and standard deviation 1/sqrt(r), so that squared norms are
    kept on average and `E[P @ P.T]` is the identity; or 1/r, as in the paper's own code.
    P is a function of public numbers alone: the run's seed, the tensor's name, and how often it
    was refreshed. It is independent of the data, so projecting costs no privacy.

    Args:
        name: canonical name of the tensor.
        shape: its shape.
        rank: r; 0 leaves the gradient as it is.
        scale: standard deviation of P's entries.
        seed: public seed of the run.
        device: where P is kept.
    """

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        *,
        rank: int,
        scale: Scale = "1/sqrt(r)",
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self.full_shape = shape
        self.side = projected_side(shape, rank)
        self.rank = rank if self.side else 0
        self.scale = scale
        self.seed = seed
        self.device = torch.device(device)
        self.refresh_index = 0
        self._matrix: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the projected gradient."""
        if self.side is None:
            return self.full_shape
        rows, columns = matrix_shape(self.full_shape)
        return torch.Size((rows, self.rank) if self.side == "right" else (self.rank, columns))

    @property
    def entry_stddev(self) -> float:
        """Standard deviation of P's entries, if there is a P."""
        return self.rank**-0.5 if self.scale == "1/sqrt(r)" else 1 / self.rank

    @property
    def matrix(self) -> Tensor:
        """P, float32, of shape (shrunk side, r)."""
        if self._matrix is None:
            self._matrix = self.matrix_at(self.refresh_index)
        return self._matrix

    def prepare(self) -> None:
        """Draws P now, if there is one."""
        if self.side is not None:
            _ = self.matrix

    def matrix_at(self, refresh_index: int) -> Tensor:
        """P as it is after that many refreshes."""
        if self.side is None:
            raise ValueError(f"`{self.name}` is not projected, it has no projection matrix.")
        rows, columns = matrix_shape(self.full_shape)
        key = f"{self.seed}/{self.name}/{refresh_index}".encode()
        public_seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
        # Drawn on the CPU, so that every device and process has the same P.
        generator = torch.Generator().manual_seed(public_seed)
        shrunk = columns if self.side == "right" else rows
        drawn = torch.randn(shrunk, self.rank, generator=generator)
        return drawn.mul_(self.entry_stddev).to(self.device)

    def refresh_(self, refresh_index: int) -> None:
        """Moves on to another P."""
        if refresh_index != self.refresh_index:
            self.refresh_index = refresh_index
            self._matrix = None

    def on_rows(self, factor: Tensor) -> Tensor:
        """Projects a left factor (..., m) if the left side shrinks."""
        return factor @ self.matrix.to(factor.dtype) if self.side == "left" else factor

    def on_columns(self, factor: Tensor) -> Tensor:
        """Projects a right factor (..., n) if the right side shrinks."""
        return factor @ self.matrix.to(factor.dtype) if self.side == "right" else factor

    def rows_at(self, ids: Tensor) -> Tensor | None:
        """Rows of P at these ids, (..., r), if the left side shrinks."""
        return self.matrix[ids] if self.side == "left" else None

    def on_gradient(self, gradient: Tensor) -> Tensor:
        """Projects gradients (..., *full_shape) that were formed in full."""
        if self.side is None:
            return gradient
        matrix = self.matrix.to(gradient.dtype)
        batch = gradient.shape[: gradient.ndim - len(self.full_shape)]
        as_matrix = gradient.reshape(*batch, *matrix_shape(self.full_shape))
        return as_matrix @ matrix if self.side == "right" else matrix.T @ as_matrix

    def lift_onto_(self, weight: Tensor, update: Tensor, rows: slice = slice(None)) -> None:
        """Adds some rows of the lifted update to the same rows of a weight, in place.

        Args:
            weight: those rows of the weight, as a matrix, in the update's dtype.
            update: the whole update, of the projected shape.
            rows: which rows they are.
        """
        if self.side is None:
            weight.add_(update.view(matrix_shape(self.full_shape))[rows])
        elif self.side == "right":
            weight.addmm_(update[rows], self.matrix.to(update.dtype).T)
        else:
            weight.addmm_(self.matrix[rows].to(update.dtype), update)
