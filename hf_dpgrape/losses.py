"""Per-sample losses of transformers' task heads.

Loss i equals `model(**sample_i).loss`, the model's own loss of that sample alone: it is normalized
inside the sample, by its own number of labels, and never by anything of its neighbors (so
`num_items_in_batch` has no place here). A sample without any label has loss 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto as auto

#: Label positions that count for nothing, transformers' convention.
IGNORED = -100

Loss = Callable[[Any, Mapping[str, Tensor], Any], Tensor]


def _mean_over_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over a sample's own labels: logits (B, T, V), labels (B, T) -> (B,)."""
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.view_as(labels).sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def _aligned(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels for all positions of the logits: virtual tokens of prompt tuning come first."""
    return F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=IGNORED)


def _at_least_float32(tensor: Tensor) -> Tensor:
    """16-bit logits in float32, as transformers' own losses do."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def causal_lm(outputs: Any, labels: Mapping[str, Tensor], config: Any) -> Tensor:
    """Next-token prediction: logits at t against the label at t + 1."""
    logits = _at_least_float32(outputs.logits)
    # The labels are shifted, not the logits: a slice of those would be a copy.
    following = F.pad(_aligned(labels["labels"], logits)[:, 1:], (0, 1), value=IGNORED)
    return _mean_over_labels(logits, following)


def token_level(outputs: Any, labels: Mapping[str, Tensor], config: Any) -> Tensor:
    """One label per position: masked LM, token classification."""
    logits = _at_least_float32(outputs.logits)
    return _mean_over_labels(logits, _aligned(labels["labels"], logits))


def seq2seq_lm(outputs: Any, labels: Mapping[str, Tensor], config: Any) -> Tensor:
    """The decoder's next tokens: its inputs are the labels shifted, so positions agree."""
    return token_level(outputs, labels, config)


def _shift_right(labels: Tensor, config: Any) -> Tensor:
    """Decoder inputs: the start token, then the labels but for the last one."""
    start = config.decoder_start_token_id
    shifted = F.pad(labels[:, :-1], (1, 0), value=start)
    return shifted.masked_fill(shifted == IGNORED, config.pad_token_id)


def sequence_classification(outputs: Any, labels: Mapping[str, Tensor], config: Any) -> Tensor:
    """One label, one number or several yes/no labels per sample, by `config.problem_type`."""
    logits, target = _at_least_float32(outputs.logits), labels["labels"]
    problem = config.problem_type
    if problem is None:
        integral = not (target.is_floating_point() or target.is_complex())
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
    (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, causal_lm, "text-generation"),
    (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, token_level, "fill-mask"),
    (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, seq2seq_lm, "text2text-generation"),
    (auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, seq2seq_lm, "automatic-speech-recognition"),
)

_LABELS = ("labels", "start_positions", "end_positions")


def _task_of(model: nn.Module) -> tuple[Loss, str] | None:
    """Loss and name of the task of a model's head; None if its class has none."""
    name = type(model).__name__
    for names, loss, task in _TASKS:
        for value in names.values():
            if name == value or (isinstance(value, tuple) and name in value):
                return loss, task
    return None


def loss_of(model: nn.Module) -> Loss | None:
    """The per-sample loss of a model's task head; None if its class has none."""
    found = _task_of(model)
    return found and found[0]


def task_name_of(model: nn.Module) -> str:
    """What the Hub calls the task of a model's head, as "text-classification"."""
    found = _task_of(model)
    return found[1] if found else "other"


def head_of(model: nn.Module) -> nn.Module:
    """The model that has the task head: the base model of a PEFT model, else itself."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


class PerSampleLoss:
    """Runs a model on a batch and returns one loss per sample.

    Args:
        head: the model that has the task head (the base model of a PEFT model).
        compute_loss_func: the user's own loss, `(outputs, labels) -> (B,)`; None for the head's.

    Raises:
        ValueError: neither is there a `compute_loss_func` nor a per-sample loss for the head.
    """

    def __init__(
        self, head: nn.Module, compute_loss_func: Callable[..., Tensor] | None = None
    ) -> None:
        self._loss = loss_of(head)
        if self._loss is None and compute_loss_func is None:
            raise ValueError(
                f"`{type(head).__name__}` has no per-sample loss of ours; pass "
                "`compute_loss_func=f` with f(outputs, labels) returning one loss per sample."
            )
        self._head = head
        self._compute_loss_func = compute_loss_func

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """One loss per sample (B,) of this batch."""
        features = dict(inputs)
        labels = {key: features.pop(key) for key in _LABELS if key in features}
        if self._loss is seq2seq_lm and "labels" in labels:
            start = _shift_right(labels["labels"], self._head.config)
            features.setdefault("decoder_input_ids", start)
        outputs = model(**features)
        if self._compute_loss_func is not None:
            target = labels["labels"] if list(labels) == ["labels"] else labels
            return self._compute_loss_func(outputs, target)
        if not labels:
            raise ValueError(
                f"The training data has none of the label columns {list(_LABELS)}; "
                "rename yours, or pass `compute_loss_func`."
            )
        assert self._loss is not None
        return self._loss(outputs, labels, self._head.config)
