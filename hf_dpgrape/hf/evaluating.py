"""Evaluations of a private Trainer: their loss, and whether one class is all that is predicted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import nn
from transformers import Trainer

from hf_dpgrape.hf.class_counts import ClassCounts, OneClass
from hf_dpgrape.hf.disclosure import Disclosure
from hf_dpgrape.hf.task_losses import head_of, labels_are_tokens
from hf_dpgrape.hf.trainers_losses import evaluation_loss, has_own_evaluation

logger = logging.getLogger(__name__)


class Evaluations:
    """Counts what a classifier predicts while it is evaluated, and says if it is one class only.

    Guarantees:
        Predictions on the training set are not counted.

    Args:
        trainer: which evaluates.
        disclosure: knows on which data.
    """

    def __init__(self, trainer: Trainer, disclosure: Disclosure) -> None:
        self._trainer = trainer
        self._disclosure = disclosure
        self._counts: ClassCounts | None = None  # of the present evaluation
        # By the prefix of its metrics, what a data set's last evaluation was if it is of one class.
        self._of_one_class: dict[str, dict[str, Any]] = {}

    def begin_run(self) -> None:
        """Forgets the evaluations of a run before."""
        self._of_one_class.clear()

    def record(self) -> dict[str, Any]:
        """What `privacy.json` says, by prefix; nothing if no evaluation was of one class."""
        return {"evaluations_of_one_class": dict(self._of_one_class)} if self._of_one_class else {}

    @contextmanager
    def of(self, prefix: str) -> Iterator[None]:
        """Counts inside the block, in which a data set is evaluated; says what was found after it.

        Args:
            prefix: of the metrics' names.
        """
        counts = self._counts = ClassCounts()
        try:
            yield
        finally:
            self._counts = None
        self._tell(counts.over_processes().one_class(), prefix)

    def loss(
        self,
        usual: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of an evaluation: the mean of the examples' own if it is not the model's.

        Args:
            usual: the Trainer's `compute_loss`, whose other arguments follow.
            model: the model.
            inputs: of a batch.
            return_outputs: whether the outputs are wanted, too.
            num_items_in_batch: over which the usual loss is averaged.
        """
        labels = inputs.get("labels")
        if has_own_evaluation(self._trainer):
            loss, outputs = evaluation_loss(self._trainer, model, inputs)
        elif return_outputs:
            loss, outputs = usual(model, inputs, True, num_items_in_batch)
        else:  # TRL asks for none, and warns who does
            return usual(model, inputs, False, num_items_in_batch)
        self._count(model, outputs, labels)
        return (loss, outputs) if return_outputs else loss

    def _count(self, model: nn.Module, outputs: Any, labels: Any) -> None:
        """Counts a batch of an evaluation whose labels are classes."""
        if self._counts is None or self._disclosure.is_on_training_set:
            return
        if not labels_are_tokens(head_of(model)):
            self._counts.add(outputs, labels)

    def _tell(self, found: OneClass | None, prefix: str) -> None:
        """Keeps for the record, and says unless training goes on, that one class is predicted."""
        if self._disclosure.is_on_training_set:
            return
        self._of_one_class.pop(prefix, None)
        if found is None:
            return
        trainer = self._trainer
        step = trainer.state.global_step
        self._of_one_class[prefix] = {"step": step, **asdict(found), "says": str(found)}
        goes_on = trainer.is_in_train and step < trainer.state.max_steps
        if trainer.is_world_process_zero() and not goes_on:
            logger.warning(
                "The model %s: it has learned next to nothing; `hf-dpgrape suggest` gives "
                "settings with more signal.",
                found,
            )


def one_by_one(
    evaluate: Callable[..., dict[str, float]],
    datasets: Mapping[str, Any],
    ignore_keys: list[str] | None,
    prefix: str,
    **kwargs: Any,
) -> dict[str, float]:
    """The metrics of several data sets, each under its own prefix."""
    parts = (
        evaluate(data, ignore_keys, f"{prefix}_{name}", **kwargs) for name, data in datasets.items()
    )
    return {name: value for part in parts for name, value in part.items()}
