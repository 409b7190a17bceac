"""A run is resumed with all that its optimizer's state depends on, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_trainer import MakeTrainer, examples
from families import CLASSIFY, make_model
from transformers import TrainerCallback

SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture
def checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> Path:
    make_trainer(**SAVES, update_proj_gap=3).train()
    return tmp_path / "out" / "checkpoint-2"


def resume(trainer: Any, checkpoint: Path, message: str) -> None:
    """Is refused, and has loaded nothing."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 8}, "`rank` was 5, is now 8"),
        ({"rank": 0}, "`rank` was 5, is now 0"),
        ({"seed": 1}, "`seed` was 42, is now 1"),
        ({"update_proj_gap": 2}, "`update_proj_gap` was 3, is now 2"),
        ({"projection_scale": "1/r"}, r"`projection_scale` was 1/sqrt\(r\), is now 1/r"),
        ({"refresh_moments": "reset"}, "`refresh_moments` was keep, is now reset"),
        ({"optim_target_modules": ["attention"]}, r"`optim_target_modules` was None, is now \['at"),
        ({"optim": "sgd"}, r"`optim` was adamw_torch\w*, is now sgd"),
        ({"clip_grouping": "layer"}, "`clip_grouping` was joint, is now layer"),
        ({"head_modules": ["out_proj"]}, r"`head_tensors` was \[\], is now \['classifier.out_proj"),
        ({"bf16_weights": True}, r"`trainable_tensors` was \d+ of sha256 \w+, is now \d+ of sha25"),
    ],
)
def test_what_the_state_depends_on_is_not_changed(
    make_trainer: MakeTrainer, checkpoint: Path, changed: dict[str, Any], message: str
) -> None:
    resume(make_trainer(**{**SAVES, "update_proj_gap": 3, **changed}), checkpoint, message)


def test_other_tensors_are_refused(make_trainer: MakeTrainer, checkpoint: Path) -> None:
    model = make_model("roberta", CLASSIFY).float()
    model.classifier.dense.bias.requires_grad_(False)
    trainer = make_trainer(model=model, **SAVES, update_proj_gap=3)
    resume(trainer, checkpoint, r"`trainable_tensors` was \d+ of sha256")


def test_another_optimizer_that_is_passed_is_refused(
    make_trainer: MakeTrainer, checkpoint: Path
) -> None:
    model = make_model("roberta", CLASSIFY).float()
    more = {"optimizers": (torch.optim.Adagrad(model.parameters()), None)}
    trainer = make_trainer(model=model, more=more, **SAVES, update_proj_gap=3)
    resume(trainer, checkpoint, "is now Adagrad")


def test_all_changes_are_in_one_message(make_trainer: MakeTrainer, checkpoint: Path) -> None:
    trainer = make_trainer(**SAVES, noise_multiplier=2.0, rank=6, seed=3, update_proj_gap=3)
    with pytest.raises(ValueError) as caught:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    text = str(caught.value)
    assert "`noise_multiplier` was 1.0, is now 2.0; `rank` was 5, is now 6; `seed` was 42" in text


def test_groups_of_other_tensors_are_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def passed(order: int) -> dict[str, Any]:
        model = make_model("roberta", CLASSIFY).float()
        sgd = torch.optim.SGD([*model.parameters()][::order], lr=0.1, momentum=0.9)
        return {"model": model, "more": {"optimizers": (sgd, None)}}

    make_trainer(**SAVES, **passed(1)).train()
    trainer = make_trainer(**SAVES, **passed(-1))
    with pytest.raises(ValueError, match="groups hold other tensors than those of the checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    trainer = make_trainer(**SAVES, **passed(1))
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    assert trainer.privacy_record()["steps_done"] == 4


def test_a_record_of_an_earlier_version_is_refused(
    make_trainer: MakeTrainer, checkpoint: Path
) -> None:
    record = json.loads((checkpoint / "privacy.json").read_text())
    del record["optimizer"]
    (checkpoint / "privacy.json").write_text(json.dumps(record))
    trainer = make_trainer(**SAVES, update_proj_gap=3)
    resume(trainer, checkpoint, "record does not tell `optim`, .*`head_tensors`, on which the opt")


def test_a_checkpoint_of_the_model_alone_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make_trainer(**SAVES, save_only_model=True).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    resume(make_trainer(**SAVES), checkpoint, r"Expected `optimizer.pt`, `scheduler.pt` in .*would")


def test_the_record_tells_what_was_trained_whatever_is_set_later(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    before = trainer.privacy_record()
    trainer.model.requires_grad_(False)
    trainer.args.rank = 9
    assert trainer.privacy_record() == before
    assert before["optimizer"]["optim"].startswith("adamw_torch")
    assert before["projection"]["rank"] == 5


class Evaluations(TrainerCallback):
    """Notes steps and epochs of a run."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("step", state.global_step, state.epoch))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end of an epoch", state.global_step, state.epoch))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("evaluation", state.global_step, state.epoch))


@pytest.mark.parametrize(("step", "workers"), [(1, 0), (3, 0), (4, 2), (6, 0)])
def test_epochs_go_on_where_they_were(
    make_trainer: MakeTrainer, tmp_path: Path, step: int, workers: int
) -> None:
    """13 examples a step are an epoch of 3, so that thirds are rounded as they would have been."""
    options: dict[str, Any] = {
        "expected_batch_size": 13,
        "max_steps": 7,
        "eval_strategy": "epoch",
        "logging_steps": 1,
        "dataloader_num_workers": workers,
        "dataloader_persistent_workers": workers > 0,
    }

    def run(**more: Any) -> tuple[Any, list[tuple[str, int, float]]]:
        noted = Evaluations()
        trainer = make_trainer(
            **options, **more, more={"eval_dataset": examples(5), "callbacks": [noted]}
        )
        resumed = None if more else str(tmp_path / "out" / f"checkpoint-{step}")
        trainer.train(resume_from_checkpoint=resumed)
        return trainer, noted.seen

    whole, in_one_piece = run(save_strategy="steps", save_steps=1)
    resumed, continued = run()
    assert continued == [seen for seen in in_one_piece if seen[1] > step]
    assert {log["epoch"] for log in whole.state.log_history} == {
        log["epoch"] for log in resumed.state.log_history
    }
    assert resumed.privacy_record()["steps_done"] == 7
