"""`DPGrapeTrainer`: transformers' Trainer with the private step in place of the backward pass."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput, has_length

from hf_dpgrape.arguments import DPGrapeTrainingArguments
from hf_dpgrape.callbacks import show_epsilon
from hf_dpgrape.capture.recording import BATCHED, Records
from hf_dpgrape.collation import warn_of_exact_lengths
from hf_dpgrape.data import LogicalBatches, why_alone
from hf_dpgrape.dpmup import WidthTransfer, proxy_of, resolve
from hf_dpgrape.engine.private_step import PhysicalBatch, PrivateStep
from hf_dpgrape.engine.tensors import (
    make_projections,
    matching,
    newly_initialized,
    refuse_other_tensors,
)
from hf_dpgrape.hub import PublishingMixin
from hf_dpgrape.input_limits import longest_input
from hf_dpgrape.logs import LoggingMixin
from hf_dpgrape.losses import PerSampleLoss, head_of
from hf_dpgrape.own_generators import refuse_own_generators
from hf_dpgrape.preflight import Preflight, checked_sites, refuse, refuse_in_any_capture
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.plan import BODY, HEAD, PrivacyPlan
from hf_dpgrape.privacy.randomness import SecretSource, secret_global_randomness
from hf_dpgrape.privacy.sampling import PoissonSampler
from hf_dpgrape.rates import own_optimizer, set_rates
from hf_dpgrape.record import (
    FIXED,
    SECRET,
    privacy_record,
    projection_record,
    with_earlier_part,
    write_record,
)
from hf_dpgrape.refusals import refuse_bypasses, refuse_other_order
from hf_dpgrape.resuming import ResumingMixin
from hf_dpgrape.subspace.parameters import Subspace
from hf_dpgrape.subspace.projection import Projection
from hf_dpgrape.synthetic import SyntheticExamples
from hf_dpgrape.trainer_part import TrainerPart
from hf_dpgrape.tuning import TellsEndsOfEpochs, TuningMixin

logger = logging.getLogger(__name__)


class DPGrapeMixin(TuningMixin, ResumingMixin, LoggingMixin, PublishingMixin, TrainerPart):
    """The private part of a Trainer, for `class PrivateTrainer(DPGrapeMixin, SomeTrainer)`.

    Everything that a `transformers.Trainer` does stays: constructor, callbacks, schedulers,
    evaluation, saving. Training differs in that an optimizer step is a private step on a Poisson
    sample (see `hf_dpgrape.engine.private_step`) and stops after the planned number of steps.

    Guarantees:
        After `train()` the weights, the checkpoints and the logs are
        (`plan.epsilon(steps_counted)`, `target_delta`)-DP in the training set, add-or-remove-one,
        unless `log_non_private_metrics` is set (then the logs are not). The steps counted are
        those that the mechanism itself has counted, whoever called it, or all planned ones if
        results may decide where the run ends or which checkpoint is kept; `privacy_record()`
        tells.

    Attributes:
        plan: the `PrivacyPlan`; None without a training set.
    """

    args: DPGrapeTrainingArguments
    model: Any  # None only inside the Trainer's constructor
    optimizer: Any
    plan: PrivacyPlan | None = None
    _ledger: RunLedger | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_other_order(cls, DPGrapeMixin)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_bypasses(type(self), DPGrapeMixin)
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, DPGrapeTrainingArguments):
            raise TypeError(
                "`args` must be DPGrapeTrainingArguments (they hold the privacy budget), got "
                f"{type(self.args).__name__}."
            )
        self._know_training_sets(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        fixed = self.args.unsafe_test_seed
        self._source = SecretSource(
            # Processes must not share coins or dropout masks, in tests neither.
            unsafe_seed=None if fixed is None else fixed + self.args.process_index
        )
        self._private_step: PrivateStep | None = None
        self._width_transfer: WidthTransfer | None = None
        self._private_losses: list[float] = []  # those since the last log
        if not self.args.log_non_private_metrics:  # memory tells how many examples were drawn
            self._memory_tracker.skip_memory_metrics = True
        self._given_optimizer = self._name_of_given_optimizer()
        if self.args.bf16_weights:
            self.model.to(torch.bfloat16)
        show_epsilon(self, lambda step: self._told_ledger().epsilon(step))
        self.add_callback(TellsEndsOfEpochs(lambda: self._ledger))
        if self.train_dataset is not None and (warnings := self._make_plan().warnings()):
            logger.warning("%s", " ".join(warnings))

    # ---- Before training -------------------------------------------------------------------

    def _make_plan(self) -> PrivacyPlan:
        """Checks model and data, and derives the plan from the arguments."""
        if isinstance(self.train_dataset, dict):
            raise ValueError(
                "`train_dataset` must be one data set, got a dictionary of "
                f"{len(self.train_dataset)} splits; pass the one to train on, as "
                '`train_dataset["train"]`.'
            )
        if isinstance(self.train_dataset, torch.utils.data.IterableDataset) or not has_length(
            self.train_dataset
        ):
            raise ValueError(
                "`train_dataset` must have a length and indexed access, got "
                f"{type(self.train_dataset).__name__}: Poisson sampling draws each example with a "
                "known probability. Load it as a map-style dataset."
            )
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError(
                "Expected a model with trainable tensors, got one that is frozen as a whole; set "
                "`requires_grad_(True)` on those to train."
            )
        loss = PerSampleLoss(head_of(self.model), self.compute_loss_func)
        if self.args.capture == BATCHED:
            checked_sites(self.model)
            refuse(self.model, {"": loss.why_single} if loss.why_single else {})
        refuse_in_any_capture(self.model)
        if self.args.dpmup_base_model is not None:
            proxy = self.dpmup_proxy(self.args.dpmup_base_model)
            self._width_transfer = resolve(self.args, self.model, proxy, self._head())
        width = self._width_transfer
        own = set() if self.args.head_clip_share is None else {HEAD}
        self.plan = self.args.make_plan(
            len(self.train_dataset),
            has_head=bool(self._head()),
            layers=sorted(set(self._clip_groups().values()) - own),
            clip_shares=None if width is None else width.rules.clip_shares,
        )
        self._ledger = self._ledger or RunLedger(self.plan)
        return self.plan

    def dpmup_proxy(self, base_model: str) -> nn.Module:
        """The narrow model that was tuned, of which only shapes are used.

        Override it for a model that is not transformers' own.

        Args:
            base_model: the argument `dpmup_base_model`.
        """
        return proxy_of(self.model, base_model)

    def _clip_groups(self) -> dict[str, str]:
        """The clip group of every trainable tensor: the head's own, and the body's one or many."""
        if self._width_transfer is not None:
            return self._width_transfer.clip_groups
        head = self._head() if self.args.head_clip_share is not None else frozenset()
        per_layer = self.args.clip_grouping == "layer"
        return {
            name: HEAD if name in head else name.rpartition(".")[0] if per_layer else BODY
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def _head(self) -> frozenset[str]:
        """Canonical names of the head's tensors."""
        if self.args.head_modules is None:
            return newly_initialized(self.model)
        names = [n for n, p in self.model.named_parameters() if p.requires_grad]
        head = matching(names, self.args.head_modules)
        if not head:
            raise ValueError(
                f"`head_modules`={self.args.head_modules} matches no trainable tensor; the last "
                f"ones are {names[-3:]}."
            )
        return head

    def create_accelerator_and_postprocess(self) -> None:
        """Keeps accelerate from wrapping the model in DistributedDataParallel.

        Its buckets would be as large as the full gradients, and would wait for gradients that
        never come; the small projected sums are reduced by the private step instead.
        """
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = functools.partial(
            self.accelerator.prepare_model,
            evaluation_mode=True,
        )

    def get_train_dataloader(self) -> DataLoader[list[PhysicalBatch]]:
        """Logical batches, drawn by Poisson sampling from secret randomness."""
        plan = self._make_plan()
        assert self._ledger is not None
        self._ledger.set_plan(plan)
        if self.args.length_grid and getattr(self.model, "main_input_name", "") == "input_ids":
            warn_of_exact_lengths(self.data_collator)
        self._batches = self._logical_batches()
        return DataLoader(
            self._batches,
            batch_size=None,
            sampler=PoissonSampler(
                num_examples=plan.num_examples,
                sampling_prob=plan.sampling_prob,
                num_batches=self.args.steps_per_epoch(plan.num_examples),
                generator=self._source.generator(),
                rank=self.args.process_index,
                num_processes=self.args.world_size,
            ),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type != "cpu",
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def _logical_batches(self) -> LogicalBatches:
        """The training set with the columns that the model takes."""
        dataset, collate = self.train_dataset, self.data_collator
        refuse_own_generators(collate, dataset)
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        return LogicalBatches(
            dataset,
            collate,
            self.args.per_device_train_batch_size,
            source=self._source,
            length_grid=self.args.length_grid,
            longest=longest_input(self.model, self.processing_class),
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own optimizer, made to step in the subspace; and the private step."""
        assert self._ledger is not None
        plan, given = self._ledger.plan, self.optimizer_cls_and_kwargs
        self.optimizer_cls_and_kwargs = given or own_optimizer(self.args, plan)
        super().create_optimizer(model)
        self.optimizer_cls_and_kwargs = given  # the next run's noise and rates may differ
        head = self._head()
        weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        projections = make_projections(
            self.model,
            rank=self.args.rank,
            scale=self.args.projection_scale,  # type: ignore[arg-type]
            seed=self.args.seed,
            head=head,
            target_modules=self.args.optim_target_modules,
        )
        self._subspace = Subspace(
            weights,
            projections,
            update_proj_gap=self.args.refresh_gap(plan.num_steps),
            moments=self.args.refresh_moments,  # type: ignore[arg-type]
            seed=self.args.seed,
        )
        self._rates_were_set = set_rates(
            self.args, self.optimizer, self.model, projections, head, self._width_transfer
        )
        self._subspace.adopt(self.optimizer)
        self._subspace.start_at_(self._ledger.num_releases)
        self._per_sample_loss = PerSampleLoss(head_of(self.model), self.compute_loss_func)
        self._private_step = PrivateStep(
            ledger=self._ledger,
            recorder=self._recorder(projections),
            subspace=self._subspace,
            clip_groups=self._clip_groups(),
            head=head,
            source=self._source,
        )
        self._inner_optimizer = self.optimizer
        self._projection_facts = self._projection_arguments(plan)
        self._optimizer_facts = {**self._optimizer_record(), "groups": self._groups()}
        if distributed.is_available() and distributed.is_initialized():
            for parameter in self.model.parameters():
                distributed.broadcast(parameter.data, src=0)
        return self.optimizer  # type: ignore[no-any-return]

    def _recorder(self, projections: Mapping[str, Projection]) -> Records:
        """Takes per-sample gradients; the model was rehearsed on synthetic examples before.

        Raises:
            ValueError: the rehearsal found what cannot be trained privately.
        """
        structure = self._logical_batches().one_by_one()[[0]][0].inputs
        preflight = Preflight(
            model=self.model,
            projections=projections,
            examples=self.synthetic_examples(structure),
            losses=self._per_sample_loss_of,
            settle=self._settle_loss,
            take_own_loss_=self._per_sample_loss.take_own_,
        )
        recorder, is_single = preflight.recorder(self.args.capture, why_alone=why_alone(structure))
        if is_single:
            self._batches.one_by_one()
        return recorder

    def _settle_loss(self, inputs: Mapping[str, Any]) -> str:
        """Why no per-sample loss is the model's own on this example; nothing if one is."""
        with self.compute_loss_context_manager():
            return self._per_sample_loss.settle(self.model, self._prepare_inputs(dict(inputs)))

    def synthetic_examples(self, structure: Mapping[str, Any]) -> SyntheticExamples:
        """Made-up examples for the rehearsal; override it for inputs of a special kind.

        Args:
            structure: one collated example, for its names, dtypes and shapes alone.
        """
        return SyntheticExamples(head_of(self.model), structure)

    def _per_sample_loss_of(self, inputs: Any) -> Tensor:
        """One loss per sample of a physical batch, under the Trainer's precision."""
        with self.compute_loss_context_manager():
            return self._per_sample_loss(self.model_wrapped, self._prepare_inputs(inputs))

    # ---- Training --------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Trains privately for the planned number of steps.

        Raises:
            ValueError: this trainer has trained already, or a resumed run changes the plan.
        """
        self._refuse_repetition(resume_from_checkpoint)
        if self._private_step is not None:  # the optimizer belongs to the run before
            self.optimizer, self.lr_scheduler = None, None
        self._refuse_choices_by_training_set()
        self._begin_run()
        self._private_losses = []
        try:
            output: TrainOutput = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:  # whoever interrupts a run may have seen its results
            if self._ledger is not None:
                self._ledger.end("it ended before its planned steps")
        if not self.args.log_non_private_metrics:
            output = output._replace(training_loss=float("nan"))
        return output

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """The training loop under secret global randomness (dropout, collators, augmentation)."""
        with secret_global_randomness(self._source):
            output: TrainOutput = super()._inner_training_loop(*args, **kwargs)
            return output

    def training_step(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: list[PhysicalBatch],
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """One private step on a logical batch; the loss it returns is 0 unless asked for."""
        assert self._private_step is not None
        ledger, tensors = self._private_step.ledger, self._subspace.tensors
        model.train()
        refuse_other_tensors(self.model, {name: t.weight for name, t in tensors.items()})
        self._subspace.refresh_(ledger.num_releases, self._inner_optimizer)
        with secret_global_randomness(self._source):  # anew: a callback may have set a seed
            loss = self._private_step(inputs, self._per_sample_loss_of)
        if loss.private_mean is not None:
            self._private_losses.append(float(loss.private_mean))
        raw_sum = loss.raw_sum if self.args.log_non_private_metrics else torch.zeros(())
        return (raw_sum / ledger.plan.expected_batch_size).to(self.args.device)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """Norm of the private gradient, which is noised already."""
        grads = [
            t.stand_in.grad for t in self._subspace.tensors.values() if t.stand_in.grad is not None
        ]
        return float(nn.utils.get_total_norm(grads))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The expected batch size, for the Trainer's messages."""
        assert self.args.expected_batch_size is not None
        return self.args.expected_batch_size

    def floating_point_ops(self, inputs: Any) -> int:
        """0: the number of tokens drawn, which a count would reveal, is secret."""
        return 0

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> None:
        """None: a count over the batch must not reach any sample's loss."""
        return None

    # ---- Files ----------------------------------------------------------------------------

    def privacy_record(self) -> dict[str, Any]:
        """What `privacy.json` says about the model as it is now."""
        ledger = self._told_ledger()
        present = privacy_record(
            ledger.plan,
            ledger.num_releases,
            {
                **self._projection_facts,
                **projection_record(self._subspace.projections.values()),
                "randomness": SECRET if self._source.is_secret else FIXED,
            },
            steps_counted=ledger.steps_counted(),
            counted_because=ledger.reasons,
            optimizer=self._optimizer_facts,
            example_unit=self.args.example_unit,
            tuning=self.tuning_record(),
            raw_metrics_were_logged=self._raw_metrics_were_logged
            or self.args.log_non_private_metrics,
            dpmup=None
            if self._width_transfer is None
            else self._width_transfer.record(ledger.plan.noise_multiplier),
        )
        return with_earlier_part(present, self._recorded)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves model and processing class, and the privacy record beside them."""
        super()._save(output_dir, state_dict=state_dict)
        if self.args.should_save and self._private_step is not None:
            write_record(self._folder(output_dir), self.privacy_record())


class DPGrapeTrainer(DPGrapeMixin, Trainer):
    """`transformers.Trainer` that trains privately; see `DPGrapeMixin` for what differs."""
