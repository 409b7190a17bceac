"""Every model type of the installed transformers, small: how its gradients are taken, or why not.

    python tests/every_model.py --write              # all of them, into docs/coverage.md
    python tests/every_model.py --only bert,gpt2     # some, printed

Configurations are the types' defaults with their sizes shrunk by name; inputs are synthetic, of the
first structure that a head takes. Nothing here knows a model type, so a new release of transformers
needs no work. Each example's gradient is compared with one plain backward pass of the loss that the
model itself returns for that example, on a copy of the model that has seen nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import itertools
import logging
import multiprocessing
import re
import resource
import signal
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from every_model_table import NOT_TRIED, REFUSED, Row, written
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import configuration_auto
from transformers.models.auto import modeling_auto as auto

from hf_dpgrape.gradients.rehearsal import PADDED, Batch, deviations
from hf_dpgrape.gradients.single import SingleRecorder
from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.hf.own_loss import configs_of, named_outputs, without_caches
from hf_dpgrape.hf.task_losses import labels_are_tokens
from hf_dpgrape.mechanism.checks import Preflight, cause_of
from hf_dpgrape.mechanism.synthetic import SyntheticExamples
from hf_dpgrape.mechanism.tensors import make_projections
from hf_dpgrape.subspace.projection import Projection

PATH = Path(__file__).parents[1] / "docs" / "coverage.md"

LENGTH, IMAGE_SIZE, FRAMES = 12, 32, 4000

#: Largest models that are built; gigabytes and seconds that one case may take from the command.
MOST_PARAMETERS, MOST_GIGABYTES, MOST_SECONDS = 20_000_000, 12, 120

#: Largest deviation in float32, relative to the norm of the example's whole gradient.
TOLERANCE = 1e-4

HEADS = {
    "sequence classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question answering": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "multiple choice": auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    "next sentence": auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES,
    "masked LM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "causal LM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq LM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech seq2seq": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image classification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "video classification": auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
    "segmentation": auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    "image and text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "CTC": auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "audio classification": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}

#: Sizes by what their names hold, in three groups; the first that fits counts.
_COUNTS: tuple[tuple[str, int], ...] = (
    (r"^vocab_size$", 60),
    (r"vocab_size|_vocab$", 12),
    (r"layers?$|^n_layers?$|num_blocks$|hidden_layers|depths$", 2),
    (r"(n_|num_)(local_|routed_)?experts$", 4),
    (r"num_experts_per_tok|experts_top_k|^top_k$|^moe_topk$", 2),
    (r"shared_experts$|^n_group$|^topk_group$", 1),
    (r"max_\w*position|n_positions|max_\w*length|n_ctx", 64),
    (r"^attention_window$", 4),
    (r"num_latents", 8),
    (r"^image_size$", IMAGE_SIZE),
)
_INNER: tuple[tuple[str, int], ...] = (
    (r"intermediate_size|ffn_dim|d_ff|d_inner|ffn_hidden|inner_dim", 32),
)
_WIDTHS: tuple[tuple[str, int], ...] = (
    (r"(key_value|kv)_heads?$|multi_query_groups", 2),
    (r"(heads?|n_head)$", 2),
    (r"^(d_kv|d_head|head_dim|v_head_dim|attention_head_size|qk_\w*head_dim)$", 8),
    (r"_lora_rank$|^rank$", 8),
    (
        r"^(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|emb_dim|lru_width|d_latents)$",
        16,
    ),
    (r"(hidden_size|embed_dim|embedding_size|embed_proj_dim|hidden_dim)$", 16),
    (r"(hidden_sizes|embed_dims|encoder_stride|channels)$", 16),
    (r"rotary_dim", 4),
    (r"projection_dim$", 16),
    (r"^patch_size$", 8),
)
#: What is shrunk, from all to little: sizes that must agree in ways that no name tells keep theirs.
SHRINKINGS = ((*_COUNTS, *_INNER, *_WIDTHS), (*_COUNTS, *_INNER), _COUNTS)

Sizes = tuple[tuple[str, int], ...]


class TookTooLongError(BaseException):
    """Not an `Exception`: what is tried falls back on those."""


def shrunk(config: PreTrainedConfig, sizes: Sizes) -> PreTrainedConfig:
    """A configuration with small sizes, tokens within its vocabulary, no dropout and no caches."""
    for name, value in list(vars(config).items()):
        size = next((s for pattern, s in sizes if re.search(pattern, name)), None)
        new: Any = value
        if isinstance(value, PreTrainedConfig):
            shrunk(value, sizes)
        elif "drop" in name and isinstance(value, float):
            new = 0.0
        elif re.search(r"_token_(id|index)$", name):
            known = {"bos": 0, "pad": 1, "eos": 2, "decoder_start": 1}
            special = known.get(re.sub(r"_token_(id|index)$", "", name))
            if special is not None and not (isinstance(value, int) and 0 <= value < 60):
                new = special
            elif isinstance(value, int) and value >= 60:
                new = 40 + value % 20
        elif size is not None and isinstance(value, list | tuple):
            if all(type(v) is int for v in value):
                new = type(value)(min(v, size) for v in value)
        elif size is not None and type(value) is int and value > size:
            new = size
        if new is not value:
            with contextlib.suppress(Exception):
                setattr(config, name, new)
    return config


def small_config(model_type: str, sizes: Sizes) -> PreTrainedConfig:
    """The configuration of a type, made again of shrunk numbers so that lists agree with them."""
    kind = configuration_auto.CONFIG_MAPPING[model_type]
    numbers = {
        n: v
        for n, v in vars(shrunk(kind(), sizes)).items()
        if isinstance(v, int | float) and n[0] != "_"
    }
    try:
        config = shrunk(kind(**numbers), sizes)
    except Exception:
        config = shrunk(kind(), sizes)
    config.num_labels = 2
    config.apply_spec_augment = False  # draws from NumPy, which no seed here fixes
    return config


def small_model(model_type: str, class_name: str, sizes: Sizes) -> nn.Module:
    """A small random model.

    Raises:
        ValueError: it is not small.
    """
    config = small_config(model_type, sizes)
    kind = getattr(transformers, class_name)
    if not isinstance(config, kind.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        number = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
    if number > MOST_PARAMETERS:
        raise ValueError(f"{number:,} parameters after shrinking")
    torch.manual_seed(0)
    model: nn.Module = kind(config)
    for module in model.modules():  # some have a default of their own for a head
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():  # as they are initialized, many layers' gradients are close to nothing
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * (0.5 / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.1))
    return model


def inner_configs(config: Any) -> list[Any]:
    """A configuration and those inside it."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(c for one in inner if one is not None for c in inner_configs(one))]


def setting(model: Any, *names: str, default: int) -> int:
    """The first of these numbers that the configuration, or one inside it, has."""
    found = (getattr(c, n, None) for n in names for c in inner_configs(model.config))
    first = next((v[0] if isinstance(v, list | tuple) else v for v in found if v), default)
    return first if isinstance(first, int) else default


def images(model: Any) -> Iterator[tuple[int, int, int]]:
    """Shapes that an image may have."""
    channels = setting(model, "num_channels", "in_channels", "in_chans", default=3)
    size = setting(model, "image_size", default=IMAGE_SIZE)
    for side in dict.fromkeys((size, IMAGE_SIZE, 64)):
        yield channels, side, side


def sounds(model: Any) -> Iterator[dict[str, Tensor]]:
    """Structures that a sound may have: waves, or spectra."""
    main = model.main_input_name
    bins = setting(model, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
    bins = setting(model, "feature_projection_input_dim", default=bins)
    frames = setting(model, "max_length", default=LENGTH * 4)
    sources = 2 * setting(model, "max_source_positions", default=64)
    if main != "input_features":
        yield {main: torch.zeros(1, FRAMES)}
    for shape in ((1, frames, bins), (1, bins, sources), (1, sources, bins)):
        yield {main: torch.zeros(shape)}
        yield {main: torch.zeros(shape), "attention_mask": torch.ones(1, shape[1]).long()}


def text(model: Any, shape: tuple[int, ...], length: int = LENGTH) -> Iterator[dict[str, Tensor]]:
    """Structures that a text may have, with boxes where the head takes them."""
    ones = torch.ones(*shape, length).long()
    inputs = {"input_ids": ones, "attention_mask": ones}
    takes = forward_arguments(model)
    if "bbox" in takes:
        yield {**inputs, "bbox": torch.zeros(*shape, length, 4).long()}
        yield {**inputs, "bbox": torch.zeros(*shape, length, 4)}
        for image, name in itertools.product(images(model), ("pixel_values", "image")):
            if name in takes:
                boxes = torch.zeros(*shape, length, 4).long()
                yield {**inputs, "bbox": boxes, name: torch.zeros(1, *image)}
    elif "attention_mask" in takes or "kwargs" in takes:
        yield inputs
        for name in {"token_type_ids", "mm_token_type_ids"} & takes:
            yield {**inputs, name: torch.zeros(*shape, length).long()}
    yield {"input_ids": ones}
    yield {"input_ids": ones, "decoder_input_ids": ones}


def forward_arguments(model: Any) -> set[str]:
    """Names of the arguments of a model's forward."""
    code = type(model).forward
    return set(getattr(code, "__wrapped__", code).__code__.co_varnames)


def structures(model: Any, head: str) -> Iterator[dict[str, Tensor]]:
    """What an example of a head may look like, the likeliest first."""
    one, main = torch.zeros(1).long(), model.main_input_name
    if head in ("image classification", "segmentation", "video classification"):
        if main == "input_ids":
            length = setting(model, "n_positions", default=LENGTH)
            yield {"input_ids": torch.ones(1, length).long(), "labels": one}
        frames = setting(model, "num_frames", default=8)
        for channels, high, wide in images(model):
            shape = (1, channels, high, wide)
            if head == "video classification":
                shape = (1, frames, channels, high, wide)
            labels = torch.zeros(1, high, wide).long() if head == "segmentation" else one
            yield {main: torch.zeros(shape), "labels": labels}
    elif head in ("CTC", "audio classification", "speech seq2seq"):
        labels = {"CTC": torch.zeros(1, 4), "speech seq2seq": torch.zeros(1, LENGTH)}.get(head, one)
        for sound in sounds(model):
            yield {**sound, "labels": labels.long()}
            yield {**sound, "labels": labels.long(), "input_ids": torch.ones(labels.shape).long()}
    elif head == "image and text":
        for image, words in itertools.product(images(model), text(model, (1,), 288)):
            labels = words["input_ids"]
            yield {**words, "pixel_values": torch.zeros(1, *image), "labels": labels}
            yield {**words, "pixel_values": torch.zeros(1, 1, *image), "labels": labels}
    else:
        yield from with_labels(model, head)


def with_labels(model: Any, head: str) -> Iterator[dict[str, Tensor]]:
    """Texts, with the labels of a head."""
    one, shape = torch.zeros(1).long(), (1, 2) if head == "multiple choice" else (1,)
    for words in text(model, shape):
        if head == "question answering":
            yield {**words, "start_positions": one, "end_positions": one}
        elif head in ("sequence classification", "multiple choice", "next sentence"):
            yield {**words, "labels": one}
        else:
            yield {**words, "labels": torch.zeros(1, LENGTH).long()}


def small(model_type: str, head: str) -> tuple[nn.Module, SyntheticExamples, Batch]:
    """A small model, synthetic examples, and those of its batches that it takes.

    Raises:
        Exception: none is small enough, or it takes no input that is known here.
    """
    names = HEADS[head][model_type]
    name = names[0] if isinstance(names, tuple) else names
    failures: list[Exception] = []
    for sizes in SHRINKINGS:
        try:
            model = small_model(model_type, name, sizes).train()
        except Exception as error:
            failures.append(error)
            continue
        for structure in structures(model, head):
            tokens = labels_are_tokens(model)
            examples = SyntheticExamples(model, structure, labels_are_tokens=tokens)
            for batch, *_ in examples.choices():
                try:
                    runs(model, batch([0]))
                    return model, examples, batch
                except Exception as error:
                    failures.append(error)
    raise failures[0]


def runs(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Runs a model on an example in training mode."""
    with torch.no_grad(), without_caches(configs_of(model)):
        model(**inputs)


def captured(model: nn.Module, examples: SyntheticExamples, batch: Batch) -> Row:
    """How a model's gradients are taken, and how far they are from one backward per example."""
    fresh = copy.deepcopy(model)
    loss = PerSampleLoss(model)
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
    assert is_single == isinstance(recorder, SingleRecorder)
    numbers, worst = (0, PADDED, 1), 0.0
    model.train()
    for some in [[n] for n in numbers] if is_single else [list(numbers)]:
        torch.manual_seed(1)
        with recorder.record(len(some), inputs=batch(some)) as gradients:
            loss(model, batch(some)).sum().backward()
        for place, number in enumerate(some):
            mine = {n: gradients.of_sample(n, place) for n in gradients}
            alone = by_autograd(fresh, batch([number]), projections)
            worst = max(worst, *deviations(mine, alone).values())
    why = said[0].partition("because of ")[2] if said else ""
    return Row("", "", "single" if is_single else "batched", why, worst)


def by_autograd(
    model: nn.Module, inputs: Mapping[str, Any], projections: Mapping[str, Projection]
) -> dict[str, Tensor]:
    """Projected gradients of the loss that the model itself returns for one example."""
    tensors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(1)
    with named_outputs(model.config), without_caches(configs_of(model)):
        loss = getattr(model.train()(**inputs), "loss", None)
    if loss is None:  # it returns none: ours, which nothing can be compared with
        loss = PerSampleLoss(model)(model, inputs).sum()
    found = torch.autograd.grad(loss.sum(), list(tensors.values()), allow_unused=True)
    return {
        name: projections[name].on_gradient(gradient[None])[0]
        for name, gradient in zip(tensors, found, strict=True)
        if gradient is not None
    }


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


def row_of(case: tuple[str, str]) -> Row:
    """The row of one head of one model type, whatever happens."""
    model_type, head = case
    try:
        model, examples, batch = small(model_type, head)
    except Exception as error:
        return Row(model_type, head, NOT_TRIED, first_line(error))
    try:
        row = captured(model, examples, batch)
    except Exception as error:
        return Row(model_type, head, REFUSED, cause_of(model, error))
    return dataclasses.replace(row, model_type=model_type, head=head)


def first_line(error: Exception) -> str:
    """The first line of an exception."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def cases() -> list[tuple[str, str]]:
    """All pairs of a model type and a head that transformers lists."""
    known = configuration_auto.CONFIG_MAPPING_NAMES
    return sorted((t, head) for head, names in HEADS.items() for t in names if t in known)


def limited_row_of(case: tuple[str, str]) -> Row:
    """The row, with bounds on time and memory, in a process that is not this one."""

    def ring(*_: Any) -> None:
        raise TookTooLongError

    resource.setrlimit(resource.RLIMIT_AS, (MOST_GIGABYTES << 30, MOST_GIGABYTES << 30))
    signal.signal(signal.SIGALRM, ring)
    signal.alarm(MOST_SECONDS)
    torch.set_num_threads(1)
    try:
        return row_of(case)
    except TookTooLongError:
        return Row(*case, NOT_TRIED, f"it takes more than {MOST_SECONDS} s")
    finally:
        signal.alarm(0)


def main() -> None:
    """Prints rows as they come, or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PATH.name}")
    parser.add_argument("--only", help="model types, with commas between")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    only = None if options.only is None else options.only.split(",")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    chosen = [case for case in cases() if only is None or case[0] in only]
    rows = []
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=40) as pool:
        for row in pool.imap_unordered(limited_row_of, chosen):
            rows.append(row)
            print(*dataclasses.astuple(row), sep=" | ", flush=True)
    if options.write:
        PATH.write_text(written(rows, transformers.__version__, TOLERANCE), encoding="utf-8")


if __name__ == "__main__":
    main()
