"""Zeroth order and naive DP-GaLore: what they release, and what they do with it.

Covers: mechanism/estimators/base.py, mechanism/estimators/zeroth_order.py,
mechanism/estimators/galore.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from test_private_training import Net, losses, make_plan, make_training
from torch import Tensor, nn

from hf_dpgrape import PrivateTraining
from hf_dpgrape.mechanism.checks import RefusedModelError
from hf_dpgrape.mechanism.estimators.galore import STATE_KEY
from hf_dpgrape.mechanism.estimators.zeroth_order import DIRECTIONS, DirectionSpace
from hf_dpgrape.mechanism.private_step import PhysicalBatch
from hf_dpgrape.privacy.plan import BODY, HEAD, LOSS
from hf_dpgrape.privacy.randomness import SecretSource

NO_NOISE: dict[str, Any] = {"noise_multiplier": 0.0, "l2_clip_norm": 1e6}


def zeroth(model: nn.Module | None = None, plan: Any = None, **changes: Any) -> PrivateTraining:
    plan = make_plan(**NO_NOISE) if plan is None else plan
    return make_training(model, plan, **{"estimator": "zeroth_order", **changes})


def batch(training: PrivateTraining, indices: list[int]) -> list[PhysicalBatch]:
    return training._batches[indices]


def bits(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone().view(torch.int64) for p in model.parameters()]


def private(training: PrivateTraining) -> Tensor:
    """The private coefficients of the step."""
    (gradient,) = training.gradients()
    return gradient


class Dropping(Net):
    """A network with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.dropout(torch.tanh(self.first(x)), 0.5, self.training))


# ---- Zeroth order ------------------------------------------------------------------------------


def test_weights_come_back_bit_for_bit() -> None:
    model = Net().double()
    with torch.no_grad():
        model.first.bias[0] = -0.0
    training = zeroth(model, per_sample_losses=double_losses, num_directions=3)
    before = bits(model)
    training.take_gradient(batch(training, [0, 1, 2, 3, 4, 5]))
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))
    assert all(p.grad is None for p in model.parameters())


def double_losses(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    return losses(model, {"x": inputs["x"].double(), "y": inputs["y"]})


def test_weights_come_back_from_a_forward_that_fails() -> None:
    model = Net()
    calls = []

    def failing(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        calls.append(1)
        if armed and len(calls) == 2:
            raise FloatingPointError
        return losses(model, inputs)

    armed = False
    training = zeroth(model, per_sample_losses=failing)
    before = [p.detach().clone() for p in model.parameters()]
    armed = True
    calls.clear()
    with pytest.raises(FloatingPointError):
        training.take_gradient(batch(training, [0, 1]))
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert training.ledger.num_releases == 1


def test_a_sample_has_its_slopes_along_the_directions() -> None:
    """In float64, against one backward pass per sample, and that pass's own directions."""
    model = Net().double()
    training = zeroth(model, per_sample_losses=double_losses, num_directions=5)
    drawn = batch(training, [3, 8, 11])
    training.take_gradient(drawn)
    space = training.subspace
    assert isinstance(space, DirectionSpace)
    want = torch.zeros(5, dtype=torch.float64)
    for part in drawn:
        for sample in range(part.num_samples):
            one = {key: value[sample : sample + 1] for key, value in part.inputs.items()}
            model.zero_grad()
            double_losses(model, one).sum().backward()
            for j in range(5):
                slopes = [(p.grad * space.direction(n, j)).sum() for n, p in space.weights.items()]
                want[j] += torch.stack(slopes).sum()
    assert private(training).double() == pytest.approx(want / 6, rel=1e-4, abs=1e-6)


def test_weights_move_along_the_directions_with_rates_and_decays_of_their_groups() -> None:
    model = Net().double()
    groups = [
        {"params": [*model.first.parameters()], "lr": 0.3, "weight_decay": 0.1},
        {"params": [*model.out.parameters()], "lr": 0.02},
    ]
    training = zeroth(
        model,
        optimizer=torch.optim.SGD(groups, lr=1.0),
        per_sample_losses=double_losses,
        num_directions=2,
    )
    space = training.subspace
    assert isinstance(space, DirectionSpace)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    drawn = batch(training, [0, 1])
    training.take_gradient(drawn)
    coefficients = training.gradients()[0].clone()
    training.optimizer.step()
    assert coefficients.abs().min() > 0
    for name, p in model.named_parameters():
        rate, keep = (0.3, 1 - 0.3 * 0.1) if name.startswith("first") else (0.02, 1.0)
        step = sum(c * space.direction(name, j) for j, c in enumerate(coefficients.tolist()))
        torch.testing.assert_close(p.detach(), keep * before[name] - rate * step)
    assert all(bool(s.eq(0).all()) for s in space.stand_ins.values())


@pytest.mark.parametrize("num_directions", [1, 7])
def test_directions_are_public_and_have_their_scale(num_directions: int) -> None:
    weights = {"a": nn.Parameter(torch.zeros(60, 70)), "b": nn.Parameter(torch.zeros(4000))}
    space, same = (DirectionSpace(weights, num_directions=num_directions, seed=5) for _ in range(2))
    torch.manual_seed(0)
    drawn = space.direction("a", 0)
    torch.manual_seed(1)  # no global generator, nor the weights, have a say
    with torch.no_grad():
        weights["a"].add_(3.0)
    assert torch.equal(drawn, same.direction("a", 0))
    want = num_directions**-0.5
    assert float(drawn.std()) == pytest.approx(want, rel=0.05)
    assert float(drawn.std()) != pytest.approx(1.1 * want, rel=0.05)
    others = [space.direction("a", 1), space.direction("b", 0)]
    space.refresh_(1)
    others.append(space.direction("a", 0))
    others.append(DirectionSpace(weights, num_directions=num_directions, seed=6).direction("a", 0))
    for other in others:
        pair = torch.stack([drawn.flatten()[:4000], other.flatten()[:4000]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.07


def test_all_passes_draw_the_same_and_the_next_batch_other_numbers() -> None:
    seen: list[Tensor] = []

    def watched(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        seen.append(torch.rand(9))
        return losses(model, inputs)

    training = zeroth(
        Dropping(), per_sample_losses=watched, num_directions=2, capture="batched", rank=2
    )
    drawn = batch(training, [0, 1, 2, 3, 4, 5])
    assert len(drawn) == 2
    seen.clear()
    training.take_gradient(drawn)
    assert len(seen) == 2 * 4
    first, second = seen[:4], seen[4:]
    assert all(torch.equal(one, part[0]) for part in (first, second) for one in part)
    assert not torch.equal(first[0], second[0])
    seen.clear()
    training.take_gradient(drawn)
    assert not torch.equal(seen[0], first[0])


def test_the_vector_is_clipped_as_a_whole() -> None:
    plan = make_plan(noise_multiplier=0.0, l2_clip_norm=1e-3)
    training = zeroth(plan=plan, num_directions=9)
    training.take_gradient(batch(training, [4]))
    assert float(private(training).norm()) * 6 == pytest.approx(1e-3, rel=1e-4)


def test_a_released_loss_is_that_of_the_weights() -> None:
    shares = {BODY: math.sqrt(1 - 0.36), LOSS: 0.6}
    plan = make_plan(noise_multiplier=0.0, clip_shares=shares, private_loss_bound=9.0)
    training = zeroth(plan=plan)
    drawn = batch(training, [0, 1, 2])
    with torch.no_grad():
        want = sum(losses(training.model, part.inputs).sum() for part in drawn)
    found = training.take_gradient(drawn).private_mean
    assert found is not None
    assert float(found) == pytest.approx(float(want) / 6, rel=1e-3)


class Mixing(Net):
    """Subtracts the batch's mean."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.out(torch.tanh(hidden - hidden.mean(0, keepdim=True)))


def test_a_model_that_mixes_samples_is_refused() -> None:
    with pytest.raises(RefusedModelError):
        zeroth(Mixing(), capture="batched")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"clip_shares": {BODY: 0.6, HEAD: 0.8}}, "got the clip group `HEAD`"),
        ({"clip_shares": {BODY: 0.6, HEAD: 0.8}, "head_only_steps": 1}, "got the clip group"),
    ],
)
def test_groups_of_tensors_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("HEAD", HEAD)):
        zeroth(plan=make_plan(**changes), head=frozenset({"out.weight", "out.bias"}))


@pytest.mark.parametrize("changes", [{"num_directions": 0}, {"perturbation_scale": 0.0}])
def test_numbers_must_be_positive(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`num_directions` and `perturbation_scale` must be pos"):
        zeroth(**changes)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`estimator` to be one of \['backward', .* got 'forwar"):
        make_training(estimator="forward")


def test_16_bit_weights_are_trained_and_come_back() -> None:
    model = Net().to(torch.bfloat16)

    def halves(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        return losses(model, {"x": inputs["x"].bfloat16(), "y": inputs["y"]}).float()

    training = zeroth(model, per_sample_losses=halves, perturbation_scale=0.05)
    before = [p.detach().clone() for p in model.parameters()]
    training.take_gradient(batch(training, [0, 1, 2]))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    training.optimizer.step()
    assert not torch.equal(before[0], model.first.weight)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


# ---- Naive DP-GaLore ---------------------------------------------------------------------------


def galore(**changes: Any) -> PrivateTraining:
    model = Net()
    given = {"optimizer": torch.optim.Adam(model.parameters(), lr=0.01), "estimator": "galore"}
    return make_training(model, **{**given, **changes})


def watched_steps(training: PrivateTraining, num: int) -> list[dict[str, Tensor]]:
    """What each of some steps released, before it was projected."""
    found: list[dict[str, Tensor]] = []
    own: Any = training.subspace.set_gradients

    def look(gradients: Mapping[str, Tensor]) -> None:
        if gradients:
            found.append({name: g.clone() for name, g in gradients.items()})
        own(gradients)

    training.subspace.set_gradients = look  # type: ignore[method-assign]
    for step in range(num):
        training.step(batch(training, [step, step + 9]))
    return found


def test_the_full_gradient_is_released_and_projected_on_its_singular_vectors() -> None:
    training = galore(rank=2, source=SecretSource(unsafe_seed=1))
    (gradients,) = watched_steps(training, 1)
    assert gradients["first.weight"].shape == (11, 7) and gradients["out.weight"].shape == (3, 11)
    left = {"first.weight": False, "out.weight": True}
    for name, is_left in left.items():
        u, _, vh = torch.linalg.svd(gradients[name], full_matrices=False)
        vectors = training.projections[name].matrix
        own = u[:, :2] if is_left else vh[:2].T
        torch.testing.assert_close(vectors @ vectors.T, own @ own.T)  # signs are free
        projected = vectors.T @ gradients[name] if is_left else gradients[name] @ vectors
        torch.testing.assert_close(training.subspace.stand_ins[name].grad, projected)
    torch.testing.assert_close(
        training.subspace.stand_ins["first.bias"].grad, gradients["first.bias"]
    )


@pytest.mark.parametrize(("gap", "renewed"), [(0, [0]), (2, [0, 2]), (1, [0, 1, 2, 3])])
def test_singular_vectors_are_renewed_and_saved(gap: int, renewed: list[int]) -> None:
    training = galore(rank=2, update_proj_gap=gap)
    stand_in = training.subspace.stand_ins["first.weight"]
    held = []
    for step in range(4):
        training.step(batch(training, [step, step + 9]))
        held.append(training.optimizer.state[stand_in][STATE_KEY].clone())
        assert torch.equal(held[-1], training.projections["first.weight"].matrix)
    changed = [0] + [i for i in range(1, 4) if not torch.equal(held[i], held[i - 1])]
    assert changed == renewed


@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_moments_at_a_renewal(moments: str) -> None:
    training = galore(rank=2, update_proj_gap=2, refresh_moments=moments)
    watched_steps(training, 3)
    state = training.optimizer.state
    counts = {n: int(state[s]["step"]) for n, s in training.subspace.stand_ins.items()}
    assert counts["first.weight"] == (3 if moments == "keep" else 1)
    assert counts["first.bias"] == 3


def test_weights_move_in_the_span_of_the_singular_vectors_alone() -> None:
    training = galore(rank=2)
    before = training.model.first.weight.detach().clone()  # type: ignore[union-attr]
    watched_steps(training, 2)
    moved = training.model.first.weight.detach() - before  # type: ignore[union-attr]
    vectors = training.projections["first.weight"].matrix
    assert moved.norm() > 0
    torch.testing.assert_close(moved @ vectors @ vectors.T, moved)


def test_the_zeroth_part_has_one_name() -> None:
    training = zeroth()
    assert list(training.subspace) == [DIRECTIONS]
    assert training.subspace.zero_sums(frozenset()) == {}
