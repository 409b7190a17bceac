"""A training loss that is released with the gradients: logs, options, record, card."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_trainer import MakeTrainer, examples
from families import CLASSIFY, make_config, make_model
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_dpgrape.privacy.plan import LOSS

SILENT: dict[str, Any] = {"noise_multiplier": 0.0, "allow_zero_noise": True}


def training_logs(trainer: Any) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "epsilon" in log]


def losses(trainer: Any, name: str = "private_loss") -> list[float]:
    return [log[name] for log in training_logs(trainer) if name in log]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_grouping": "layer"},
        {"activation_checkpointing": True},
        {"head_modules": ["classifier"], "head_clip_share": 0.5, "head_only_steps": 2},
        {"bf16_weights": True},
        {"expected_batch_size": 1},  # mostly empty batches
        {"rank": 0, "per_device_train_batch_size": 1, "optim": "muon"},
        {"causal": True, "private_loss_bound": 9.0},
    ],
    ids=lambda c: "-".join(c) or "plain",
)
def test_without_noise_it_is_the_mean_of_the_drawn_examples(
    make_trainer: MakeTrainer, changes: dict[str, Any]
) -> None:
    options = {"private_loss_share": 0.2, "log_non_private_metrics": True, "logging_steps": 2}
    trainer = make_trainer(**{**SILENT, **options, "max_steps": 5, **changes})
    trainer.train()
    # The raw one is the sum over the expected batch size, too; step 5 is in the last log.
    released, raw = losses(trainer), losses(trainer, "non_private_loss")
    assert len(released) == 3 and len(raw) == 2
    assert released[:2] == pytest.approx(raw, rel=1e-3 if "bf16_weights" in changes else 1e-5)
    assert max(raw) > 0
    assert losses(trainer, "private_loss_stderr") == [0.0, 0.0, 0.0]


def test_logs_show_the_mean_with_its_noise(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        private_loss_share=0.3,
        private_loss_bound=4.0,
        noise_multiplier=0.8,
        logging_steps=3,
        max_steps=7,
    )
    trainer.train()
    one = 0.8 * 4.0 / (0.3 * 10)
    stderr = losses(trainer, "private_loss_stderr")
    assert stderr == pytest.approx([one / math.sqrt(3), one / math.sqrt(3), one])
    # Guessing among three classes costs ln 3, and the number drawn varies about ten.
    for value, noise in zip(losses(trainer), stderr, strict=True):
        assert abs(value - math.log(3)) < 4 * noise + 1
    assert all("loss" not in log and "train_loss" not in log for log in trainer.state.log_history)


def test_noise_is_that_of_the_plan(make_trainer: MakeTrainer) -> None:
    # The noise is so strong that examples do not matter. 60 steps tell its size to 9 %; the test
    # of the private step itself is sharper.
    trainer = make_trainer(
        private_loss_share=0.5,
        private_loss_bound=0.1,
        noise_multiplier=300.0,
        logging_steps=1,
        max_steps=60,
        expected_batch_size=1,
    )
    trainer.train()
    want = 300 * 0.1 / 0.5
    assert losses(trainer, "private_loss_stderr") == pytest.approx([want] * 60)
    assert torch.tensor(losses(trainer)).std() == pytest.approx(want, rel=0.27)


def test_share_is_taken_from_the_clip_norm_and_costs_no_epsilon(make_trainer: MakeTrainer) -> None:
    plain, with_loss = make_trainer(), make_trainer(private_loss_share=0.6)
    assert dict(with_loss.plan.clip_shares) == pytest.approx({"body": 0.8, LOSS: 0.6})
    assert with_loss.plan.epsilon() == plain.plan.epsilon()
    layers = make_trainer(private_loss_share=0.6, clip_grouping="layer").plan.clip_shares
    assert sum(share**2 for share in layers.values()) == pytest.approx(1)
    assert sum(share**2 for name, share in layers.items() if name != LOSS) == pytest.approx(0.64)


def test_width_transfer_leaves_the_loss_its_share(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    config = make_config("roberta")
    config.hidden_size, config.num_attention_heads, config.intermediate_size = 12, 1, 20
    config.save_pretrained(tmp_path / "narrow")
    options = {"dpmup_base_model": str(tmp_path / "narrow"), "clipping": "automatic"}
    trainer = make_trainer(private_loss_share=0.6, max_steps=1, **options)
    trainer.train()
    shares = dict(trainer.plan.clip_shares)
    assert shares.pop(LOSS) == 0.6
    rules = trainer._planned.width_transfer.rules.clip_shares
    assert shares == pytest.approx({name: 0.8 * share for name, share in rules.items()})
    assert len(losses(trainer)) == 1


def test_off_by_default(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(logging_steps=1)
    trainer.train()
    assert trainer.plan.private_loss_bound is None
    assert not losses(trainer) and not losses(trainer, "private_loss_stderr")
    trainer.create_model_card()
    assert "training loss, released" not in Path(trainer.args.output_dir, "README.md").read_text()


def test_record_and_card_tell(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(private_loss_share=0.25, private_loss_bound=3.0)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    folder = Path(trainer.args.output_dir)
    plan = json.loads((folder / "privacy.json").read_text())["plan"]
    assert plan["clip_shares"][LOSS] == 0.25 and plan["private_loss_bound"] == 3.0
    row = "with the gradients, share 0.25 of the clip norm, clamped to 3 |"
    assert f"| training loss, released with noise | {row}" in (folder / "README.md").read_text()


# ---- Resuming and further runs -----------------------------------------------------------------


def test_resumed_run_goes_on_under_the_same_share(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "max_steps": 5}
    make_trainer(private_loss_share=0.3, **options).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    resumed = make_trainer(private_loss_share=0.3, **options)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert [log["step"] for log in training_logs(resumed) if "private_loss" in log] == [
        *(1, 2, 3, 4, 5)
    ]
    for changed in ({}, {"private_loss_share": 0.2}, {"private_loss_bound": 1.0}):
        given = {"private_loss_share": 0.3, **changed} if changed else {}
        with pytest.raises(ValueError, match="must keep its privacy plan"):
            make_trainer(**given, **options).train(resume_from_checkpoint=checkpoint)


def test_steps_of_an_interrupted_run_do_not_reach_the_next_mean(make_trainer: MakeTrainer) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    def fresh() -> Any:
        return make_model("roberta", CLASSIFY).float()

    trainer = make_trainer(
        private_loss_share=0.3, logging_steps=2, more={"model_init": fresh, "callbacks": [Stop()]}
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.pop_callback(Stop)
    trainer.train()
    one = trainer.plan.private_loss_stddev
    assert losses(trainer, "private_loss_stderr") == pytest.approx([one / math.sqrt(2)] * 2)


# ---- Names of layers ---------------------------------------------------------------------------


class Named(nn.Module):
    """A model whose only layers have the names of clip groups."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.loss = (nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.loss(torch.relu(self.head(torch.relu(self.body(x)))))}


def named(make_trainer: MakeTrainer, **changes: Any) -> Any:
    def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        x = torch.tensor([[float(e["label"] == i % 3) for i in range(7)] for e in batch])
        return {"x": x, "labels": torch.tensor([e["label"] for e in batch])}

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")

    more = {"data_collator": collate, "compute_loss_func": loss, "train_dataset": examples()}
    options = {"remove_unused_columns": False, "max_steps": 1, **changes}
    return make_trainer(model=Named(), more=more, **options)


@pytest.mark.parametrize("grouping", ["joint", "layer"])
def test_layers_may_be_called_head_and_loss(make_trainer: MakeTrainer, grouping: str) -> None:
    trainer = named(make_trainer, clip_grouping=grouping)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    assert all(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    assert not losses(trainer)
    groups = {"body"} if grouping == "joint" else {"body", "head", "loss"}
    assert set(trainer.plan.clip_shares) == groups


def test_group_of_the_loss_is_not_shared_with_a_layer(make_trainer: MakeTrainer) -> None:
    named(make_trainer, private_loss_share=0.2).train()
    with pytest.raises(ValueError, match=r"the model has a layer of that name; use `clip_grouping"):
        named(make_trainer, private_loss_share=0.2, clip_grouping="layer")
