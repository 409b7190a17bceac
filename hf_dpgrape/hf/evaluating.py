"""The part of a private Trainer that evaluates and predicts."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from hf_dpgrape.hf.class_counts import ClassCounts, OneClass
from hf_dpgrape.hf.disclosure import Disclosure
from hf_dpgrape.hf.own_loss import named_outputs
from hf_dpgrape.hf.task_losses import head_of, labels_are_tokens
from hf_dpgrape.hf.trainer_part import TrainerPart
from hf_dpgrape.hf.trainers_losses import evaluation_loss, has_own_evaluation

logger = logging.getLogger(__name__)


class EvaluatingPart(TrainerPart):
    """Evaluates by the loss that is trained, and says if a classifier predicts one class only.

    Guarantees:
        Predictions on the training set are not counted.
    """

    _disclosure: Disclosure
    model: Any  # None only inside the Trainer's constructor
    _class_counts: ClassCounts | None = None  # of the present evaluation
    # By the prefix of its metrics, what a data set's last evaluation was if it is of one class.
    _of_one_class: dict[str, dict[str, Any]]

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> dict[str, float]:
        """As `Trainer.evaluate`; metrics on the training set are returned, but not logged."""
        if isinstance(eval_dataset, dict):  # one by one, before a trainer prepares them
            parts = (
                self.evaluate(data, ignore_keys, f"{metric_key_prefix}_{name}", **kwargs)
                for name, data in eval_dataset.items()
            )
            return {name: value for part in parts for name, value in part.items()}
        with self._disclosure.evaluation(eval_dataset):
            counts = self._class_counts = ClassCounts()
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)
            self._class_counts = None
            self._tell_of_one_class(counts.over_processes().one_class(), metric_key_prefix)
            return metrics

    def _tell_of_one_class(self, found: OneClass | None, prefix: str) -> None:
        """Keeps for the record, and says unless training goes on, that one class is predicted."""
        if self._disclosure.is_on_training_set:
            return
        self._of_one_class.pop(prefix, None)
        if found is None:
            return
        step = self.state.global_step
        self._of_one_class[prefix] = {"step": step, **asdict(found), "says": str(found)}
        goes_on = self.is_in_train and step < self.state.max_steps
        if self.is_world_process_zero() and not goes_on:
            logger.warning(
                "The model %s: it has learned next to nothing; `hf-dpgrape suggest` gives "
                "settings with more signal.",
                found,
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of an evaluation: the mean of the examples' own if it is not the model's."""
        labels = inputs.get("labels")
        if has_own_evaluation(self):
            loss, outputs = evaluation_loss(self, model, inputs)
        elif return_outputs:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        else:  # TRL asks for none, and warns who does
            return super().compute_loss(model, inputs, False, num_items_in_batch)
        counts = None if self._disclosure.is_on_training_set else self._class_counts
        if counts is not None and not labels_are_tokens(head_of(model)):
            counts.add(outputs, labels)
        return (loss, outputs) if return_outputs else loss

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
