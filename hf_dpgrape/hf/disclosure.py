"""What is logged: epsilon and the noisy loss; nothing about training data without noise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from transformers import DefaultFlowCallback, Trainer
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import TrainOutput

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.mechanism.private_step import StepLoss
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.plan import PrivacyPlan

logger = logging.getLogger(__name__)

_RAW = "non_private_"

#: Log entries of the Trainer that are functions of private data without noise.
_RAW_LOGS = ("loss", "train_loss")

#: Time and memory grow with the number of examples drawn, which is secret.
_RAW_TRAIN_METRICS = ("_runtime", "_per_second")
_RAW_MEMORY = "_mem_"


class Disclosure:
    """Decides what a trainer logs, and shows its callbacks.

    Guarantees:
        Neither the logs nor a callback see a training loss without noise, how long training took
        or how much memory, or a metric of an evaluation on the training set, unless
        `log_non_private_metrics` is set; such an evaluation returns its metrics to the caller
        alone.

    Args:
        trainer: the trainer.
        train_dataset: what it was given, for one like TRL's prepares it to new objects.
        eval_dataset: what it was given.

    Attributes:
        is_on_training_set: whether the present evaluation is on the training set.
        raw_metrics_were_logged: whether anything was logged under `log_non_private_metrics`.
    """

    def __init__(self, trainer: Trainer, train_dataset: object, eval_dataset: object) -> None:
        self._trainer = trainer
        given, now = _by_name(eval_dataset), _by_name(trainer.eval_dataset)
        same = (now.get(name) for name, data in given.items() if _is_same(data, train_dataset))
        self._training_sets = (train_dataset, *same)
        self._private_losses: list[float] = []  # those since the last log
        self._present_evaluation: ExitStack | None = None
        self.is_on_training_set = False
        self._was_warned_of_training_set = False
        self.raw_metrics_were_logged = False
        if not self._is_asked_for:  # memory tells how many examples were drawn
            trainer._memory_tracker.skip_memory_metrics = True

    @property
    def _is_asked_for(self) -> bool:
        """Whether raw metrics may be logged."""
        args = self._trainer.args
        return isinstance(args, DPGrapeTrainingArguments) and args.log_non_private_metrics

    # ---- Logs ------------------------------------------------------------------------------

    def begin_run(self, *, is_search: bool) -> None:
        """Forgets the released losses of the run before.

        Args:
            is_search: whether a search of hyperparameters is on.

        Raises:
            ValueError: raw metrics on the training set would decide about something.
        """
        self._refuse_choices_by_training_set(is_search=is_search)
        self._private_losses = []

    def shown_loss(self, loss: StepLoss, plan: PrivacyPlan) -> Tensor:
        """What the Trainer sees of a step's loss: 0 unless the raw one is asked for.

        A loss that the mechanism released is kept for the next log.

        Args:
            loss: of the step.
            plan: of the run; an average is over its expected batch.
        """
        if loss.private_mean is not None:
            self._private_losses.append(float(loss.private_mean))
        raw_sum = loss.raw_sum if self._is_asked_for else torch.zeros(())
        return (raw_sum / plan.expected_batch_size).to(self._trainer.args.device)

    def shown_output(self, output: TrainOutput) -> TrainOutput:
        """What `train` returns: without the mean loss unless it is asked for."""
        return output if self._is_asked_for else output._replace(training_loss=float("nan"))

    def filter_(self, logs: dict[str, float], told_ledger: Callable[[], RunLedger] | None) -> None:
        """Leaves no raw loss that was not asked for, and adds epsilon and the noisy loss."""
        if self.is_on_training_set:  # goes nowhere, see there
            return
        is_training_log = any(name in logs for name in _RAW_LOGS)
        for name in [name for name in logs if _is_raw(name)]:
            value = logs.pop(name)
            if self._is_asked_for:
                logs[_RAW + name] = value
                self.raw_metrics_were_logged = True
        if is_training_log and told_ledger is not None:
            ledger = told_ledger()
            logs["epsilon"] = ledger.epsilon()
            logs["target_delta"] = ledger.plan.target_delta
            if self._private_losses:
                logs.update(ledger.plan.mean_private_loss(self._private_losses))
                self._private_losses.clear()

    # ---- Evaluation on the training set ----------------------------------------------------

    @contextmanager
    def evaluation(self, dataset: object) -> Iterator[None]:
        """One evaluation, perhaps inside that of a dictionary of data sets.

        Args:
            dataset: on which it is, if that is known already: neither None nor a name.
        """
        outer = self._present_evaluation
        try:
            with ExitStack() as self._present_evaluation:
                self.begin_evaluation(dataset)
                yield
        finally:
            self._present_evaluation = outer

    def begin_evaluation(self, dataset: object) -> None:
        """Keeps the rest of the present evaluation, if there is one, apart where it has to be."""
        stack, is_apart = self._present_evaluation, self.is_on_training_set
        if stack is not None and not is_apart and self.is_training_set(dataset):
            stack.enter_context(self._kept_apart())

    def named(self, eval_dataset: object) -> object:
        """The evaluation data meant by None (the trainer's own) or by a name (one of these)."""
        own = self._trainer.eval_dataset
        data = own if eval_dataset is None else eval_dataset
        return _by_name(own)[data] if isinstance(data, str) else data

    @contextmanager
    def _kept_apart(self) -> Iterator[None]:
        """Evaluates without callbacks and logs."""
        if not (self._is_asked_for or self._was_warned_of_training_set):
            logger.warning(
                "Metrics on the training set are not covered by epsilon: they are returned, but "
                "not logged (unless `log_non_private_metrics`), and never on the card."
            )
            self._was_warned_of_training_set = True
        trainer = self._trainer
        handler, history = trainer.callback_handler, trainer.state.log_history
        trainer.callback_handler = CallbackHandler(  # type: ignore[no-untyped-call]
            [DefaultFlowCallback()],
            trainer.model,
            trainer.processing_class,
            trainer.optimizer,
            trainer.lr_scheduler,
        )
        trainer.state.log_history, self.is_on_training_set = [], True
        try:
            yield
        finally:
            apart = trainer.state.log_history
            trainer.callback_handler, trainer.state.log_history = handler, history
            self.is_on_training_set = False
        if self._is_asked_for:
            self.raw_metrics_were_logged = True
            for logs in apart:
                trainer.log({_RAW + k: v for k, v in logs.items() if k not in ("epoch", "step")})

    def is_training_set(self, dataset: object) -> bool:
        """Whether it is the training set itself, or the outcome of the same operations."""
        known = (self._trainer.train_dataset, *self._training_sets)
        return any(_is_same(dataset, other) for other in known)

    def _refuse_choices_by_training_set(self, *, is_search: bool) -> None:
        """Refuses a best checkpoint, a stop, a rate or a search that raw training metrics decide.

        Raises:
            ValueError: in one sentence.
        """
        data = self._trainer.eval_dataset
        names = [name for name, part in _by_name(data).items() if self.is_training_set(part)]
        prefixes = [f"eval_{name}_" if name else "eval_" for name in names]
        metric = self._trainer.args.metric_for_best_model
        key = metric if metric is None or metric.startswith("eval_") else f"eval_{metric}"
        decides = key is not None and key.startswith(tuple(prefixes))
        if prefixes and (decides or is_search):
            what = f"`metric_for_best_model={metric}`" if decides else "A search"
            raise ValueError(
                f"{what} would choose by metrics on the training set, which epsilon does not "
                "cover; evaluate on other data."
            )


def _by_name(dataset: object) -> dict[str, object]:
    """Data sets by name; "" for the only one."""
    return dataset if isinstance(dataset, dict) else {"": dataset}


def _is_raw(name: str) -> bool:
    """Whether a log entry is a function of the training data without noise."""
    of_training = name.startswith("train_") and name.endswith(_RAW_TRAIN_METRICS)
    return name in _RAW_LOGS or of_training or _RAW_MEMORY in name


def _is_same(dataset: object, other: object) -> bool:
    """Whether two are one object, or have one fingerprint (of Hugging Face's `datasets`)."""
    mine, theirs = (getattr(data, "_fingerprint", None) for data in (dataset, other))
    return dataset is not None and (dataset is other or (mine is not None and mine == theirs))
