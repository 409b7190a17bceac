"""Whoever makes a step, and whenever the record is written, every release is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest_trainer import NUM_EXAMPLES, MakeTrainer, examples
from families import CLASSIFY, make_model
from torch import Tensor
from transformers import TrainerCallback, set_seed


def recorded(folder: Any) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((Path(folder) / "privacy.json").read_text())
    return record


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class At(TrainerCallback):
    """Does something at an event of the training loop."""

    def __init__(self, event: str, do: Any) -> None:
        setattr(self, event, lambda args, state, control, **kwargs: do(state, **kwargs))


# ---- Counting ----------------------------------------------------------------------------------


def test_steps_outside_of_train_are_counted(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    loader = trainer.get_train_dataloader()
    trainer.create_optimizer()
    trainer.model_wrapped = trainer.model
    before, done = weights(trainer.model), 0
    for batch in loader:  # an epoch has as many as the plan
        trainer.training_step(trainer.model, batch)
        trainer.optimizer.step()
        done += 1
        record = trainer.privacy_record()
        assert record["steps_done"] == done
        assert record["epsilon"] == trainer.plan.epsilon(done)
    assert done == 4 and any(
        not torch.equal(before[n], w) for n, w in weights(trainer.model).items()
    )
    with pytest.raises(RuntimeError, match="The plan's 4 steps are done"):
        trainer.training_step(trainer.model, batch)
    with pytest.raises(ValueError, match=r"already spent epsilon=.* in 4 steps"):
        trainer.train()


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step"])
def test_a_save_in_the_middle_of_a_step_counts_it(make_trainer: MakeTrainer, event: str) -> None:
    found = []

    def save(state: Any, **kwargs: Any) -> None:
        folder = f"{trainer.args.output_dir}/saved-{state.global_step}"
        trainer.save_model(folder)
        found.append(recorded(folder))

    trainer = make_trainer(more={"callbacks": [At(event, save)]})
    trainer.train()
    assert [record["steps_done"] for record in found] == [1, 2, 3, 4]
    assert [r["epsilon"] for r in found] == [trainer.plan.epsilon(step) for step in range(1, 5)]


def test_a_step_that_fails_is_counted(make_trainer: MakeTrainer) -> None:
    def loss(outputs: Any, labels: Tensor) -> Tensor:
        losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        if trainer.state.global_step == 2:
            raise RuntimeError("out of memory")
        return losses

    trainer = make_trainer(more={"compute_loss_func": loss})
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    record = trainer.privacy_record()
    assert (record["steps_done"], record["steps_counted"]) == (3, 4)
    assert record["all_steps_count_because"] == ["it ended before its planned steps"]


def test_an_epoch_that_a_callback_ends_counts_in_every_later_log(make_trainer: MakeTrainer) -> None:
    class EndEpoch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step == 2

    options = {"num_train_epochs": 3, "max_steps": -1, "logging_steps": 3}
    trainer = make_trainer(more={"callbacks": [EndEpoch()]}, **options)
    trainer.train()
    assert trainer.state.global_step < trainer.plan.num_steps == 12
    logged = [log["epsilon"] for log in trainer.state.log_history if "epsilon" in log]
    assert len(logged) > 1 and set(logged) == {trainer.plan.epsilon(12)}
    assert trainer.privacy_record()["all_steps_count_because"][0] == "a callback ended it"


# ---- What is trained ---------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end"])
def test_tensors_do_not_change_sides_in_a_run(
    make_trainer: MakeTrainer, event: str, wanted: bool
) -> None:
    model = make_model("roberta", CLASSIFY).float()
    bias = model.classifier.out_proj.bias
    bias.requires_grad_(not wanted)

    def turn(state: Any, **kwargs: Any) -> None:
        bias.requires_grad_(wanted)

    trainer = make_trainer(model=model, more={"callbacks": [At(event, turn)]})
    with pytest.raises(RuntimeError, match=r"frozen, thawed or exchanged.*`classifier.out_proj.b"):
        trainer.train()
    assert trainer.privacy_record()["steps_done"] == (0 if event == "on_train_begin" else 1)


def test_tensors_do_not_change_identity_in_a_run(make_trainer: MakeTrainer) -> None:
    model = make_model("roberta", CLASSIFY).float()

    def exchange(state: Any, **kwargs: Any) -> None:
        head = model.classifier.out_proj
        head.weight = torch.nn.Parameter(head.weight.detach().clone())

    trainer = make_trainer(model=model, more={"callbacks": [At("on_step_end", exchange)]})
    with pytest.raises(RuntimeError, match=r"exchanged since \(`classifier.out_proj.weight`\)"):
        trainer.train()


def test_tensors_frozen_before_training_stay(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    for name, p in trainer.model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    before = weights(trainer.model)
    trainer.train()
    assert all(
        torch.equal(before[name], w) != name.endswith("bias")
        for name, w in weights(trainer.model).items()
    )


def test_an_optimizer_without_the_head_is_refused(make_trainer: MakeTrainer) -> None:
    model = make_model("roberta", CLASSIFY).float()
    body = [p for name, p in model.named_parameters() if not name.startswith("classifier")]
    trainer = make_trainer(model=model, more={"optimizers": (torch.optim.SGD(body, lr=0.1), None)})
    with pytest.raises(ValueError, match=r"lacks 4 of \d+ trainable tensors, as `classifier.out_p"):
        trainer.train()


def test_a_frozen_model_is_refused(make_trainer: MakeTrainer) -> None:
    model = make_model("roberta", CLASSIFY).float().requires_grad_(False)
    with pytest.raises(ValueError, match="Expected a model with trainable tensors, got one that i"):
        make_trainer(model=model)


# ---- Secret randomness -------------------------------------------------------------------------


def test_a_seed_that_a_callback_sets_does_not_reach_dropout(make_trainer: MakeTrainer) -> None:
    def run(dropout: float) -> dict[str, Tensor]:
        model = make_model("roberta", CLASSIFY).float()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        trainer = make_trainer(
            model=model,
            more={"callbacks": [At("on_step_begin", lambda state, **kwargs: set_seed(0))]},
            noise_multiplier=0.0,
            allow_zero_noise=True,
            expected_batch_size=NUM_EXAMPLES,
            max_steps=2,
            unsafe_test_seed=None,
        )
        trainer.train()
        return weights(model)

    first, second = run(0.3), run(0.3)
    assert not torch.equal(first["classifier.dense.weight"], second["classifier.dense.weight"])
    first, second = run(0.0), run(0.0)  # nothing else differs between two runs
    assert all(torch.equal(first[name], second[name]) for name in first)


def drawn(trainer: Any, epochs: int = 1) -> list[int]:
    """Sizes of the logical batches of some epochs of a trainer's loader."""
    loader = trainer.get_train_dataloader()
    return [sum(part.num_samples for part in batch) for _ in range(epochs) for batch in loader]


def test_the_public_seed_does_not_draw_the_sample(make_trainer: MakeTrainer) -> None:
    def sizes(fixed: int | None) -> list[int]:
        set_seed(5)
        return drawn(make_trainer(seed=5, data_seed=5, unsafe_test_seed=fixed), epochs=5)

    # 20 sizes of standard deviation 2.7: two secret samples agree with probability 1e-18.
    assert sizes(None) != sizes(None)
    assert sizes(7) == sizes(7)  # so that a difference is one of the coins


def rate_is(sizes: list[int], prob: float) -> bool:
    """Whether so many draws are those of coins with this probability, at five sigma."""
    num = NUM_EXAMPLES * len(sizes)
    return abs(sum(sizes) - num * prob) < 5 * float(np.sqrt(num * prob * (1 - prob)))


def test_the_loader_draws_at_the_planned_rate(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(unsafe_test_seed=8)
    prob = trainer.plan.sampling_prob
    sizes = drawn(trainer, epochs=250)
    assert rate_is(sizes, prob)
    draws = np.random.default_rng(3)
    for factor in (0.9, 1.1):
        wrong = draws.binomial(NUM_EXAMPLES, factor * prob, size=len(sizes))
        assert not rate_is(wrong.tolist(), prob)


# ---- Time and memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_time_and_memory_of_training_stay_out_of_the_logs(
    make_trainer: MakeTrainer, asked: bool
) -> None:
    trainer = make_trainer(
        max_steps=1,
        skip_memory_metrics=False,
        log_non_private_metrics=asked,
        more={"eval_dataset": examples(6)},
    )
    output = trainer.train()
    trainer.evaluate()
    logs = [output.metrics, *trainer.state.log_history]
    of_draws = {
        name
        for log in logs
        for name in log
        if "_mem_" in name or name.endswith(("train_runtime", "train_steps_per_second"))
    }
    assert {"epoch", "epsilon"} <= output.metrics.keys()
    if not asked:
        assert not of_draws
    assert all(name.startswith("non_private_") for name in of_draws)
    assert bool(of_draws) == asked
