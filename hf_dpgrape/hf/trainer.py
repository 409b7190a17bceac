"""`DPGrapeTrainer`: transformers' Trainer with the private step in place of the backward pass."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_dpgrape.artifacts.record import (
    FIXED,
    SECRET,
    privacy_record,
    projection_record,
    with_earlier_part,
    write_record,
)
from hf_dpgrape.gradients.recording import BATCHED, SINGLE
from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.callbacks import show_epsilon
from hf_dpgrape.hf.choices import Choices, TellsEndsOfEpochs, search_backend
from hf_dpgrape.hf.disclosure import Disclosure, evaluation_loss
from hf_dpgrape.hf.dpmup import WidthTransfer, proxy_of, resolve
from hf_dpgrape.hf.exact_lengths import warn_of_exact_lengths
from hf_dpgrape.hf.input_limits import longest_input
from hf_dpgrape.hf.losses import PerSampleLoss, head_of, labels_are_tokens
from hf_dpgrape.hf.methods import (
    method_of,
    method_record,
    prepared,
    refuse_given_optimizer,
    with_prepared_model,
)
from hf_dpgrape.hf.planning import clip_groups, head_tensors, length_of
from hf_dpgrape.hf.publishing import Publisher
from hf_dpgrape.hf.rates import own_optimizer, set_rates
from hf_dpgrape.hf.refusals import refuse_bypasses, refuse_other_order
from hf_dpgrape.hf.resuming import (
    already_spent,
    groups_of,
    optimizer_record,
    projection_arguments,
    refuse_other_groups,
    resumed,
)
from hf_dpgrape.hf.trainer_part import TrainerPart
from hf_dpgrape.hf.trainers_losses import TrainersLosses
from hf_dpgrape.mechanism.checks import checked_sites, refuse, refuse_in_any_capture
from hf_dpgrape.mechanism.logical_batches import LogicalBatches, TrainingData
from hf_dpgrape.mechanism.private_step import PhysicalBatch
from hf_dpgrape.mechanism.private_training import PrivateTraining
from hf_dpgrape.mechanism.synthetic import SyntheticExamples
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.plan import HEAD, PrivacyPlan
from hf_dpgrape.privacy.randomness import SecretSource, secret_global_randomness

logger = logging.getLogger(__name__)


class DPGrapeMixin(TrainerPart):
    """The private part of a Trainer, for `class PrivateTrainer(DPGrapeMixin, SomeTrainer)`.

    Everything that a `transformers.Trainer` does stays: constructor, callbacks, schedulers,
    evaluation, saving. Training differs in that an optimizer step is a private step on a Poisson
    sample (see `hf_dpgrape.mechanism.private_step`) and stops after the planned number of steps.

    Guarantees:
        After `train()` the weights, the checkpoints and the logs are
        (`plan.epsilon(steps_counted)`, `target_delta`)-DP in the training set, add-or-remove-one,
        unless `log_non_private_metrics` is set (then the logs are not). The steps counted are
        those that the mechanism itself has counted, whoever called it, or all planned ones if
        results may decide where the run ends or which checkpoint is kept; `privacy_record()`
        tells.

    Attributes:
        plan: the `PrivacyPlan`; None without a training set.
        private_training: what trains the present run; None before its optimizer is made.
    """

    args: DPGrapeTrainingArguments
    model: Any  # None only inside the Trainer's constructor
    optimizer: Any
    plan: PrivacyPlan | None = None
    private_training: PrivateTraining | None = None
    _ledger: RunLedger | None = None
    _batches: LogicalBatches | None = None  # what the loader of the present run draws from
    _recorded: Mapping[str, Any] = {}  # of the checkpoint that the present run continues
    _rates_were_set = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_other_order(cls, DPGrapeMixin)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_bypasses(type(self), DPGrapeMixin)
        args, kwargs = with_prepared_model(args, kwargs, DPGrapeTrainingArguments)
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, DPGrapeTrainingArguments):
            raise TypeError(
                "`args` must be DPGrapeTrainingArguments (they hold the privacy budget), got "
                f"{type(self.args).__name__}."
            )
        self._publisher = Publisher(self)
        self._disclosure = Disclosure(self, kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        fixed = self.args.unsafe_test_seed
        self._source = SecretSource(
            # Processes must not share coins or dropout masks, in tests neither.
            unsafe_seed=None if fixed is None else fixed + self.args.process_index
        )
        self._width_transfer: WidthTransfer | None = None
        if not self.args.log_non_private_metrics:  # memory tells how many examples were drawn
            self._memory_tracker.skip_memory_metrics = True
        self._given_optimizer: str | None = None
        if self.optimizer is not None:
            self._given_optimizer = type(self.optimizer).__name__
        elif self.optimizer_cls_and_kwargs is not None:
            self._given_optimizer = self.optimizer_cls_and_kwargs[0].__name__
        refuse_given_optimizer(self.args, self._given_optimizer)
        if self.args.bf16_weights:
            self.model.to(torch.bfloat16)
        show_epsilon(self, lambda step: self._told_ledger().epsilon(step))
        self.add_callback(TellsEndsOfEpochs(lambda: self._ledger))
        if self.train_dataset is not None and (warnings := self._make_plan().warnings()):
            logger.warning("%s", " ".join(warnings))

    # ---- Before training -------------------------------------------------------------------

    def _make_plan(self) -> PrivacyPlan:
        """Checks model and data, and derives the plan from the arguments."""
        num_examples = length_of(self.train_dataset)
        refuse_in_any_capture(self.model)
        loss = PerSampleLoss(head_of(self.model), self.compute_loss_func)
        if self.args.capture == BATCHED:
            checked_sites(self.model)
            refuse(self.model, {"": loss.why_single} if loss.why_single else {})
        if self.args.dpmup_base_model is not None:
            proxy = self.dpmup_proxy(self.args.dpmup_base_model)
            self._width_transfer = resolve(self.args, self.model, proxy, self._head())
        width = self._width_transfer
        own = set() if self.args.head_clip_share is None else {HEAD}
        self.plan = self.args.make_plan(
            num_examples,
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
        return clip_groups(self.args, self.model, self._head(), self._width_transfer)

    def _head(self) -> frozenset[str]:
        """Canonical names of the head's tensors."""
        return head_tensors(self.model, self.args.head_modules)

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
        """Logical batches, drawn by the plan's sampling from secret randomness."""
        plan = self._make_plan()
        assert self._ledger is not None
        self._ledger.set_plan(plan)
        if self.args.length_grid and getattr(self.model, "main_input_name", "") == "input_ids":
            warn_of_exact_lengths(self.data_collator)
        self._batches = LogicalBatches(**self._training_data())
        return self._batches.loader(
            plan,
            self.args.steps_per_epoch(plan.num_examples),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type != "cpu",
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def _training_data(self) -> TrainingData:
        """The training set with the columns that the model takes, and how it is collated."""
        dataset, collate = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        return {
            "examples": dataset,
            "collate": collate,
            "physical_batch_size": self.args.per_device_train_batch_size,
            "source": self._source,
            "length_grid": self.args.length_grid,
            "longest": longest_input(self.model, self.processing_class),
        }

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own optimizer, made to step in the subspace by a `PrivateTraining`."""
        assert self._ledger is not None
        plan, given = self._ledger.plan, self.optimizer_cls_and_kwargs
        self.optimizer_cls_and_kwargs = given or own_optimizer(self.args, plan)
        super().create_optimizer(model)
        self.optimizer_cls_and_kwargs = given  # the next run's noise and rates may differ
        head = self._head()
        self._rates_were_set = set_rates(
            self.args, self.optimizer, self.model, head, self._width_transfer
        )
        losses = TrainersLosses(
            PerSampleLoss(head_of(self.model), self.compute_loss_func),
            self.compute_loss_context_manager,
            self._prepare_inputs,
        )
        self.private_training = PrivateTraining(
            self.model,
            self.optimizer,
            plan,
            losses,
            **self._training_data(),
            capture=self.args.capture,
            estimator=method_of(self.args).estimator,
            num_directions=self.args.num_directions,
            perturbation_scale=self.args.perturbation_scale,
            rank=self.args.rank,
            head=head,
            clip_groups=self._clip_groups(),
            update_proj_gap=self.args.refresh_gap(plan.num_steps),
            refresh_moments=self.args.refresh_moments,  # type: ignore[arg-type]
            projection_scale=self.args.projection_scale,  # type: ignore[arg-type]
            target_modules=self.args.optim_target_modules,
            seed=self.args.seed,
            ledger=self._ledger,
            synthetic=self.synthetic_examples,
        )
        if self.private_training.capture == SINGLE and self._batches is not None:
            self._batches.one_by_one()  # those of the loader that was made before
        self._projection_facts = projection_arguments(self.args, plan)
        self._method_facts = method_record(self.args)
        self._optimizer_facts = {
            **optimizer_record(self.args, self.model, head, self._given_optimizer),
            "groups": groups_of(self.private_training),
        }
        return self.optimizer  # type: ignore[no-any-return]

    def synthetic_examples(self, structure: Mapping[str, Any]) -> SyntheticExamples:
        """Made-up examples for the rehearsal; override it for inputs of a special kind.

        Args:
            structure: one collated example, for its names, dtypes and shapes alone.
        """
        head = head_of(self.model)
        return SyntheticExamples(head, structure, labels_are_tokens=labels_are_tokens(head))

    # ---- Training --------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Trains privately for the planned number of steps.

        Raises:
            ValueError: this trainer has trained already, or a resumed run changes the plan.
        """
        has_begun = self._ledger is not None and self._ledger.num_releases > 0
        if has_begun and self.model_init is None and not resume_from_checkpoint:
            raise already_spent(self._told_ledger())
        if self.private_training is not None:  # the optimizer belongs to the run before
            self._refuse_the_given_optimizer()
            self.optimizer, self.lr_scheduler = None, None
        is_search = self.hp_search_backend is not None
        self._disclosure.refuse_choices_by_training_set(is_search=is_search)
        self.control.should_training_stop = self.control.should_epoch_stop = False
        self._choices().warn_of_validation()
        self._disclosure.begin_run()
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
        assert self.private_training is not None
        loss = self.private_training.take_gradient(inputs)
        self._disclosure.add_private_loss(loss.private_mean)
        raw_sum = loss.raw_sum if self.args.log_non_private_metrics else torch.zeros(())
        expected = self.private_training.ledger.plan.expected_batch_size
        return (raw_sum / expected).to(self.args.device)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """Norm of the private gradient, which is noised already."""
        assert self.private_training is not None
        return float(nn.utils.get_total_norm(self.private_training.gradients()))

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

    # ---- Logs and evaluation ---------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs epsilon spent so far, and no raw loss unless it was asked for."""
        self._disclosure.filter_(logs, None if self._ledger is None else self._told_ledger)
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> dict[str, float]:
        """As `Trainer.evaluate`; metrics on the training set are returned, but not logged."""
        if isinstance(eval_dataset, dict):  # one by one, before a trainer prepares them
            metrics: dict[str, float] = {}
            for name, data in eval_dataset.items():
                prefix = f"{metric_key_prefix}_{name}"
                metrics.update(self.evaluate(data, ignore_keys, prefix, **kwargs))
            return metrics
        with self._disclosure.evaluation():
            if not isinstance(eval_dataset, str):
                self._disclosure.begin_evaluation(eval_dataset)
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of an evaluation: with `compute_loss_func`, the mean of the examples' own."""
        if not callable(self.compute_loss_func):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        own = PerSampleLoss(head_of(self.model), self.compute_loss_func)
        loss, outputs = evaluation_loss(own, model, inputs)
        return (loss, outputs) if return_outputs else loss

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.predict`; callbacks see no metrics on the training set."""
        with self._disclosure.evaluation():
            self._disclosure.begin_evaluation(test_dataset)
            return super().predict(test_dataset, *args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As the Trainer's; here an evaluation tells on which data it is."""
        data: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        by_name: Any = self.eval_dataset
        self._disclosure.begin_evaluation(by_name[data] if isinstance(data, str) else data)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As the Trainer's; here a prediction tells on which data it is."""
        self._disclosure.begin_evaluation(test_dataset)
        return super().get_test_dataloader(test_dataset)

    # ---- Several runs, and continued ones --------------------------------------------------

    def _choices(self) -> Choices:
        """What results decide about at this moment."""
        return Choices(
            self.args,
            self.callback_handler.callbacks,
            is_search=self.hp_search_backend is not None,
            ledger=self._ledger,
        )

    def _told_ledger(self) -> RunLedger:
        """The ledger, told what the Trainer knows at this moment."""
        return self._choices().tell(self.control)

    def _refuse_the_given_optimizer(self) -> None:
        """Refuses to use an optimizer that was passed for another run."""
        if self._given_optimizer is not None and self.optimizer_cls_and_kwargs is None:
            raise ValueError(
                "The optimizer that was passed belongs to the run before; resume with a new "
                "trainer and a new optimizer."
            )

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: Any = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Trainer.hyperparameter_search`; says what all trials spend together.

        Every trial is a private run with an epsilon of its own. The total holds if the number of
        trials, and their noise, sampling and steps, do not depend on results.
        """
        chosen = search_backend(backend, kwargs.get("n_jobs", 1))
        best = super().hyperparameter_search(
            hp_space, compute_objective, n_trials, direction, chosen, hp_name, **kwargs
        )
        self._choices().warn_of_total()
        return best

    def _hp_search_setup(self, trial: Any) -> None:
        """Checks the arguments again, which a trial or the user may have changed since."""
        super()._hp_search_setup(trial)
        self.args.check()
        if self.args.gradient_accumulation_steps != 1:
            raise ValueError(
                "`gradient_accumulation_steps` must not be changed after the arguments were made, "
                f"got {self.args.gradient_accumulation_steps}; change `expected_batch_size`."
            )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model in the precision that is asked for, to which nothing before belongs."""
        self._recorded = {}
        if self._ledger is not None:
            self._ledger.begin_run()
        model: nn.Module = prepared(super().call_model_init(trial), self.args)
        return model.to(torch.bfloat16) if self.args.bf16_weights else model

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The Trainer's schedule, or that of `optimizers` if it fits.

        Raises:
            ValueError: the given schedule was made before the learning rates were set.
        """
        if self.lr_scheduler is not None and self._rates_were_set:
            raise ValueError(
                "The schedule in `optimizers` was made before `head_learning_rate`, Muon or DP-muP "
                "gave tensors rates of their own; pass `optimizers=(optimizer, None)` with "
                "`lr_scheduler_type`, or override `create_scheduler`, which is called later."
            )
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint, whose run goes on."""
        plan = self._make_plan()
        assert self._ledger is not None
        self._recorded = resumed(
            self._ledger,
            resume_from_checkpoint,
            plan,
            projection_arguments(self.args, plan),
            optimizer_record(self.args, self.model, self._head(), self._given_optimizer),
        )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the optimizer's state, if its groups hold the tensors that they held."""
        if checkpoint is not None:
            assert self.private_training is not None
            refuse_other_groups(self._recorded, self.private_training)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves nothing: the generators are secret, and tell how many examples were drawn."""
        os.makedirs(output_dir, exist_ok=True)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads nothing: a resumed run draws fresh secret randomness."""

    # ---- Files ----------------------------------------------------------------------------

    def privacy_record(self) -> dict[str, Any]:
        """What `privacy.json` says about the model as it is now."""
        ledger = self._told_ledger()
        assert self.private_training is not None
        present = privacy_record(
            ledger.plan,
            ledger.num_releases,
            {
                **self._projection_facts,
                **projection_record(
                    self.private_training.projections.values(), self.private_training.capture
                ),
                "randomness": SECRET if self._source.is_secret else FIXED,
            },
            method=self._method_facts,
            steps_counted=ledger.steps_counted(),
            counted_because=ledger.reasons,
            optimizer=self._optimizer_facts,
            example_unit=self.args.example_unit,
            tuning=self._choices().record(),
            raw_metrics_were_logged=self._disclosure.raw_metrics_were_logged
            or self.args.log_non_private_metrics,
            dpmup=None
            if self._width_transfer is None
            else self._width_transfer.record(ledger.plan.noise_multiplier),
        )
        return with_earlier_part(present, self._recorded)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves model and processing class, and the privacy record beside them."""
        self._publisher.before_saving(output_dir)
        super()._save(output_dir, state_dict=state_dict)
        if self.args.should_save and self.private_training is not None:
            write_record(self._publisher.folder(output_dir), self.privacy_record())

    def create_model_card(  # type: ignore[override]
        self,
        language: Any = None,
        license: str | None = None,
        tags: Any = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the privacy card as `README.md` into the output folder.

        Takes the Trainer's arguments; those about the training data set's name are not used, as
        the card tells nothing about private data that is not in the privacy record.
        """
        if not self.is_world_process_zero():
            return
        if self.private_training is None:
            raise ValueError("The card describes a trained model; call `train()` first.")
        self._publisher.write_card(
            self.privacy_record(),
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
        )

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Uploads the model, its processing class, `privacy.json` and the card to the Hub.

        Takes what `Trainer.push_to_hub` takes, and returns what it returns: a `CommitInfo`, or a
        future of one unless `blocking`; None on other processes than the first.
        """
        if self.private_training is None:
            raise ValueError("A push needs a privacy record; call `train()` first.")
        return self._publisher.push(
            commit_message,
            blocking=blocking,
            token=token,
            revision=revision,
            private=private,
            **kwargs,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes what is known to be covered of a checkpoint that was just saved."""
        self._publisher.push_checkpoint(checkpoint_folder)

    def published_files(self, folder: str | Path) -> list[str]:
        """Names of the files of a folder that may be pushed, the card apart."""
        return self._publisher.published_files(folder)


class DPGrapeTrainer(DPGrapeMixin, Trainer):
    """`transformers.Trainer` that trains privately; see `DPGrapeMixin` for what differs."""
