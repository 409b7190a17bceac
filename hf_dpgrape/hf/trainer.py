"""`DPGrapeTrainer`: transformers' Trainer with the private step in place of the backward pass."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_dpgrape.artifacts.record import write_record
from hf_dpgrape.gradients.recording import SINGLE
from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.callbacks import show_epsilon
from hf_dpgrape.hf.choices import Choices, TellsEndsOfEpochs, search_arguments
from hf_dpgrape.hf.disclosure import Disclosure
from hf_dpgrape.hf.dpmup import proxy_of
from hf_dpgrape.hf.evaluating import Evaluations, one_by_one
from hf_dpgrape.hf.exact_lengths import warn_of_exact_lengths
from hf_dpgrape.hf.given_optimizer import GivenOptimizer
from hf_dpgrape.hf.little_signal import warn_of_little_signal
from hf_dpgrape.hf.methods import prepared, with_prepared_model
from hf_dpgrape.hf.own_loss import named_outputs
from hf_dpgrape.hf.pairs import SyntheticPairs, pair_loss_of
from hf_dpgrape.hf.planning import (
    Planned,
    head_tensors,
    planned,
    refuse_other_arguments,
    say_processes,
)
from hf_dpgrape.hf.publishing import Publisher
from hf_dpgrape.hf.refusals import refuse_bypasses, refuse_other_order
from hf_dpgrape.hf.resuming import already_spent, refuse_other_groups, resumed, run_facts
from hf_dpgrape.hf.task_losses import head_of, labels_are_tokens
from hf_dpgrape.hf.trained_run import TrainedRun, trained_run
from hf_dpgrape.hf.trainer_part import TrainerPart
from hf_dpgrape.hf.trainers_losses import trainers_losses
from hf_dpgrape.hf.training_data import planned_loader, secret_source, training_data
from hf_dpgrape.hf.units import without_unit
from hf_dpgrape.mechanism.logical_batches import LogicalBatches, TrainingData
from hf_dpgrape.mechanism.private_step import LogicalBatch
from hf_dpgrape.mechanism.private_training import PrivateTraining
from hf_dpgrape.mechanism.synthetic import SyntheticExamples
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.randomness import secret_global_randomness

logger = logging.getLogger(__name__)


class DPGrapeMixin(TrainerPart):
    """The private part of a Trainer, for `class PrivateTrainer(DPGrapeMixin, SomeTrainer)`.

    Everything that a `transformers.Trainer` does stays: constructor, callbacks, schedulers,
    evaluation, saving. Training differs in that an optimizer step is a private step on a Poisson
    sample (see `hf_dpgrape.mechanism.private_step`) and stops after the planned number of steps.

    Guarantees:
        After `train()` the weights, the checkpoints and the logs are
        (`plan.epsilon(steps_counted)`, `target_delta`)-DP in the training set, add-or-remove-one
        (one row, or with `privacy_unit_column` all rows with one value of that column),
        unless `log_non_private_metrics` is set (then the logs are not). The steps counted are
        those that the mechanism itself has counted, or all planned ones if results may decide
        where the run ends or which checkpoint is kept; `privacy_record()` tells.
    """

    args: DPGrapeTrainingArguments
    model: Any  # None only inside the Trainer's constructor
    optimizer: Any
    _planned: Planned | None = None
    _run: TrainedRun | None = None
    _ledger: RunLedger | None = None
    _batches: LogicalBatches | None = None  # what the loader of the present run draws from
    _recorded: Mapping[str, Any] = {}  # of the checkpoint that the present run continues
    _has_searched = False  # for hyperparameters, in this trainer

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_other_order(cls, DPGrapeMixin)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_bypasses(type(self), DPGrapeMixin)
        args, kwargs = with_prepared_model(args, kwargs, DPGrapeTrainingArguments)
        super().__init__(*args, **kwargs)
        refuse_other_arguments(self.args)
        self._publisher = Publisher(self)
        self._disclosure = Disclosure(self, kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        self._evaluations = Evaluations(self, self._disclosure)
        self._source = secret_source(self.args)
        self._given_optimizer = GivenOptimizer(self, self.args)
        if self.args.bf16_weights:
            self.model.to(torch.bfloat16)
        show_epsilon(self, lambda step: self._told_ledger().epsilon(step))
        self.add_callback(TellsEndsOfEpochs(lambda: self._ledger))
        if self.train_dataset is not None and (warnings := self._make_plan().warnings()):
            logger.warning("%s", " ".join(warnings))

    # ---- Before training -------------------------------------------------------------------

    @property
    def plan(self) -> PrivacyPlan | None:
        """The privacy plan; None without a training set."""
        return None if self._planned is None else self._planned.plan

    @property
    def private_training(self) -> PrivateTraining | None:
        """What trains the present run; None before its optimizer is made."""
        return None if self._run is None else self._run.training

    def _make_plan(self) -> PrivacyPlan:
        """Checks model and data, and derives the plan from the arguments."""
        self._planned = planned(
            self.args, self.model, self.train_dataset, self.compute_loss_func, self.dpmup_proxy
        )
        self._ledger = self._ledger or RunLedger(self._planned.plan)
        return self._planned.plan

    def dpmup_proxy(self, base_model: str) -> nn.Module:
        """The narrow model that was tuned, of which only shapes are used.

        Override it for a model that is not transformers' own.

        Args:
            base_model: the argument `dpmup_base_model`.
        """
        return proxy_of(self.model, base_model)

    def create_accelerator_and_postprocess(self) -> None:
        """Keeps accelerate from wrapping the model in DistributedDataParallel.

        Its buckets would be as large as the full gradients, and wait for some that never come; the
        private step reduces the small projected sums instead.
        """
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = functools.partial(prepare, evaluation_mode=True)

    def get_train_dataloader(self) -> DataLoader[LogicalBatch]:
        """Logical batches, drawn by the plan's sampling from secret randomness."""
        plan = self._make_plan()
        assert self._ledger is not None
        self._ledger.set_plan(plan)
        warn_of_exact_lengths(self.data_collator, self.model, self.args.length_grid)
        if self.is_world_process_zero():
            head = head_tensors(self.model, self.args.head_modules)
            warn_of_little_signal(plan, self.args, has_head=bool(head))
        self._batches = LogicalBatches(**self._training_data())
        return planned_loader(self._batches, plan, self.args)

    def _training_data(self) -> TrainingData:
        """The training set with the columns that the model takes, and how it is collated."""
        assert self._planned is not None
        return training_data(self, self.args, self._source, self._planned.units)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own optimizer, made to step in the subspace by a `PrivateTraining`."""
        assert self._ledger is not None and self._planned is not None
        with self._given_optimizer.or_own(self.args, self._ledger.plan):
            super().create_optimizer(model)
        self._run = trained_run(
            self.args,
            self.model,
            self.optimizer,
            given_optimizer=self._given_optimizer.name,
            losses=trainers_losses(self),
            data=self._training_data(),
            ledger=self._ledger,
            synthetic=self.synthetic_examples,
            width_transfer=self._planned.width_transfer,
        )
        if self._run.training.capture == SINGLE and self._batches is not None:
            self._batches.one_by_one()  # those of the loader that was made before
        return self.optimizer  # type: ignore[no-any-return]

    def synthetic_examples(self, structure: Mapping[str, Any]) -> SyntheticExamples:
        """Made-up examples for the rehearsal; override it for inputs of a special kind.

        Args:
            structure: one collated example, for its names, dtypes and shapes alone.
        """
        head = head_of(self.model)
        if pair_loss_of(self):
            return SyntheticPairs(head, structure)
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
            self._given_optimizer.drop_()
        self._disclosure.begin_run(is_search=self.hp_search_backend is not None)
        self._evaluations.begin_run()
        self.control.should_training_stop = self.control.should_epoch_stop = False
        self._choices().warn_of_validation()
        say_processes(self.args)
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:  # whoever interrupts a run may have seen its results
            if self._ledger is not None:
                self._ledger.end("it ended before its planned steps")
        return self._disclosure.shown_output(output)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """The training loop under secret global randomness (dropout, collators, augmentation)."""
        with secret_global_randomness(self._source):
            output: TrainOutput = super()._inner_training_loop(*args, **kwargs)
            return output

    def training_step(  # type: ignore[override]
        self, model: nn.Module, inputs: LogicalBatch, num_items_in_batch: Any = None
    ) -> Tensor:
        """One private step on a logical batch; the loss it returns is 0 unless asked for."""
        assert self.private_training is not None
        loss = self.private_training.take_gradient(inputs)
        return self._disclosure.shown_loss(loss, self.private_training.ledger.plan)

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

    # ---- Logs and evaluation ---------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs epsilon spent so far, and no raw loss unless it was asked for."""
        self._disclosure.filter_(logs, self._told_ledger if self._ledger else None)
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
            return one_by_one(self.evaluate, eval_dataset, ignore_keys, metric_key_prefix, **kwargs)
        with self._disclosure.evaluation(eval_dataset), self._evaluations.of(metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The loss of an evaluation: the mean of the examples' own if it is not the model's."""
        return self._evaluations.loss(super().compute_loss, model, inputs, *args, **kwargs)

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; outputs have names, as in training, whatever the configuration says."""
        if callable(self.compute_loss_func):  # which is given what the model returns
            return super().prediction_step(model, *args, **kwargs)
        with named_outputs(getattr(head_of(self.model), "config", None)):
            return super().prediction_step(model, *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.predict`; callbacks see no metrics on the training set."""
        with self._disclosure.evaluation(test_dataset):
            return super().predict(test_dataset, *args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As the Trainer's; here an evaluation tells on which data it is."""
        self._disclosure.begin_evaluation(self._disclosure.named(eval_dataset))
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As the Trainer's; here a prediction tells on which data it is."""
        self._disclosure.begin_evaluation(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """As the Trainer's; no model sees the column that tells whose a row is."""
        return super()._remove_unused_columns(without_unit(dataset, self.args), description)

    # ---- Several runs, and continued ones --------------------------------------------------

    def _choices(self) -> Choices:
        """What results decide about at this moment."""
        return Choices(
            self.args,
            self.callback_handler.callbacks,
            is_search=self.hp_search_backend is not None,
            has_searched=self._has_searched,
            ledger=self._ledger,
        )

    def _told_ledger(self) -> RunLedger:
        """The ledger, told what the Trainer knows at this moment."""
        return self._choices().tell(self.control)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.hyperparameter_search`; says what all trials spend together.

        Every trial is a private run with an epsilon of its own. The total holds if the number of
        trials, and their noise, sampling and steps, do not depend on results.
        """
        self._has_searched = True
        best = super().hyperparameter_search(**search_arguments(*args, **kwargs))
        self._choices().warn_of_total()
        return best

    def _hp_search_setup(self, trial: Any) -> None:
        """Checks the arguments again, which a trial or the user may have changed since."""
        super()._hp_search_setup(trial)
        self.args.check_again()

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
        self._given_optimizer.refuse_early_schedule(self._run)
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint, whose run goes on."""
        plan = self._make_plan()
        assert self._ledger is not None
        facts = run_facts(self.args, self.model, plan, self._given_optimizer.name)
        self._recorded = resumed(self._ledger, resume_from_checkpoint, plan, facts)
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
        assert self._run is not None
        record = self._run.record(
            self._told_ledger(), self.args, self._choices(), self._disclosure, self._recorded
        )
        return {**record, **self._evaluations.record()}

    def save_privacy_record(self, folder: str | Path) -> None:
        """Writes `privacy.json` beside weights that the model itself has saved there.

        `save_model` and checkpoints write it anyway. `model.save_pretrained(folder)` knows nothing
        of the run, and neither does a model whose adapters were merged into it.
        """
        if self.private_training is None:
            raise ValueError("The record describes a trained model; call `train()` first.")
        write_record(folder, self.privacy_record())

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves model and processing class, and the privacy record beside them."""
        self._publisher.before_saving(output_dir)
        super()._save(output_dir, state_dict=state_dict)
        if self.args.should_save and self.private_training is not None:
            self.save_privacy_record(self._publisher.folder(output_dir))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the privacy card as `README.md` into the output folder.

        Takes the Trainer's arguments; those about the data set's name are not used, as the card
        tells nothing about private data that is not in the privacy record.
        """
        if not self.is_world_process_zero():
            return
        if self.private_training is None:
            raise ValueError("The card describes a trained model; call `train()` first.")
        self._publisher.write_card(self.privacy_record(), *args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Uploads the model, its processing class, `privacy.json` and the card to the Hub.

        Takes what `Trainer.push_to_hub` takes, and returns what it returns: a `CommitInfo`, or a
        future of one unless `blocking`; None on other processes than the first.
        """
        if self.private_training is None:
            raise ValueError("A push needs a privacy record; call `train()` first.")
        return self._publisher.push(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes what is known to be covered of a checkpoint that was just saved."""
        self._publisher.push_checkpoint(checkpoint_folder)

    def published_files(self, folder: str | Path) -> list[str]:
        """Names of the files of a folder that may be pushed, the card apart."""
        return self._publisher.published_files(folder)


class DPGrapeTrainer(DPGrapeMixin, Trainer):
    """`transformers.Trainer` that trains privately; see `DPGrapeMixin` for what differs."""
