"""What is logged: epsilon and the noisy loss; nothing about training data without noise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from transformers import DefaultFlowCallback
from transformers.trainer_callback import CallbackHandler

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.losses import PerSampleLoss, head_of
from hf_dpgrape.hf.trainer_part import TrainerPart
from hf_dpgrape.privacy.ledger import RunLedger

logger = logging.getLogger(__name__)

_RAW = "non_private_"

#: Log entries of the Trainer that are functions of private data without noise.
_RAW_LOGS = ("loss", "train_loss")

#: Time and memory grow with the number of examples drawn, which is secret.
_RAW_TRAIN_METRICS = ("_runtime", "_per_second")
_RAW_MEMORY = "_mem_"


class LoggingMixin(TrainerPart):
    """The part of a private Trainer that decides what is logged.

    Guarantees:
        Neither the logs nor a callback see a training loss without noise, how long training took
        or how much memory, or a metric of an evaluation on the training set, unless
        `log_non_private_metrics` is set; such an evaluation returns its metrics to the caller
        alone.
    """

    args: DPGrapeTrainingArguments
    model: Any
    _ledger: RunLedger | None
    _private_losses: list[float]
    _told_ledger: Any
    _training_sets: tuple[Any, ...] = ()
    _present_evaluation: ExitStack | None = None
    _is_on_training_set = False
    _was_warned_of_training_set = False
    _raw_metrics_were_logged = False

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs epsilon spent so far, and no raw loss unless it was asked for."""
        if self._is_on_training_set:  # goes nowhere, see there
            super().log(logs, start_time)
            return
        is_training_log = any(name in logs for name in _RAW_LOGS)
        for name in [name for name in logs if _is_raw(name)]:
            value = logs.pop(name)
            if self.args.log_non_private_metrics:
                logs[_RAW + name] = value
                self._raw_metrics_were_logged = True
        if is_training_log and self._ledger is not None:
            ledger: RunLedger = self._told_ledger()
            logs["epsilon"] = ledger.epsilon()
            logs["target_delta"] = ledger.plan.target_delta
            if self._private_losses:
                logs.update(ledger.plan.mean_private_loss(self._private_losses))
                self._private_losses.clear()
        super().log(logs, start_time)

    # ---- Evaluation on the training set ----------------------------------------------------

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
        with self._evaluation():
            if not isinstance(eval_dataset, str):
                self._begin_evaluation(eval_dataset)
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
        losses, outputs = own.with_outputs(model, inputs)
        loss = losses.mean()
        if not isinstance(outputs, dict):  # the Trainer leaves the first of several out, the loss
            outputs = (loss, *(outputs if isinstance(outputs, tuple) else (outputs,)))
        return (loss, outputs) if return_outputs else loss

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.predict`; callbacks see no metrics on the training set."""
        with self._evaluation():
            self._begin_evaluation(test_dataset)
            return super().predict(test_dataset, *args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As the Trainer's; here an evaluation tells on which data it is."""
        data: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        by_name: Any = self.eval_dataset
        self._begin_evaluation(by_name[data] if isinstance(data, str) else data)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As the Trainer's; here a prediction tells on which data it is."""
        self._begin_evaluation(test_dataset)
        return super().get_test_dataloader(test_dataset)

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """One evaluation, perhaps inside that of a dictionary of data sets."""
        outer = self._present_evaluation
        try:
            with ExitStack() as self._present_evaluation:
                yield
        finally:
            self._present_evaluation = outer

    def _begin_evaluation(self, dataset: Any) -> None:
        """Keeps the rest of the present evaluation, if there is one, apart where it has to be."""
        stack, is_apart = self._present_evaluation, self._is_on_training_set
        if stack is not None and not is_apart and self._is_training_set(dataset):
            stack.enter_context(self._kept_apart())

    @contextmanager
    def _kept_apart(self) -> Iterator[None]:
        """Evaluates without callbacks and logs."""
        if not (self.args.log_non_private_metrics or self._was_warned_of_training_set):
            logger.warning(
                "Metrics on the training set are not covered by epsilon: they are returned, but "
                "not logged (unless `log_non_private_metrics`), and never on the card."
            )
            self._was_warned_of_training_set = True
        handler, history = self.callback_handler, self.state.log_history
        self.callback_handler = CallbackHandler(  # type: ignore[no-untyped-call]
            [DefaultFlowCallback()],
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        self.state.log_history, self._is_on_training_set = [], True
        try:
            yield
        finally:
            apart = self.state.log_history
            self.callback_handler, self.state.log_history = handler, history
            self._is_on_training_set = False
        if self.args.log_non_private_metrics:
            self._raw_metrics_were_logged = True
            for logs in apart:
                self.log({_RAW + k: v for k, v in logs.items() if k not in ("epoch", "step")})

    def _know_training_sets(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Remembers what a trainer was given, for one like TRL's prepares it to new objects."""
        of_given = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
        of_now = (
            self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        )
        same = (of_now.get(k) for k, data in of_given.items() if _is_same(data, train_dataset))
        self._training_sets = (train_dataset, *same)

    def _is_training_set(self, dataset: Any) -> bool:
        """Whether it is the training set itself, or the outcome of the same operations."""
        return any(_is_same(dataset, known) for known in (self.train_dataset, *self._training_sets))

    def _refuse_choices_by_training_set(self) -> None:
        """Refuses a best checkpoint, a stop, a rate or a search that raw training metrics decide.

        Raises:
            ValueError: in one sentence.
        """
        by_name = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
        prefixes = [
            f"eval_{name}_" for name, data in by_name.items() if self._is_training_set(data)
        ]
        if self._is_training_set(self.eval_dataset):
            prefixes = ["eval_"]
        metric = self.args.metric_for_best_model
        key = metric if metric is None or metric.startswith("eval_") else f"eval_{metric}"
        decides = key is not None and key.startswith(tuple(prefixes))
        if prefixes and (decides or self.hp_search_backend is not None):
            what = f"`metric_for_best_model={metric}`" if decides else "A search"
            raise ValueError(
                f"{what} would choose by metrics on the training set, which epsilon does not "
                "cover; evaluate on other data."
            )


def _is_raw(name: str) -> bool:
    """Whether a log entry is a function of the training data without noise."""
    of_training = name.startswith("train_") and name.endswith(_RAW_TRAIN_METRICS)
    return name in _RAW_LOGS or of_training or _RAW_MEMORY in name


def _is_same(dataset: Any, other: Any) -> bool:
    """Whether two are one object, or have one fingerprint (of Hugging Face's `datasets`)."""
    mine, theirs = (getattr(data, "_fingerprint", None) for data in (dataset, other))
    return dataset is not None and (dataset is other or (mine is not None and mine == theirs))
