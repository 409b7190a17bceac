"""The width rules: published figures, the way back, and the limits of the projected case.

Covers: width/rules.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_dpgrape.width.rules import LayerShape, transfer

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


@pytest.mark.parametrize(("narrow_rank", "wide_rank"), [(16, 16), (2**8, 2**16), (0, 64)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
def test_a_projection_of_natural_scale_changes_nothing(
    narrow_rank: int, wide_rank: int, optimizer: str
) -> None:
    projected = transfer(mlp(2**12, narrow_rank), mlp(2**20, wide_rank), optimizer=optimizer)
    assert projected == transfer(mlp(2**12), mlp(2**20), optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
def test_the_papers_scale_puts_the_gain_on_the_rate(optimizer: str) -> None:
    def shapes(width: int, rank: int) -> dict[str, LayerShape]:
        return {"h": LayerShape(n_out=width, n_in=width, rank=rank, projection_stddev=1 / rank)}

    small, large = (
        transfer(shapes(128, 16), shapes(1024, rank), optimizer=optimizer) for rank in (16, 64)
    )
    assert large.noise_ratio == small.noise_ratio
    assert large.rate_ratios["h"] == pytest.approx(2 * small.rate_ratios["h"])


def test_lifted_noise_has_the_entries_of_noise_in_full_space() -> None:
    """The derivation's second moment, and the bound on the norm it accumulates."""
    g = torch.Generator().manual_seed(0)
    size, rank = 256, 16
    for num_subspaces in (1, 8):
        total = torch.zeros(size, size)
        for _ in range(num_subspaces):
            noise = torch.randn(size, rank, generator=g) / num_subspaces**0.5
            total += noise @ (torch.randn(size, rank, generator=g) * rank**-0.5).T
        shape = LayerShape(n_out=size, n_in=size, rank=rank)
        assert total.std().item() == pytest.approx(1, rel=0.05)
        norm = torch.linalg.matrix_norm(total, 2).item()
        bound = shape.accumulated_noise_metric(num_subspaces)
        assert 0.85 * bound < norm < bound
        assert norm > 1.2 * LayerShape(n_out=size, n_in=size).accumulated_noise_metric(1)


def test_vectors_and_lookups() -> None:
    def shapes(width: int) -> dict[str, LayerShape]:
        return {
            "norm": LayerShape(n_out=width, n_in=1, kind="vector"),
            "embedding": LayerShape(n_out=width, n_in=1, kind="lookup"),
        }

    assert shapes(7)["norm"].noise_metric == pytest.approx(math.sqrt(2 * math.log(7)))
    adam = transfer(shapes(10**4), shapes(10**8), optimizer="adam")
    assert adam.rate_ratios["norm"] == 1
    sgd = transfer(shapes(10**4), shapes(10**8), optimizer="sgd")
    assert sgd.rate_ratios["norm"] == sgd.noise_ratio > 1
    assert adam.rate_ratios["embedding"] == pytest.approx(1, rel=0.02)


def test_layers_without_a_partner() -> None:
    deep = {**mlp(512), "h4": LayerShape(n_out=512, n_in=512)}
    found = transfer(mlp(64), deep, optimizer="adam")
    assert found.rate_ratios["h4"] == 1
    assert found.clip_shares["h4"] == pytest.approx(6**-0.5)
    assert sum(share**2 for share in found.clip_shares.values()) == pytest.approx(1)
    signal_to_noise = [
        found.clip_shares[name] * found.noise_ratio / deep[name].noise_metric / 5**-0.5
        for name in NAMES
    ]
    before = [1 / mlp(64)[name].noise_metric for name in NAMES]
    assert signal_to_noise == pytest.approx(before)


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="got none in common"):
        transfer({"other": mlp(4)["h1"]}, mlp(8), optimizer="adam")
    with pytest.raises(ValueError, match="Expected positive"):
        LayerShape(n_out=0, n_in=3)
