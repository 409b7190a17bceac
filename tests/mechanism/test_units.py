"""A unit's rows are clipped as one, whoever is drawn beside it.

Covers: mechanism/unit_mean.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from conftest_trainer import collate_lm
from families import CAUSAL, PAD, VOCAB, make_model
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpgrape import PerSampleLoss, PrivacyPlan, PrivateTraining
from hf_dpgrape.mechanism.logical_batches import LogicalBatches
from hf_dpgrape.mechanism.private_step import UnitBatch
from hf_dpgrape.mechanism.units import Units
from hf_dpgrape.privacy.plan import BODY, LOSS
from hf_dpgrape.privacy.randomness import ExampleSeeds, SecretSource

#: Whose each row is; unit 2 has more rows than a step takes, unit 3 is one row.
OWNERS = ["a", "b", "c", "a", "c", "c", "d", "b", "c", "c", "a", "c"]
LENGTHS = [5, 7, 4, 5, 4, 6, 9, 7, 4, 8, 6, 4]
CLIP, MAX_ROWS = 0.3, 4


def rows(owners: list[str] = OWNERS) -> list[dict[str, Any]]:
    """Texts with the column that says whose they are."""
    found = []
    for i, owner in enumerate(owners):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(3, VOCAB, (LENGTHS[i % len(LENGTHS)],), generator=g).tolist()
        found.append({"patient": owner, "input_ids": ids})
    return found


def collated(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As a language model's rows; nobody may see the column."""
    assert all(row.keys() == {"input_ids"} for row in batch)
    return collate_lm(batch)


def masked(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As `collated`, with tokens replaced at random, as an augmentation does."""
    inputs = collated(batch)
    hit = torch.rand(inputs["input_ids"].shape) < 0.3
    return {**inputs, "input_ids": inputs["input_ids"].masked_fill(hit, 3)}


def text_model(dropout: float = 0.0) -> nn.Module:
    """A language model of float64 whose embedding and head are one tensor."""
    model = make_model("gpt2", CAUSAL)
    assert model.lm_head.weight is model.transformer.wte.weight
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model


def text_loss(model: nn.Module, row: Mapping[str, Tensor]) -> Tensor:
    """The loss of one text, which the model's own would round to float32."""
    logits = model(row["input_ids"], attention_mask=row["attention_mask"]).logits[0, :-1]
    return F.cross_entropy(logits, row["labels"][0, 1:])


def units(data: list[dict[str, Any]], max_rows: int = MAX_ROWS) -> Units:
    return Units.of((row["patient"] for row in data), column="patient", max_rows=max_rows)


def logical(
    data: list[dict[str, Any]], collate: Any = collated, max_rows: int = MAX_ROWS, size: int = 3
) -> LogicalBatches:
    """Logical batches of the units of some rows."""
    source = SecretSource(unsafe_seed=3)
    return LogicalBatches(data, collate, size, source=source, units=units(data, max_rows))


def drawn(batches: LogicalBatches, indices: list[int], seed: int = 3) -> list[UnitBatch]:
    """A logical batch of these units, by the secrets that belong to the seed."""
    batches._source = SecretSource(unsafe_seed=seed)
    found = batches[indices]
    assert all(isinstance(unit, UnitBatch) for unit in found)
    return found  # type: ignore[return-value]


class Bench:
    """Private training of a text model by units, of which tests can draw any."""

    def __init__(
        self,
        data: list[dict[str, Any]] | None = None,
        *,
        collate: Any = collated,
        dropout: float = 0.0,
        max_rows: int = MAX_ROWS,
        size: int = 3,
        plan: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.data = rows() if data is None else data
        self.units = units(self.data, max_rows)
        self.model = text_model(dropout)
        self.plan = PrivacyPlan(
            **{
                "num_examples": len(self.units),
                "expected_batch_size": 2,
                "num_steps": 1000,
                "noise_multiplier": 0.0,
                "l2_clip_norm": CLIP,
                "target_delta": 1e-3,
                "privacy_unit_column": "patient",
                "max_rows_per_unit": max_rows,
                **(plan or {}),
            }
        )
        self.training = PrivateTraining(
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            self.plan,
            PerSampleLoss(self.model),
            examples=self.data,
            collate=collate,
            physical_batch_size=size,
            units=self.units,
            **{"rank": 5, "source": SecretSource(unsafe_seed=1), **options},
        )
        self.batches = logical(self.data, collate, max_rows, size)
        if self.training.capture == "single":
            self.batches.one_by_one()

    def drawn(self, indices: list[int], seed: int = 3) -> list[UnitBatch]:
        """A logical batch of these units, by the secrets that belong to the seed."""
        return drawn(self.batches, indices, seed)

    def clipped_sum(self, indices: list[int]) -> dict[str, Tensor]:
        """What a step without noise releases of these units."""
        loss = self.training.take_gradient(self.drawn(indices))
        size = self.plan.expected_batch_size
        found = {
            name: stand_in.grad * size
            for name, stand_in in self.training.subspace.stand_ins.items()
            if stand_in.grad is not None
        }
        if loss.private_mean is not None:
            found[LOSS] = loss.private_mean * size
        return found

    def by_autograd(self, unit: int) -> dict[str, Tensor]:
        """Gradient of the mean loss of the rows that are drawn, in one plain backward pass."""
        self.model.train().zero_grad()
        chosen = [part.inputs for part in self.drawn([unit])[0].parts]
        alone = [
            {name: value[i : i + 1] for name, value in inputs.items()}
            for inputs in chosen
            for i in range(len(inputs["input_ids"]))
        ]
        torch.stack([text_loss(self.model, row) for row in alone]).mean().backward()
        found = {
            name: p.on_gradient(dict(self.model.named_parameters())[name].grad)
            for name, p in self.training.projections.items()
        }
        self.model.zero_grad()
        return found


def norm(vector: Mapping[str, Tensor]) -> float:
    return float(torch.stack([g.double().norm() for g in vector.values()]).norm())


def minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    assert a.keys() == b.keys()
    return {name: a[name] - b[name] for name in a}


# ---- The clipped sum ---------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["batched", "single"])
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("clip", [CLIP, 1e6])
def test_a_units_part_is_its_own_mean_gradient_clipped(
    capture: str, rank: int, clip: float
) -> None:
    bench = Bench(capture=capture, rank=rank, plan={"l2_clip_norm": clip})
    for unit in range(len(bench.units)):
        got, mean = bench.clipped_sum([unit]), bench.by_autograd(unit)
        factor = min(1.0, clip / norm(mean))
        expected = {name: factor * g.view_as(got[name]) for name, g in mean.items()}
        # A clipped vector is scaled to a millionth below the bound.
        assert norm(minus(got, expected)) <= (1e-9 if clip > 1 else 2e-6) * norm(expected)
        assert norm(got) <= clip and (clip > 1 or norm(got) > 0.99 * clip)


@pytest.mark.parametrize("capture", ["batched", "single"])
def test_a_unit_more_or_less_moves_the_sum_by_its_own_part_alone(capture: str) -> None:
    """With dropout, an augmentation, and more rows than a step takes."""
    new = rows([*OWNERS, "new", "new", "new", "new", "new", "new"])
    bench = Bench(new, capture=capture, dropout=0.2, collate=masked)
    old = Bench(rows(), capture=capture, dropout=0.2, collate=masked)
    added = len(old.units)
    for beside in ([], [2], [0, 1, 2, 3], [3, 2, 0]):
        more = bench.clipped_sum([*beside, added])
        moved = minus(more, old.clipped_sum(beside))
        assert norm(moved) <= CLIP * (1 + 1e-9)
        assert norm(minus(moved, bench.clipped_sum([added]))) <= 1e-9 * CLIP
        assert norm(moved) > 0.5 * CLIP  # the bound is not kept by losing signal


def test_rows_of_one_unit_add_up_before_they_are_clipped() -> None:
    """Were rows clipped one by one, a unit's part would grow with their number."""
    same = [{**row, "input_ids": rows()[0]["input_ids"]} for row in rows(["a"] + ["b"] * 4)]
    bench = Bench(same)
    assert norm(minus(bench.clipped_sum([0]), bench.clipped_sum([1]))) <= 1e-9


@pytest.mark.parametrize("grouping", [False, True])
def test_how_rows_are_split_changes_nothing(grouping: bool) -> None:
    """With a clip group for each third of the tensors, gradients are freed during backward."""
    names = [name for name, _ in text_model().named_parameters()]
    groups = {name: str(i % 3) if grouping else BODY for i, name in enumerate(names)}
    shares = {"0": 0.48, "1": 0.64, "2": 0.6} if grouping else {BODY: 1.0}
    bench = Bench(size=100, capture="batched", clip_groups=groups, plan={"clip_shares": shares})
    whole = bench.clipped_sum([0, 1, 2, 3])
    for size in (1, 2, 3):
        bench.batches = logical(bench.data, size=size)
        most = max(part.num_samples for unit in bench.drawn([0, 1, 2, 3]) for part in unit.parts)
        assert most == min(size, 2) or size == 3
        assert norm(minus(whole, bench.clipped_sum([0, 1, 2, 3]))) <= 1e-9 * norm(whole)


@pytest.mark.parametrize("estimator", ["backward", "galore", "zeroth_order"])
def test_a_units_vector_is_the_mean_of_its_rows_for_every_estimator(estimator: str) -> None:
    data = rows(["a", "b", "b", "c", "b"])
    plan = {"l2_clip_norm": 1e6, "expected_batch_size": 2}
    together = Bench(data, estimator=estimator, plan=plan)
    by_row = [{**row, "patient": str(i)} for i, row in enumerate(data)]
    alone = Bench(by_row, estimator=estimator, plan=plan)
    unit = together.clipped_sum([1])
    three = alone.clipped_sum([1, 2, 4])
    assert norm(minus({n: 3 * g for n, g in unit.items()}, three)) <= 1e-6 * norm(three)


def test_a_row_that_is_not_finite_takes_its_unit_out() -> None:
    class Broken(PerSampleLoss):
        def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
            losses = super().__call__(model, inputs)
            return losses * torch.where((inputs["input_ids"] == 4).any(1), torch.inf, 1.0)

    data = rows(["a", "a", "b", "b"])
    for row in data:
        row["input_ids"] = [5 if token == 4 else token for token in row["input_ids"]]
    data[1]["input_ids"][2] = 4
    bench = Bench(data, plan={"num_examples": 2})
    bench.training._losses = Broken(bench.model)
    assert norm(bench.clipped_sum([0])) == 0.0
    assert norm(minus(bench.clipped_sum([0, 1]), bench.clipped_sum([1]))) == 0.0
    assert norm(bench.clipped_sum([1])) > 0.9 * CLIP


def test_the_released_loss_is_the_units_mean_within_its_bound() -> None:
    shares = {"clip_shares": {BODY: 0.8, LOSS: 0.6}, "private_loss_bound": 2.0}
    bench = Bench(plan=shares)
    assert float(bench.clipped_sum([0])[LOSS]) == pytest.approx(2.0)  # of log(VOCAB), 3 or so
    bench = Bench(plan={**shares, "private_loss_bound": 50.0})
    inputs = [part.inputs for part in bench.drawn([0])[0].parts]
    own = torch.cat([PerSampleLoss(bench.model)(bench.model, part) for part in inputs])
    assert float(bench.clipped_sum([0])[LOSS]) == pytest.approx(
        float(own.detach().mean()), rel=1e-5
    )


# ---- Which rows a step takes -------------------------------------------------------------------


def taken(batches: LogicalBatches, indices: list[int], seed: int) -> list[list[list[int]]]:
    """The texts of the rows that each unit has in a step."""
    return [
        [
            [token for token in text if token != PAD]
            for part in unit.parts
            for text in part.inputs["input_ids"].tolist()
        ]
        for unit in drawn(batches, indices, seed)
    ]


def test_at_most_so_many_rows_are_taken_anew_at_every_step() -> None:
    batches, seen = logical(rows()), set()
    own = [row["input_ids"] for row in rows() if row["patient"] == "c"]
    for seed in range(40):
        for unit, texts in enumerate(taken(batches, [0, 1, 2, 3], seed)):
            assert len(texts) == min(MAX_ROWS, len(units(rows()).rows[unit]))
            if unit == 2:
                assert all(text in own for text in texts)
                seen.add(tuple(sorted(map(tuple, texts))))
    assert len(seen) > 8  # of 15 choices


def test_what_a_unit_holds_does_not_depend_on_the_others() -> None:
    batches = logical(rows(), masked)
    for seed in range(5):
        (alone,) = taken(batches, [2], seed)
        assert taken(batches, [3, 0, 2, 1], seed)[2] == alone
        assert taken(batches, [2, 3], seed)[0] == alone
    assert taken(batches, [2], 0) != taken(batches, [2], 1)


def test_all_choices_of_rows_are_alike() -> None:
    """A chi-squared test, which sees a row that is taken a tenth less often."""
    given = Units.of([0] * 6, column="x", max_rows=2)
    num, counts = 6000, Counter[tuple[int, ...]]()
    for step in range(num):
        key = step.to_bytes(32, "big")
        counts[tuple(row for _, row in given.draw(0, ExampleSeeds(key, 0)))] += 1
    pairs = [(i, j) for i in range(6) for j in range(i + 1, 6)]
    observed = [counts[pair] for pair in pairs]
    assert sum(observed) == num
    assert stats.chisquare(observed).pvalue > 1e-3
    less = np.array(
        [n * (0.9 if 0 in pair else 1.05) for n, pair in zip(observed, pairs, strict=True)]
    )
    assert stats.chisquare(less, np.full(15, less.sum() / 15)).pvalue < 1e-3


def test_rows_have_draws_of_their_own() -> None:
    same = [{**row, "input_ids": [5] * 40} for row in rows(["a", "b", "a", "b"])]
    batches = logical(same, masked)
    texts = [tuple(text) for unit in taken(batches, [0, 1], 3) for text in unit]
    assert len(set(texts)) == 4


def test_places_of_rows_have_other_seeds_than_units() -> None:
    key = bytes(32)
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    assert len({ExampleSeeds(key, *path).seed() for path in paths}) == len(paths)


# ---- Units, and what they are refused for ------------------------------------------------------


def test_units_are_numbered_by_their_first_rows() -> None:
    values = [torch.tensor(7), np.int64(3), 7, 3, np.float64(3.0), "7"]
    found = Units.of(values, column="x", max_rows=2)
    assert found.rows == ((0, 2), (1, 3, 4), (5,))
    assert len(found) == 3 and len(Units.of([], column="x", max_rows=1)) == 0


@pytest.mark.parametrize("value", [None, float("nan"), np.float32("nan"), torch.tensor(torch.nan)])
def test_a_row_without_an_owner_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="value of `privacy_unit_column=x` in every row, got row"):
        Units.of(["somebody", value], column="x", max_rows=2)


@pytest.mark.parametrize("value", [["secret"], {"secret": 1}, torch.tensor([1, 2])])
def test_what_is_no_single_value_is_refused_without_being_shown(value: Any) -> None:
    with pytest.raises(ValueError, match="one number or text per row") as caught:
        Units.of([value], column="x", max_rows=2)
    assert "secret" not in str(caught.value)


def test_rows_without_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows with fields by name, .* got rows of type list"):
        units(rows()).without_column([1, 2])


@pytest.mark.parametrize(
    "changes", [{"privacy_unit_column": "owner"}, {"max_rows_per_unit": MAX_ROWS + 1}]
)
def test_a_plan_for_other_units_is_refused(changes: dict[str, Any]) -> None:
    message = "Expected `units` of the plan's `privacy_unit_column` and `max_rows_per_unit`"
    with pytest.raises(ValueError, match=message):
        Bench(plan=changes)
    bench = Bench()
    plain = {"privacy_unit_column": None, "max_rows_per_unit": None}
    other = PrivacyPlan(**{**bench.plan.to_dict(), **plain})
    with pytest.raises(ValueError, match=message):
        bench.batches.loader(other, 3)


def test_rows_in_the_place_of_units_are_refused() -> None:
    bench = Bench()
    parts = list(bench.drawn([0])[0].parts)
    with pytest.raises(
        ValueError, match=r"batch of units, as .* is 'patient', got a PhysicalBatch"
    ):
        bench.training.take_gradient(parts)
    plan = {"privacy_unit_column": None, "max_rows_per_unit": None}
    with pytest.raises(ValueError, match="got 'patient' and 4"):
        Bench(plan=plan)


def test_a_loop_of_ones_own_draws_units() -> None:
    bench = Bench(plan={"num_steps": 5})
    for batch in bench.training.batches():
        assert all(isinstance(unit, UnitBatch) for unit in batch)
        bench.training.step(batch)
    assert bench.training.ledger.num_releases == 5
    more = PrivacyPlan(**{**bench.plan.to_dict(), "num_examples": 5})
    with pytest.raises(ValueError, match="Expected the 5 units that the plan is for, got 4"):
        bench.batches.loader(more, 1)


def test_units_are_drawn_at_the_plans_rate() -> None:
    """Rows do not count: a unit of six is drawn as often as a unit of one."""
    batches, num = logical(rows()), 400
    plan = PrivacyPlan(
        num_examples=4,
        expected_batch_size=1,
        num_steps=num,
        noise_multiplier=1.0,
        l2_clip_norm=1.0,
        target_delta=1e-3,
        privacy_unit_column="patient",
        max_rows_per_unit=MAX_ROWS,
    )
    counts = Counter(index for batch in batches.loader(plan, num).batch_sampler for index in batch)
    for unit in range(4):
        assert stats.binomtest(counts[unit], num, plan.sampling_prob).pvalue > 1e-4
    assert set(counts) == {0, 1, 2, 3} and plan.sampling_prob == 0.25
