"""What every optimizer of the table has to do; one row there is one more run of each test here.

Covers: optim/table.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dpgrape.optim.groups import regroup
from hf_dpgrape.optim.table import OPTIMIZERS, OptimizerRow, Setting, register_optimizer
from hf_dpgrape.subspace.parameters import Subspace
from hf_dpgrape.subspace.projection import Projection

NOISE = 0.3
SETTINGS: dict[Setting, Any] = {
    "lr": 0.02,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "noise_variance": NOISE**2,
}
Make = Any


def make(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the table, with what Muon takes marked as the trainer does."""
    row = OPTIMIZERS[name]
    optimizer: torch.optim.Optimizer = row.make(params, **row.arguments(SETTINGS, None))
    if "use_muon" in optimizer.param_groups[0]:
        regroup(optimizer, lambda p, group: {"use_muon": True} if p.ndim == 2 else {})
    return optimizer


def torch_adafactor(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Reads the weights' norms, which a row must not: what a test has to notice."""
    return torch.optim.Adafactor(params, lr=0.02)


def start(scale: float = 1.0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(scale * torch.randn(s, generator=g)) for s in ((9, 7), (5,))]


def gradient_steps(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], num: int, seed: int = 1
) -> None:
    """Steps on gradients that are a function of the seed alone."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(num):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()


def distance(params: list[nn.Parameter]) -> float:
    return sum(p.detach().square().sum().item() for p in params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_down_a_noisy_quadratic(name: str) -> None:
    g = torch.Generator().manual_seed(1)
    params = start()
    optimizer, before = make(name, params), distance(params)
    for _ in range(200):
        for p in params:
            p.grad = p.detach() + NOISE * torch.randn(p.shape, generator=g)
        optimizer.step()
    assert distance(params) < 0.1 * before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_makes_a_round_trip(name: str) -> None:
    params = start()
    optimizer = make(name, params)
    gradient_steps(optimizer, params, 3)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    other = make(name, copies)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((optimizer, params), (other, copies)):
        gradient_steps(one, its, 3, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))
    forgetful = [nn.Parameter(p.detach().clone()) for p in copies]
    gradient_steps(make(name, forgetful), forgetful, 3, seed=2)
    gradient_steps(other, copies, 3, seed=2)
    assert not torch.allclose(forgetful[0], copies[0])  # the state does matter


def largest_difference(make_on: Make) -> float:
    """How much farther the same gradients move a weight of 1 than one of 0."""
    moved = []
    for scale in (0.0, 1.0):
        params = start(scale)
        before = [p.detach().clone() for p in params]
        gradient_steps(make_on(params), params, 4)
        moved.append(
            torch.cat([(p.detach() - b).flatten() for p, b in zip(params, before, strict=True)])
        )
    return ((moved[0] - moved[1]).norm() / moved[1].norm()).item()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_its_step_depends_on_gradients_alone(name: str) -> None:
    assert largest_difference(lambda params: make(name, params)) < 1e-4


def test_an_optimizer_that_reads_weights_is_noticed() -> None:
    assert largest_difference(torch_adafactor) > 0.5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stand_ins_move_the_weights(name: str) -> None:
    matrix, vector = start()
    weights = {"matrix": matrix, "vector": vector}
    projections = {n: Projection(n, p.shape, rank=2) for n, p in weights.items()}
    subspace = Subspace(weights, projections)
    optimizer = make(name, [matrix, vector])
    subspace.adopt(optimizer)
    tensor, before = subspace.tensors["matrix"], matrix.detach().clone()
    small = nn.Parameter(torch.zeros(tensor.projection.shape))
    its_own = make(name, [small])
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        gradients: dict[str, Tensor] = {
            n: torch.randn(p.shape, generator=g) for n, p in projections.items()
        }
        subspace.set_gradients(gradients)
        small.grad = gradients["matrix"]
        optimizer.step()
        its_own.step()
        assert tensor.stand_in.eq(0).all()
    tensor.projection.lift_onto_(before, small.detach())
    torch.testing.assert_close(matrix.detach(), before, rtol=1e-4, atol=1e-5)


def test_names_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    row = OptimizerRow(make=torch.optim.SGD, width_rule="sgd", settings=("lr",))
    monkeypatch.setitem(OPTIMIZERS, "another", row)  # taken out again at the end
    with pytest.raises(ValueError, match=r"new name for an optimizer, got 'another', .* of SGD"):
        register_optimizer("another", row)
    del OPTIMIZERS["another"]
    register_optimizer("another", row)
    assert OPTIMIZERS["another"].arguments(SETTINGS, None) == {"lr": 0.02}
