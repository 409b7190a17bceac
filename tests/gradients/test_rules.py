"""Every layer rule at inputs of 2, 3 and 4 dimensions and batches of 0, 1 and 3.

Covers: gradients/generic.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

import hf_dpgrape.hf  # noqa: F401  # tells the rules of transformers' own layers
from hf_dpgrape.gradients.observation import observe_layouts
from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.mechanism.tensors import make_projections, sites_or_problems

WIDTH, ROWS = 7, 9
POSITIONS = {2: (), 3: (4,), 4: (4, 5)}


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(ids + 1) * factor


class Toy(nn.Module):
    """A layer between something that requires grad and a loss that weighs every output."""

    def __init__(self, layer: nn.Module, kwargs: dict[str, float] | None = None) -> None:
        super().__init__()
        self.layer, self.kwargs = layer, kwargs or {}

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x, **self.kwargs)
        weights = torch.linspace(-1, 2, out[:1].numel(), dtype=out.dtype).view_as(out[:1])
        return (out.tanh() * weights).flatten(1).sum(1)


def floats(batch: int, *positions: int) -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.randn(batch, *positions, WIDTH, generator=g, dtype=torch.float64)


def ids(batch: int, *positions: int) -> Tensor:
    return torch.randint(ROWS - 1, (batch, *positions), generator=torch.Generator().manual_seed(3))


LAYERS: dict[str, tuple[Callable[[], Toy], Callable[..., Tensor]]] = {
    "linear": (lambda: Toy(nn.Linear(WIDTH, 11)), floats),
    "linear, narrow": (lambda: Toy(nn.Linear(WIDTH, 5, bias=False)), floats),
    "Conv1D": (lambda: Toy(Conv1D(11, WIDTH)), floats),
    "layer norm": (lambda: Toy(nn.LayerNorm(WIDTH)), floats),
    "RMS norm": (lambda: Toy(LlamaRMSNorm(WIDTH)), floats),
    "embedding": (lambda: Toy(nn.Embedding(ROWS, 5, padding_idx=2)), ids),
    "embedding, wide": (lambda: Toy(nn.Embedding(ROWS, 13)), ids),
    "embedding subclass": (lambda: Toy(Scaled(ROWS, 5), {"factor": 1.7}), ids),
}


def check(model: Toy, inputs: Tensor, rank: int) -> None:
    torch.manual_seed(0)
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    sites, problems = sites_or_problems(model)
    assert not problems
    three = torch.cat([inputs, inputs, inputs, inputs])[:3] if len(inputs) else inputs
    three = three if len(three) == 3 else inputs.new_zeros(3, *inputs.shape[1:])
    layouts = observe_layouts(model, sites, lambda i: model(three[i]))
    projections = make_projections(model, rank=rank, scale="1/sqrt(r)", seed=0, head=frozenset())
    recorder = Recorder(model, sites, projections, layouts)
    with recorder.record(len(inputs)) as gradients:
        model(inputs).sum().backward()
    for name, p in model.named_parameters():
        got = gradients.dense(name)
        if len(inputs) == 0:
            assert got is None
            continue
        assert got is not None and len(got) == len(inputs)
        for i in range(len(inputs)):
            (want,) = torch.autograd.grad(model(inputs[i : i + 1]).sum(), [p])
            assert torch.allclose(got[i].flatten(), projections[name].on_gradient(want).flatten())


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("layer", list(LAYERS))
def test_layer(layer: str, dims: int, batch: int, rank: int) -> None:
    make, inputs = LAYERS[layer]
    check(make(), inputs(batch, *POSITIONS[dims]), rank)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolution(groups: int, kernel: int, batch: int, rank: int) -> None:
    images = torch.randn(batch, 4, 6, 5, generator=torch.Generator().manual_seed(1)).double()
    layer = nn.Conv2d(4, 8, kernel, stride=2, padding=1, dilation=1, groups=groups)
    check(Toy(layer), images, rank)


def test_bare_tensor_that_is_not_broadcast_is_found() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 5)
            self.shift = nn.Parameter(torch.zeros(1, 5))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) + self.shift[0]).tanh().sum(1)

    model = Indexed().double()
    sites, _ = sites_or_problems(model)
    layouts = observe_layouts(model, sites, lambda i: model(floats(3)[i]))
    problems = [layout.problem for layout in layouts.values() if layout.problem]
    assert problems == ["it is used in a way that does not let every sample have its own copy"]


def test_table_of_positions_is_not_taken_for_a_batch() -> None:
    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(WIDTH, 4), nn.Embedding(ROWS, 4)

        def forward(self, x: Tensor) -> Tensor:
            table = self.bias(torch.arange(3))  # three positions, as many as samples
            return (self.layer(x).unsqueeze(1) * table).flatten(1).sum(1)

    model = Relative().double()
    sites, _ = sites_or_problems(model)
    layouts = observe_layouts(model, sites, lambda i: model(floats(3)[i]))
    assert "no batch dimension in front" in layouts["bias"].problem
