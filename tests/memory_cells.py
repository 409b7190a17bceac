"""Small models whose training step is measured, and the measurement of a process of its own."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import transformers

from hf_dpgrape.commands.memory.account import predict
from hf_dpgrape.commands.memory.setting import Setting

_TEXT = {
    "vocab_size": 4001,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1000,
    "max_position_embeddings": 130,
}
_GPT2 = {"vocab_size": 3001, "n_embd": 320, "n_layer": 4, "n_head": 5, "n_positions": 150}
_OPT = {**_TEXT, "hidden_size": 384, "ffn_dim": 1500, "word_embed_proj_dim": 384}
_VIT = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 96}

CLASSIFY, CAUSAL, IMAGE = "sequence-classification", "causal-lm", "image-classification"

#: (model type, sizes, task, setting) by name.
CELLS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "roberta": ("roberta", _TEXT, CLASSIFY, {"batch_size": 7, "seq_len": 100}),
    "roberta-checkpointing": (
        "roberta",
        _TEXT,
        CLASSIFY,
        {"batch_size": 12, "seq_len": 100, "gradient_checkpointing": True},
    ),
    "gpt2-bfloat16": ("gpt2", _GPT2, CAUSAL, {"batch_size": 5, "dtype": "bfloat16"}),
    "opt-by-layer": (
        "opt",
        _OPT,
        CAUSAL,
        {
            "batch_size": 6,
            "seq_len": 90,
            "gradient_checkpointing": True,
            "clip_grouping": "layer",
        },
    ),
    "vit-sgd": ("vit", _VIT, IMAGE, {"batch_size": 9, "optim": "sgd"}),
}


def accounts(
    cell: str, methods: list[str], *, device: str, without_storage: bool, **changes: Any
) -> list[Any]:
    """Accounts of one cell, its setting changed as told."""
    model_type, sizes, task, setting = CELLS[cell]
    return predict(
        transformers.AutoConfig.for_model(model_type, **sizes),
        Setting(device=device, **{**setting, **changes}),
        task=task,
        methods=methods,
        without_storage=without_storage,
    )


def _resident(key: str) -> int:
    """`VmRSS` or `VmHWM` of this process in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith(key))
    return int(line.split()[1]) * 2**10


def main() -> None:
    """Prints by how many bytes a method's real step made this process grow."""
    cell, method = sys.argv[1:]
    # glibc then returns freed tensors at once; see benchmarks/peak_memory.py.
    m_mmap_threshold = -3
    ctypes.CDLL("libc.so.6").mallopt(m_mmap_threshold, 2**16)
    real = {"device": "cpu", "without_storage": False}
    accounts(cell, [method], batch_size=1, **real)  # loads libraries
    before = _resident("VmRSS")
    (account,) = accounts(cell, [method], **real)
    print(json.dumps({"growth": _resident("VmHWM") - before, "tensors": account.peak}))


if __name__ == "__main__":
    main()
