"""The width rules: published figures, the way back, and the limits of the projected case."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dpgrape.mup.rules import LayerShape, transfer

NAMES = ["in", "h1", "h2", "h3", "out"]


def mlp(width: int, rank: int = 0) -> dict[str, LayerShape]:
    """3072-W-W-W-W-10 without biases."""
    sizes = [3072, width, width, width, width, 10]
    return {
        name: LayerShape(n_out=n_out, n_in=n_in, rank=rank, is_hidden=name not in ("in", "out"))
        for name, n_in, n_out in zip(NAMES, sizes, sizes[1:], strict=False)
    }


def test_published_figures() -> None:
    found = transfer(mlp(128), mlp(8192), optimizer="adam")
    assert found.noise_ratio == pytest.approx(6.90874, abs=5e-6)
    assert found.noise_ratio * 1.02295 == pytest.approx(7.06729, abs=5e-6)
    shares = [found.clip_shares[name] for name in NAMES]
    assert shares == pytest.approx([0.14155, 0.51785, 0.51785, 0.51785, 0.41887], abs=5e-6)
    rates = [found.rate_ratios[name] for name in NAMES]
    assert rates == pytest.approx([3.65857, 0.125, 0.125, 0.125, 0.019317], abs=5e-6)
    sgd = transfer(mlp(128), mlp(8192), optimizer="sgd").rate_ratios
    assert [sgd[name] for name in NAMES] == pytest.approx(
        [25.2761, 0.86359, 0.86359, 0.86359, 0.13346], rel=5e-6, abs=5e-6
    )


def test_muon_keeps_one_rate_for_hidden_matrices() -> None:
    muon = transfer(mlp(128), mlp(8192), optimizer="muon").rate_ratios
    adam = transfer(mlp(128), mlp(8192), optimizer="adam").rate_ratios
    assert all(muon[name] == (1.0 if name.startswith("h") else adam[name]) for name in NAMES)


@given(
    st.integers(1, 4000),
    st.integers(1, 4000),
    st.integers(0, 64),
    st.integers(0, 64),
    st.sampled_from(["sgd", "adam", "muon"]),
)
def test_there_and_back_is_the_identity(
    narrow: int, wide: int, rank: int, wide_rank: int, optimizer: str
) -> None:
    proxy, target = mlp(narrow, rank), mlp(wide, wide_rank)
    there = transfer(proxy, target, optimizer=optimizer)
    assert sum(share**2 for share in there.clip_shares.values()) == pytest.approx(1)
    back = transfer(target, proxy, optimizer=optimizer, proxy_shares=there.clip_shares)
    assert there.noise_ratio * back.noise_ratio == pytest.approx(1)
    for name in NAMES:
        assert there.rate_ratios[name] * back.rate_ratios[name] == pytest.approx(1)
        assert back.clip_shares[name] == pytest.approx(len(NAMES) ** -0.5)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4000))
def test_signal_to_noise_is_kept(narrow: int, wide: int, n_in: int) -> None:
    proxy = {"a": LayerShape(n_out=narrow, n_in=n_in), "b": LayerShape(n_out=7, n_in=narrow)}
    target = {"a": LayerShape(n_out=wide, n_in=n_in), "b": LayerShape(n_out=7, n_in=wide)}
    found = transfer(proxy, target, optimizer="adam")
    for name in proxy:
        before = 2**-0.5 / (found.noise_ratio * proxy[name].noise_metric)
        after = found.clip_shares[name] / target[name].noise_metric
        assert after == pytest.approx(before)


def test_limits_of_the_projected_rule() -> None:
    def hidden_rate(rank: int, wide_rank: int) -> float:
        found = transfer(mlp(2**12, rank), mlp(2**20, wide_rank), optimizer="adam")
        return math.log2(found.rate_ratios["h1"]) / 8  # exponent of the width

    assert hidden_rate(16, 16) == pytest.approx(-1, abs=0.03)  # the rank still shows
    assert hidden_rate(2**8, 2**16) == pytest.approx(-0.5, abs=1e-9)
    assert hidden_rate(0, 0) == pytest.approx(-0.5, abs=1e-9)


def test_small_layers_are_not_projected() -> None:
    shape = LayerShape(n_out=10, n_in=512, rank=16)
    assert not shape.is_projected
    assert shape.noise_metric == pytest.approx(math.sqrt(10) + math.sqrt(512))


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match=r"one side only: \['out'\]"):
        transfer({k: v for k, v in mlp(4).items() if k != "out"}, mlp(8), optimizer="adam")
    with pytest.raises(ValueError, match="Expected positive"):
        LayerShape(n_out=0, n_in=3)
