"""TRL's trainers on pairs of answers: one example is one pair, whose loss is its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from families import CAUSAL, CLASSIFY, make_model
from test_trl import WORDS, tokenizer
from torch import nn

from hf_dpgrape import DPGrapeMixin, DPGrapeTrainingArguments
from hf_dpgrape.hf.trainers_losses import trainers_losses

trl = pytest.importorskip("trl", reason="the optional extra `trl` is not installed")

pytestmark = pytest.mark.filterwarnings(  # TRL asks transformers by an old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@dataclass
class PrivateDPOConfig(DPGrapeTrainingArguments, trl.DPOConfig):
    pass


class PrivateDPOTrainer(DPGrapeMixin, trl.DPOTrainer):
    pass


@dataclass
class PrivateRewardConfig(DPGrapeTrainingArguments, trl.RewardConfig):
    pass


class PrivateRewardTrainer(DPGrapeMixin, trl.RewardTrainer):
    pass


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dpo": (
        PrivateDPOTrainer,
        PrivateDPOConfig,
        {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 1, "beta": 0.7},
    ),
    "reward": (PrivateRewardTrainer, PrivateRewardConfig, {"center_rewards_coefficient": 0.2}),
}


def pairs(num: int = 24) -> datasets.Dataset:
    """The chosen answers are of other words than the rejected ones."""
    g = torch.Generator().manual_seed(3)

    def text(length: int, low: int, high: int) -> str:
        return " ".join(WORDS[i] for i in torch.randint(low, high, (length,), generator=g))

    return datasets.Dataset.from_list(
        [
            {
                "prompt": text(2 + i % 3, 2, 28),
                "chosen": " " + text(1 + i % 5, 2, 12),
                "rejected": " " + text(1 + i % 4, 16, 26),
            }
            for i in range(num)
        ]
    )


def small(kind: str) -> nn.Module:
    model = make_model("gpt2", CAUSAL if kind == "dpo" else CLASSIFY).float()
    if kind == "reward":
        model.score = nn.Linear(model.score.in_features, 1, bias=False)
        model.config.num_labels = model.num_labels = 1
    model.config.pad_token_id = 0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def make(tmp_path: Path, kind: str, model: nn.Module | None = None, **changes: Any) -> Any:
    trainer, config, own = KINDS[kind]
    given: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"),
        "noise_multiplier": 1.0,
        "target_delta": 1e-3,
        "per_device_train_batch_size": 4,
        "expected_batch_size": 8,
        "max_steps": 2,
        "rank": 5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "unsafe_test_seed": 987654321,
        **own,
    }
    return trainer(
        model=small(kind) if model is None else model,
        args=config(**{**given, **changes}),
        train_dataset=pairs(),
        eval_dataset=pairs(7),
        processing_class=tokenizer(),
    )


def batch_of(trainer: Any, *rows: int) -> dict[str, Any]:
    batch: dict[str, Any] = trainer.data_collator([trainer.train_dataset[i] for i in rows])
    return batch


LOSSES = [("dpo", {"loss_type": [name]}) for name in ("sigmoid", "hinge", "ipo")] + [("reward", {})]


@pytest.mark.parametrize(("kind", "changes"), LOSSES)
def test_a_step_is_the_clipped_sum_of_each_pairs_own_gradient(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    """By one backward of TRL's own loss per pair, on weights that are not the reference's."""
    options = {"noise_multiplier": 0.0, "allow_zero_noise": True, "rank": 0, "l2_clip_norm": 0.3}
    steps = {"optim": "sgd", "learning_rate": 1.0, "expected_batch_size": 24, "max_steps": 1}
    trainer = make(tmp_path, kind, eval_strategy="no", **options, **steps, **changes)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    parameters = dict(trainer.model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
    losses, factors = trainers_losses(trainer), []
    trainer.model.train()
    for i in range(24):
        trainer.model.zero_grad()
        own = trainer.compute_loss(trainer.model, batch_of(trainer, i))
        assert torch.allclose(losses(trainer.model, batch_of(trainer, i)), own, rtol=1e-4)
        own.backward()
        norm = float(torch.stack([p.grad.norm() for p in parameters.values()]).norm())
        factors.append(0.3 / max(norm, 0.3))
        for name, p in parameters.items():
            expected[name] -= factors[-1] * p.grad / 24
    assert min(factors) < 0.9
    trainer.model.zero_grad()
    trainer.train()
    assert trainer.private_training.capture == "single"
    for name, p in parameters.items():
        assert torch.allclose(p.detach() - before[name], expected[name], atol=1e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_pair_reaches_the_logs(tmp_path: Path, kind: str) -> None:
    trainer = make(tmp_path, kind)
    trainer.train()
    record = trainer.privacy_record()
    assert record["steps_done"] == 2 and record["epsilon"] == trainer.plan.epsilon()
    assert not trainer._metrics["train"]
    logs = trainer.state.log_history
    assert any("eval_loss" in log for log in logs)
    assert not any(log.get("total_flos") for log in logs)
    allowed = {
        "epoch",
        "step",
        "total_flos",
        "epsilon",
        "target_delta",
        "grad_norm",
        "learning_rate",
    }
    for log in logs:
        assert {n for n in log if not n.startswith("eval_")} <= allowed
        assert log.get("eval_num_tokens", 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_answers_are_preferred(tmp_path: Path, kind: str) -> None:
    trainer = make(
        tmp_path,
        kind,
        noise_multiplier=0.5,
        learning_rate=0.02,
        max_steps=12,
        expected_batch_size=20,
        eval_strategy="no",
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics.get("eval_rewards/accuracies", metrics.get("eval_accuracy")) > 0.8


def test_adapters(tmp_path: Path) -> None:
    """The reference is the model without them, which its log-probabilities were taken of before."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, target_modules=["c_fc"], fan_in_fan_out=True
    )
    model = peft.get_peft_model(small("dpo"), config)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    trainer = make(tmp_path, "dpo", model)
    trainer.train()
    assert set(trainer.private_training.subspace.weights) == trained
    assert trainer.private_training.capture == "single"


def test_several_pairs_in_a_batch_have_no_loss(tmp_path: Path) -> None:
    trainer = make(tmp_path, "dpo", capture="batched")
    with pytest.raises(ValueError, match=r"two answers of one pair.*got 4 rows"):
        trainers_losses(trainer)(trainer.model, batch_of(trainer, 0, 1))
    with pytest.raises(ValueError, match='set `capture="single"`'):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss_type": ["bco_pair"]}, "choose one of sigmoid, hinge, ipo"),
        ({"loss_type": ["sigmoid", "sft"]}, "choose one of sigmoid, hinge, ipo"),
        ({"loss_weights": [2.0]}, "leave it out"),
        ({"ld_alpha": 0.5}, "leave it out"),
        ({"use_weighting": True}, "leave it out"),
        ({"f_divergence_type": "forward_kl"}, "leave it out"),
        ({"precompute_ref_log_probs": False}, "set it to True, with `precompute_ref_batch_size=1`"),
        ({"precompute_ref_batch_size": None}, "set it to 1"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=rf"`{name}=.*` is not possible .*{reason}"):
        make(tmp_path, "dpo", **changes)


def test_a_loss_of_the_users_own_is_refused(tmp_path: Path) -> None:
    class Mine(PrivateDPOTrainer):
        def _compute_loss(self, *args: Any) -> Any:
            return super()._compute_loss(*args)

    with pytest.raises(ValueError, match=r"`Mine._compute_loss` is not possible"):
        Mine(small("dpo"))


def test_other_trainers_on_pairs_are_refused_by_name() -> None:
    class PrivateKTOTrainer(DPGrapeMixin, trl.KTOTrainer):
        pass

    with pytest.raises(ValueError, match="train with SFTTrainer, DPOTrainer or RewardTrainer"):
        PrivateKTOTrainer(small("dpo"))


def test_label_smoothing_has_no_place_in_a_loss_of_pairs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`label_smoothing_factor` needs .*pairs of answers"):
        make(tmp_path, "dpo", label_smoothing_factor=0.1).train()
