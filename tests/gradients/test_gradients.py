"""What one sample adds to a sum never exceeds the clip norm, whatever its gradient is.

Covers: gradients/forms.py, gradients/norm_bounds.py, gradients/precision.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dpgrape.gradients.forms import Dense, Gradient, Outer, PerSampleGradients, Scatter
from hf_dpgrape.gradients.precision import full_float32
from hf_dpgrape.privacy.clipping import clip_factors
from hf_dpgrape.privacy.plan import CLIP_NORMS, Clipping

KINDS: tuple[Clipping, ...] = ("flat", "automatic")
C = 0.7
#: No two sizes equal: rows of the matrix, columns, positions.
M, N, T = 301, 19, 5

Parts = dict[str, list[Gradient]]


def added(
    parts: Parts, *, clipping: Clipping = "flat", bound: float = C, num_samples: int = 1
) -> float:
    """The norm, in float64, of what samples add to float32 sums of zero."""
    gradients = PerSampleGradients(num_samples, form="factors")
    sums: dict[str, Tensor] = {}
    for name, contributions in parts.items():
        for part in contributions:
            gradients.add(name, part)
        sums[name] = torch.zeros(shape_of(contributions[0]))
    total = next(iter(sums.values()))
    factors = clip_factors(gradients.squared_norms(sums, total), bound=bound, clipping=clipping)
    for name, out in sums.items():
        gradients.add_weighted_sum_(name, out, factors)
    return math.sqrt(sum(float(out.double().square().sum()) for out in sums.values()))


def shape_of(part: Gradient) -> tuple[int, ...]:
    if isinstance(part, Dense):
        return tuple(part.values.shape[1:])
    if isinstance(part, Outer):
        return part.rows.shape[2], part.columns.shape[2]
    return part.num_rows, part.values.shape[2]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def setting(set_: Callable[[], Any], unset: Callable[[], Any]) -> Iterator[None]:
    set_()
    try:
        yield
    finally:
        unset()


def older(precision: str) -> Any:
    """What most scripts write."""
    return setting(
        lambda: torch.set_float32_matmul_precision(precision),
        lambda: torch.set_float32_matmul_precision("highest"),
    )


def newer(module: Any, precision: str) -> Any:
    """What torch 2.9 and later advise."""
    return setting(
        lambda: setattr(module, "fp32_precision", precision),
        lambda: setattr(module, "fp32_precision", "none"),
    )


PRECISIONS: dict[str, Callable[[], Any]] = {
    "default": nullcontext,
    "medium": lambda: older("medium"),
    "high": lambda: older("high"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "flush": lambda: setting(
        lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)
    ),
}
if hasattr(torch.backends, "fp32_precision"):
    PRECISIONS["bf16"] = lambda: newer(torch.backends.mkldnn.matmul, "bf16")
    PRECISIONS["tf32"] = lambda: newer(torch.backends, "tf32")


# ---- The faults that there were ----------------------------------------------------------------


def cancelling(seed: int) -> Outer:
    """Two positions whose large contributions almost cancel."""
    x, d = random(1, 1, 64, seed=seed), random(1, 1, 64, seed=seed + 1000) * 1e4
    return Outer(torch.cat([d, -d], 1), torch.cat([x, x * (1 + 1e-4)], 1))


@pytest.mark.parametrize("clipping", KINDS)
def test_cancelling_positions_are_within_the_bound(clipping: Clipping) -> None:
    # Gram matrices in float32 alone gave up to 1,431 times (automatic: 143,111 times) the bound.
    for seed in range(200):
        assert added({"w": [cancelling(seed)]}, clipping=clipping) <= C


@pytest.mark.parametrize("clipping", KINDS)
def test_cancelling_uses_of_one_tensor_are_within_the_bound(clipping: Clipping) -> None:
    for seed in range(40):
        whole = cancelling(seed)
        uses: list[Gradient] = [Outer(whole.rows[:, [t]], whole.columns[:, [t]]) for t in (0, 1)]
        assert added({"w": uses}, clipping=clipping) <= C


def test_many_tensors_of_one_group_are_within_the_bound() -> None:
    # Squares of 400 tensors added in float32 gave 6.5e-7 more than the bound.
    parts: Parts = {f"{i}": [Dense(random(1, 40, 3, seed=i))] for i in range(400)}
    assert added(parts) <= C
    assert added(parts) > 0.9999 * C
    one: Parts = {f"{i}": [Dense(torch.full((1, 7), 0.1))] for i in range(400)}
    assert added(one) <= C


def test_long_sums_that_round_up_are_within_the_bound() -> None:
    # Equal terms are rounded in the same direction, as long as the sum has the same exponent.
    long = Scatter(torch.zeros(1, 3000, dtype=torch.long), torch.ones(1, 3000, 2), 3)
    for bound in torch.linspace(1, 2, 25).tolist():
        assert added({"w": [long]}, bound=bound) <= bound


@pytest.mark.parametrize("bound", [*CLIP_NORMS, 1e-6])
@pytest.mark.parametrize("scale", [1e-25, 1e-23, 1e-19, 1e-12, 1e-6, 1.0, 1e6, 1e18])
@pytest.mark.parametrize("clipping", KINDS)
def test_small_and_large_bounds(clipping: Clipping, bound: float, scale: float) -> None:
    gradient = random(1, 700, 3) * scale
    assert added({"w": [Dense(gradient)]}, clipping=clipping, bound=bound) <= bound
    outer = Outer(random(1, T, M) * scale, random(1, T, N, seed=1))
    assert added({"w": [outer]}, clipping=clipping, bound=bound) <= bound
    if clipping == "flat" and scale > 1e3 * bound:
        assert added({"w": [Dense(gradient)]}, bound=bound) > 0.999 * bound


def forms(scale: float = 1.0) -> dict[str, Parts]:
    ids = torch.arange(T)[None] % 3
    outer = Outer(random(1, T, M) * scale, random(1, T, N, seed=1))
    scatter = Scatter(ids, random(1, T, N, seed=2) * scale, M)
    return {
        "dense": {"w": [Dense(random(1, M, N) * scale)]},
        "outer": {"w": [outer]},
        "scatter": {"w": [scatter]},
        "both": {"w": [outer, scatter]},
        "several": {"w": [scatter, outer], "v": [Dense(random(1, 3, seed=3))], "x": [outer]},
    }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", forms())
def test_precision_settings_change_nothing(form: str, precision: str) -> None:
    # Products rounded to 16 bits after the norm was taken exceeded the bound by some thousandths.
    expected = {clipping: added(forms(9.0)[form], clipping=clipping) for clipping in KINDS}
    with PRECISIONS[precision]():
        for clipping in KINDS:
            assert added(forms(9.0)[form], clipping=clipping) == expected[clipping] <= C


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_16_bits_round_up(precision: str) -> None:
    # In bfloat16, 1 + 3/1024 becomes 1, which makes the norm too small and the weight too large;
    # weight times value, near 1 + 5.5/1024 times a power of two, becomes 1 + 8/1024 times it.
    outer = Outer(torch.full((1, 128, 768), 1 + 3 / 1024), torch.ones(1, 128, 768))
    bound = 128 * 768 * 2**-17 * (1 + 2.5 / 1024)
    with PRECISIONS[precision]():
        assert 0.99 * bound < added({"w": [outer]}, bound=bound) <= bound


class Precise(TorchDispatchMode):
    """Fails when matrices are multiplied while they may be rounded to less than float32."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm", "mv", "addmm", "baddbmm"):
            self.seen += 1
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
            if hasattr(torch.backends, "fp32_precision"):
                assert torch.backends.cuda.matmul.fp32_precision == "ieee"
                assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
            assert all(arg.dtype == torch.float32 for arg in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_product_is_rounded_to_less_than_float32(precision: str) -> None:
    # What a GPU or another processor does with a setting cannot be seen here: that it is off, can.
    with PRECISIONS[precision](), Precise() as mode:
        added(forms()["several"])
    assert mode.seen >= 6


def test_autocast_does_not_reach_inside() -> None:
    a, b = random(30, 40), random(40, 50, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ b).dtype == torch.bfloat16
        with full_float32(a.device):
            inside = a @ b
    assert inside.dtype == torch.float32
    assert torch.equal(inside, a @ b)


def state() -> list[Any]:
    """All settings that `full_float32` touches, and what is read of the older kind."""
    newer = [
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.backends.fp32_precision,
    ]
    try:
        return [*newer, torch.get_float32_matmul_precision()]
    except RuntimeError:  # torch refuses, once both kinds were used
        return [*newer, None]


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="before torch 2.9")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_settings_come_back(precision: str) -> None:
    with PRECISIONS[precision]():
        before = state()
        with pytest.raises(KeyError), full_float32(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.is_autocast_enabled("cpu")
            raise KeyError
        assert state() == before
        assert torch.is_autocast_enabled("cpu") == (precision == "autocast")


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="before torch 2.9")
def test_a_setting_for_all_libraries_stays_one() -> None:
    with newer(torch.backends, "tf32"):
        with full_float32(torch.device("cpu")):
            pass
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_before_torch_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    # There the modules of the newer settings are missing.
    monkeypatch.setattr("hf_dpgrape.gradients.precision._LIBRARIES", ("cpu",))
    with older("medium"):
        with full_float32(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"


# ---- The property ------------------------------------------------------------------------------

ODD = [0.0, 1e-45, 1e-38, 1e-30, 1e-20, 1e-7, 1.0, 1e4, 1e10, 1e18, 1e25, 3e38, math.inf, math.nan]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64]


@st.composite
def factors(draw: Any, width: int) -> Tensor:
    """Factors (1, T, width): random, of mixed scales, with odd entries, pairs almost cancelling."""
    values = random(T, width, seed=draw(st.integers(0, 99)))
    scales = st.sampled_from([1.0] * 6 + ODD) if draw(st.booleans()) else st.just(1.0)
    values *= torch.tensor(draw(st.lists(scales, min_size=T, max_size=T)))[:, None]
    values *= draw(st.sampled_from([1.0, 1e-25, 1e-10, 1e-3, 1e3, 1e9, 1e18]))
    if draw(st.booleans()):
        values[1] = values[0] * draw(st.sampled_from([-1.0, 1.0])) * (1 + draw(st.floats(0, 1e-3)))
    if draw(st.booleans()):
        values[draw(st.integers(0, T - 1)), 0] = draw(st.sampled_from(ODD))
    if draw(st.booleans()):
        values = values.abs()
    return values[None].to(draw(st.sampled_from(DTYPES)))


@st.composite
def gradients(draw: Any) -> Parts:
    """Tensors with one to three contributions in some form."""
    parts: Parts = {}
    for name in range(draw(st.integers(1, 3))):
        if draw(st.integers(0, 3)) == 0:
            parts[f"{name}"] = [Dense(draw(factors(M)))]
            continue
        contributions: list[Gradient] = []
        for _ in range(draw(st.integers(1, 3))):
            columns = draw(factors(N))
            if draw(st.booleans()):
                contributions.append(Outer(draw(factors(M)), columns))
            else:
                ids = draw(st.lists(st.integers(0, 2), min_size=T, max_size=T))
                contributions.append(Scatter(torch.tensor([ids]), columns, M))
        parts[f"{name}"] = contributions
    return parts


@pytest.mark.parametrize("clipping", KINDS)
@settings(max_examples=400, deadline=None)
@given(
    parts=gradients(),
    precision=st.sampled_from(list(PRECISIONS)),
    bound=st.sampled_from([*CLIP_NORMS, 1e-6, 1e-3, 1.0, 1e3]),
)
@example(parts=forms(1e25)["outer"], precision="flush", bound=CLIP_NORMS[0])
def test_no_sample_adds_more_than_the_bound(
    clipping: Clipping, parts: Parts, precision: str, bound: float
) -> None:
    with PRECISIONS[precision]():
        assert added(parts, clipping=clipping, bound=bound) <= bound


def test_cut_off_of_huge_factors() -> None:
    # Flushed to zero, the small factor of each position would lose more than the bound allows.
    rows, columns = torch.full((1, 2, M), 1e-20), torch.full((1, 2, N), 1e19)
    gradients = PerSampleGradients(1, form="factors")
    gradients.add("w", Outer(rows, columns))
    assert gradients.squared_norms(["w"], torch.zeros(())).isinf().all()
    assert added({"w": [Outer(rows, columns)]}) == 0


# ---- The bound is not far from the norm ---------------------------------------------------------


@pytest.mark.parametrize(
    ("num_positions", "m", "n", "at_least"),
    [
        (1, 64, 48, 0.99998),
        (128, 256, 100, 0.997),
        (128, 3072, 768, 0.997),
        (512, 3000, 1096, 0.99),
    ],
)
def test_ordinary_gradients_come_close_to_the_bound(
    num_positions: int, m: int, n: int, at_least: float
) -> None:
    rows, columns = random(1, num_positions, m), random(1, num_positions, n, seed=1)
    reached = added({"w": [Outer(rows, columns)]}) / C
    assert at_least < reached <= 1
    ids = torch.arange(num_positions)[None]
    reached = added({"w": [Scatter(ids, columns, num_positions + 3)]}) / C
    assert at_least < reached <= 1
    assert 0.99999 < added({"w": [Dense(random(1, m, n))]}) / C <= 1


def test_bound_is_above_the_true_norm_and_near() -> None:
    names = list(forms()["several"])
    collected = PerSampleGradients(1, form="factors")
    for name, contributions in forms()["several"].items():
        for part in contributions:
            collected.add(name, part)
    true = sum(float(collected.dense(name).double().square().sum()) for name in names)
    found = float(collected.squared_norms(names, torch.zeros(())))
    assert true < found < 1.001 * true


@pytest.mark.parametrize("form", forms())
def test_a_sample_of_a_batch_has_the_bound_it_has_alone(form: str) -> None:
    parts = forms(1e3)[form]
    huge = {name: [scaled(part, math.nan) for part in some] for name, some in parts.items()}
    alone, both = PerSampleGradients(1, form="factors"), PerSampleGradients(2, form="factors")
    for name, contributions in parts.items():
        for part, other in zip(contributions, huge[name], strict=True):
            alone.add(name, part)
            both.add(name, joined(other, part))
    like = torch.zeros(())
    found = both.squared_norms(parts, like)
    assert found[0].isnan() or found[0].isinf()
    torch.testing.assert_close(found[1:], alone.squared_norms(parts, like), rtol=1e-5, atol=0)


def scaled(part: Gradient, factor: float) -> Gradient:
    if isinstance(part, Dense):
        return Dense(part.values * factor)
    if isinstance(part, Outer):
        return Outer(part.rows * factor, part.columns)
    return Scatter(part.ids, part.values * factor, part.num_rows)


def joined(a: Gradient, b: Gradient) -> Gradient:
    tensors = {
        key: torch.cat([value, vars(b)[key]])
        for key, value in vars(a).items()
        if isinstance(value, Tensor)
    }
    return type(a)(**{**vars(a), **tensors})
