"""Small random models of many families and heads, with default inputs: the table that tests run on.

No two sizes are equal where a family allows it, so that a transposed or swapped dimension shows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

BATCH, LENGTH, VOCAB, LABELS, PAD = 4, 11, 53, 3, 1

CLASSIFY, TOKENS, QA, MASKED, CAUSAL, SEQ2SEQ, IMAGE, SPEECH = (
    "sequence classification",
    "token classification",
    "question answering",
    "masked LM",
    "causal LM",
    "seq2seq LM",
    "image classification",
    "speech seq2seq",
)

HEADS = {
    CLASSIFY: auto.AutoModelForSequenceClassification,
    TOKENS: auto.AutoModelForTokenClassification,
    QA: auto.AutoModelForQuestionAnswering,
    MASKED: auto.AutoModelForMaskedLM,
    CAUSAL: auto.AutoModelForCausalLM,
    SEQ2SEQ: auto.AutoModelForSeq2SeqLM,
    IMAGE: auto.AutoModelForImageClassification,
    SPEECH: auto.AutoModelForSpeechSeq2Seq,
}

#: Sizes under the names that most text configurations use.
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 37,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 12}
VISION = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 44,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 3,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One model type of transformers with a small configuration."""

    model_type: str
    sizes: dict[str, Any]
    heads: tuple[str, ...]


ENCODER_HEADS = (CLASSIFY, TOKENS, QA, MASKED)
DECODER_HEADS = (CLASSIFY, TOKENS, QA, CAUSAL)

FAMILIES = {
    family.model_type: family
    for family in (
        Family("bert", TEXT, ENCODER_HEADS),
        Family("roberta", TEXT, ENCODER_HEADS),
        Family(
            "distilbert",
            {**TEXT, "dim": 24, "n_layers": 2, "n_heads": 2, "hidden_dim": 40},
            ENCODER_HEADS,
        ),
        Family("albert", {**TEXT, "embedding_size": 16}, ENCODER_HEADS),
        Family("electra", {**TEXT, "embedding_size": 16}, ENCODER_HEADS),
        Family(
            "deberta-v2",
            {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
            ENCODER_HEADS,
        ),
        Family("mpnet", TEXT, ENCODER_HEADS),
        Family(
            "gpt2",
            {**TEXT, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 37},
            DECODER_HEADS,
        ),
        Family(
            "gpt_neo",
            {
                **TEXT,
                "num_layers": 2,
                "num_heads": 2,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 7,
            },
            DECODER_HEADS,
        ),
        Family("gpt_neox", TEXT, DECODER_HEADS),
        Family(
            "opt",
            {**TEXT, "ffn_dim": 40, "word_embed_proj_dim": 16},
            (CLASSIFY, QA, CAUSAL),
        ),
        Family("bloom", {**TEXT, "n_layer": 2, "n_head": 2}, DECODER_HEADS),
        Family("llama", DECODER, DECODER_HEADS),
        Family("mistral", DECODER, DECODER_HEADS),
        Family("qwen2", DECODER, DECODER_HEADS),
        Family("qwen3", DECODER, DECODER_HEADS),
        Family("gemma", DECODER, (CLASSIFY, TOKENS, CAUSAL)),
        Family("gemma2", DECODER, (CLASSIFY, TOKENS, CAUSAL)),
        Family("phi3", {**DECODER, "head_dim": 12}, (CLASSIFY, TOKENS, CAUSAL)),
        Family("falcon", TEXT, DECODER_HEADS),
        Family(
            "t5",
            {
                **TEXT,
                "d_model": 24,
                "d_kv": 7,
                "d_ff": 40,
                "num_layers": 2,
                "num_heads": 3,
                "decoder_start_token_id": 0,
            },
            (CLASSIFY, TOKENS, QA, SEQ2SEQ),
        ),
        Family(
            "bart",
            {
                **TEXT,
                "d_model": 24,
                "encoder_layers": 2,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 3,
                "encoder_ffn_dim": 40,
                "decoder_ffn_dim": 28,
                "decoder_start_token_id": 2,
                "forced_eos_token_id": None,
            },
            (CLASSIFY, QA, SEQ2SEQ),
        ),
        Family("vit", VISION, (IMAGE,)),
        Family("deit", VISION, (IMAGE,)),
        Family("beit", VISION, (IMAGE,)),
        Family("dinov2", VISION, (IMAGE,)),
        Family(
            "convnext",
            {
                "hidden_sizes": [12, 16],
                "depths": [1, 2],
                "num_stages": 2,
                "image_size": 16,
                "patch_size": 4,
            },
            (IMAGE,),
        ),
        Family(
            "swin",
            {
                "embed_dim": 12,
                "depths": [1, 2],
                "num_heads": [2, 3],
                "image_size": 16,
                "patch_size": 4,
                "window_size": 2,
            },
            (IMAGE,),
        ),
        Family(
            "whisper",
            {
                **TEXT,
                "d_model": 24,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 3,
                "encoder_ffn_dim": 40,
                "decoder_ffn_dim": 28,
                "num_mel_bins": 9,
                "max_source_positions": 14,
                "max_target_positions": 37,
                "decoder_start_token_id": 2,
            },
            (SPEECH,),
        ),
    )
}

CASES = [(family, head) for family in FAMILIES for head in FAMILIES[family].heads]


def make_config(family: str) -> PreTrainedConfig:
    """The small configuration of a family."""
    sizes = FAMILIES[family].sizes
    kind = type(AutoConfig.for_model(family))
    known = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else None
    attributes = kind.attribute_map
    kept = {k: v for k, v in sizes.items() if known is None or k in known or k in attributes}
    config = kind(num_labels=LABELS, **kept)
    if "decoder_start_token_id" in sizes:
        config.decoder_start_token_id = sizes["decoder_start_token_id"]
    return config


def make_model(family: str, head: str) -> nn.Module:
    """A model in float64 and evaluation mode, with weights away from zeros and ones."""
    torch.manual_seed(0)
    config = make_config(family)
    if head == QA:
        config.num_labels = 2
    if family == "deit":  # two classes share this head; the other is for distillation
        config.architectures = ["DeiTForImageClassification"]
    model = HEADS[head].from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.double().eval()


def make_inputs(family: str, head: str) -> dict[str, Tensor]:
    """A batch with labels, padded as a collator would, in a fixed random order."""
    g = torch.Generator().manual_seed(1)
    config = make_config(family)
    if head == IMAGE:
        size = config.image_size
        pixels = torch.randn(BATCH, 3, size, size, generator=g, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 2, 1, 2])}
    if head == SPEECH:
        frames = 2 * config.max_source_positions
        sound = torch.randn(BATCH, config.num_mel_bins, frames, generator=g, dtype=torch.float64)
        labels = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=g)
        labels[1, 5:] = -100
        return {"input_features": sound, "labels": labels}
    lengths = torch.tensor([LENGTH, 7, 5, 9])
    real = torch.arange(LENGTH) < lengths[:, None]
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=g).masked_fill(~real, PAD)
    if getattr(config, "is_encoder_decoder", False) and head in (CLASSIFY, QA):
        ids[torch.arange(BATCH), lengths - 1] = 2  # BART and T5 read the last end-of-text token
    inputs = {"input_ids": ids, "attention_mask": real.long()}
    if head == CLASSIFY:
        inputs["labels"] = torch.tensor([0, 2, 1, 2])
    elif head == QA:
        inputs["start_positions"] = torch.tensor([1, 0, 3, 2])
        inputs["end_positions"] = torch.tensor([4, 6, 4, 8])
    elif head == TOKENS:
        tags = torch.randint(LABELS, (BATCH, LENGTH), generator=g)
        inputs["labels"] = tags.masked_fill(~real, -100)
    elif head == MASKED:
        asked = real & (torch.rand(BATCH, LENGTH, generator=g) < 0.5)
        asked[:, 1] = True
        inputs["labels"] = ids.masked_fill(~asked, -100)
    else:
        inputs["labels"] = ids.masked_fill(~real, -100)
    return inputs
