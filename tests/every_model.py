"""Every model type of the installed transformers, small: how its gradients are taken, or why not.

    python tests/every_model.py models.md --only bert,gpt2

Configurations are the types' defaults with every size shrunk by name; what does not build that way
is reported as such. Gradients are compared with one plain backward pass per synthetic example.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import math
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import configuration_auto
from transformers.models.auto import modeling_auto as auto

from hf_dpgrape.gradients.rehearsal import deviations
from hf_dpgrape.gradients.single import SingleRecorder, single_gradients
from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.hf.task_losses import labels_are_tokens
from hf_dpgrape.mechanism.checks import Preflight
from hf_dpgrape.mechanism.synthetic import SyntheticExamples
from hf_dpgrape.mechanism.tensors import make_projections

LENGTH, IMAGE_SIZE, FRAMES, MOST_PARAMETERS = 12, 32, 4000, 3_000_000

HEADS = {
    "sequence classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question answering": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "multiple choice": auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    "next sentence": auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES,
    "masked LM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "causal LM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq LM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image classification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "CTC": auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "audio classification": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}

#: Sizes by what their names hold; the first that fits counts.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"^vocab_size$", 60),
    (r"vocab_size", 12),
    (r"(key_value|kv)_heads?$|multi_query_groups", 2),
    (r"(heads?|n_head)$", 2),
    (r"layers?$|^n_layers?$|num_blocks$|hidden_layers", 2),
    (r"^(d_kv|d_head|head_dim|v_head_dim|attention_head_size|qk_\w*head_dim)$", 8),
    (r"_lora_rank$|^rank$", 8),
    (r"num_experts_per_tok|experts_top_k|^top_k$", 2),
    (r"(n_|num_)(local_|routed_)?experts$", 4),
    (r"shared_experts$", 1),
    (r"^n_group$|^topk_group$", 1),
    (r"intermediate_size|ffn_dim|d_ff|d_inner|ffn_hidden|inner_dim", 32),
    (r"max_\w*position|n_positions|max_\w*length|n_ctx", 64),
    (r"^(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|emb_dim|lru_width)$", 16),
    (r"(hidden_size|embed_dim|embedding_size|embed_proj_dim|hidden_dim)$", 16),
    (r"^image_size$", IMAGE_SIZE),
    (r"^patch_size$", 8),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one head of one model type."""

    model_type: str
    head: str
    outcome: str
    detail: str = ""
    error: float | None = None


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """A configuration with small sizes and without dropout."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrunk(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((s for pattern, s in SIZES if re.search(pattern, name)), None)
            if size is not None and value > size:
                with contextlib.suppress(Exception):
                    setattr(config, name, size)
    return config


def small_config(model_type: str) -> PreTrainedConfig:
    """The configuration of a type, made again of shrunk numbers so that lists agree with them."""
    kind = configuration_auto.CONFIG_MAPPING[model_type]
    sizes = {
        n: v for n, v in vars(shrunk(kind())).items() if isinstance(v, int | float) and n[0] != "_"
    }
    try:
        config = shrunk(kind(**sizes))
    except Exception:
        config = shrunk(kind())
    for name in ("pad", "bos", "eos", "decoder_start"):
        if not isinstance(token := getattr(config, f"{name}_token_id", None), int) or token >= 60:
            with contextlib.suppress(Exception):
                setattr(config, f"{name}_token_id", {"bos": 0, "eos": 2}.get(name, 1))
    config.num_labels = 2
    config.apply_spec_augment = False  # draws from NumPy, which no seed here fixes
    return config


def structure_of(model: Any, head: str) -> dict[str, Tensor]:
    """One example of the names and shapes that a head takes."""
    main = model.main_input_name
    if head == "image classification":
        size = getattr(model.config, "image_size", IMAGE_SIZE)
        size = size if isinstance(size, int) else IMAGE_SIZE
        channels = getattr(model.config, "num_channels", 3)
        return {main: torch.zeros(1, channels, size, size), "labels": torch.zeros(1).long()}
    if head in ("CTC", "audio classification"):
        shape = (1, FRAMES) if main == "input_values" else (1, FRAMES, 80)
        length = (4,) if head == "CTC" else ()
        return {main: torch.zeros(shape), "labels": torch.zeros(1, *length).long()}
    shape = (1, 2, LENGTH) if head == "multiple choice" else (1, LENGTH)
    inputs = {"input_ids": torch.ones(shape).long(), "attention_mask": torch.ones(shape).long()}
    if head == "question answering":
        return {**inputs, **{f"{s}_positions": torch.zeros(1).long() for s in ("start", "end")}}
    whole = head in ("sequence classification", "multiple choice", "next sentence")
    return {**inputs, "labels": torch.zeros((1,) if whole else shape).long()}


def built(model_type: str, names: Any) -> nn.Module:
    """A small random model."""
    name = names[0] if isinstance(names, tuple) else names
    config = small_config(model_type)
    kind = getattr(transformers, name)
    with torch.device("meta"):
        number = sum(p.numel() for p in kind(config).parameters())
    if number > MOST_PARAMETERS:
        raise ValueError(f"{number:,} parameters after shrinking")
    torch.manual_seed(0)
    model = kind(config)
    for module in model.modules():  # some have a default of their own for a head
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def captured(model: nn.Module, head: str) -> Row:
    """How a model's gradients are taken, and how far they are from one backward per example."""
    loss = PerSampleLoss(model)
    examples = SyntheticExamples(
        model, structure_of(model, head), labels_are_tokens=labels_are_tokens(model)
    )
    projections = make_projections(model, rank=4, scale="1/sqrt(r)", seed=7, head=frozenset())
    preflight = Preflight(
        model=model,
        projections=projections,
        examples=examples,
        losses=lambda inputs: loss(model, inputs),
        settle=lambda inputs: loss.settle(model, inputs),
        take_own_loss_=loss.take_own_,
    )
    with messages() as said:
        recorder, is_single = preflight.recorder("auto")
    batch = examples.choices()[0][0]
    numbers, worst = ([0] if is_single else [0, 1, 2]), 0.0
    model.train()
    torch.manual_seed(1)
    with recorder.record(len(numbers), inputs=batch(numbers)) as gradients:
        loss(model, batch(numbers)).sum().backward()
    for place, number in enumerate(numbers):
        torch.manual_seed(1)
        with single_gradients(model, projections) as alone:
            loss(model, batch([number])).sum().backward()
        mine = {n: gradients.of_sample(n, place) for n in gradients}
        worst = max(worst, *deviations(mine, alone).values())
    assert is_single == isinstance(recorder, SingleRecorder)
    why = said[0].partition("because of ")[2] if said else ""
    return Row("", head, "single" if is_single else "batched", why, worst)


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """What the preflight logs inside the block."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_dpgrape.mechanism.checks")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def row_of(model_type: str, head: str) -> Row:
    """The row of one head of one model type, whatever happens."""
    try:
        model = built(model_type, HEADS[head][model_type])
    except Exception as error:
        return Row(model_type, head, "cannot be built", first_line(error))
    try:
        return dataclasses.replace(captured(model, head), model_type=model_type)
    except Exception as error:
        return Row(model_type, head, "refused", first_line(error))


def first_line(error: Exception) -> str:
    """The first line of an exception."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def table(rows: list[Row]) -> str:
    """Counts and all rows, as Markdown."""
    counts = collections.Counter(row.outcome for row in rows)
    rows = sorted(rows, key=lambda row: (row.model_type, row.head))
    lines = [", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()), ""]
    lines += ["| type | head | outcome | largest error | detail |", "|---|---|---|---|---|"]
    for r in rows:
        error = "" if r.error is None or math.isnan(r.error) else f"{r.error:.0e}"
        detail = r.detail.replace("|", "\\|")[:200]
        lines.append(f"| {r.model_type} | {r.head} | {r.outcome} | {error} | {detail} |")
    return "\n".join(lines) + "\n"


def cases() -> list[tuple[str, str]]:
    """All pairs of a model type and a head that transformers lists."""
    known = configuration_auto.CONFIG_MAPPING_NAMES
    return sorted((t, head) for head, names in HEADS.items() for t in names if t in known)


def main() -> None:
    """Writes the table, row by row as it grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", help="model types, with commas between")
    options = parser.parse_args()
    only = None if options.only is None else options.only.split(",")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    # In a mixed but fixed order, so that an interrupted run is a fair sample.
    for model_type, head in random.Random(0).sample(cases(), len(cases())):
        if only is None or model_type in only:
            rows.append(row_of(model_type, head))
            options.path.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
