"""A tiny text classification task for trainer tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from families import CAUSAL, CLASSIFY, PAD, VOCAB, make_model
from torch import Tensor

from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments

NUM_EXAMPLES = 40


def examples(num: int = NUM_EXAMPLES) -> datasets.Dataset:
    """Sentences of different lengths with labels 0, 1 and 2."""
    g = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, VOCAB, (3 + i % 7,), generator=g).tolist() for i in range(num)]
    return datasets.Dataset.from_dict({"input_ids": ids, "label": [i % 3 for i in range(num)]})


def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads to the longest."""
    longest = max(len(e["input_ids"]) for e in batch)
    rows = [e["input_ids"] + [PAD] * (longest - len(e["input_ids"])) for e in batch]
    ids = torch.tensor(rows)
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if "label" in batch[0]:
        inputs["labels"] = torch.tensor([e["label"] for e in batch])
    return inputs


def collate_lm(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """For language models: the labels are the inputs."""
    inputs = collate([{"input_ids": e["input_ids"]} for e in batch])
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs


MakeTrainer = Callable[..., DPGrapeTrainer]


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    """Makes a trainer on the task; keyword arguments change its training arguments."""

    def make(*, model: Any = None, causal: bool = False, more: Any = None, **changes: Any) -> Any:
        family = ("gpt2", CAUSAL) if causal else ("roberta", CLASSIFY)
        given: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "noise_multiplier": 1.0,
            "target_delta": 1e-3,
            "per_device_train_batch_size": 4,
            "expected_batch_size": 10,
            "max_steps": 4,
            "rank": 5,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "logging_steps": 100,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "unsafe_test_seed": 987654321,
        }
        options: dict[str, Any] = {
            "train_dataset": examples(),
            "data_collator": collate_lm if causal else collate,
            **(more or {}),
        }
        if "model_init" not in options:
            options["model"] = make_model(*family).float() if model is None else model
        return DPGrapeTrainer(args=DPGrapeTrainingArguments(**{**given, **changes}), **options)

    return make
