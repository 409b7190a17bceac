"""Projections: shapes, moments, seeds, and the lift as the adjoint of the projection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dpgrape.subspace.projection import Projection, projected_side


@pytest.mark.parametrize(
    ("shape", "rank", "side", "projected"),
    [
        ((30, 20), 4, "right", (30, 4)),
        ((20, 30), 4, "left", (4, 30)),
        ((20, 20), 4, "right", (20, 4)),
        ((30, 4), 4, None, (30, 4)),
        ((30,), 4, None, (30,)),
        ((30, 20), 0, None, (30, 20)),
        ((30, 3, 5, 5), 4, "left", (4, 75)),
        ((99, 3, 5, 5), 4, "right", (99, 4)),
        ((8, 96, 32), 4, "right", (8 * 96, 4)),  # a stack of experts
        ((3, 5, 32), 4, "left", (4, 32)),
        ((64, 8, 3), 4, "right", (64, 4)),  # a convolution
        ((1, 50, 20), 4, None, (1, 50, 20)),  # a table with a batch dimension in front
    ],
)
def test_shapes(shape: tuple[int, ...], rank: int, side: str, projected: tuple[int, ...]) -> None:
    projection = Projection("w", torch.Size(shape), rank=rank)
    assert projection.side == side == projected_side(torch.Size(shape), rank)
    assert tuple(projection.shape) == projected
    assert projection.on_gradient(torch.randn(2, *shape)).shape[1:].numel() == (
        torch.Size(projected).numel()
    )


@settings(max_examples=20, deadline=None)
@given(m=st.integers(2, 12), n=st.integers(2, 12), rank=st.integers(1, 5))
def test_lift_is_the_adjoint_of_projecting(m: int, n: int, rank: int) -> None:
    projection = Projection("w", torch.Size((m, n)), rank=rank)
    g = torch.Generator().manual_seed(m * 100 + n)
    gradient = torch.randn(m, n, generator=g, dtype=torch.float64)
    update = torch.randn(projection.shape, generator=g, dtype=torch.float64)
    lifted = torch.zeros(m, n, dtype=torch.float64)
    projection.lift_onto_(lifted, update)
    inner = (projection.on_gradient(gradient) * update).sum()
    assert torch.allclose(inner, (gradient * lifted).sum())


def test_a_stack_is_projected_and_lifted_matrix_by_matrix() -> None:
    projection = Projection("w", torch.Size((3, 7, 5)), rank=2)
    gradients = torch.randn(4, 3, 7, 5, dtype=torch.float64)
    each = (gradients @ projection.matrix.double()).reshape(4, 21, 2)
    torch.testing.assert_close(projection.on_gradient(gradients), each)
    lifted = torch.zeros(3, 7, 5, dtype=torch.float64)
    projection.lift_onto_(lifted.view(21, 5), each[0])
    torch.testing.assert_close(lifted, each[0].view(3, 7, 2) @ projection.matrix.double().T)


def test_norms_are_kept_on_average_and_lifting_is_unbiased() -> None:
    gradient = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    projection = Projection("w", gradient.shape, rank=6, seed=3)
    squares, lifted = [], torch.zeros_like(gradient)
    for index in range(400):
        projection.refresh_(index)
        projected = projection.on_gradient(gradient)
        squares.append(float(projected.square().sum()))
        projection.lift_onto_(lifted, projected)
    assert sum(squares) / 400 == pytest.approx(float(gradient.square().sum()), rel=0.03)
    error = (lifted / 400 - gradient).norm() / gradient.norm()
    assert error < 0.15  # it falls as 1 / sqrt(number of projections)


def test_scale_of_the_authors_code() -> None:
    gradient = torch.randn(40, 30)
    ours, theirs = (
        Projection("w", gradient.shape, rank=9, scale=scale).on_gradient(gradient)
        for scale in ("1/sqrt(r)", "1/r")
    )
    assert torch.allclose(ours, theirs * 3, atol=1e-5)


def test_matrix_depends_on_public_numbers_alone() -> None:
    def matrix(name: str = "w", seed: int = 0, refresh: int = 0) -> torch.Tensor:
        torch.rand(3)  # the global generator plays no part
        return Projection(name, torch.Size((8, 6)), rank=2, seed=seed).matrix_at(refresh)

    assert torch.equal(matrix(), matrix())
    others = [matrix("v"), matrix(seed=1), matrix(refresh=1)]
    assert all(not torch.equal(matrix(), other) for other in others)
