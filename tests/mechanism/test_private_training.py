"""Private training as one object, in a loop of one's own.

Covers: mechanism/checks.py, mechanism/clip_groups.py, mechanism/placement.py, mechanism/tensors.py.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from conftest_trainer import MakeTrainer, collate, examples, make_trainer  # noqa: F401
from families import CLASSIFY, make_model
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpgrape import PerSampleLoss, PrivacyPlan, PrivateTraining, RunLedger
from hf_dpgrape.mechanism.checks import RefusedModelError
from hf_dpgrape.mechanism.logical_batches import LogicalBatches
from hf_dpgrape.mechanism.synthetic import SyntheticExamples
from hf_dpgrape.privacy.plan import BODY, HEAD, LOSS
from hf_dpgrape.privacy.randomness import SecretSource
from hf_dpgrape.privacy.sampling.poisson import Poisson

NUM_EXAMPLES = 30


class Net(nn.Module):
    """Knows nothing of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.out = nn.Linear(7, 11), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


def losses(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(inputs["x"]), inputs["y"], reduction="none")


def stacked(batch: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in batch]), "y": torch.tensor([y for _, y in batch])}


def points() -> list[tuple[Tensor, int]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(7, generator=g), i % 3) for i in range(NUM_EXAMPLES)]


def make_plan(**changes: Any) -> PrivacyPlan:
    given: dict[str, Any] = {
        "num_examples": NUM_EXAMPLES,
        "expected_batch_size": 6,
        "num_steps": 4,
        "noise_multiplier": 1.1,
        "l2_clip_norm": 0.8,
        "target_delta": 1e-3,
    }
    return PrivacyPlan(**{**given, **changes})


def make_training(
    model: nn.Module | None = None, plan: PrivacyPlan | None = None, **changes: Any
) -> PrivateTraining:
    model = Net() if model is None else model
    given: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "per_sample_losses": losses,
        "examples": points(),
        "collate": stacked,
        "physical_batch_size": 4,
        "rank": 2,
    }
    return PrivateTraining(model, plan=plan or make_plan(), **{**given, **changes})


# ---- The same as the Trainer -------------------------------------------------------------------


class InTheTrainersOrder(SecretSource):
    """The test's seeds as the Trainer deals them out.

    It seeds the global generators (4) and its loader's coins (1) before it collates an example for
    the rehearsal (7); a loop of one's own has its loader afterwards.
    """

    def __init__(self, unsafe_seed: int) -> None:
        super().__init__(unsafe_seed=unsafe_seed)
        drawn = [SecretSource.seed(self) for _ in range(4 + 1 + 7)]
        self._waiting = [*drawn[5:], drawn[4]]

    def seed(self) -> int:
        waiting = getattr(self, "_waiting", [])
        return waiting.pop(0) if waiting else super().seed()


@pytest.mark.parametrize("rank", [0, 5])
def test_a_loop_of_ones_own_is_the_trainers_bit_for_bit(
    make_trainer: MakeTrainer,  # noqa: F811
    rank: int,
) -> None:
    trainer = make_trainer(rank=rank, optim="adamw_torch", weight_decay=0.01, update_proj_gap=2)
    model = make_model("roberta", CLASSIFY).float()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    plain = [n for n in start if "bias" in n or "LayerNorm" in n]
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in plain) == is_plain]}
        for is_plain in (False, True)
    ]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    training = PrivateTraining(
        model,
        torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.01),
        trainer.plan,
        PerSampleLoss(model),
        examples=examples(),
        collate=collate,
        physical_batch_size=4,
        rank=rank,
        update_proj_gap=2,
        source=InTheTrainersOrder(trainer.args.unsafe_test_seed),
    )
    for batch in training.batches():
        training.step(batch)
    trained = dict(trainer.model.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, trained[name]), name
        assert not torch.equal(p, start[name]), name
    assert training.epsilon == trainer.privacy_record()["epsilon"]


# ---- Counting ----------------------------------------------------------------------------------


def test_every_step_counts_and_no_more_than_planned_are_taken() -> None:
    training, taken = make_training(), 0
    for batch in training.batches():
        training.step(batch)
        taken += 1
        assert training.epsilon == training.ledger.plan.epsilon(taken)
    assert taken == 4
    assert list(training.batches()) == []
    before = [p.detach().clone() for p in training.model.parameters()]
    with pytest.raises(RuntimeError, match="The plan's 4 steps are done"):
        training.step(batch)
    after = training.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_loop_that_is_left_early_counts_in_full() -> None:
    training = make_training()
    for batch in training.batches():
        training.step(batch)
        break
    assert training.ledger.num_releases == 1
    assert training.epsilon == training.ledger.plan.epsilon(4)
    assert training.ledger.reasons == ("the loop was left before its planned steps",)


# ---- Continuing --------------------------------------------------------------------------------


def after_two_steps() -> tuple[PrivateTraining, dict[str, Any], dict[str, Any]]:
    """A run with what was saved of it and of its model after two steps."""
    training = make_training(update_proj_gap=1)
    for batch in training.batches():
        training.step(batch)
        if training.ledger.num_releases == 2:
            saved = json.loads(json.dumps(training.state_dict()))
            weights = {k: v.clone() for k, v in training.model.state_dict().items()}
    return training, saved, weights


def test_a_continued_run_goes_on_counting() -> None:
    training, saved, weights = after_two_steps()
    model = Net()
    model.load_state_dict(weights)
    continued = make_training(model, update_proj_gap=1)
    continued.load_state_dict(saved)
    assert continued.epsilon == continued.ledger.plan.epsilon(2) > 0
    assert {p.refresh_index for p in continued.projections.values() if p.side} == {1}
    taken = [continued.step(batch) for batch in continued.batches()]
    assert len(taken) == 2
    assert continued.epsilon == training.epsilon == training.ledger.plan.epsilon()


def test_reasons_and_earlier_runs_are_continued() -> None:
    earlier = RunLedger(make_plan(), earlier_runs=[(1.5, Poisson(sampling_prob=0.1), 7)])
    training = make_training(ledger=earlier)
    for batch in training.batches():
        training.step(batch)
        training.ledger.results_may_decide("a validation score")
        saved = training.state_dict()
    continued = make_training()
    continued.load_state_dict(saved)
    assert continued.ledger.reasons == ("a validation score",)
    assert continued.ledger.runs == training.ledger.runs
    assert len(continued.ledger.runs) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": make_plan(noise_multiplier=1.2)}, "`noise_multiplier` was 1.1, is now 1.2"),
        ({"update_proj_gap": 3}, "`update_proj_gap` was 1, is now 3"),
        ({"rank": 1}, "`rank` was 2, is now 1"),
        ({"seed": 3}, "`seed` was 42, is now 3"),
        ({"head": frozenset({"first.weight"})}, "`shapes` was"),
    ],
)
def test_a_continued_run_keeps_plan_and_projections(changes: Any, message: str) -> None:
    _, saved, _ = after_two_steps()
    other = make_training(**{"update_proj_gap": 1, **changes})
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    assert other.ledger.num_releases == 0


def test_a_state_of_something_else_is_refused() -> None:
    _, saved, _ = after_two_steps()
    other = make_training(update_proj_gap=1)
    with pytest.raises(ValueError, match=r"without \['plan', 'projection'"):
        other.load_state_dict({"num_releases": 2})
    del saved["projection"]["estimator"]  # as an earlier version wrote it
    with pytest.raises(ValueError, match="`estimator` was not saved, is now backward"):
        other.load_state_dict(saved)


def test_steps_that_were_taken_are_not_repeated() -> None:
    training, saved, _ = after_two_steps()
    with pytest.raises(ValueError, match="release some twice"):
        training.load_state_dict(saved)


def test_a_state_holds_public_facts_alone() -> None:
    _, saved, _ = after_two_steps()
    assert set(saved) == {"num_releases", "reasons", "runs", "plan", "projection"}
    assert set(saved["projection"]) == {
        *("rank", "projection_scale", "update_proj_gap", "refresh_moments", "seed", "shapes"),
        *("estimator", "num_directions", "perturbation_scale"),
    }


# ---- Randomness and data -----------------------------------------------------------------------


def states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_the_global_generators_come_back() -> None:
    model = Net()
    torch.manual_seed(3)
    before = states()
    training = make_training(model)
    assert states() == before
    for batch in training.batches():
        assert states() == before
        training.step(batch)
        assert states() == before
    assert states() == before


def test_a_public_seed_decides_neither_sample_nor_noise() -> None:
    def run(source: SecretSource) -> list[Tensor]:
        torch.manual_seed(3)
        training = make_training(source=source)
        for batch in training.batches():
            training.step(batch)
        return [p.detach() for p in training.model.parameters()]

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert not same(run(SecretSource()), run(SecretSource()))
    assert same(run(SecretSource(unsafe_seed=1)), run(SecretSource(unsafe_seed=1)))
    assert make_training().is_secret
    assert not make_training(source=SecretSource(unsafe_seed=1)).is_secret


def drawn(source: SecretSource | None) -> list[list[float]]:
    """What steps draw after a public seed was set."""
    torch.manual_seed(3)
    training = make_training(source=source, seed=3)
    return [
        [x for part in batch for x in part.inputs["x"][:, 0].tolist()]
        for batch in training.batches()
    ]


def noise(source: SecretSource | None) -> list[Tensor]:
    """What a step releases about nobody after a public seed was set."""
    torch.manual_seed(3)
    training = make_training(source=source, seed=3)
    training.take_gradient([])
    return training.gradients()


def test_a_public_seed_alone_does_not_decide_who_is_drawn() -> None:
    assert drawn(None) != drawn(None)  # 120 coins
    assert drawn(SecretSource(unsafe_seed=1)) == drawn(SecretSource(unsafe_seed=1))


def test_a_public_seed_alone_does_not_decide_the_noise() -> None:
    assert not any(map(torch.equal, noise(None), noise(None)))
    assert all(map(torch.equal, *(noise(SecretSource(unsafe_seed=1)) for _ in range(2))))


def test_each_example_is_collated_alone() -> None:
    sizes: list[int] = []

    def noting(batch: list[Any]) -> dict[str, Tensor]:
        sizes.append(len(batch))
        return stacked(batch)

    plan = make_plan(expected_batch_size=NUM_EXAMPLES)  # everybody is drawn
    (first, *_) = make_training(plan=plan, collate=noting).batches()
    assert set(sizes) == {1}
    assert [part.num_samples for part in first] == [4] * 7 + [2]


# ---- Refusals ----------------------------------------------------------------------------------


def test_other_generators_are_refused() -> None:
    draws = np.random.default_rng(0)

    def masking(batch: list[Any]) -> dict[str, Tensor]:
        inputs = stacked(batch)
        inputs["x"] *= draws.random() < 0.5
        return inputs

    with pytest.raises(ValueError, match=r"got `data_collator\.draws`, a Generator of its own"):
        make_training(collate=masking)


def test_another_number_of_examples_is_refused() -> None:
    training = make_training(plan=make_plan(num_examples=31))
    with pytest.raises(ValueError, match="Expected the 31 examples that the plan is for, got 30"):
        list(training.batches())


def test_optimizers_of_other_tensors_are_refused() -> None:
    model = Net()
    part = torch.optim.SGD(model.first.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"lacks 2 of 4 trainable tensors, as `out\.weight`"):
        make_training(model, optimizer=part)
    with pytest.raises(ValueError, match="parameters that are not the model's; build it on"):
        make_training(model, optimizer=torch.optim.SGD(Net().parameters(), lr=0.1))


def test_a_group_without_a_share_is_refused() -> None:
    groups = {"first.weight": "first", "first.bias": BODY, "out.weight": BODY, "out.bias": BODY}
    with pytest.raises(ValueError, match=r"have, \['body'\], got `first` and 0 more"):
        make_training(clip_groups=groups)


def test_the_share_of_a_released_loss_is_no_group_of_tensors() -> None:
    groups = dict.fromkeys(("first.weight", "first.bias", "out.weight"), BODY) | {"out.bias": LOSS}
    shares = {BODY: 0.8, LOSS: 0.6}
    make_training(clip_groups=groups, plan=make_plan(clip_shares=shares))
    released = make_plan(clip_shares=shares, private_loss_bound=2.0)
    with pytest.raises(ValueError, match="got `loss` and 0 more"):
        make_training(clip_groups=groups, plan=released)


def test_a_wrapped_model_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="got it inside `DataParallel`"):
        make_training(nn.DataParallel(model), optimizer=optimizer)


def test_a_model_that_mixes_examples_is_refused() -> None:
    class Mixing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    with pytest.raises(RefusedModelError, match="examples beside it"):
        make_training(Mixing(), capture="batched")
    assert make_training(Mixing()).capture == "single"
    assert make_training().capture == "batched"


def test_an_example_taken_alone_has_its_own_draws() -> None:
    drawn: dict[int, tuple[float, ...]] = {}

    def noting(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        key = int(inputs["x"].view(torch.int32).sum())  # which example it is
        drawn[key] = (float(torch.rand(())), random.random(), float(np.random.rand()))
        return losses(model, inputs)

    def draws(indices: list[int]) -> dict[int, tuple[float, ...]]:
        training = make_training(capture="single", per_sample_losses=noting)
        source = SecretSource(unsafe_seed=3)
        batch = LogicalBatches(points(), stacked, 4, source=source).one_by_one()[indices]
        drawn.clear()
        training.step(batch)
        return dict(drawn)

    few, more = draws([2, 5]), draws([0, 2, 4, 5, 7])
    assert len(few) == 2 and len(set(more.values())) == len(more) == 5
    assert few.items() <= more.items()


def test_losses_that_are_not_the_models_own_are_refused() -> None:
    class Unsettled:
        labels_are_tokens = False

        def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
            return losses(model, inputs)

        def settle(self, model: nn.Module, inputs: Mapping[str, Any]) -> str:
            return f"a loss of {len(inputs['y'])} example differs"

    with pytest.raises(RefusedModelError, match="`Net`: a loss of 1 example differs"):
        make_training(per_sample_losses=Unsettled())


def test_the_rehearsal_sees_synthetic_examples_alone() -> None:
    seen: list[Tensor] = []

    def noting(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        seen.append(inputs["x"])
        return losses(model, inputs)

    made: list[Mapping[str, Any]] = []

    def synthetic(structure: Mapping[str, Any]) -> SyntheticExamples:
        made.append(structure)
        return SyntheticExamples(Net(), structure)

    make_training(per_sample_losses=noting, synthetic=synthetic)
    private = {tuple(x.tolist()) for x, _ in points()}
    assert len(made) == 1 and seen
    assert not private & {tuple(row) for x in seen for row in x.tolist()}


# ---- Groups ------------------------------------------------------------------------------------


def test_the_head_has_the_group_that_the_plan_gives_it() -> None:
    plan = make_plan(
        noise_multiplier=0.0, expected_batch_size=NUM_EXAMPLES, clip_shares={HEAD: 0.6, BODY: 0.8}
    )
    training = make_training(plan=plan, head=frozenset({"out.weight", "out.bias"}), rank=0)
    batch = next(iter(training.batches()))
    training.take_gradient(batch)
    norms = {
        part: torch.cat(
            [t.stand_in.grad.flatten() for n, t in tensors if n.startswith(part)]
        ).norm()
        for tensors in [training.subspace.tensors.items()]
        for part in ("out", "first")
    }
    assert 0 < norms["out"] <= 0.6 * plan.l2_clip_norm
    assert 0 < norms["first"] <= 0.8 * plan.l2_clip_norm


# ---- Without transformers ----------------------------------------------------------------------

PROGRAM = """
import sys, torch
from torch import nn
from hf_dpgrape import PrivacyPlan, PrivateTraining

def losses(model, inputs):
    return nn.functional.cross_entropy(model(inputs["x"]), inputs["y"], reduction="none")

def collate(batch):
    return {"x": torch.stack([x for x, _ in batch]), "y": torch.tensor([y for _, y in batch])}

plan = PrivacyPlan(num_examples=20, expected_batch_size=5, num_steps=3, noise_multiplier=1.0,
                   l2_clip_norm=1.0, target_delta=1e-3)
model = nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 3))
training = PrivateTraining(
    model, torch.optim.SGD(model.parameters(), lr=0.1), plan, losses,
    examples=[(torch.randn(7), i % 3) for i in range(20)], collate=collate, rank=2,
)
for batch in training.batches():
    training.step(batch)
assert training.epsilon == plan.epsilon()
print(sorted({"transformers", "accelerate", "datasets", "peft"} & set(sys.modules)))
"""


def test_a_module_of_ones_own_needs_no_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
