"""A recording refuses what the rehearsal could not see: what depends on contents alone.

Covers: gradients/stage.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.observation import observe_layouts
from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.mechanism.tensors import make_projections, sites_or_problems

WIDTH, NUM_SAMPLES = 7, 4


class Sudden(nn.Module):
    """Does something else as soon as one number is large, as none of the observed ones is."""

    def __init__(self, otherwise: Callable[[Sudden, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.otherwise = nn.Linear(WIDTH, 3), otherwise
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.otherwise(self, x) if bool((x > 100).any()) else self.layer(x)
        return out.square().sum(1)


def twice(model: Sudden, x: Tensor) -> Tensor:
    """The layer sees two rows per sample, of which a sample's own are not beside each other."""
    return model.layer(torch.cat([x, x]))[: len(x)]


def half(model: Sudden, x: Tensor) -> Tensor:
    """The layer sees one row for two samples."""
    return model.layer(x[::2]).repeat(2, 1)


def counting(model: Sudden, x: Tensor) -> Tensor:
    model.count += 1
    return model.layer(x)


def replacing(model: Sudden, x: Tensor) -> Tensor:
    model.count = model.count + 1
    return model.layer(x)


def record(otherwise: Callable[[Sudden, Tensor], Tensor], *, largest: float) -> None:
    """Takes the gradients of samples of which one has such a number."""
    model = Sudden(otherwise)
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    sites, problems = sites_or_problems(model)
    assert not problems
    layouts = observe_layouts(model, sites, lambda samples: model(x[samples]))
    projections = make_projections(model, rank=2, scale="1/sqrt(r)", seed=0, head=frozenset())
    x[1, 2] = largest
    with Recorder(model, sites, projections, layouts).record(NUM_SAMPLES) as gradients:
        model(x).sum().backward()
    assert set(gradients) == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("otherwise", [twice, half])
def test_other_rows_than_observed_are_refused(otherwise: Callable[..., Tensor]) -> None:
    record(otherwise, largest=1.0)
    with pytest.raises(RuntimeError, match=r"`layer` \(Linear\): expected 1 row\(s\) per sample"):
        record(otherwise, largest=1e3)


@pytest.mark.parametrize("otherwise", [counting, replacing])
def test_a_buffer_that_moves_is_refused(otherwise: Callable[..., Tensor]) -> None:
    record(otherwise, largest=1.0)
    with pytest.raises(RuntimeError, match="The buffer `count` changed"):
        record(otherwise, largest=1e3)
