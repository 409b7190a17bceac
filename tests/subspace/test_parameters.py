"""Stand-ins, their lift onto the weights, refreshes and 16-bit weights.

Covers: subspace/rounding.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

from hf_dpgrape.optim.adamw_bc import AdamWBC
from hf_dpgrape.optim.muon import MuonWithAdamW
from hf_dpgrape.subspace.parameters import Subspace
from hf_dpgrape.subspace.projection import Projection, matrix_shape
from hf_dpgrape.subspace.rounding import round_to_bfloat16


def make(
    dtype: torch.dtype = torch.float32, rank: int = 2, shape: tuple[int, ...] = (9, 7), **more: Any
) -> tuple[nn.Parameter, Subspace]:
    g = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=g).to(dtype))
    return weight, Subspace({"w": weight}, {"w": Projection("w", weight.shape, rank=rank)}, **more)


@pytest.mark.parametrize("shape", [(9, 7), (7, 9), (3, 2, 5)])
def test_step_lifts_the_stand_in(shape: tuple[int, ...]) -> None:
    weight, subspace = make(shape=shape)
    optimizer = torch.optim.SGD([weight], lr=0.5, weight_decay=0.1)
    subspace.adopt(optimizer)
    tensor, before = subspace.tensors["w"], weight.detach().clone()
    gradient = torch.randn(tensor.projection.shape)
    subspace.set_gradients({"w": gradient})
    optimizer.step()
    want = before.view(matrix_shape(weight.shape)) * (1 - 0.5 * 0.1)
    tensor.projection.lift_onto_(want, -0.5 * gradient)
    assert torch.allclose(weight.view(want.shape), want, atol=1e-6)
    assert tensor.stand_in.eq(0).all() and weight.grad is None


#: Optimizers with their ways to decay weights: coupled with the gradient, or not.
DECAYING: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.1),
    "Nesterov": lambda p: torch.optim.SGD(
        p, lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.5, weight_decay=0.1),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.5, weight_decay=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.1),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.1, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.1, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.5, weight_decay=0.1),
    "NAdam, decoupled": lambda p: torch.optim.NAdam(
        p, lr=0.5, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.5, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.5, weight_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.5, weight_decay=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.5, lambd=0.0, weight_decay=0.1),
    "transformers' Adafactor": lambda p: Adafactor(
        p, lr=0.5, weight_decay=0.1, relative_step=False, scale_parameter=False
    ),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.5, weight_decay=0.1),
    "MuonWithAdamW": lambda p: MuonWithAdamW(p, lr=0.5, weight_decay=0.1),
    "AdamWBC": lambda p: AdamWBC(p, lr=0.5, noise_variance=0.04, weight_decay=0.1),
}


@pytest.mark.parametrize("name", DECAYING)
def test_decay_acts_once_and_on_the_weight_itself(name: str) -> None:
    moved = {}
    for decay in (0.0, 0.1):
        g = torch.Generator().manual_seed(1)
        weight, subspace = make()
        optimizer = DECAYING[name]([weight])
        (group,) = optimizer.param_groups
        group["weight_decay"] = decay
        subspace.adopt(optimizer)
        tensor, way = subspace.tensors["w"], []
        for _ in range(3):
            before = weight.detach().clone()
            gradient = torch.randn(tensor.projection.shape, generator=g)
            subspace.set_gradients({"w": gradient})
            optimizer.step()
            assert tensor.stand_in.eq(0).all()
            way.append(weight.detach() - before * (1 - 0.5 * decay))
        moved[decay] = torch.stack(way)
        assert optimizer.param_groups == [group] and len(group["params"]) == 1
    # Gradients alone decide on the rest of the step: no optimizer sees the decayed weight.
    torch.testing.assert_close(moved[0.1], moved[0.0], rtol=1e-5, atol=1e-6)
    assert moved[0.0].norm() > 0


def test_groups_stay_as_they_are() -> None:
    g = torch.Generator().manual_seed(0)
    shapes = {"a": (9, 7), "b": (7,), "c": (6, 8), "frozen": (5, 4)}
    weights = {n: nn.Parameter(torch.randn(s, generator=g)) for n, s in shapes.items()}
    frozen = weights.pop("frozen").requires_grad_(False)
    projections = {n: Projection(n, p.shape, rank=2) for n, p in weights.items()}
    subspace = Subspace(weights, projections)
    optimizer = torch.optim.AdamW(
        [
            {"params": [weights["c"], frozen, weights["b"]], "weight_decay": 0.1, "lr": 0.2},
            {"params": [weights["a"]], "lr": 0.4},
            {"params": [frozen.clone().detach()]},
        ]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    groups = list(optimizer.param_groups)
    subspace.adopt(optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    stand_ins = {n: t.stand_in for n, t in subspace.tensors.items()}
    held = [[id(p) for p in group["params"]] for group in groups]
    assert held == [[id(stand_ins["c"]), id(stand_ins["b"])], [id(stand_ins["a"])], []]
    before = {n: p.detach().clone() for n, p in weights.items()}
    for _ in range(2):
        subspace.set_gradients({n: torch.zeros_like(s) for n, s in stand_ins.items()})
        optimizer.step()
        schedule.step()
    decayed = (1 - 0.2 * 0.1) * (1 - 0.1 * 0.1)
    for name in ("b", "c"):  # "b" is its own stand-in
        torch.testing.assert_close(weights[name].detach(), before[name] * decayed)
    assert optimizer.param_groups[1]["lr"] == 0.1


def test_without_gradient_nothing_moves() -> None:
    weight, subspace = make()
    optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.1)
    subspace.adopt(optimizer)
    before = weight.detach().clone()
    subspace.set_gradients({})
    optimizer.step()
    assert torch.equal(weight, before)


def test_optimizer_with_state_is_refused() -> None:
    weight, subspace = make()
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(ValueError, match="pass a new one"):
        subspace.adopt(optimizer)
    with pytest.raises(ValueError, match="as Adagrad does from the start"):
        subspace.adopt(torch.optim.Adagrad([weight]))


class NVLamb(torch.optim.SGD):
    """Called as one of those that scale their step by the weight's norm."""


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.Adafactor(p, lr=0.5),
        lambda p: Adafactor(p, lr=0.5, relative_step=False, scale_parameter=True),
        lambda p: NVLamb(p, lr=0.5),
    ],
)
def test_what_reads_weights_is_refused_where_stand_ins_are_zero(make_optimizer: Any) -> None:
    sentence = "scales its step by the weight's norm"
    for dtype, rank in ((torch.float32, 2), (torch.bfloat16, 0)):
        weight, subspace = make(dtype, rank=rank)
        with pytest.raises(ValueError, match=sentence):
            subspace.adopt(make_optimizer([weight]))
    weight, subspace = make(rank=0)
    subspace.adopt(make_optimizer([weight]))  # the weight is its own stand-in


@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_moments_at_a_refresh(moments: Any) -> None:
    weight, subspace = make(update_proj_gap=3, moments=moments)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    subspace.adopt(optimizer)
    tensor = subspace.tensors["w"]

    def first_moment() -> Tensor:
        return optimizer.state[tensor.stand_in]["exp_avg"].clone()

    for step in range(3):
        subspace.refresh_(step, optimizer)
        subspace.set_gradients({"w": torch.randn(tensor.projection.shape)})
        optimizer.step()
    old = first_moment()
    subspace.refresh_(3, optimizer)
    assert tensor.projection.refresh_index == 1
    if moments == "reset":
        assert not optimizer.state[tensor.stand_in]
    else:
        assert torch.equal(first_moment(), old)


def test_start_at_leaves_moments_alone() -> None:
    _, subspace = make(update_proj_gap=3, moments="reset")
    subspace.start_at_(7)
    assert subspace.tensors["w"].projection.refresh_index == 2


def test_wide_sums_and_stand_ins_for_16_bit_weights() -> None:
    for rank in (0, 2):
        weight, subspace = make(torch.bfloat16, rank=rank)
        tensor = subspace.tensors["w"]
        assert tensor.stand_in is not weight and tensor.stand_in.dtype == torch.float32
        assert subspace.zero_sums(frozenset({"w"}))["w"].dtype == torch.float32


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("shape", [(61, 53), (53, 61), (3001,)])
def test_many_small_updates_of_16_bit_weights_add_up(rank: int, shape: tuple[int, ...]) -> None:
    weight, subspace = make(torch.bfloat16, rank=rank, shape=shape)
    with torch.no_grad():
        weight.fill_(1.0)  # half a unit in the last place is 2^-8 above and 2^-9 below
    optimizer = torch.optim.SGD([weight], lr=1.0)
    subspace.adopt(optimizer)
    tensor = subspace.tensors["w"]
    steps, size = 64, 2.0**-12
    gradient = torch.full(tensor.projection.shape, -size)
    lifted = torch.zeros(matrix_shape(weight.shape))
    tensor.projection.lift_onto_(lifted, -gradient)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(steps):
            subspace.set_gradients({"w": gradient.clone()})
            optimizer.step()
    moved = weight.detach().float().view(shape[0], -1) - 1
    want = steps * lifted
    # A rounding error has at most the standard deviation 2^-8 per step; the mean over all entries.
    tolerance = 5 * 2**-8 * math.sqrt(steps / moved.numel())
    assert abs(float((moved - want).mean())) < tolerance
    assert tolerance < 0.7 * float(want.abs().mean()) or rank  # the test can tell it from no move


def test_rounding_is_unbiased_and_keeps_what_fits() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        value = 1 + 0.3 * 2**-7  # three tenths of the way to the next bfloat16
        rounded = round_to_bfloat16(torch.full((100_000,), value)).float()
        assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
        up = (rounded > 1).float().mean()
        assert abs(float(up) - 0.3) < 5 * math.sqrt(0.21 / 100_000)
        fits = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf, -math.inf])
        assert torch.equal(round_to_bfloat16(fits).float(), fits)
        assert round_to_bfloat16(torch.tensor([math.nan])).isnan().all()
        negative = round_to_bfloat16(torch.full((1000,), -value)).float()
        assert set(negative.tolist()) == {-1.0, -1 - 2**-7}
