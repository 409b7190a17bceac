"""Private training as one object: data, capture, subspace, mechanism and ledger of one run.

It is what a Trainer drives, and what a loop of one's own drives. Everything that the guarantee
rests on is wired here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.recording import AUTO, BATCHED, CAPTURES, SINGLE, Records
from hf_dpgrape.mechanism.checks import Preflight, refuse_other_optimizer
from hf_dpgrape.mechanism.clip_groups import default_groups, refuse_unplanned_groups
from hf_dpgrape.mechanism.estimators.base import Made, Setup, SpaceArguments
from hf_dpgrape.mechanism.estimators.table import BACKWARD, make_estimator
from hf_dpgrape.mechanism.logical_batches import LogicalBatches, why_alone, with_their_draws
from hf_dpgrape.mechanism.placement import broadcast_, moved
from hf_dpgrape.mechanism.private_step import (
    LogicalBatch,
    PrivateStep,
    StepLoss,
)
from hf_dpgrape.mechanism.synthetic import SyntheticExamples
from hf_dpgrape.mechanism.tensors import (
    TargetModules,
    newly_initialized,
    refuse_other_tensors,
)
from hf_dpgrape.mechanism.units import Units, refuse_other_units
from hf_dpgrape.privacy.ledger import RunLedger, run_from_dict, run_to_dict
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.randomness import (
    SecretSource,
    global_randomness_restored,
    secret_global_randomness,
)
from hf_dpgrape.subspace.parameters import Moments
from hf_dpgrape.subspace.projection import Projection, Scale

_LEFT = "the loop was left before its planned steps"
#: One loss per sample of a batch.
PerSampleLosses = Callable[[nn.Module, Mapping[str, Any]], Tensor]

Projections = Mapping[str, Projection]

#: Makes synthetic examples of the structure of a collated one.
Synthetic = Callable[[Mapping[str, Any]], SyntheticExamples]


@runtime_checkable
class TaskLosses(Protocol):
    """Per-sample losses that know the model's task, as `PerSampleLoss` does."""

    @property
    def labels_are_tokens(self) -> bool:
        """Whether labels are ids of tokens."""

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """One loss per sample (B,)."""

    def settle(self, model: nn.Module, inputs: Mapping[str, Any]) -> str:
        """Compares them with the model's own loss of one synthetic example; why they differ."""


@runtime_checkable
class OffersOwnLoss(Protocol):
    """Per-sample losses that can be the model's own, `model(**example).loss`."""

    def take_own_(self) -> None:
        """From now on the loss is the model's own, of one example at a time."""


class PrivateTraining:
    """Trains a model privately for the planned number of steps.

    Before it reads anything private it rehearses the model on synthetic examples, and refuses one
    whose per-sample gradients could not be taken exactly. Each step draws a Poisson sample from
    secret randomness, and gives the optimizer the private gradient in the subspace; a hook lifts
    the optimizer's step onto the weights.

    Guarantees:
        After `step` or `take_gradient` was called any number of times, weights and optimizer are
        (`epsilon`, `plan.target_delta`)-DP in the examples, add-or-remove-one; under a plan with
        a `privacy_unit_column` in the units, each with all of its rows. More steps than
        planned are refused, those before a resumed part included. A loop over `batches()` that is
        left early counts with all planned steps, as a result may have decided on its end.

    Args:
        model: the model, on the device that it is trained on.
        optimizer: on the model's own trainable tensors, before its first step; it is made to step
            in the subspace. Its groups stay, so that any schedule may hold it.
        plan: the privacy plan.
        per_sample_losses: `(model, inputs)` to one loss per sample, of which loss i depends on
            sample i alone, such as a `PerSampleLoss`.
        examples: the private examples, with a length and indexed access.
        collate: makes model inputs of a list of examples; it is always given one.
        physical_batch_size: most examples that pass through the model at once, in batched capture.
        capture: "batched" takes gradients from whole physical batches, and refuses a model for
            which that is not exact; "single" from one example at a time; "auto" chooses the
            former where it is exact.
        length_grid: finest step of the grid to which lengths are rounded; 0 for exact lengths.
        longest: most tokens that the model takes; None if it does not limit them.
        units: which rows are drawn and clipped together, for a plan with a `privacy_unit_column`.
        estimator: what a step releases of an example, a name in `ESTIMATORS`: "backward" for its
            projected gradient, "zeroth_order" for differences of its loss along random
            directions, "galore" for its full gradient, projected after the noise.
        rank: of the projections; 0 for full space.
        head: canonical names of tensors that are not projected, and are the plan's HEAD group if
            it has one; None for those that a checkpoint did not have.
        clip_groups: clip group of every trainable tensor; None for head and body.
        update_proj_gap: steps between refreshes of the projections; 0 for never.
        refresh_moments: what becomes of the optimizer's moments at a refresh.
        projection_scale: standard deviation of the projections' entries.
        target_modules: which tensors are projected; None for all but the head.
        num_directions: random directions of a step of zeroth order.
        perturbation_scale: how far along each of them the loss is looked at.
        seed: public seed of projections, directions and rounding.
        ledger: of a run that is continued, or whose earlier runs count; None for a new one.
        source: secret randomness; None for the operating system's.
        synthetic: makes the examples of the rehearsal; None for `SyntheticExamples`.

    Attributes:
        capture: how gradients are taken, "batched" or "single".

    Raises:
        ValueError: model or optimizer cannot be trained privately as they are, or model, data and
            plan do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: PrivacyPlan,
        per_sample_losses: PerSampleLosses,
        *,
        examples: Any,
        collate: Callable[[list[Any]], Any],
        physical_batch_size: int = 8,
        capture: str = AUTO,
        length_grid: int = 0,
        longest: int | None = None,
        units: Units | None = None,
        estimator: str = BACKWARD,
        rank: int = 16,
        head: frozenset[str] | None = None,
        clip_groups: Mapping[str, str] | None = None,
        update_proj_gap: int = 0,
        refresh_moments: Moments = "keep",
        projection_scale: Scale = "1/sqrt(r)",
        target_modules: TargetModules = None,
        num_directions: int = 1,
        perturbation_scale: float = 1e-3,
        seed: int = 42,
        ledger: RunLedger | None = None,
        source: SecretSource | None = None,
        synthetic: Synthetic | None = None,
    ) -> None:
        if capture not in CAPTURES:
            raise ValueError(f"Expected `capture` to be one of {list(CAPTURES)}, got {capture!r}.")
        self.model = model
        self.optimizer = optimizer
        self.ledger = RunLedger(plan) if ledger is None else ledger
        self.ledger.set_plan(plan)
        refuse_other_units(units, plan)
        self._losses = per_sample_losses
        self._synthetic = self._default_synthetic if synthetic is None else synthetic
        self._source = SecretSource() if source is None else source
        self._batches = LogicalBatches(
            examples,
            collate,
            physical_batch_size,
            source=self._source,
            length_grid=length_grid,
            longest=longest,
            units=units,
        )
        refuse_other_optimizer(optimizer, model)
        head = newly_initialized(model) if head is None else head
        groups = default_groups(model, plan, head) if clip_groups is None else clip_groups
        refuse_unplanned_groups(groups, plan)
        self._space = SpaceArguments(
            estimator=estimator,
            rank=rank,
            projection_scale=projection_scale,
            update_proj_gap=update_proj_gap,
            refresh_moments=refresh_moments,
            seed=seed,
            num_directions=num_directions,
            perturbation_scale=perturbation_scale,
        )
        made = make_estimator(
            Setup(
                model=model,
                plan=plan,
                arguments=self._space,
                head=head,
                clip_groups=groups,
                target_modules=target_modules,
            )
        )
        self.projections, self.subspace = made.projections, made.space
        self.capture, self._private_step = self._wired(capture, made, head)
        broadcast_(model)

    # ---- A loop of one's own ---------------------------------------------------------------

    def batches(self, *, num_workers: int = 0) -> Iterator[LogicalBatch]:
        """The logical batches of the remaining planned steps, each drawn anew.

        Args:
            num_workers: processes that load examples.
        """
        plan, done = self.ledger.plan, self.ledger.num_releases
        loader = self._batches.loader(plan, plan.num_steps - done, num_workers=num_workers)
        try:
            with global_randomness_restored():
                batches = iter(loader)
            for _ in range(len(loader)):
                with global_randomness_restored():
                    batch = next(batches)
                yield batch
        finally:  # whoever leaves may have seen results
            self.ledger.end(_LEFT)

    def step(self, batch: LogicalBatch) -> StepLoss:
        """One private step on a logical batch, the optimizer's included.

        Raises:
            RuntimeError: the planned steps are used up, or the trainable tensors changed.
        """
        loss = self.take_gradient(batch)
        self.optimizer.step()
        return loss

    def take_gradient(self, batch: LogicalBatch) -> StepLoss:
        """The part of a step before the optimizer's: its gradients are private then.

        Raises:
            RuntimeError: the planned steps are used up, or the trainable tensors changed.
        """
        self.model.train()
        refuse_other_tensors(self.model, self.subspace.weights)
        self.subspace.refresh_(self.ledger.num_releases, self.optimizer)
        with secret_global_randomness(self._source):  # anew: somebody may have set a seed
            return self._private_step(with_their_draws(batch), self._losses_of)

    @property
    def epsilon(self) -> float:
        """Epsilon spent until now, at the plan's delta."""
        return self.ledger.epsilon()

    @property
    def is_secret(self) -> bool:
        """Whether noise and samples come from the operating system's randomness."""
        return self._source.is_secret

    def gradients(self) -> list[Tensor]:
        """The private gradients that the optimizer is about to step with."""
        grads = (stand_in.grad for stand_in in self.subspace.stand_ins.values())
        return [grad for grad in grads if grad is not None]

    # ---- Continuing a run ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a run is continued with, beside the states of model and optimizer; no secrets."""
        return {
            "num_releases": self.ledger.num_releases,
            "reasons": list(self.ledger.reasons),
            "runs": [run_to_dict(run) for run in self.ledger.runs],
            "plan": self.ledger.plan.to_dict(),
            "projection": self._facts(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues a run; load the optimizer's state after it.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: plan or projections differ, or steps that were taken would be repeated.
        """
        if missing := {"num_releases", "reasons", "runs", "plan", "projection"} - state.keys():
            raise ValueError(
                "Expected what `state_dict` of a `PrivateTraining` returned, got a state without "
                f"{sorted(missing)}; load the file that was saved beside the model's state."
            )
        before = state["projection"]
        changed = self.ledger.plan.differences(PrivacyPlan.from_dict(state["plan"]))
        changed += [
            f"`{name}` was {before.get(name, 'not saved')}, is now {value}"
            for name, value in self._facts().items()
            if name not in before or before[name] != value
        ]
        if changed:
            raise ValueError(
                "A continued run must keep its plan and its projections, but "
                f"{'; '.join(changed)}. Restore these, or start a new run (whose epsilon adds to "
                "what was spent)."
            )
        earlier = [run_from_dict(run) for run in state["runs"][:-1]]
        self.ledger.resume(state["num_releases"], reasons=state["reasons"], earlier_runs=earlier)
        self.subspace.start_at_(self.ledger.num_releases)

    def _facts(self) -> dict[str, Any]:
        """What the optimizer's state depends on."""
        shapes = {name: list(p.shape) for name, p in self.projections.items()}
        return {**asdict(self._space), "shapes": shapes}

    # ---- The rehearsal ---------------------------------------------------------------------

    def _wired(self, capture: str, made: Made, head: frozenset[str]) -> tuple[str, PrivateStep]:
        """Puts the optimizer into the subspace, and rehearses the model.

        Args:
            capture: one of `CAPTURES`.
            made: estimator and subspace.
            head: tensors that the plan may train first.

        Returns:
            How gradients are taken, "batched" or "single", and the private step.
        """
        self.subspace.adopt(self.optimizer)
        self.subspace.start_at_(self.ledger.num_releases)
        recorder, is_single = self._recorder(capture, made.rehearsed)
        if is_single:
            self._batches.one_by_one()
        private_step = PrivateStep(
            ledger=self.ledger,
            estimator=made.estimator(recorder),
            space=self.subspace,
            clip_groups=made.clip_groups,
            head=head,
            source=self._source,
        )
        return SINGLE if is_single else BATCHED, private_step

    def _recorder(self, capture: str, projections: Projections) -> tuple[Records, bool]:
        """Takes per-sample gradients; the model is rehearsed on synthetic examples first.

        Args:
            capture: one of `CAPTURES`.
            projections: how they are projected.

        Returns:
            The recorder, and whether it takes one example at a time.

        Raises:
            ValueError: the rehearsal found what cannot be trained privately.
        """
        with global_randomness_restored():
            structure = self._batches.example(0)
        preflight = Preflight(
            model=self.model,
            projections=projections,
            examples=self._synthetic(structure),
            losses=self._losses_of,
            settle=self._settle,
            take_own_loss_=self._losses.take_own_
            if isinstance(self._losses, OffersOwnLoss)
            else None,
        )
        return preflight.recorder(capture, why_alone=why_alone(structure))

    def _losses_of(self, inputs: Mapping[str, Any]) -> Tensor:
        """One loss per sample of a physical batch."""
        return self._losses(self.model, moved(inputs, self.model))

    def _settle(self, inputs: Mapping[str, Any]) -> str:
        """Why the losses are not the model's own on this synthetic example; nothing if so."""
        if not isinstance(self._losses, TaskLosses):
            return ""
        return self._losses.settle(self.model, moved(inputs, self.model))

    def _default_synthetic(self, structure: Mapping[str, Any]) -> SyntheticExamples:
        losses = self._losses
        are_tokens = isinstance(losses, TaskLosses) and losses.labels_are_tokens
        return SyntheticExamples(self.model, structure, labels_are_tokens=are_tokens)
