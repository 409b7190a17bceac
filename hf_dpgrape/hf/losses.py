"""Per-sample losses of transformers' task heads.

Loss i equals `model(**sample_i).loss`, the model's own loss of that sample alone: it is normalized
inside the sample, by its own number of labels, and never by anything of its neighbors (so
`num_items_in_batch` has no place here). A sample without any label has loss 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto as auto

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
from hf_dpgrape.mechanism.synthetic import IGNORED
from hf_dpgrape.privacy.randomness import global_randomness_restored

#: Tasks whose labels are tokens.
_TOKEN_TASKS = frozenset(
    {
        "text-generation",
        "fill-mask",
        "text2text-generation",
        "automatic-speech-recognition",
        "image-text-to-text",
    }
)

Loss = Callable[[Any, Mapping[str, Tensor], Any], Tensor]


def _mean_over_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over a sample's own labels: logits (B, T, V), labels (B, T) -> (B,)."""
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.view_as(labels).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def _checked(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels of which there is one for every position of the logits."""
    if labels.shape != logits.shape[:2]:
        raise ValueError(
            "Expected one label for every position of the model's logits, got `labels` of another "
            "shape; let the collator bring both to one length, or pass `compute_loss_func`."
        )
    return labels


def _at_least_float32(tensor: Tensor) -> Tensor:
    """16-bit logits in float32, as transformers' own losses do."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def causal_lm(outputs: Any, labels: Mapping[str, Tensor], config: Any) -> Tensor:
    """Next-token prediction: logits at t against the label at t + 1."""
    logits = _at_least_float32(outputs.logits)
    # The labels are shifted, not the logits: a slice of those would be a copy.
    following = F.pad(_checked(labels["labels"], logits)[:, 1:], (0, 1), value=IGNORED)
    return _mean_over_labels(logits, following)


def token_level(outputs: Any, labels: Mapping[str, Tensor], config: Any) -> Tensor:
    """One label per position: masked LM, token classification."""
    logits = _at_least_float32(outputs.logits)
    return _mean_over_labels(logits, _checked(labels["labels"], logits))


def seq2seq_lm(outputs: Any, labels: Mapping[str, Tensor], config: Any) -> Tensor:
    """The decoder's next tokens: its inputs are the labels shifted, so positions agree."""
    return token_level(outputs, labels, config)


def _decoder_inputs(head: Any, labels: Tensor) -> Tensor:
    """The labels behind a start token, as the model itself makes them."""
    own = getattr(head, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:  # MBart's and PLBart's start token is the language, the last of the labels
        return own(labels=labels)  # type: ignore[no-any-return]
    shifted = F.pad(labels[:, :-1], (1, 0), value=head.config.decoder_start_token_id)
    return shifted.masked_fill(shifted == IGNORED, head.config.pad_token_id)


def sequence_classification(outputs: Any, labels: Mapping[str, Tensor], config: Any) -> Tensor:
    """One label, one number or several yes/no labels per sample, by `config.problem_type`."""
    logits, target = _at_least_float32(outputs.logits), labels["labels"]
    problem = config.problem_type
    if problem is None:
        integral = target.dtype in (torch.long, torch.int)
        single = "single_label_classification" if integral else "multi_label_classification"
        problem = "regression" if config.num_labels == 1 else single
    if problem == "regression":
        return F.mse_loss(
            logits.flatten(1), target.to(logits.dtype).view(len(logits), -1), reduction="none"
        ).mean(1)
    if problem == "single_label_classification":
        return F.cross_entropy(logits, target.view(-1), reduction="none", ignore_index=IGNORED)
    target = target.to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)


def question_answering(outputs: Any, labels: Mapping[str, Tensor], config: Any) -> Tensor:
    """Mean of the losses of an answer's start and end; positions outside the input are ignored."""
    total: Any = 0.0
    for side in ("start", "end"):
        logits = _at_least_float32(outputs[f"{side}_logits"])
        positions = labels[f"{side}_positions"].view(len(logits)).clamp(0, logits.shape[1])
        total = total + F.cross_entropy(
            logits, positions, reduction="none", ignore_index=logits.shape[1]
        )
    return total / 2  # type: ignore[no-any-return]


#: Loss and the Hub's name of each task, by the class names that transformers' auto classes know.
#: Some classes have several tasks: BART's is listed for masked LM too, but its loss is seq2seq's.
_TASKS: tuple[tuple[Mapping[str, Any], Loss, str], ...] = (
    (
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        sequence_classification,
        "text-classification",
    ),
    (
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        sequence_classification,
        "image-classification",
    ),
    (
        auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
        sequence_classification,
        "audio-classification",
    ),
    (auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, token_level, "token-classification"),
    (auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES, question_answering, "question-answering"),
    (auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, seq2seq_lm, "automatic-speech-recognition"),
    (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, seq2seq_lm, "text2text-generation"),
    (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, causal_lm, "text-generation"),
    (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, token_level, "fill-mask"),
    (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, seq2seq_lm, "image-text-to-text"),
)

#: Losses with one label per position.
_BY_POSITION = (causal_lm, token_level, seq2seq_lm)

#: Largest relative deviation from the model's own loss, in 16 bits and in more: both are computed
#: from the same logits, but some models average in the precision of these.
_AGREEMENT_16_BIT, _AGREEMENT = 5e-2, 1e-4


def _tasks_of(model: nn.Module) -> list[tuple[Loss, str]]:
    """Losses and names of the tasks of a model's head, the likeliest first."""
    name = type(model).__name__
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    found = []
    for names, loss, task in _TASKS:
        if any(name in (v if isinstance(v, tuple) else (v,)) for v in names.values()):
            # Models of sound or images without a decoder of their own read the text after these.
            found.append((causal_lm if loss is seq2seq_lm and not has_encoder else loss, task))
    return found


def candidate_losses(model: nn.Module) -> tuple[Loss, ...]:
    """The losses that a model's head may have, the likeliest first.

    Decoders that were taken out of an encoder-decoder model (`BartForCausalLM`) are trained on
    labels that are shifted already.
    """
    found = [loss for loss, _ in _tasks_of(model)]
    if causal_lm in found:
        found.append(token_level)
    return tuple(dict.fromkeys(found))


def loss_of(model: nn.Module) -> Loss | None:
    """The likeliest per-sample loss of a model's task head; None if its class has none."""
    return next(iter(candidate_losses(model)), None)


def task_name_of(model: nn.Module) -> str:
    """What the Hub calls the task of a model's head, as "text-classification"."""
    return next((task for _, task in _tasks_of(model)), "other")


def labels_are_tokens(model: nn.Module) -> bool:
    """Whether the labels of a model's task are ids of tokens."""
    return task_name_of(model) in _TOKEN_TASKS


def head_of(model: nn.Module) -> nn.Module:
    """The model that has the task head: the base model of a PEFT model, else itself."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


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

    Raises:
        ValueError: there is neither a `compute_loss_func`, nor a loss for the head, nor one of the
            model's own.
    """

    def __init__(
        self, head: nn.Module, compute_loss_func: Callable[..., Tensor] | None = None
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

    def take_own_(self) -> None:
        """From now on the loss is the model's own, of one example at a time."""
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
            return self._by_task(self._loss, model, inputs)
        features, labels = _parted(inputs)
        outputs = model(**self._forward_inputs(self._loss, features, labels))
        one = list(labels) == ["labels"]
        target = labels["labels"] if one else labels or None
        return self._by_row(outputs, target, _num_rows({**labels, **features})), outputs

    def _by_task(
        self, loss: Loss | None, model: nn.Module, inputs: Mapping[str, Any]
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
        if loss in _BY_POSITION:
            labels = _behind_virtual_tokens(model, outputs.logits, labels)
        assert loss is not None
        return loss(outputs, labels, self._head.config), outputs

    def _forward_inputs(
        self, loss: Loss | None, features: dict[str, Any], labels: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """What the model is called with, without labels."""
        if loss is not seq2seq_lm or "labels" not in labels or "decoder_input_ids" in features:
            return features
        return {**features, "decoder_input_ids": _decoder_inputs(self._head, labels["labels"])}

    # ---- Which of the candidates -----------------------------------------------------------

    @torch.no_grad()
    def settle(self, model: nn.Module, inputs: Mapping[str, Any]) -> str:
        """Chooses the candidate that is the model's own loss, by one synthetic example.

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
