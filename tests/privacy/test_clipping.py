"""Clip factors: the bound holds for whatever norm comes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_dpgrape.privacy.clipping import clip_factors
from hf_dpgrape.privacy.plan import Clipping

KINDS: tuple[Clipping, ...] = ("flat", "automatic")

squares = st.one_of(
    st.floats(0, 10),
    st.floats(0, allow_infinity=True),
    st.just(math.nan),
    st.sampled_from([0.0, 1e-300, 1e-45, 1e-38, 3.4e38, 1e300, math.inf]),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(values=st.lists(squares, min_size=1, max_size=7), bound=st.floats(1e-3, 1e3))
@example(values=[0.0, 1e-45, 1e-38, 3e38, math.inf, math.nan, 1.0], bound=1.0)
def test_bound_holds(kind: Clipping, dtype: torch.dtype, values: list[float], bound: float) -> None:
    squared = torch.tensor(values, dtype=torch.float64).to(dtype)
    factors = clip_factors(squared, bound=bound, clipping=kind)
    assert factors.shape == squared.shape and factors.isfinite().all() and (factors >= 0).all()
    finite = squared.isfinite()
    assert (factors[~finite] == 0).all()
    # The product is taken in float64: the guarantee is about real numbers.
    contribution = factors[finite].double() * squared[finite].double().sqrt()
    assert (contribution <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
@given(
    norm=st.floats(0, 1e150), bound=st.floats(1e-12, 1e12), wanted=st.sampled_from([True, False])
)
@example(norm=3e37, bound=1.0, wanted=False)
@example(norm=1.3e38, bound=1.0, wanted=False)
@example(norm=1e45, bound=1.0, wanted=False)
def test_factors_are_rounded_down(kind: Clipping, norm: float, bound: float, wanted: bool) -> None:
    dtype = torch.float64 if wanted else torch.float32
    squared = torch.tensor([norm**2], dtype=torch.float64)
    factor = clip_factors(squared, bound=bound, clipping=kind, dtype=dtype)
    assert factor.dtype == dtype
    assert float(factor) == 0 or float(factor) >= torch.finfo(dtype).tiny
    assert float(factor) * norm <= bound * (1 - 9e-7)


def test_a_square_below_zero_is_no_norm() -> None:
    for kind in KINDS:
        assert clip_factors(torch.tensor([-1e-9]), bound=1.0, clipping=kind) == 0


@given(norms=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=7), bound=st.floats(1e-3, 1e3))
def test_flat_leaves_small_gradients_and_scales_large_ones_to_the_bound(
    norms: list[float], bound: float
) -> None:
    squared = torch.tensor(norms, dtype=torch.float64) ** 2
    factors = clip_factors(squared, bound=bound, clipping="flat").numpy()
    below = np.array(norms) < bound * (1 - 1e-5)
    assert (factors[below] == 1).all()
    clipped = np.array(norms) > bound
    np.testing.assert_allclose((factors * norms)[clipped], bound, rtol=1e-5)


@given(norms=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=7), bound=st.floats(1e-3, 1e3))
def test_automatic_scales_all_gradients(norms: list[float], bound: float) -> None:
    squared = torch.tensor(norms, dtype=torch.float64) ** 2
    factors = clip_factors(squared, bound=bound, clipping="automatic").numpy()
    np.testing.assert_allclose(factors, bound / (np.array(norms) + 0.01), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=5),
    norms=st.lists(st.floats(0, 1e15), min_size=5, max_size=5),
)
def test_groups_together_stay_within_the_clip_norm(
    kind: Clipping, weights: list[float], norms: list[float]
) -> None:
    shares = np.array(weights) / np.linalg.norm(weights)
    contributions = [
        float(clip_factors(torch.tensor([norm**2]), bound=1.7 * share, clipping=kind)) * norm
        for share, norm in zip(shares.tolist(), norms, strict=False)
    ]
    assert np.linalg.norm(contributions) <= 1.7


def test_clip_norm_matters() -> None:
    squared = torch.tensor([25.0, 1e4], dtype=torch.float64)
    for kind in KINDS:
        small = clip_factors(squared, bound=0.2, clipping=kind)
        large = clip_factors(squared, bound=2.0, clipping=kind)
        torch.testing.assert_close(large, 10 * small)
