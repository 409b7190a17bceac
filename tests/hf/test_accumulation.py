"""How a logical batch is cut into physical ones changes nothing, with accumulation or without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest_trainer import MakeTrainer
from families import CAUSAL, CLASSIFY, make_model
from torch import Tensor

#: Physical batch, and accumulation steps that make 16 of it.
CUTS = [(1, 16), (4, 4), (16, 1)]


def without_dropout(family: str, head: str) -> Any:
    """A model in float64 without dropout, whose masks depend on the order of examples."""
    model = make_model(family, head)
    for module in model.modules():
        for name in {"p", "dropout"} & vars(module).keys():  # OPT keeps the rate in its layers
            setattr(module, name, 0.0)
    return model


def run(
    make_trainer: MakeTrainer, causal: bool, physical: int, accumulation: int, **changes: Any
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Weights and logs of a run in float64 whose noise and samples are fixed for the test."""
    model = without_dropout(*(("gpt2", CAUSAL) if causal else ("roberta", CLASSIFY)))
    trainer = make_trainer(
        model=model,
        causal=causal,
        expected_batch_size=None,
        per_device_train_batch_size=physical,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        **changes,
    )
    assert trainer.plan.expected_batch_size == 16
    trainer.train()
    logs = [log for log in trainer.state.log_history if "learning_rate" in log]
    return {n: p.detach().clone() for n, p in model.named_parameters()}, logs


@pytest.mark.parametrize(
    ("rank", "clip_grouping", "causal"),
    [
        (5, "joint", False),
        (0, "layer", True),
        *(
            pytest.param(rank, grouping, causal, marks=pytest.mark.slow)
            for rank in (0, 5)
            for grouping in ("joint", "layer")
            for causal in (False, True)
            if (rank, grouping, causal) not in ((5, "joint", False), (0, "layer", True))
        ),
    ],
)
def test_physical_batch_and_accumulation_give_the_same_parameters(
    make_trainer: MakeTrainer, rank: int, clip_grouping: str, causal: bool
) -> None:
    options = {"rank": rank, "clip_grouping": clip_grouping, "private_loss_share": 0.3}
    start = make_model(*(("gpt2", CAUSAL) if causal else ("roberta", CLASSIFY)))
    (first, first_logs), *others = (run(make_trainer, causal, *cut, **options) for cut in CUTS)
    for name, value in start.named_parameters():
        assert (first[name] - value).norm() > 1e-3, name
    for weights, logs in others:
        for name, value in weights.items():
            torch.testing.assert_close(value, first[name], rtol=0, atol=1e-8)
        assert [log["private_loss"] for log in logs] == pytest.approx(
            [log["private_loss"] for log in first_logs], abs=1e-9
        )


@pytest.mark.parametrize("family", ["roberta", "bert", "distilbert", "gpt2", "opt"])
def test_heads_without_a_normalizer_of_their_own_are_not_scaled(
    make_trainer: MakeTrainer, family: str
) -> None:
    # Where a head takes no `num_items_in_batch`, the stock Trainer leaves out its division.
    moved = []
    for physical, accumulation in ((16, 1), (4, 4)):
        model = without_dropout(family, CLASSIFY)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        make_trainer(
            model=model,
            expected_batch_size=None,
            per_device_train_batch_size=physical,
            gradient_accumulation_steps=accumulation,
            noise_multiplier=0.0,
            allow_zero_noise=True,
            l2_clip_norm=1e6,
            optim="sgd",
            rank=0,
            max_steps=1,
        ).train()
        moved.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    total = sum(float(way.square().sum()) for way in moved[0].values()) ** 0.5
    assert total > 1e-3
    for name, way in moved[0].items():
        torch.testing.assert_close(moved[1][name], way, rtol=0, atol=1e-10 * total)
