"""Logical batches for the private step: drawn by the plan, split into physical ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Sampler, default_convert

from hf_dpgrape.mechanism.collation import AloneCollator
from hf_dpgrape.mechanism.own_generators import refuse_own_generators
from hf_dpgrape.mechanism.private_step import LogicalBatch, PhysicalBatch, UnitBatch
from hf_dpgrape.mechanism.units import Units, refuse_other_units
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.randomness import (
    ExampleSeeds,
    SecretSource,
    Seeds,
    reseed_cpu_,
    reseed_global_,
)
from hf_dpgrape.privacy.sampling.sampler import LogicalBatchSampler

#: Values that are no tensors and pass to the model as they are.
_PRIMITIVES = (bool, int, float, str, bytes, type(None))


class TrainingData(TypedDict):
    """The arguments of `LogicalBatches`, by name."""

    examples: Any
    collate: Callable[[list[Any]], Any]
    physical_batch_size: int
    source: SecretSource
    length_grid: int
    longest: int | None
    units: Units | None


class LogicalBatches(Dataset[LogicalBatch]):
    """Maps the indices of a logical batch, none included, to its physical batches.

    With `units` the indices are those of units. Each becomes a `UnitBatch` of physical batches that
    hold rows of this unit alone.

    Every example is fetched alone and collated alone, under secret randomness of its own. A
    physical batch joins examples whose tensors have equal names, shapes and dtypes.

    Guarantees:
        An example's tensors are a function of that example and of secret draws of its own (see
        `ExampleSeeds`), whoever is drawn beside it, as long as data set and collator keep nothing
        from one example for the next. So is what the model draws for it, taken one by one.
        Which examples share a physical batch, and in which order, is a function of `indices`, the
        shapes of their tensors and the values that are no tensors.
        A `UnitBatch` is a function of the rows of its unit and of secret draws of its own: which
        rows it holds, what collator and model draw for them, and how they are split.

    Args:
        examples: the training set.
        collate: makes model inputs of a list of examples; it is always given one.
        physical_batch_size: largest number of examples per physical batch.
        source: seeds the global generators anew for every example.
        length_grid: finest step of the grid to which lengths are rounded; 0 for exact lengths.
        longest: most tokens that the model takes; None if it does not limit them.
        units: which rows are drawn together; None if every row is drawn by itself.

    Raises:
        ValueError: examples or collator hold generators of their own.
    """

    def __init__(
        self,
        examples: Any,
        collate: Callable[[list[Any]], Any],
        physical_batch_size: int,
        *,
        source: SecretSource,
        length_grid: int = 0,
        longest: int | None = None,
        units: Units | None = None,
    ) -> None:
        refuse_own_generators(collate, examples)
        self._units = units
        self.examples = examples
        self.collate = collate
        self._alone = AloneCollator(collate, length_grid=length_grid, longest=longest)
        self._size = physical_batch_size
        self._is_one_by_one = False
        self._source = source

    def one_by_one(self) -> LogicalBatches:
        """From now on every example is a physical batch by itself, of whatever form."""
        self._is_one_by_one = True
        return self

    def example(self, index: int) -> dict[str, Any]:
        """One example's inputs, of whatever form."""
        reseed_global_(self._source)
        return self._inputs(index, self._source)

    def __len__(self) -> int:
        """Number of examples, or of units, as the Trainer's bookkeeping expects."""
        return len(self.examples if self._units is None else self._units)

    def __getitem__(self, indices: Sequence[int]) -> LogicalBatch:
        """The physical batches of the examples at these indices, or the units there."""
        reseed_global_(self._source)
        key = self._source.key()
        if self._units is not None:
            return [self._unit(self._units, index, key) for index in indices]
        seeds = [ExampleSeeds(key, index) for index in indices]
        inputs = [self._inputs(*both) for both in zip(indices, seeds, strict=True)]
        if self._is_one_by_one:
            return [PhysicalBatch(1, *both) for both in zip(inputs, seeds, strict=True)]
        return [PhysicalBatch(len(part), _joined(part)) for part in self._split(inputs)]

    def _unit(self, units: Units, index: int, key: bytes) -> UnitBatch:
        """The rows of one unit that a step takes."""
        drawn = units.draw(index, ExampleSeeds(key, index))
        seeds = [ExampleSeeds(key, index, place) for place, _ in drawn]
        inputs = [self._inputs(row, own) for (_, row), own in zip(drawn, seeds, strict=True)]
        if self._is_one_by_one:
            both = zip(inputs, seeds, strict=True)
            return UnitBatch(len(drawn), [PhysicalBatch(1, *row) for row in both])
        # Each part has seeds of the unit's own for what the model draws, never the step's.
        parts = zip(self._split(inputs), seeds, strict=False)
        return UnitBatch(
            len(drawn), [PhysicalBatch(len(part), _joined(part), own) for part, own in parts]
        )

    def _split(self, inputs: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """Examples of equal form, as many together as a physical batch holds."""
        groups: dict[Hashable, list[dict[str, Any]]] = {}
        for one in inputs:
            groups.setdefault(_form(one), []).append(one)
        for group in groups.values():
            yield from (group[i : i + self._size] for i in range(0, len(group), self._size))

    def __getitems__(self, indices: Sequence[int]) -> LogicalBatch:
        """As `[indices]`: what a `DataLoader` asks for with a batch of indices, one or none."""
        return self[indices]

    def loader(
        self, plan: PrivacyPlan, num_batches: int, **options: Any
    ) -> DataLoader[LogicalBatch]:
        """Draws logical batches as planned, this process's share of them.

        Args:
            plan: tells how examples, or units, are drawn.
            num_batches: logical batches of one iteration.
            options: for workers and pinned memory, as those of `DataLoader`.

        Raises:
            ValueError: the plan is for another number of examples, or for other units.
        """
        refuse_other_units(self._units, plan)
        if len(self) != plan.num_examples:
            raise ValueError(
                f"Expected the {plan.num_examples} {plan.drawn} that the plan is for, got "
                f"{len(self)}; plan with `num_examples={len(self)}`."
            )
        # As a batch sampler, so that who skips batches, as a resumed Trainer does, skips draws.
        batches = _sampler(plan, num_batches, self._source)
        return DataLoader(self, batch_sampler=batches, collate_fn=default_convert, **options)

    def _inputs(self, index: int, seeds: Seeds) -> dict[str, Any]:
        """One example's inputs."""
        reseed_cpu_(seeds)
        row = self.examples[index]
        inputs = self._alone(row if self._units is None else self._units.without_column(row))
        if not isinstance(inputs, Mapping):
            raise ValueError(
                "Expected `data_collator` to return a dict of the model's inputs by name, got "
                f"{type(inputs).__name__}."
            )
        # Copied at once, in case the collator returns memory that it fills again.
        return {k: pytree.tree_map_only(Tensor, torch.clone, v) for k, v in inputs.items()}


def with_their_draws(batch: LogicalBatch) -> Iterator[PhysicalBatch | UnitBatch]:
    """Seeds the global generators anew before each physical batch, also of a unit."""
    for drawn in batch:
        if isinstance(drawn, UnitBatch):  # lazily: right before the model runs on each part
            yield drawn._replace(parts=_each_with_its_draws(drawn.parts))
        else:
            yield from _each_with_its_draws([drawn])


def _each_with_its_draws(batch: Iterable[PhysicalBatch]) -> Iterator[PhysicalBatch]:
    """Seeds the global generators anew before each physical batch that has seeds of its own."""
    for part in batch:
        if part.seeds is not None:
            reseed_global_(part.seeds)
        yield part


def why_alone(inputs: Mapping[str, Any]) -> str:
    """Why an example of this form cannot share a physical batch; empty if it can."""
    try:
        _form(inputs)
    except ValueError as error:
        return str(error)
    return ""


def _sampler(plan: PrivacyPlan, num_batches: int, source: SecretSource) -> Sampler[list[int]]:
    """Draws this process's share of the examples, by coins that are its own."""
    parallel = distributed.is_available() and distributed.is_initialized()
    return LogicalBatchSampler(
        plan.sampling,
        num_examples=plan.num_examples,
        num_batches=num_batches,
        generator=source.generator(),
        rank=distributed.get_rank() if parallel else 0,
        num_processes=distributed.get_world_size() if parallel else 1,
    )


def _form(inputs: Mapping[str, Any]) -> Hashable:
    """What examples of one physical batch have in common: all but the contents of tensors."""
    return tuple((name, _form_of(name, value)) for name, value in inputs.items())


def _form_of(name: str, value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if value.ndim == 0 or value.shape[0] != 1:
            raise ValueError(
                "Expected `data_collator` to return tensors with a first dimension of 1 for a list "
                f"of one example, but `{name}`, with {value.ndim} dimensions, has none or another "
                "size; return one row per example."
            )
        return value.shape[1:], value.dtype
    if isinstance(value, _PRIMITIVES):
        return type(value), repr(value)  # 1, True and 1.0 are equal, as are 0.0 and -0.0
    raise ValueError(
        f"Expected tensors or single values from `data_collator`, got `{name}` as "
        f"{type(value).__name__}, which examples cannot share; return a tensor or leave it out."
    )


def _joined(part: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The inputs of several examples of one form."""
    return {
        name: torch.cat([inputs[name] for inputs in part]) if isinstance(value, Tensor) else value
        for name, value in part[0].items()
    }
