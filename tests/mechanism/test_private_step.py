"""The private step's guarantees, on real models.

Covers: mechanism/estimators/backward.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import CAUSAL, CLASSIFY, IMAGE, SEQ2SEQ, make_inputs, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import alone, batch_size, enable_checkpointing, make_recorder, select
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dpgrape.gradients.forms import Dense, PerSampleGradients
from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.mechanism.estimators.backward import Backward
from hf_dpgrape.mechanism.private_step import PhysicalBatch, PrivateStep
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.plan import BODY, HEAD, LOSS, PrivacyPlan
from hf_dpgrape.privacy.randomness import SecretSource
from hf_dpgrape.privacy.secure_noise import grid_of
from hf_dpgrape.subspace.parameters import Subspace
from hf_dpgrape.subspace.projection import Projection

CASES = [("roberta", CLASSIFY), ("gpt2", CAUSAL), ("t5", SEQ2SEQ), ("vit", IMAGE)]


def make_plan(**changes: Any) -> PrivacyPlan:
    given: dict[str, Any] = {
        "num_examples": 100,
        "expected_batch_size": 8,
        "num_steps": 10,
        "noise_multiplier": 0.0,
        "l2_clip_norm": 0.3,
        "target_delta": 1e-5,
    }
    return PrivacyPlan(**{**given, **changes})


class Bench:
    """A model with its inputs and a private step that tests can call with any samples."""

    def __init__(
        self,
        family: str,
        head: str,
        *,
        rank: int = 5,
        form: str = "auto",
        groups: Any = None,
        **plan: Any,
    ) -> None:
        self.model = make_model(family, head)
        self.inputs = make_inputs(family, head)
        recorder, projections = make_recorder(self.model, self.inputs, rank=rank, form=form)
        self.projections = projections
        weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.subspace = Subspace(weights, projections)
        self.loss = PerSampleLoss(self.model)
        self.head = frozenset(list(weights)[-2:])
        self.step = PrivateStep(
            ledger=RunLedger(make_plan(**plan)),
            estimator=Backward(recorder),
            space=self.subspace,
            clip_groups={
                n: HEAD if HEAD in plan.get("clip_shares", ()) and n in self.head else BODY
                for n in weights
            }
            if groups is None
            else {n: groups(n) for n in weights},
            head=self.head,
            source=SecretSource(unsafe_seed=5),
        )

    def gradient(
        self, samples: list[int], *, size: int = 3, step: int = 0, inputs: Any = None
    ) -> dict[str, Tensor]:
        """What is released about these samples, times the public divisor."""
        inputs = self.inputs if inputs is None else inputs
        parts = [samples[i : i + size] for i in range(0, len(samples), size)]
        logical = [PhysicalBatch(len(part), select(inputs, part)) for part in parts]
        plan = self.step.ledger.plan
        self.step.ledger = RunLedger(plan, num_releases=step)
        loss = self.step(logical, lambda x: self.loss(self.model, x))
        released = {
            name: tensor.stand_in.grad * plan.expected_batch_size
            for name, tensor in self.subspace.tensors.items()
            if tensor.stand_in.grad is not None
        }
        if loss.private_mean is not None:
            scale = plan.private_loss_scale * plan.expected_batch_size
            released[LOSS] = loss.private_mean * scale
        return released


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return math.sqrt(sum(float((a[n] - b[n]).square().sum()) for n in a))


@pytest.fixture(scope="module", params=CASES, ids=lambda c: c[0])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(*request.param)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_one_sample_moves_the_sum_by_at_most_the_clip_norm(bench: Bench, data: Any) -> None:
    samples = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    leave_out = data.draw(st.integers(0, len(samples) - 1))
    rest = samples[:leave_out] + samples[leave_out + 1 :]
    moved = distance(bench.gradient(samples), bench.gradient(rest))
    assert moved <= bench.step.ledger.plan.l2_clip_norm * (1 + 1e-9)
    assert (
        moved > 0.2 * bench.step.ledger.plan.l2_clip_norm
    )  # the bound is not kept by losing signal


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize("shares", [{BODY: 1.0}, {BODY: 0.8, HEAD: 0.6}])
def test_bound_holds_for_groups_and_kinds(clipping: str, shares: dict[str, float]) -> None:
    bench = Bench("roberta", CLASSIFY, clipping=clipping, clip_shares=shares)
    for sample in range(4):
        one = bench.gradient([sample])
        assert distance(one, {n: torch.zeros_like(g) for n, g in one.items()}) <= 0.3
        head = math.sqrt(sum(float(one[n].square().sum()) for n in bench.head))
        assert head <= 0.3 * shares.get(HEAD, 1.0)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_splitting_changes_nothing(bench: Bench, size: int) -> None:
    samples = [0, 1, 2, 3, 2, 0, 1]
    whole = bench.gradient(samples, size=len(samples))
    assert distance(whole, bench.gradient(samples, size=size)) < 1e-12


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("form", ["auto", "dense", "factors"])
@pytest.mark.parametrize(("family", "head"), CASES[:2])
def test_sum_is_that_of_the_naive_loop(family: str, head: str, form: str, rank: int) -> None:
    bench = Bench(family, head, rank=rank, form=form)
    got = bench.gradient([0, 1, 2, 3])
    want = {name: torch.zeros_like(g) for name, g in got.items()}
    for full in alone(bench.model, bench.inputs):
        projected = {n: bench.projections[n].on_gradient(g) for n, g in full.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in projected.values()))
        for name, g in projected.items():
            want[name] += g * min(1.0, bench.step.ledger.plan.l2_clip_norm * (1 - 1e-6) / norm)
    assert distance(got, want) < 1e-10


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(("family", "head"), [("gpt2", CAUSAL), ("t5", SEQ2SEQ)])
def test_a_group_per_tensor_is_clipped_during_backward(
    family: str, head: str, reentrant: bool | None
) -> None:
    names = [n for n, _ in make_model(family, head).named_parameters()]
    share = len(names) ** -0.5
    bench = Bench(family, head, groups=str, clip_shares=dict.fromkeys(names, share))
    if reentrant is not None:  # in training mode, without dropout's randomness
        for module in bench.model.train().modules():
            for name in {"p", "dropout"} & vars(module).keys():
                setattr(module, name, 0.0)
        enable_checkpointing(bench.model, {"use_reentrant": reentrant})
    bound = bench.step.ledger.plan.l2_clip_norm * share * (1 - 1e-6)
    got = bench.gradient([0, 1, 2, 3])
    want = {name: torch.zeros_like(g) for name, g in got.items()}
    for full in alone(bench.model, bench.inputs):
        for name, g in full.items():
            projected = bench.projections[name].on_gradient(g)
            norm = float(projected.norm())
            want[name] += projected * (min(1.0, bound / norm) if norm else 0.0)
    assert distance(got, want) < 1e-10


def test_more_uses_than_observed_are_an_error() -> None:
    gradients = PerSampleGradients(2, num_uses={"w": 1}, when_complete=lambda g, n: g.discard(n))
    gradients.add("w", Dense(torch.ones(2, 3)))
    gradients.use_is_done("w")
    with pytest.raises(RuntimeError, match="used more often in training"):
        gradients.add("w", Dense(torch.ones(2, 3)))


def test_clip_norm_matters() -> None:
    small, large = (Bench("gpt2", CAUSAL, l2_clip_norm=c).gradient([0, 1, 2]) for c in (0.01, 0.1))
    ratio = distance(large, {n: torch.zeros_like(g) for n, g in large.items()}) / distance(
        small, {n: torch.zeros_like(g) for n, g in small.items()}
    )
    assert ratio == pytest.approx(10)


@pytest.mark.parametrize("samples", [[], [0, 1]])
def test_noise_once_with_public_divisor(samples: list[int]) -> None:
    bench = Bench("roberta", CLASSIFY, noise_multiplier=400.0)
    for size in (1, 2):
        gradient = bench.gradient(samples, size=size)
        values = torch.cat([g.flatten() for g in gradient.values()])
        assert values.std() == pytest.approx(400 * 0.3, rel=0.03)
        names = {n for n, p in bench.model.named_parameters() if p.requires_grad}
        assert gradient.keys() == names


def test_secure_noise_is_the_planned_one_on_a_grid() -> None:
    plain, secure = (
        Bench("roberta", CLASSIFY, noise_multiplier=2.0, secure_noise=on) for on in (False, True)
    )
    found = secure.gradient([])
    size = sum(tensor.numel() for tensor in found.values())
    grid = grid_of(noise_multiplier=2.0, l2_clip_norm=0.3, num_coordinates=size)
    noise = torch.cat([tensor.flatten().double() for tensor in found.values()])
    assert abs(float(noise.std()) / grid.stddev - 1) < 4 / math.sqrt(2 * size)
    assert abs(float(noise.std()) / grid.stddev - 1.1) > 8 / math.sqrt(2 * size)  # can fail
    # Another step has other noise; who was drawn moves it by the sum, but for rounding.
    again = secure.gradient([])
    assert distance(found, again) > math.sqrt(size) * grid.stddev
    twins = [Bench("roberta", CLASSIFY, noise_multiplier=2.0, secure_noise=True) for _ in range(2)]
    alone, together = twins[0].gradient([]), twins[1].gradient([0, 1, 2])
    moved = {name: together[name] - alone[name] for name in alone}
    want = Bench("roberta", CLASSIFY).gradient([0, 1, 2])
    assert distance(moved, want) < 1e-4 * 0.3
    assert distance(plain.gradient([]), found) > math.sqrt(size) * grid.stddev


def test_noise_of_every_group_is_that_of_the_whole_clip_norm() -> None:
    bench = Bench(
        "roberta",
        CLASSIFY,
        noise_multiplier=400.0,
        clip_shares={BODY: 0.8, HEAD: 0.36, LOSS: 0.48},
        private_loss_bound=2.0,
    )
    gradient = bench.gradient([])
    del gradient[LOSS]  # one number; its noise has a test of its own
    for is_head in (True, False):
        group = [g.flatten() for n, g in gradient.items() if (n in bench.head) == is_head]
        # A head of few numbers: five standard errors.
        allowed = 5 / math.sqrt(2 * sum(map(len, group)))
        assert torch.cat(group).square().mean().sqrt() == pytest.approx(400 * 0.3, rel=allowed)


def test_no_two_coordinates_share_their_noise() -> None:
    gradient = Bench("roberta", CLASSIFY, noise_multiplier=400.0).gradient([])
    values = torch.cat([g.flatten() for g in gradient.values()])
    assert values.dtype == torch.float64  # in which no two of so many draws agree by chance
    assert len(values.unique()) == len(values)


def test_two_steps_have_independent_noise() -> None:
    bench = Bench("roberta", CLASSIFY, noise_multiplier=400.0)
    first, second = (
        torch.cat([g.flatten() for g in bench.gradient([]).values()]) for _ in range(2)
    )
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.05


@pytest.mark.parametrize("form", ["dense", "factors"])
def test_poisoned_sample_contributes_nothing(form: str) -> None:
    bench = Bench("vit", IMAGE, form=form)
    poisoned = {k: v.clone() for k, v in bench.inputs.items()}
    poisoned["pixel_values"][2] = math.inf
    got = bench.gradient([0, 1, 2, 3], size=4, inputs=poisoned)
    assert distance(got, bench.gradient([0, 1, 3], size=4)) < 1e-12


def test_head_alone_first() -> None:
    bench = Bench("roberta", CLASSIFY, head_only_steps=2, clip_shares={BODY: 0.8, HEAD: 0.6})
    first = bench.gradient([0, 1], step=0)
    assert first.keys() == bench.head
    one = bench.gradient([0], step=1)
    norm = distance(one, {n: torch.zeros_like(g) for n, g in one.items()})
    assert norm == pytest.approx(0.3, rel=1e-5)  # the head has the whole clip norm
    assert bench.gradient([0], step=2).keys() > bench.head


# ---- The loss as one more coordinate -----------------------------------------------------------

WITH_LOSS: dict[str, Any] = {
    "clip_shares": {BODY: 0.64, HEAD: 0.48, LOSS: 0.6},
    "private_loss_bound": 2.5,
}
ODD_NUMBERS = [0.0, 1.0, -1.0, 1e-30, 1e30, -1e30, 1e200, math.inf, -math.inf, math.nan]


class LossBench(Bench):
    """Multiplies each sample's loss, hence its gradient, by a factor, and adds an offset to it."""

    def __init__(self, family: str = "roberta", head: str = CLASSIFY, **options: Any) -> None:
        super().__init__(family, head, **{**WITH_LOSS, **options})
        own = self.loss
        self.inputs["factor"] = torch.ones(4, dtype=torch.float64)
        self.inputs["offset"] = torch.zeros(4, dtype=torch.float64)

        def loss(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
            names = [name for name in x if name not in ("factor", "offset")]
            return own(model, {name: x[name] for name in names}) * x["factor"] + x["offset"]

        self.loss = loss  # type: ignore[assignment]

    def with_numbers(self, factor: list[float], offset: list[float]) -> dict[str, Tensor]:
        numbers = {"factor": torch.tensor(factor).double(), "offset": torch.tensor(offset).double()}
        return {**self.inputs, **numbers}


@pytest.fixture(scope="module")
def loss_bench() -> LossBench:
    return LossBench()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_one_sample_moves_gradient_and_loss_by_at_most_the_clip_norm(
    loss_bench: LossBench, data: Any
) -> None:
    numbers = st.sampled_from(ODD_NUMBERS) | st.floats(-10, 10)
    four = st.lists(numbers, min_size=4, max_size=4)
    inputs = loss_bench.with_numbers(data.draw(four), data.draw(four))
    samples = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    leave_out = data.draw(st.integers(0, len(samples) - 1))
    rest = samples[:leave_out] + samples[leave_out + 1 :]
    step = data.draw(st.integers(0, 1))
    whole = loss_bench.gradient(samples, inputs=inputs, step=step)
    assert LOSS in whole
    assert all(bool(value.isfinite().all()) for value in whole.values())
    moved = distance(whole, loss_bench.gradient(rest, inputs=inputs, step=step))
    assert moved <= loss_bench.step.ledger.plan.l2_clip_norm * (1 + 1e-9)


@pytest.mark.parametrize(
    ("offset", "counts_as"),
    [(9.0, 2.5), (-9.0, -2.5), (math.inf, 2.5), (-math.inf, -2.5), (math.nan, 2.5)],
)
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_bound_is_reached_and_any_loss_counts(
    loss_bench: LossBench, offset: float, counts_as: float, factor: float
) -> None:
    # A factor of infinity makes loss and gradient infinite: the loss counts all the same.
    inputs = loss_bench.with_numbers([factor, 1, 1, 1], [offset, 0, 0, 0])
    released = loss_bench.gradient([0], inputs=inputs)
    counts_as = 2.5 if factor == math.inf else counts_as  # infinity minus infinity is NaN
    assert float(released[LOSS]) == pytest.approx(counts_as / 2.5 * 0.6 * 0.3)
    norm = distance(released, {n: torch.zeros_like(v) for n, v in released.items()})
    assert norm == pytest.approx(0.3 if factor == 1 else 0.6 * 0.3, rel=1e-5)


@pytest.mark.parametrize(("family", "head"), CASES)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_released_loss_without_noise_is_the_sum_over_the_expected_size(
    family: str, head: str, size: int
) -> None:
    bench = LossBench(family, head, private_loss_bound=50.0)
    raw = bench.loss(bench.model, bench.inputs).detach()
    samples = [0, 1, 2, 3, 3, 1]
    parts = [samples[i : i + size] for i in range(0, 6, size)]
    logical = [PhysicalBatch(len(part), select(bench.inputs, part)) for part in parts]
    loss = bench.step(logical, lambda x: bench.loss(bench.model, x))
    assert loss.private_mean is not None
    assert float(loss.private_mean) == pytest.approx(float(raw[samples].sum()) / 8, rel=1e-12)
    assert float(loss.raw_sum) == pytest.approx(float(raw[samples].sum()), rel=1e-6)


@pytest.mark.parametrize("loss_share", [0.1, 0.6])
def test_gradients_keep_the_rest_of_the_clip_norm(loss_share: float) -> None:
    left = math.sqrt(1 - loss_share**2)
    bench = Bench(
        "gpt2", CAUSAL, clip_shares={BODY: left, LOSS: loss_share}, private_loss_bound=2.5
    )
    released, plain = bench.gradient([0, 1, 2]), Bench("gpt2", CAUSAL).gradient([0, 1, 2])
    del released[LOSS]
    assert distance({n: v / left for n, v in released.items()}, plain) < 1e-12


def test_head_alone_leaves_the_loss_its_share() -> None:
    bench = LossBench(head_only_steps=1)
    released = bench.gradient([0], inputs=bench.with_numbers([1] * 4, [9.0] * 4))
    assert released.keys() == bench.head | {LOSS}
    assert float(released.pop(LOSS)) == pytest.approx(0.6 * 0.3)
    norm = distance(released, {n: torch.zeros_like(v) for n, v in released.items()})
    assert norm == pytest.approx(0.8 * 0.3, rel=1e-5)


def test_loss_gets_the_noise_of_one_coordinate_also_without_examples() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    model = Tiny()
    projections = {"scale": Projection("scale", model.scale.shape, rank=0)}
    plan = make_plan(
        noise_multiplier=1.7,
        clip_shares={BODY: math.sqrt(0.99), LOSS: 0.1},
        private_loss_bound=2.0,
        num_steps=4000,
    )
    step = PrivateStep(
        ledger=RunLedger(plan),
        estimator=Backward(Recorder(model, [], projections, {})),
        space=Subspace(dict(model.named_parameters()), projections),
        clip_groups={"scale": BODY},
        source=SecretSource(unsafe_seed=3),
    )
    losses, gradients = [], []
    for _ in range(4000):
        found = step([], lambda x: x).private_mean
        assert found is not None
        losses.append(float(found))
        gradients.append(float(model.scale.grad[0]))
    want = 1.7 * 2.0 / (0.1 * 8)
    assert plan.private_loss_stddev == pytest.approx(want)
    noise = torch.tensor(losses)
    # The estimate of the scale has a standard deviation of 1.1 %: 4 % accepts, 10 % is rejected.
    assert noise.std() == pytest.approx(want, rel=0.04)
    assert abs(noise.mean()) < 4 * want / math.sqrt(4000)
    assert abs(torch.corrcoef(torch.stack([noise, torch.tensor(gradients)]))[0, 1]) < 0.06
    assert torch.tensor(gradients).std() == pytest.approx(1.7 * 0.3 / 8, rel=0.04)


def test_no_loss_is_released_unless_asked_for() -> None:
    bench = Bench("roberta", CLASSIFY)
    loss = bench.step([], lambda x: x)
    assert loss.private_mean is None


def test_stops_at_the_planned_steps() -> None:
    bench = Bench("roberta", CLASSIFY, num_steps=3)
    for index in range(3):
        assert bench.step.ledger.num_releases == index
        bench.step([], lambda x: x)
    with pytest.raises(RuntimeError, match="3 steps are done"):
        bench.step([], lambda x: x)
    assert bench.step.ledger.num_releases == 3


def test_an_interrupted_step_is_counted() -> None:
    bench = Bench("roberta", CLASSIFY)

    def interrupt(inputs: Any) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.step([PhysicalBatch(4, bench.inputs)], interrupt)
    assert bench.step.ledger.num_releases == 1


@pytest.mark.parametrize("bad", [lambda x: x.mean(), lambda x: x[:, None], lambda x: x[:1]])
def test_refuses_what_is_not_one_loss_per_sample(bad: Any) -> None:
    bench = Bench("roberta", CLASSIFY)
    loss = bench.loss
    bench.loss = lambda model, x: bad(loss(model, x))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="one value per sample"):
        bench.gradient([0, 1])


def test_unused_head_gets_noise_and_nothing_else() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    bench = Bench("vit", IMAGE)
    bench.model, bench.inputs = TwoHeads().double(), {"x": torch.randn(4, 3).double()}
    from hf_dpgrape.gradients.observation import observe_layouts
    from hf_dpgrape.mechanism.tensors import make_projections, sites_or_problems

    sites, _ = sites_or_problems(bench.model)
    loss = lambda x: bench.model(x["x"]).square().sum(1)  # noqa: E731
    layouts = observe_layouts(bench.model, sites, lambda i: loss(select(bench.inputs, i)))
    projections = make_projections(bench.model, rank=0, scale="1/r", seed=0, head=frozenset())
    subspace = Subspace(dict(bench.model.named_parameters()), projections)
    step = PrivateStep(
        ledger=RunLedger(make_plan()),
        estimator=Backward(Recorder(bench.model, sites, projections, layouts)),
        space=subspace,
        clip_groups=dict.fromkeys(projections, BODY),
        source=SecretSource(unsafe_seed=1),
    )
    step([PhysicalBatch(4, bench.inputs)], loss)
    assert bench.model.unused.weight.grad.eq(0).all()
    assert bench.model.used.weight.grad.ne(0).any()


class NoFullGradient(TorchDispatchMode):
    """Fails when an operation allocates a matrix of a projected weight's full shape."""

    def __init__(self, model: nn.Module, subspace: Subspace) -> None:
        super().__init__()
        self.shapes = {
            tuple(t.weight.shape)
            for t in subspace.tensors.values()
            if t.projection.side is not None
        }
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.own:
                for shape in self.shapes:
                    if tuple(leaf.shape[-len(shape) :]) in (shape, shape[::-1]):
                        self.seen.add((str(func), tuple(leaf.shape)))
        return out


@pytest.mark.parametrize(
    ("family", "head"), [*CASES, ("opt", CAUSAL), ("llama", CAUSAL), ("bert", CLASSIFY)]
)
def test_no_gradient_of_full_size(family: str, head: str) -> None:
    bench = Bench(family, head)
    mode = NoFullGradient(bench.model, bench.subspace)
    assert len(mode.shapes) > 3
    with mode:
        bench.gradient(list(range(batch_size(bench.inputs))), size=4)
    # Activations may have the shape of a weight by chance; these models' sizes avoid it.
    assert not mode.seen
    # The test sees what it should: an ordinary backward allocates them.
    with mode:
        bench.loss(bench.model, bench.inputs).sum().backward()
    assert mode.seen
