"""TRL's SFTTrainer with the private step: the recipe of docs/existing_code.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from families import CAUSAL, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from hf_dpgrape import DPGrapeMixin, DPGrapeTrainingArguments

trl = pytest.importorskip("trl", reason="the optional extra `trl` is not installed")


@dataclass
class PrivateSFTConfig(DPGrapeTrainingArguments, trl.SFTConfig):
    pass


class PrivateSFTTrainer(DPGrapeMixin, trl.SFTTrainer):
    pass


WORDS = ["[PAD]", "[EOS]", *"abcdefghijklmnopqrstuvwxyz"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="z"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")


def data(num: int = 40) -> datasets.Dataset:
    g = torch.Generator().manual_seed(3)

    def text(length: int) -> str:
        return " ".join(WORDS[2 + i] for i in torch.randint(26, (length,), generator=g))

    rows = [{"prompt": text(2 + i % 3), "completion": " " + text(1 + i % 5)} for i in range(num)]
    return datasets.Dataset.from_list(rows)


def make(tmp_path: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"),
        "noise_multiplier": 1.0,
        "target_delta": 1e-3,
        "per_device_train_batch_size": 4,
        "expected_batch_size": 10,
        "max_steps": 3,
        "rank": 5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "unsafe_test_seed": 987654321,
        **changes,
    }
    model = given.pop("model", None) or make_model("gpt2", CAUSAL).float()
    eval_dataset = given.pop("eval_dataset", None) or data(7)
    train_dataset = given.pop("train_dataset", None) or data()
    return PrivateSFTTrainer(
        model=model,
        args=PrivateSFTConfig(**given),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
    )


def test_unpacked_fine_tuning(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    assert trainer.train().global_step == 3
    assert all(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    record = trainer.privacy_record()
    assert record["steps_done"] == 3 and record["epsilon"] == trainer.plan.epsilon()

    logs = trainer.state.log_history
    assert any("eval_loss" in log for log in logs)
    for log in logs:
        # Nothing of TRL's training metrics: token counts, accuracy and entropy are not noised.
        assert not {"loss", "num_tokens", "mean_token_accuracy", "entropy"} & log.keys()
        assert log.get("eval_num_tokens", 0) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Privacy" in card and "num_tokens" not in card
    assert (tmp_path / "out" / "checkpoint-3" / "privacy.json").is_file()


def test_loss_is_that_of_the_completion_alone(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.model.eval()
    rows = [trainer.train_dataset[i] for i in range(4)]
    assert {len(row["input_ids"]) for row in rows} != {len(rows[0]["input_ids"])}
    assert all(row["labels"][0] == -100 != row["labels"][-1] for row in rows)
    from hf_dpgrape.hf.losses import PerSampleLoss

    loss = PerSampleLoss(trainer.model)
    with torch.no_grad():
        together = loss(trainer.model, trainer.data_collator(rows))
        alone = [trainer.compute_loss(trainer.model, trainer.data_collator([row])) for row in rows]
    assert torch.allclose(together, torch.stack(alone), atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, target_modules=["c_fc"], fan_in_fan_out=True
    )
    model = peft.get_peft_model(make_model("gpt2", CAUSAL).float(), config)
    trainer = make(tmp_path, model=model, eval_strategy="no", save_strategy="no")
    trainer.train()
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        tensor for tensor in trainer.private_training.subspace.tensors
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packing": True}, "a packed row holds several examples"),
        ({"padding_free": True}, "all examples of a batch would be one row"),
        ({"loss_type": "dft"}, "only the model's own loss is known per sample"),
        ({"router_aux_loss_coef": 0.1}, "mixes the examples of a batch"),
        ({"activation_offloading": True}, "a private step does not apply it"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=rf"`{name}={value}` is not possible .*{reason}"):
        make(tmp_path, **changes)


def test_parsed_from_a_command_line(tmp_path: Path) -> None:
    from hf_dpgrape.commands.presets import parse_arguments

    words = f"--output_dir {tmp_path} --target_epsilon 3 --target_delta 1e-4 --max_length 64"
    (args,) = parse_arguments([PrivateSFTConfig], words.split())
    assert (args.max_length, args.target_epsilon, args.packing) == (64, 3.0, False)


def test_metrics_on_the_training_set_are_not_logged(tmp_path: Path) -> None:
    # The trainer prepares all data sets, so that none of these is the object that it trains on.
    trainer = make(tmp_path, eval_strategy="no", eval_dataset={"dev": data(7), "train": data()})
    trainer.train()
    for training_set in (trainer.train_dataset, data(), {"train": data()}, None):
        metrics = trainer.evaluate(training_set)
        assert metrics["eval_loss" if "eval_loss" in metrics else "eval_train_loss"] > 0
    logged = [log for log in trainer.state.log_history if any("eval" in name for name in log)]
    assert len(logged) == 1 and logged[0]["eval_dev_loss"] == metrics["eval_dev_loss"]
    # Averages that TRL collects for its logs are those of one evaluation alone.
    again = trainer.evaluate(data(7))
    assert again["eval_entropy"] == pytest.approx(logged[0]["eval_entropy"])


def test_texts_of_one_person_are_drawn_and_clipped_together(tmp_path: Path) -> None:
    """The column survives TRL's tokenizing, and is gone before a text is collated."""
    owners = [f"person {i % 9}" for i in range(40)]
    table = data().add_column("person", owners)
    unit = {"privacy_unit_column": "person", "expected_batch_size": 4, "max_steps": 1}
    trainer = make(tmp_path, train_dataset=table, save_strategy="no", **unit)
    trainer.train()
    record = trainer.privacy_record()
    assert record["plan"]["num_examples"] == 9
    assert record["unit_of_privacy"].startswith("one value of column `person` (its rows, at most 8")
