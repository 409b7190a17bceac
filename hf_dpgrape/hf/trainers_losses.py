"""Per-sample losses as a Trainer computes them, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_dpgrape.hf.cross_entropy import PLAIN, CrossEntropy, refused_for
from hf_dpgrape.hf.loss_arguments import LossArguments
from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.hf.pairs import PairLosses, pair_loss_of
from hf_dpgrape.hf.task_losses import head_of


class TrainersLosses:
    """A Trainer's per-sample losses: under its precision, on the inputs that it prepares.

    Args:
        own: the losses.
        precision: what the Trainer computes a loss in.
        prepare: what the Trainer does to the inputs of a batch.
    """

    def __init__(
        self,
        own: PerSampleLoss,
        precision: Callable[[], AbstractContextManager[Any]],
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._own = own
        self._precision = precision
        self._prepare = prepare

    @property
    def labels_are_tokens(self) -> bool:
        """As `PerSampleLoss`."""
        return self._own.labels_are_tokens

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """One loss per sample (B,)."""
        with self._precision():
            return self._own(model, self._prepare(dict(inputs)))

    def settle(self, model: nn.Module, inputs: Mapping[str, Any]) -> str:
        """Why the losses are not the model's own of this synthetic example; nothing if so."""
        with self._precision():
            return self._own.settle(model, self._prepare(dict(inputs)))

    def take_own_(self) -> None:
        """As `PerSampleLoss`."""
        self._own.take_own_()


def own_losses(trainer: Trainer) -> PerSampleLoss:
    """The losses of a trainer's model, or those of its `compute_loss_func`."""
    return losses_of(trainer.args, _model_of(trainer), trainer.compute_loss_func)


def losses_of(
    args: TrainingArguments, model: nn.Module, compute_loss_func: Callable[..., Tensor] | None
) -> PerSampleLoss:
    """The losses that the arguments ask for.

    Raises:
        ValueError: as `PerSampleLoss`.
    """
    weights = args.class_weights if isinstance(args, LossArguments) else None
    return PerSampleLoss(
        head_of(model),
        compute_loss_func,
        class_weights=weights,
        label_smoothing=args.label_smoothing_factor,
    )


def has_own_evaluation(trainer: Trainer) -> bool:
    """Whether the loss of an evaluation is another one than the model's own."""
    return callable(trainer.compute_loss_func) or not _cross_entropy_of(trainer.args).is_plain


def _cross_entropy_of(args: TrainingArguments) -> CrossEntropy:
    """The cross entropy that the arguments ask for."""
    return args.cross_entropy() if isinstance(args, LossArguments) else PLAIN


def trainers_losses(trainer: Trainer) -> TrainersLosses | PairLosses:
    """The losses of a trainer's model as the trainer computes them.

    Raises:
        ValueError: class weights or label smoothing are asked for where examples are pairs.
    """
    precision, prepare = trainer.compute_loss_context_manager, trainer._prepare_inputs
    if pair_loss := pair_loss_of(trainer):
        if not (wanted := _cross_entropy_of(trainer.args)).is_plain:
            raise refused_for(wanted, "pairs of answers")
        head = head_of(_model_of(trainer))
        return PairLosses(pair_loss, trainer.args, head=head, precision=precision, prepare=prepare)
    return TrainersLosses(own_losses(trainer), precision, prepare)


def evaluation_loss(
    trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any]
) -> tuple[Tensor, object]:
    """The mean of the examples' own losses, and the outputs as the Trainer has them.

    Args:
        trainer: whose loss is another one than the model's own.
        model: the model.
        inputs: of a batch.
    """
    losses, outputs = own_losses(trainer).with_outputs(model, inputs)
    loss = losses.mean()
    if not isinstance(outputs, dict):  # the Trainer leaves the first of several out, the loss
        outputs = (loss, *(outputs if isinstance(outputs, tuple) else (outputs,)))
    return loss, outputs


def _model_of(trainer: Trainer) -> nn.Module:
    assert isinstance(trainer.model, nn.Module)  # it is None only inside the constructor
    return trainer.model
