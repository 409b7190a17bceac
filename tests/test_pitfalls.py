"""Bugs that users of other libraries reported and no other test covers; see docs/pitfalls.md."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dp_accounting
import pytest
import torch
from conftest_trainer import NUM_EXAMPLES, MakeTrainer, examples, make_trainer
from dp_accounting import pld, rdp
from families import CAUSAL, CLASSIFY, make_model
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, PretrainedConfig, PreTrainedModel, Trainer

from hf_dpgrape.hf.trainer import DPGrapeMixin

__all__ = ["make_trainer"]


def moved(trainer: Any) -> dict[str, float]:
    """How far each trainable tensor moves in a run."""
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    return {n: float((p.detach() - before[n]).norm()) for n, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("how", [{"device_map": "cpu"}, {"low_cpu_mem_usage": True}])
def test_model_loaded_through_the_meta_device(
    make_trainer: MakeTrainer, tmp_path: Path, how: dict[str, Any]
) -> None:
    make_model("gpt2", CAUSAL).float().save_pretrained(tmp_path / "saved")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "saved", **how)
    assert all(way > 0 for way in moved(make_trainer(model=model, causal=True)).values())


class Odd(nn.Module):
    """A layer that no library has a rule for."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.power = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix) * self.power**2


class OddModel(PreTrainedModel):
    """An architecture that is on nobody's list."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(60, 14)
        self.odd, self.score = Odd(14, 9), nn.Linear(9, 3)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mask = attention_mask[..., None]
        states = (self.odd(self.table(input_ids)) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.score(states))


def test_unknown_architecture_needs_nothing_but_a_loss(make_trainer: MakeTrainer) -> None:
    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels, reduction="none")

    trainer = make_trainer(model=OddModel(PretrainedConfig()), more={"compute_loss_func": loss})
    assert all(way > 0 for way in moved(trainer).values())
    with pytest.raises(
        ValueError, match=r"`OddModel` has no loss of one example .*compute_loss_func"
    ):
        make_trainer(model=OddModel(PretrainedConfig()))


def accepts(method: Any, of_trainer: Any) -> None:
    """Fails unless a method takes, in the same order, what the Trainer's own takes."""

    def names(function: Any) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    inspect.signature(method).bind(None, **dict.fromkeys(names(of_trainer)))
    assert names(method) == names(of_trainer)[: len(names(method))]


def test_overrides_take_what_the_trainer_passes() -> None:
    checked = set()
    for part in DPGrapeMixin.__mro__[:-1]:
        for name, method in vars(part).items():
            of_trainer = getattr(Trainer, name, None)
            if inspect.isfunction(method) and of_trainer and not name.startswith("__"):
                accepts(method, of_trainer)
                checked.add(name)
    assert {"training_step", "log", "create_optimizer", "push_to_hub", "_save"} < checked
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_items_in_batch'"):
        accepts(lambda self, model, inputs: None, Trainer.training_step)


def test_noise_and_clip_norm_reach_the_weights(make_trainer: MakeTrainer) -> None:
    # A model that was trained by accident without them would not notice either.
    def distance(**changes: Any) -> float:
        given = {"optim": "sgd", "max_steps": 2, "noise_multiplier": 1e-2, **changes}
        return sum(way**2 for way in moved(make_trainer(**given)).values()) ** 0.5

    plain = distance()
    assert distance(noise_multiplier=1e4) > 1e4 * plain
    assert distance(l2_clip_norm=0.01) == pytest.approx(plain / 100, rel=0.1)


def test_reported_epsilon_is_that_of_independent_accountants(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(noise_multiplier=1.4)
    trainer.train()
    trainer.save_model()
    record = json.loads((tmp_path / "out" / "privacy.json").read_text())
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    for name, accountant in {
        "pld": pld.PLDAccountant(relation, 1e-3),
        "rdp": rdp.RdpAccountant(neighboring_relation=relation),
    }.items():
        for _ in range(4):
            gaussian = dp_accounting.GaussianDpEvent(1.4)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(10 / NUM_EXAMPLES, gaussian))
        expected = accountant.get_epsilon(1e-3)
        assert record["epsilon_by_accountant"][name] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2},
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
        {"remove_unused_columns": False, "dataloader_in_order": False},
    ],
)
def test_loader_arguments(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    # Rare draws from few examples: some steps see nothing, others more than one physical batch.
    trainer = make_trainer(expected_batch_size=2, per_device_train_batch_size=1, **options)
    assert trainer.train().global_step == 4


def test_examples_that_are_drawn_together_do_not_meet(make_trainer: MakeTrainer) -> None:
    # The same example, once among short and once among long ones, is the same contribution.
    rows = examples(6)
    short = rows.select([0])
    both = rows.select([0, 5])
    alone, pair, other = (
        contribution(make_trainer, data) for data in (short, both, rows.select([5]))
    )
    for name, total in pair.items():
        assert torch.allclose(total, alone[name] + other[name], atol=1e-5), name


def contribution(make_trainer: MakeTrainer, data: Any) -> dict[str, Tensor]:
    """The sum of clipped gradients of a data set, which every step draws in full."""
    model = make_model("roberta", CLASSIFY).float()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trainer = make_trainer(
        model=model,
        noise_multiplier=0.0,
        allow_zero_noise=True,
        expected_batch_size=len(data),
        max_steps=1,
        rank=0,
        optim="sgd",
        learning_rate=1.0,
        more={"train_dataset": data},
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer.train()
    return {n: (before[n] - p.detach()) * len(data) for n, p in model.named_parameters()}
