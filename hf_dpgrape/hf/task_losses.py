"""The losses of transformers' task heads, one per sample, and which of them a model may have.

Loss i equals `model(**sample_i).loss`, the model's own loss of that sample alone: it is normalized
inside the sample, by its own number of labels, and never by anything of its neighbors (so
`num_items_in_batch` has no place here). A sample without any label has loss 0. Where another
`CrossEntropy` than the models' own is asked for, it stands in the place of theirs.

Shapes: B samples, T positions, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto as auto

from hf_dpgrape.hf.cross_entropy import PLAIN, CrossEntropy, refused_for
from hf_dpgrape.mechanism.synthetic import IGNORED

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

Loss = Callable[[Any, Mapping[str, Tensor], Any, CrossEntropy], Tensor]


def _mean_over_labels(logits: Tensor, labels: Tensor, cross_entropy: CrossEntropy) -> Tensor:
    """Mean cross entropy over a sample's own labels: logits (B, T, V), labels (B, T) -> (B,)."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten())
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


def causal_lm(
    outputs: Any, labels: Mapping[str, Tensor], config: Any, cross_entropy: CrossEntropy = PLAIN
) -> Tensor:
    """Next-token prediction: logits at t against the label at t + 1."""
    logits = _at_least_float32(outputs.logits)
    # The labels are shifted, not the logits: a slice of those would be a copy.
    following = F.pad(_checked(labels["labels"], logits)[:, 1:], (0, 1), value=IGNORED)
    return _mean_over_labels(logits, following, cross_entropy)


def token_level(
    outputs: Any, labels: Mapping[str, Tensor], config: Any, cross_entropy: CrossEntropy = PLAIN
) -> Tensor:
    """One label per position: masked LM, token classification."""
    logits = _at_least_float32(outputs.logits)
    return _mean_over_labels(logits, _checked(labels["labels"], logits), cross_entropy)


def seq2seq_lm(
    outputs: Any, labels: Mapping[str, Tensor], config: Any, cross_entropy: CrossEntropy = PLAIN
) -> Tensor:
    """The decoder's next tokens: its inputs are the labels shifted, so positions agree."""
    return token_level(outputs, labels, config, cross_entropy)


def decoder_inputs(head: Any, labels: Tensor) -> Tensor:
    """The labels behind a start token, as the model itself makes them."""
    own = getattr(head, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:  # MBart's and PLBart's start token is the language, the last of the labels
        return own(labels=labels)  # type: ignore[no-any-return]
    shifted = F.pad(labels[:, :-1], (1, 0), value=head.config.decoder_start_token_id)
    return shifted.masked_fill(shifted == IGNORED, head.config.pad_token_id)


def sequence_classification(
    outputs: Any, labels: Mapping[str, Tensor], config: Any, cross_entropy: CrossEntropy = PLAIN
) -> Tensor:
    """One label, one number or several yes/no labels per sample, by `config.problem_type`."""
    logits, target = _at_least_float32(outputs.logits), labels["labels"]
    problem = config.problem_type
    if problem is None:
        integral = target.dtype in (torch.long, torch.int)
        single = "single_label_classification" if integral else "multi_label_classification"
        problem = "regression" if config.num_labels == 1 else single
    if problem == "single_label_classification":
        return cross_entropy(logits, target.view(-1))
    if not cross_entropy.is_plain:
        raise refused_for(cross_entropy, f"labels for {problem}")
    if problem == "regression":
        return F.mse_loss(
            logits.flatten(1), target.to(logits.dtype).view(len(logits), -1), reduction="none"
        ).mean(1)
    target = target.to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)


def question_answering(
    outputs: Any, labels: Mapping[str, Tensor], config: Any, cross_entropy: CrossEntropy = PLAIN
) -> Tensor:
    """Mean of the losses of an answer's start and end; positions outside the input are ignored."""
    if not cross_entropy.is_plain:
        raise refused_for(cross_entropy, "positions of answers")
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
BY_POSITION = (causal_lm, token_level, seq2seq_lm)


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
