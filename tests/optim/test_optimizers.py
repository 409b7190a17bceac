"""DP-Muon and DP-AdamBC against torch's optimizers and their formulas.

Covers: optim/adamw_bc.py, optim/muon.py, optim/groups.py.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from hf_dpgrape.optim.adamw_bc import AdamWBC
from hf_dpgrape.optim.groups import regroup
from hf_dpgrape.optim.muon import MuonWithAdamW, muon_scale
from hf_dpgrape.optim.table import float_options


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(6, 4, generator=g)), nn.Parameter(torch.randn(5, generator=g))


def steps(optimizer: torch.optim.Optimizer, params: tuple[nn.Parameter, ...], num: int) -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(num):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()


def muon_with_adamw(matrix: nn.Parameter, vector: nn.Parameter) -> MuonWithAdamW:
    optimizer = MuonWithAdamW([matrix, vector], lr=0.1, betas=(0.8, 0.9))
    regroup(
        optimizer,
        lambda p, group: {"lr": 0.3, "use_muon": True, "weight_decay": 0.2} if p.ndim == 2 else {},
    )
    return optimizer


def test_muon_and_adamw_are_torchs_own() -> None:
    matrix, vector = parameters()
    steps(muon_with_adamw(matrix, vector), (matrix, vector), 4)
    its_matrix, its_vector = parameters()
    g = torch.Generator().manual_seed(1)
    muon = torch.optim.Muon([its_matrix], lr=0.3, weight_decay=0.2, momentum=0.95)
    adamw = torch.optim.AdamW([its_vector], lr=0.1, betas=(0.8, 0.9), weight_decay=0.0)
    for _ in range(4):
        its_matrix.grad = torch.randn(its_matrix.shape, generator=g)
        its_vector.grad = torch.randn(its_vector.shape, generator=g)
        muon.step()
        adamw.step()
    assert torch.equal(matrix, its_matrix)
    assert torch.equal(vector, its_vector)


def test_muon_state_can_be_saved() -> None:
    params = parameters()
    optimizer = muon_with_adamw(*params)
    steps(optimizer, params, 2)
    copies = tuple(nn.Parameter(p.detach().clone()) for p in params)
    other = muon_with_adamw(*copies)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(optimizer, params, 2)
    steps(other, copies, 2)
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))


def test_groups_whose_parameters_agree_stay_whole() -> None:
    matrix, vector = parameters()
    other = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(
        [{"params": [matrix, vector]}, {"params": [other]}, {"params": []}], lr=0.1
    )
    groups = list(optimizer.param_groups)
    regroup(optimizer, lambda p, group: {"lr": 0.2} if p is other else {})
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    assert [group["lr"] for group in groups] == [0.1, 0.2, 0.1]
    regroup(optimizer, lambda p, group: {"lr": 0.3} if p is vector else {})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3, 0.2, 0.1]
    assert [group["params"] for group in optimizer.param_groups] == [
        [matrix],
        [vector],
        [other],
        [],
    ]


@pytest.mark.parametrize(
    ("stand_in", "n_out", "n_in", "torch_shape"),
    [
        ((80, 20), 80, 20, (80, 20)),  # full space: torch's own scale
        ((80, 4), 80, 20, (80, 4)),  # projected on the right
        ((4, 80), 20, 80, (4, 80)),  # on the left
        ((20, 80), 80, 20, (20, 80)),  # a Conv1D
    ],
)
def test_muon_scale(
    stand_in: tuple[int, int], n_out: int, n_in: int, torch_shape: tuple[int, int]
) -> None:
    torchs = math.sqrt(max(1, torch_shape[0] / torch_shape[1]))
    wanted = math.sqrt(max(1, n_out / n_in))
    assert torchs * muon_scale(stand_in, n_out, n_in) == pytest.approx(wanted)


def test_adamw_bc_follows_its_formula() -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = AdamWBC(
        [p], lr=0.1, noise_variance=0.04, betas=(0.5, 0.75), floor=0.25, weight_decay=0.1
    )
    first = second = torch.zeros(2)
    expected = p.detach().clone()
    for t, grad in enumerate([torch.tensor([0.3, 0.1]), torch.tensor([-0.5, 0.1])], start=1):
        p.grad = grad
        optimizer.step()
        first = 0.5 * first + 0.5 * grad
        second = 0.75 * second + 0.25 * grad**2
        corrected = (second / (1 - 0.75**t) - 0.04).clamp(min=0.01)
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * first / (1 - 0.5**t) / corrected.sqrt()
    torch.testing.assert_close(p.detach(), expected)


def test_adamw_bc_frees_the_second_moment_of_noise() -> None:
    """Under noise, signals of different size get steps of one size, as Adam's without noise do."""
    signal = torch.tensor([0.1, 0.5]).repeat(2000, 1)
    g = torch.Generator().manual_seed(0)

    def ratio_of_steps(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> float:
        for _ in range(200):
            p.grad = signal + torch.randn(signal.shape, generator=g)
            optimizer.step()
        moved = p.detach().mean(0)
        return float(moved[1] / moved[0])

    p, q = nn.Parameter(torch.zeros(2000, 2)), nn.Parameter(torch.zeros(2000, 2))
    adamw = ratio_of_steps(torch.optim.AdamW([p], lr=1e-3, weight_decay=0.0), p)
    corrected = ratio_of_steps(AdamWBC([q], lr=1e-3, noise_variance=1.0, floor=0.01), q)
    assert adamw > 4.3  # the noise hides the sizes: the signals are 1 to 5
    assert corrected < 0.75 * adamw


@pytest.mark.parametrize("changes", [{"noise_variance": 0.0}, {"floor": 0.0}])
def test_adamw_bc_needs_noise_and_a_floor(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs noise to subtract and a positive floor"):
        AdamWBC([nn.Parameter(torch.zeros(1))], lr=0.1, **{"noise_variance": 1.0, **changes})


def test_optim_args() -> None:
    assert float_options("floor=0.1, momentum=0.9", ("floor", "momentum")) == {
        "floor": 0.1,
        "momentum": 0.9,
    }
    assert float_options(None, ("floor",)) == {}
    for wrong in ("flor=1", "floor=x", "floor"):
        with pytest.raises(ValueError, match="Expected `optim_args` of the form name=number"):
            float_options(wrong, ("floor",))
