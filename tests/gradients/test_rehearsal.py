"""The rehearsal finds planted faults, and nothing in healthy models.

Covers: gradients/draws.py, gradients/isolation.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpgrape.gradients.rehearsal import CONSTANT, PADDED, Rehearsal, Rehearser
from hf_dpgrape.mechanism.tensors import make_projections, sites_or_problems

VOCAB, WIDTH, LENGTH = 23, 6, 7

#: What a fault does to activations (B, T, WIDTH) inside a model.
Fault = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A table, a layer, a fault, a layer, a mean over positions."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        self.out = nn.Linear(WIDTH, 3)
        self.generator = torch.Generator().manual_seed(0)
        self.memory: Tensor | None = None
        self.register_buffer("count", torch.zeros(()))
        self.fault = fault
        for p in self.norm.parameters():
            p.requires_grad_(False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.first(self.table(ids))
        if self.fault is not None:
            x = self.fault(self, x, mask)
        x = torch.tanh(self.second(torch.tanh(x))) * mask[..., None]
        return self.out(x.sum(1) / mask.sum(1, keepdim=True))


def losses_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def batch(samples: Sequence[int]) -> dict[str, Tensor]:
    """Synthetic samples by their numbers."""
    rows = []
    for number in samples:
        g = torch.Generator().manual_seed(number)
        ids, real = torch.randint(1, VOCAB, (LENGTH,), generator=g), torch.ones(LENGTH)
        if number >= CONSTANT:
            ids[:] = 4
        elif number >= PADDED:
            real[4 + number % 2 - (number - PADDED) // 2 :] = 0
        rows.append((ids * real.long(), real, torch.randint(3, (), generator=g)))
    ids, mask, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"ids": ids, "mask": mask, "labels": labels}


def rehearse(
    model: nn.Module, losses: Callable[[Tensor, Tensor], Tensor] = losses_of, rank: int = 2
) -> Rehearsal:
    sites, problems = sites_or_problems(model)
    assert not problems
    projections = make_projections(model, rank=rank, scale="1/sqrt(r)", seed=7, head=frozenset())

    def run(inputs: dict[str, Tensor]) -> Tensor:
        return losses(model(inputs["ids"], inputs["mask"]), inputs["labels"])

    return Rehearser(model, sites, projections, run)([batch])


def test_a_healthy_model_is_exact() -> None:
    model = Model(lambda m, x, mask: F.dropout(x, 0.3, m.training))
    found = rehearse(model)
    assert not found.problems
    assert set(found.errors) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert max(found.errors.values()) < 1e-5


def one_mask(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x * torch.empty(1, *x.shape[1:]).bernoulli_(0.5)


def dropped_layer(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x if torch.rand([]) < 0.5 else torch.tanh(x)


def drawn_but_unused(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x if torch.rand([]) >= 0.0 else torch.tanh(x)


def numpy_mask(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x * float(np.random.rand() < 2)


def python_mask(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x * float(random.random() < 2)


def own_generator(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=m.generator)


def batch_mean_in_training(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True) if m.training else x


def batch_scale_without_gradient(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x / x.detach().abs().max()


def first_row(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x + x[:1]


def rolled(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x.roll(1, 0)


def longest_row(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x * mask.sum(1).max()


def tracked_norm(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return m.norm(x.mT).mT


def counting_buffer(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    m.count += float(x.detach().sum())
    return x


def replaced_buffer(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    m.count = x.detach().sum()
    return x


def carried_over(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    before, m.memory = m.memory, x.detach().mean()
    return x if before is None else x + before


def permuted(m: Model, x: Tensor, mask: Tensor) -> Tensor:
    return x[torch.randperm(len(x))]


FAULTS: dict[Fault, str] = {
    one_mask: "same random numbers",
    dropped_layer: "same random numbers",
    numpy_mask: "Python's or NumPy's",
    python_mask: "Python's or NumPy's",
    own_generator: "generator of its own",
    batch_mean_in_training: "depends on the other samples",
    batch_scale_without_gradient: "changes with the examples beside it",
    first_row: "depends on the other samples",
    rolled: "depends on the other samples|examples beside it",
    longest_row: "changes with the examples beside it",
    tracked_norm: "`norm.running_mean`|buffer",
    counting_buffer: "buffer",
    replaced_buffer: "buffer",
    carried_over: "batches before|beside it",
    permuted: "other samples|beside it",
}


def _found(model: nn.Module, **options: Any) -> str:
    """What is wrong, by whatever way it is said."""
    try:
        problems = rehearse(model, **options).problems
    except RuntimeError as error:  # a recording refuses buffers that move by itself
        return str(error)
    return "; ".join(f"`{name}`: {why}" for name, why in problems.items())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rank", [0, 2])
def test_planted_faults_are_found(fault: Fault, rank: int) -> None:
    said = _found(Model(fault), rank=rank)
    assert any(part in said for part in FAULTS[fault].split("|")), said


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_head_of_zeros_hides_nothing(fault: Fault) -> None:
    model = Model(fault)
    nn.init.zeros_(model.out.weight)
    nn.init.zeros_(model.out.bias)
    assert _found(model)
    assert not model.out.weight.any() and not model.out.bias.any()


def test_a_draw_that_is_not_used_is_harmless() -> None:
    assert not rehearse(Model(drawn_but_unused)).problems


@pytest.mark.parametrize(
    "losses",
    [
        lambda out, y: (each := losses_of(out, y)) * (each >= each.topk(min(2, len(y))).values[-1]),
        lambda out, y: losses_of(out, y) - losses_of(out, y).mean(),
        lambda out, y: losses_of(out, y) * len(y),
    ],
)
def test_losses_that_look_across_the_batch_are_found(losses: Any) -> None:
    said = _found(Model(), losses=losses)
    assert "examples beside it" in said or "one backward" in said or "other samples" in said


class Gathering(nn.Module):
    """Runs a layer on the tokens that are not padding, as some efficient models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids)
        out = torch.zeros_like(x)
        out[mask.bool()] = self.layer(x[mask.bool()])
        return torch.tanh(out).sum(1)[:, :3]


class TimeMajor(Gathering):
    """Folds positions into the first dimension, positions first."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids).transpose(0, 1)
        y = self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).transpose(0, 1)
        return (torch.tanh(y) * mask[..., None]).sum(1)[:, :3]


class BatchMajor(Gathering):
    """The same with the samples first."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids)
        y = self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return (torch.tanh(y) * mask[..., None]).sum(1)[:, :3]


def test_rows_of_the_wrong_samples() -> None:
    assert "`layer`: the number of rows it sees depends on what" in _found(Gathering())
    assert "depends on the other samples" in _found(TimeMajor())
    assert not rehearse(BatchMajor()).problems


class Around(nn.Module):
    """A block that reads a layer's weight around the layer."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.block = Block()
        self.inside = inside

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.block(self.table(ids))
        if not self.inside:
            x = x @ self.block.layer.weight
        return (x * mask[..., None]).sum(1)[:, :3]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) @ self.layer.weight


def test_a_tensor_used_around_its_layer_goes_to_the_module_around_both() -> None:
    found = rehearse(Around(inside=True))
    assert not found.problems
    assert [site.name for site in found.sites if "block.layer.weight" in site.tensors.values()] == [
        "block"
    ]
    assert max(found.errors.values()) < 1e-5


def test_a_tensor_used_outside_of_all_modules_is_refused() -> None:
    said = _found(Around(inside=False))
    assert "`block.layer.weight`: it is used otherwise" in said


def test_nothing_is_left_behind() -> None:
    model = Model(lambda m, x, mask: F.dropout(x, 0.3, m.training)).eval()
    model.out.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    rehearse(model)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not model.training and model.out.training and not model.table.training
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for n, p in model.named_parameters() if "norm" not in n)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.random.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == generators[1:]
