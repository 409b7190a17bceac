"""What arrives at a Hub on the loopback interface: the model and its record, nothing raw.

Covers: hf/publishing.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest_trainer import MakeTrainer, examples
from families import CLASSIFY, make_model
from hub_server import Hub, hub
from safetensors.torch import load, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, RobertaForSequenceClassification, Trainer

__all__ = ["hub"]

# huggingface_hub 2.4 uploads by LFS with an argument that its http client calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.* to upload raw:DeprecationWarning")

WANTED = {
    "README.md",
    "config.json",
    "model.safetensors",
    "privacy.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
TOKEN = "hf_secret_token"


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@pytest.fixture
def run(make_trainer: MakeTrainer) -> Any:
    """A trainer with the options that write the most into its output folder."""

    def make(**changes: Any) -> Any:
        given: dict[str, Any] = {
            "hub_token": TOKEN,
            "logging_steps": 1,
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "log_non_private_metrics": True,
            **changes,
        }
        more = {
            "eval_dataset": examples(6),
            "processing_class": tokenizer(),
            "compute_metrics": accuracy,
        }
        return make_trainer(more=more, **given)

    return make


def litter(folder: Path) -> None:
    """What trackers, scripts and earlier runs leave in an output folder."""
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "rng_state_0.pth",
        "events.out.tfevents.1",
        "train_results.json",
        "predictions.csv",
        "adapter_model.safetensors",
        "pytorch_model.bin",
        "runs/today/events.out.tfevents.2",
        "checkpoint-2/model.safetensors",
        "wandb/run.wandb",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(b"litter")


def assert_nothing_raw(hub: Hub, trainer: Any) -> None:
    """No byte that was sent tells a seed, a token, a path, or a raw loss."""
    sent = b"".join(hub.bodies)
    raw = [
        log["non_private_loss"] for log in trainer.state.log_history if "non_private_loss" in log
    ]
    assert raw and all(math.isfinite(loss) and loss > 0 for loss in raw)
    secrets = [str(loss) for loss in raw if loss > 0]
    secrets += [str(trainer.args.unsafe_test_seed), TOKEN, trainer.args.output_dir]
    secrets += ["Training Loss", "non_private", "grad_norm", "litter"]
    text = sent + b"".join(content for _, files in hub.commits for content in files.values())
    assert not [secret for secret in secrets if secret.encode() in text]


def test_push_at_the_end(hub: Hub, run: Any, tmp_path: Path) -> None:
    trainer = run(hub_model_id="somebody/reviews")
    trainer.train()
    trainer.save_state()
    litter(tmp_path / "out")
    trainer.push_to_hub(language="en", license="apache-2.0", tags="reviews")

    assert hub.repositories == ["somebody/reviews"]
    ((message, files),) = hub.commits
    assert message == "End of training" and set(files) == WANTED
    print("arrived:", *(f"{name} ({len(files[name])} bytes)" for name in sorted(files)), sep="\n  ")
    print(files["README.md"].decode())

    assert_nothing_raw(hub, trainer)
    pushed = load(files["model.safetensors"])
    assert all((pushed[n] == p).all() for n, p in trainer.model.named_parameters())
    assert json.loads(files["privacy.json"]) == trainer.privacy_record()
    card = files["README.md"].decode()
    facts = yaml.safe_load(card.split("---")[1])
    # A fixed test seed is not private, so the tag is not that of differential privacy.
    assert facts["language"] == "en" and facts["tags"] == ["dp-grape", "reviews"]
    (result,) = facts["model-index"]
    metrics = {m["type"]: m["value"] for m in result["results"][0]["metrics"]}
    last = [log for log in trainer.state.log_history if "eval_accuracy" in log][-1]
    assert metrics == {"loss": last["eval_loss"], "accuracy": last["eval_accuracy"]}
    assert result["name"] == "reviews"


def test_the_stock_push_would_send_it_all(hub: Hub, run: Any, tmp_path: Path) -> None:
    """What this package changes; and the record of what arrived is complete."""
    trainer = run(max_steps=1)
    trainer.train()
    litter(tmp_path / "out")
    Trainer.push_to_hub(trainer)
    assert {"optimizer.pt", "rng_state.pth", "training_args.bin"} < set(hub.files)
    with pytest.raises(AssertionError):
        assert_nothing_raw(hub, trainer)


def test_pushes_during_training_and_by_save_model(hub: Hub, run: Any, tmp_path: Path) -> None:
    trainer = run(push_to_hub=True, hub_strategy="every_save", hub_always_push=True)
    litter(tmp_path / "out")
    trainer.train()
    trainer.save_model()  # pushes once more, after waiting for what is on its way

    assert hub.repositories == ["somebody/out"]
    messages = [message for message, _ in hub.commits]
    assert messages == [*(f"Training in progress, step {s}" for s in (2, 4)), "Model save"]
    for _, files in hub.commits:
        assert set(files) == WANTED
    assert json.loads(hub.files["privacy.json"])["steps_done"] == 4
    assert_nothing_raw(hub, trainer)


def test_checkpoint_is_pushed_with_its_own_record(hub: Hub, run: Any) -> None:
    trainer = run(push_to_hub=True, hub_strategy="every_save", save_steps=3, hub_always_push=True)
    trainer.train()
    trainer._finish_current_push()
    records = [json.loads(files["privacy.json"]) for _, files in hub.commits]
    cards = [files["README.md"].decode() for _, files in hub.commits]
    assert [record["steps_done"] for record in records] == [3, 4]
    assert [record["epsilon"] for record in records] == [trainer.plan.epsilon(s) for s in (3, 4)]
    assert ["3 of 4 planned" in card for card in cards] == [True, False]


def test_best_checkpoint_is_pushed_with_the_epsilon_of_all_steps(hub: Hub, run: Any) -> None:
    trainer = run(
        push_to_hub=True,
        hub_strategy="every_save",
        hub_always_push=True,
        save_strategy="best",
        eval_steps=1,
        metric_for_best_model="steps",
    )
    trainer.compute_metrics = lambda prediction: {"steps": min(trainer.state.global_step, 2)}
    trainer.train()
    trainer._finish_current_push()
    records = [json.loads(files["privacy.json"]) for _, files in hub.commits]
    assert [(r["steps_done"], r["steps_counted"]) for r in records] == [(1, 4), (2, 4)]
    assert {r["epsilon"] for r in records} == {trainer.plan.epsilon(4)}
    assert "2 of 4 planned; epsilon counts all 4" in hub.files["README.md"].decode()


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_strategies_that_push_optimizer_state_are_refused(run: Any, strategy: str) -> None:
    with pytest.raises(ValueError, match=rf"`hub_strategy={strategy}` is not possible"):
        run(push_to_hub=True, hub_strategy=strategy)
    run(hub_strategy=strategy)  # harmless without a push


def test_nothing_is_pushed_without_a_record(hub: Hub, run: Any) -> None:
    trainer = run()
    with pytest.raises(ValueError, match=r"A push needs a privacy record; call `train\(\)` first"):
        trainer.push_to_hub()
    assert not hub.bodies


def test_sharded_weights_and_leftovers(hub: Hub, run: Any, tmp_path: Path) -> None:
    trainer = run(max_steps=1)
    trainer.train()
    original = trainer.model.save_pretrained
    trainer.model.save_pretrained = lambda *a, **k: original(*a, max_shard_size="20KB", **k)
    trainer.push_to_hub()
    shards = {name for name in hub.files if name.startswith("model-")}
    assert len(shards) > 1
    assert set(hub.files) == WANTED - {"model.safetensors"} | shards | {
        "model.safetensors.index.json"
    }
    # The weights of another run, perhaps not private, beside these.
    save_file(dict(trainer.model.named_parameters()), tmp_path / "out" / "model.safetensors")
    with pytest.raises(ValueError, match="Expected the weights of one run"):
        trainer.push_to_hub()


def test_pushed_model_is_ordinary(hub: Hub, run: Any, tmp_path: Path) -> None:
    trainer = run(max_steps=1)
    trainer.train()
    trainer.push_to_hub()
    for name, content in hub.files.items():
        (tmp_path / "clone").mkdir(exist_ok=True)
        (tmp_path / "clone" / name).write_bytes(content)
    RobertaForSequenceClassification.from_pretrained(tmp_path / "clone")
    assert len(PreTrainedTokenizerFast.from_pretrained(tmp_path / "clone")) == 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters(hub: Hub, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, target_modules=["query"], modules_to_save=["classifier"])
    model = peft.get_peft_model(make_model("roberta", CLASSIFY).float(), config)
    trainer = make_trainer(model=model, max_steps=1)
    trainer.train()
    litter(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"litter")
    trainer.push_to_hub()
    assert set(hub.files) == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "privacy.json",
    }
    assert "library_name: peft" in hub.files["README.md"].decode()


def test_metrics_on_the_training_set_stay_at_home(hub: Hub, run: Any) -> None:
    trainer = run(max_steps=2)
    trainer.eval_dataset = trainer.train_dataset
    trainer.train()
    trainer.push_to_hub()
    card = hub.files["README.md"].decode()
    assert "model-index" not in card and "accuracy" not in card
