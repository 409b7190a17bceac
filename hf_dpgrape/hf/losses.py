"""`PerSampleLoss`: runs a model, and gives one loss per sample that is the model's own of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpgrape.hf.cross_entropy import PLAIN, CrossEntropy
from hf_dpgrape.hf.own_loss import (
    LABELS,
    configs_of,
    kept_problem_type,
    named_outputs,
    own_loss_of_one,
    takes_labels,
    without_caches,
)
from hf_dpgrape.hf.row_by_row import RowByRow
from hf_dpgrape.hf.task_losses import (
    BY_POSITION,
    Loss,
    candidate_losses,
    decoder_inputs,
    labels_are_tokens,
    loss_of,
    seq2seq_lm,
    task_name_of,
)
from hf_dpgrape.mechanism.checks import refuse
from hf_dpgrape.mechanism.synthetic import IGNORED
from hf_dpgrape.privacy.randomness import global_randomness_restored

#: Largest relative deviation from the model's own loss, in 16 bits and in more: both are computed
#: from the same logits, but some models average in the precision of these.
_AGREEMENT_16_BIT, _AGREEMENT = 5e-2, 1e-4


class PerSampleLoss:
    """Runs a model on a batch and returns one loss per sample.

    Where no loss of ours is the head's, it can be the model's own, `model(**example).loss`. That
    may look across a batch, so the batch must then be one example.

    Guarantees:
        A `compute_loss_func` is given one sample at a time (see `RowByRow`).

    Args:
        head: the model that has the task head (the base model of a PEFT model).
        compute_loss_func: the user's own loss of one sample, `(outputs, labels)`; None for the
            head's.
        class_weights: one per class; a weight multiplies the loss of a label, and nothing is
            divided by a sum of weights.
        label_smoothing: share of each label that is spread over all classes or tokens.

    Raises:
        ValueError: there is neither a `compute_loss_func`, nor a loss for the head, nor one of the
            model's own; or weights or smoothing do not fit it.
    """

    def __init__(
        self,
        head: nn.Module,
        compute_loss_func: Callable[..., Tensor] | None = None,
        *,
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        # TRL puts a string in its place for some releases of transformers.
        self._by_row = RowByRow(compute_loss_func) if callable(compute_loss_func) else None
        loss = loss_of(head)
        self._is_own = loss is None and self._by_row is None
        if self._is_own and not takes_labels(head):
            raise ValueError(
                f"`{type(head).__name__}` has no loss of one example (its forward takes no "
                "labels); pass `compute_loss_func=f` with f(outputs, labels) returning the loss of "
                "the one sample that it is given."
            )
        self._loss = loss
        self._head: Any = head
        self._configs = configs_of(head)
        self._cross_entropy = CrossEntropy.of(class_weights, label_smoothing)
        self._refuse_unfit()

    @property
    def labels_are_tokens(self) -> bool:
        """Whether the labels of the head's task are ids of tokens."""
        return labels_are_tokens(self._head)

    @property
    def why_single(self) -> str:
        """Why only one example at a time has a loss; empty if batches have one per sample."""
        if not self._is_own:
            return ""
        return (
            f"the loss of `{type(self._head).__name__}` is known for one example at a time only; "
            'set `capture="single"`, or pass `compute_loss_func=f` with f(outputs, labels) '
            "returning the loss of the one sample that it is given"
        )

    def _refuse_unfit(self) -> None:
        """Refuses class weights and label smoothing where there is nothing to apply them to."""
        if self._cross_entropy.is_plain:
            return
        if self._by_row is not None:
            raise ValueError(
                f"{self._cross_entropy.asked_for} would change nothing beside `compute_loss_func`, "
                "which is the loss; leave it out, and weigh or smooth there."
            )
        self._cross_entropy.refuse_unfit(
            task_name_of(self._head),
            getattr(self._head, "config", None),
            labels_are_tokens=self.labels_are_tokens,
        )

    def take_own_(self) -> None:
        """From now on the loss is the model's own, of one example at a time.

        Raises:
            ValueError: class weights or label smoothing are asked for, which that loss has not.
        """
        if not self._cross_entropy.is_plain:
            why = f"{self._cross_entropy.asked_for} cannot be applied to a loss of the model's own"
            refuse(self._head, {"": why}, "Leave it out, or pass `compute_loss_func`")
        self._is_own = self._by_row is None

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """One loss per sample (B,) of this batch."""
        return self.with_outputs(model, inputs)[0]

    def with_outputs(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """One loss per sample (B,) of this batch, and what the model returned."""
        with without_caches(self._configs):
            return self._with_outputs(model, inputs)

    def _with_outputs(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """As `with_outputs`."""
        if self._is_own:
            return own_loss_of_one(self._head, model, inputs)
        if self._by_row is None:
            return self._by_task(self._loss, model, inputs, self._cross_entropy)
        features, labels = _parted(inputs)
        outputs = model(**self._forward_inputs(self._loss, features, labels))
        one = list(labels) == ["labels"]
        target = labels["labels"] if one else labels or None
        return self._by_row(outputs, target, _num_rows({**labels, **features})), outputs

    def _by_task(
        self,
        loss: Loss | None,
        model: nn.Module,
        inputs: Mapping[str, Any],
        cross_entropy: CrossEntropy = PLAIN,
    ) -> tuple[Tensor, Any]:
        """The losses by one of the task's candidates."""
        features, labels = _parted(inputs)
        if not labels:
            raise ValueError(
                f"The training data has none of the label columns {list(LABELS)}; "
                "rename yours, or pass `compute_loss_func`."
            )
        features = self._forward_inputs(loss, features, labels)
        with named_outputs(self._head.config):
            outputs = model(**features)
        if loss in BY_POSITION:
            labels = _behind_virtual_tokens(model, outputs.logits, labels)
        assert loss is not None
        return loss(outputs, labels, self._head.config, cross_entropy), outputs

    def _forward_inputs(
        self, loss: Loss | None, features: dict[str, Any], labels: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """What the model is called with, without labels."""
        if loss is not seq2seq_lm or "labels" not in labels or "decoder_input_ids" in features:
            return features
        return {**features, "decoder_input_ids": decoder_inputs(self._head, labels["labels"])}

    # ---- Which of the candidates -----------------------------------------------------------

    @torch.no_grad()
    def settle(self, model: nn.Module, inputs: Mapping[str, Any]) -> str:
        """Chooses the candidate that is the model's own loss, by one synthetic example.

        What is compared is before class weights and label smoothing, which models do not have.
        The model runs in the mode that it is in, every time from the same random state. Where it
        has no loss of its own to compare with (it returns none, or fails), the likeliest stays.

        Args:
            model: the model as it is trained, adapters included.
            inputs: ONE example with labels. It must not be private: what is chosen depends on it.

        Returns:
            Nothing, or a sentence why no candidate will do.
        """
        if self._by_row is not None:
            return ""
        if self._is_own:
            return self.why_single
        with without_caches(self._configs):
            return self._settled(model, inputs)

    def _settled(self, model: nn.Module, inputs: Mapping[str, Any]) -> str:
        """As `settle`, where there are candidates."""
        name = type(self._head).__name__
        if getattr(self._head.config, "output_router_logits", False):
            return (
                f"the loss of `{name}` has a part that balances experts over a batch; set "
                "`config.output_router_logits=False`"
            )
        own = self._own_loss(model, inputs)
        if math.isnan(own):
            return ""
        trials = [(inputs, own)]
        for trial in _first_label_alone(inputs):
            own = self._own_loss(model, trial)
            trials.append((trial, 0.0 if math.isnan(own) else own))
        candidates = candidate_losses(self._head)
        errors = [self._deviation(loss, model, trials) for loss in candidates]
        error, best = min(zip(errors, range(len(errors)), strict=True))
        if error > _agreement(model):
            return (
                f"the loss that `{name}` returns on one example is none that is known here; pass "
                "`compute_loss_func=f` with f(outputs, labels) returning the loss of the one "
                "sample that it is given"
            )
        self._loss = candidates[best]
        return ""

    def _own_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> float:
        """The model's own loss of one example; NaN if it has none."""
        config = self._head.config
        try:
            with global_randomness_restored(), named_outputs(config), kept_problem_type(config):
                loss = getattr(model(**inputs), "loss", None)
        except Exception:  # whatever it is, nothing can be compared
            return math.nan
        return math.nan if loss is None else float(loss.mean())

    def _deviation(
        self, loss: Loss, model: nn.Module, trials: list[tuple[Mapping[str, Any], float]]
    ) -> float:
        """The largest relative deviation of a candidate from the model's own loss."""
        worst = 0.0
        for inputs, own in trials:
            try:
                with global_randomness_restored():
                    found = float(self._by_task(loss, model, inputs)[0])
            except Exception:  # the candidate does not fit the outputs or labels
                return math.inf
            worst = max(worst, abs(found - own) / max(abs(own), 1e-3))
        return worst if math.isfinite(worst) else math.inf


def _parted(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The features and the labels of a batch."""
    features = dict(inputs)
    return features, {key: features.pop(key) for key in LABELS if key in features}


def _num_rows(inputs: Mapping[str, Any]) -> int:
    """Number of samples of a batch."""
    return next(len(v) for v in inputs.values() if isinstance(v, Tensor) and v.ndim)


def _behind_virtual_tokens(
    model: Any, logits: Tensor, labels: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Labels with none for the virtual tokens that prompt tuning puts before the example's own."""
    number = getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None) or 0
    target = labels["labels"]
    if logits.shape[1] != target.shape[1] + number:  # a prefix in the cache has no logits
        number = 0
    return {**labels, "labels": F.pad(target, (number, 0), value=IGNORED)}


def _first_label_alone(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The example with its first label only, if it has one per position.

    A loss that shifts labels ignores it, and one that does not shift them does not. On all labels
    the two may agree by chance: both are nearly `log(vocab_size)` if the model knows nothing yet.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return []
    first = torch.full_like(labels, IGNORED)
    first[:, 0] = labels[:, 0]
    return [{**inputs, "labels": first}]


def _agreement(model: nn.Module) -> float:
    """The largest deviation from the model's own loss that rounding explains."""
    parameter = next(model.parameters())
    halves = parameter.element_size() < 4 or torch.is_autocast_enabled(parameter.device.type)
    return _AGREEMENT_16_BIT if halves else _AGREEMENT
