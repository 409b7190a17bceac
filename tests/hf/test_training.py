"""Training runs: what the Trainer's options mean, and what a run leaves behind.

Covers: hf/trainer.py, hf/planning.py, hf/trained_run.py, hf/trainer_part.py, hf/left_out.py.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest_trainer import NUM_EXAMPLES, MakeTrainer, collate, examples
from families import CAUSAL, CLASSIFY, make_config, make_model
from torch import Tensor
from transformers import Trainer, TrainerCallback

from hf_dpgrape import DPGrapeTrainer
from hf_dpgrape.hf.planning import head_tensors

#: A test's seed under which the first step draws nobody, if an example is expected.
EMPTY = 1


def weights(trainer: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def change(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    return {n: float((after[n] - before[n]).norm()) for n in before}


def everything(**changes: Any) -> dict[str, Any]:
    """No noise, no clipping, all examples in every step: ordinary training."""
    return {
        "noise_multiplier": 0.0,
        "allow_zero_noise": True,
        "l2_clip_norm": 1e6,
        "expected_batch_size": NUM_EXAMPLES,
        "optim": "sgd",
        **changes,
    }


def test_without_noise_and_clipping_it_is_ordinary_training(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**everything(rank=0, max_steps=3, learning_rate=0.1))
    reference = make_model("roberta", CLASSIFY).float().train()
    for module in (*reference.modules(), *trainer.model.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        reference(**collate(list(examples()))).loss.backward()
        optimizer.step()
    trainer.train()
    for (name, got), want in zip(
        trainer.model.named_parameters(), reference.parameters(), strict=True
    ):
        assert torch.allclose(got, want, atol=1e-5), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "optim", ["sgd", "adamw_torch", "adamw_torch_fused", "adafactor", "rmsprop"]
)
def test_optimizers_step_in_the_subspace(
    make_trainer: MakeTrainer, optim: str, causal: bool
) -> None:
    trainer = make_trainer(causal=causal, optim=optim, max_steps=2)
    before = weights(trainer)
    output = trainer.train()
    assert output.global_step == 2
    moved = change(before, weights(trainer))
    assert all(amount > 0 for amount in moved.values()), moved
    held = [value for state in trainer.optimizer.state.values() for value in state.values()]
    shapes = {tuple(value.shape) for value in held if isinstance(value, Tensor)}
    full = {tuple(p.shape) for p in trainer.model.parameters() if p.ndim == 2 and min(p.shape) > 5}
    assert not shapes & full


@pytest.mark.parametrize("size", [1, 16])
def test_physical_batch_size_changes_nothing(make_trainer: MakeTrainer, size: int) -> None:
    model, other = (make_model("gpt2", CAUSAL).float() for _ in range(2))
    for m in (model, other):
        for module in m.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    reference = make_trainer(causal=True, model=model)
    reference.train()
    trainer = make_trainer(causal=True, model=other, per_device_train_batch_size=size)
    trainer.train()
    assert max(change(weights(reference), weights(trainer)).values()) < 1e-4


def test_accumulation_is_absorbed_into_the_logical_batch(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        expected_batch_size=None, gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=2
    )
    assert trainer.args.gradient_accumulation_steps == 1
    assert trainer.plan.expected_batch_size == 12
    assert trainer.plan.num_steps == 8
    assert trainer.train().global_step == 8


class CountDraws(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


def test_one_noise_draw_per_step(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_dpgrape.mechanism import private_step

    draws: list[int] = []
    original = private_step.PrivateStep._add_noise_once_
    monkeypatch.setattr(
        private_step.PrivateStep,
        "_add_noise_once_",
        lambda self, sums: (draws.append(len(sums)), original(self, sums))[1],
    )
    count = CountDraws()
    trainer = make_trainer(per_device_train_batch_size=1, more={"callbacks": [count]})
    trainer.train()
    assert len(draws) == count.steps == trainer.plan.num_steps == 4


def noting_(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """How many examples each step of the trainer will have, and the loss that the Trainer sees."""
    noted: list[tuple[int, float]] = []
    original = trainer.training_step

    def step(model: Any, inputs: Any, *args: Any) -> Tensor:
        loss = original(model, inputs, *args)
        noted.append((sum(part.num_samples for part in inputs), float(loss)))
        return loss

    monkeypatch.setattr(trainer, "training_step", step)
    return noted


@pytest.mark.parametrize("asked", [False, True])
def test_the_trainer_sees_no_raw_loss_unless_asked_for(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    trainer = make_trainer(log_non_private_metrics=asked)
    noted = noting_(trainer, monkeypatch)
    trainer.train()
    assert any(num for num, _ in noted)
    assert all((loss > 0) == (asked and num > 0) for num, loss in noted)


def test_update_without_examples_is_noise_of_the_planned_size(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(
        unsafe_test_seed=EMPTY,
        expected_batch_size=1,
        noise_multiplier=50.0,
        l2_clip_norm=0.2,
        max_steps=1,
        rank=0,
        optim="sgd",
        learning_rate=0.5,
    )
    before, noted = weights(trainer), noting_(trainer, monkeypatch)
    trainer.train()
    assert [num for num, _ in noted] == [0]
    moved = torch.cat([(weights(trainer)[n] - before[n]).flatten() for n in before])
    assert moved.std() == pytest.approx(0.5 * 50.0 * 0.2 / 1, rel=0.02)


def test_mostly_empty_batches(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(expected_batch_size=1, max_steps=6)
    assert trainer.train().global_step == 6


def test_weight_decay_acts_on_projected_weights(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        **everything(l2_clip_norm=1e-9, max_steps=1, weight_decay=0.5, learning_rate=0.1)
    )
    name = "roberta.encoder.layer.0.output.dense.weight"
    before = weights(trainer)[name]
    trainer.train()
    assert torch.allclose(weights(trainer)[name], before * (1 - 0.1 * 0.5), atol=1e-7)


def test_schedule_reaches_the_inner_optimizer(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(lr_scheduler_type="linear", learning_rate=0.4, max_steps=4)
    seen: list[float] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(trainer.private_training.optimizer.param_groups[0]["lr"])

    trainer.add_callback(Watch())
    trainer.train()
    assert seen == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_head_has_its_own_rate_group_and_phase(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        head_modules=["classifier"],
        head_learning_rate=0.3,
        head_clip_share=0.6,
        head_only_steps=2,
        max_steps=2,
    )
    before = weights(trainer)
    trainer.train()
    moved = change(before, weights(trainer))
    assert all((amount > 0) == n.startswith("classifier") for n, amount in moved.items())
    rates = {group["lr"] for group in trainer.private_training.optimizer.param_groups}
    assert rates == {1e-2, 0.3}
    head = trainer.private_training.subspace.tensors["classifier.dense.weight"]
    assert head.is_own_stand_in


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim_target_modules": "qkv_proj"}, "`optim_target_modules` to .*got 'qkv_proj', which"),
        ({"optim_target_modules": ["dense", "qkv"]}, "`optim_target_modules` to .*got 'qkv', whic"),
        ({"head_modules": ["classifier", "score"]}, "`head_modules` to match .*got 'score', which"),
    ],
)
def test_a_name_that_matches_nothing_is_refused(
    make_trainer: MakeTrainer, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_trainer(**changes).train()
    assert "`classifier.out_proj`" in str(caught.value)


@pytest.mark.parametrize("changes", [{"optim_target_modules": "bias"}, {"rank": 99}])
def test_a_choice_of_which_nothing_can_be_projected_is_refused(
    make_trainer: MakeTrainer, changes: dict[str, Any]
) -> None:
    trainer = make_trainer(**{"optim_target_modules": ["dense"], **changes})
    with pytest.raises(ValueError, match="to choose matrices with both sides above `rank`"):
        trainer.train()


def test_checkpointed_model_trains_the_same(make_trainer: MakeTrainer) -> None:
    runs = []
    for on in (False, True):
        trainer = make_trainer(activation_checkpointing=on)
        trainer.train()
        runs.append(weights(trainer))
    assert max(change(*runs).values()) < 1e-4


def test_given_optimizer_is_adopted(make_trainer: MakeTrainer) -> None:
    model = make_model("roberta", CLASSIFY).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = make_trainer(model=model, more={"optimizers": (optimizer, None)})
    before = weights(trainer)
    trainer.train()
    assert all(amount > 0 for amount in change(before, weights(trainer)).values())


def test_runs_differ_unless_a_test_fixes_the_seed(make_trainer: MakeTrainer) -> None:
    def run(seed: int | None) -> dict[str, Tensor]:
        trainer = make_trainer(unsafe_test_seed=seed, max_steps=2)
        trainer.train()
        return weights(trainer)

    assert max(change(run(1), run(1)).values()) == 0
    assert min(change(run(None), run(None)).values()) > 0


def test_global_randomness_is_secret_inside_and_restored_after(make_trainer: MakeTrainer) -> None:
    draws: list[float] = []

    class Draw(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            draws.append(float(torch.rand(())))

    for _ in range(2):
        trainer = make_trainer(unsafe_test_seed=None, max_steps=1, more={"callbacks": [Draw()]})
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        trainer.train()
        assert states[0] == random.getstate()
        assert states[1] == np.random.get_state()[1].tolist()
        assert torch.equal(states[2], torch.get_rng_state())
    assert draws[0] != draws[1]


def test_second_training_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    with pytest.raises(ValueError, match="already spent"):
        trainer.train()


def test_interrupted_run_counts_and_can_be_resumed(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    interrupt = Interrupt()
    trainer = make_trainer(
        save_strategy="steps", save_steps=2, max_steps=5, more={"callbacks": [interrupt]}
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    spent = trainer.plan.epsilon(5)  # whoever interrupts it may have seen results
    with pytest.raises(ValueError, match=rf"already spent epsilon={spent:.4g} in 3 steps"):
        trainer.train()
    trainer.remove_callback(interrupt)
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    with pytest.raises(ValueError, match=r"has taken 3 steps, so continuing after step 2 would"):
        trainer.train(resume_from_checkpoint=checkpoint)
    resumed = make_trainer(save_strategy="steps", save_steps=2, max_steps=5)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.privacy_record()["steps_done"] == 5


def test_record_without_noise_is_valid_json(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(**everything(max_steps=1))
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    record = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert record["epsilon"] is None
    assert "no privacy" in (tmp_path / "out" / "README.md").read_text()


def test_same_model_in_two_trainers_then_ordinary_training(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    model = make_model("roberta", CLASSIFY).float()
    for _ in range(2):
        make_trainer(model=model, max_steps=1).train()
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "plain"),
        max_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        learning_rate=0.1,
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    Trainer(model, arguments, train_dataset=examples(), data_collator=collate).train()
    after = {n: p.detach() for n, p in model.named_parameters()}
    assert sum(amount > 0 for amount in change(before, after).values()) > 30


def test_frozen_tensors_stay(make_trainer: MakeTrainer) -> None:
    model = make_model("roberta", CLASSIFY).float()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))  # BitFit
    trainer = make_trainer(model=model)
    before = weights(trainer)
    trainer.train()
    moved = change(before, weights(trainer))
    assert all((amount > 0) == n.endswith("bias") for n, amount in moved.items())


def test_positions_folded_into_the_batch(make_trainer: MakeTrainer) -> None:
    # OPT's feed-forward layers see (batch x length) rows, and lengths differ between batches.
    model = make_model("opt", CAUSAL).float()
    trainer = make_trainer(model=model, causal=True, per_device_train_batch_size=2)
    assert trainer.train().global_step == 4


def test_custom_loss(make_trainer: MakeTrainer) -> None:
    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)

    make_trainer(max_steps=1, more={"compute_loss_func": loss}).train()
    wrong = make_trainer(max_steps=1, more={"compute_loss_func": lambda o, y: o.logits})
    with pytest.raises(ValueError, match="one number for the one example"):
        wrong.train()


# ---- What is written and logged ---------------------------------------------------------------


def test_logs_hold_epsilon_and_no_raw_loss(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(
        logging_steps=2,
        max_steps=4,
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        more={"eval_dataset": examples(6)},
    )
    output = trainer.train()
    assert math.isnan(output.training_loss)
    assert "train_loss" not in output.metrics
    logs = [log for log in trainer.state.log_history if "learning_rate" in log]
    assert [log["step"] for log in logs] == [2, 4]
    assert [log["epsilon"] for log in logs] == [trainer.plan.epsilon(2), trainer.plan.epsilon(4)]
    assert all(log["target_delta"] == 1e-3 for log in logs)
    for log in trainer.state.log_history:
        assert not {"loss", "train_loss", "non_private_loss"} & log.keys()
    checkpoint = tmp_path / "out" / "checkpoint-4"
    assert not list(checkpoint.glob("rng_state*"))
    state = (checkpoint / "trainer_state.json").read_text()
    assert '"loss"' not in state and json.loads(state)["total_flos"] == 0


def test_raw_loss_only_under_an_honest_name(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**everything(log_non_private_metrics=True, logging_steps=1, max_steps=1))
    trainer.train()
    logged = trainer.state.log_history[0]
    assert "loss" not in logged and 0.5 < logged["non_private_loss"] < 3


def test_record_and_card(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(more={"eval_dataset": examples(6)})
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()
    record = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert record["steps_done"] == 4
    assert record["epsilon"] == trainer.plan.epsilon(4)
    assert record["plan"]["noise_multiplier"] == 1.0
    assert "NOT PRIVATE" in record["projection"]["randomness"]
    assert record["plan"].pop("private_loss_bound") is None
    text = json.dumps(record)
    assert "loss" not in text and str(trainer.args.unsafe_test_seed) not in text
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Training Loss" not in card and "pipeline_tag: text-classification" in card
    assert f"**{record['epsilon']:.4g}**" in card and "add or remove one" in card


def test_trained_model_is_ordinary(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    trainer = make_trainer(causal=True, max_steps=1)
    trainer.train()
    trainer.save_model()
    assert all(not m._forward_hooks for m in trainer.model.modules())
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[5, 6, 7]])
    trainer.model.eval()
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, trainer.model(ids).logits, atol=1e-6)
    mine, theirs = (
        m.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
        for m in (trainer.model, loaded)
    )
    assert torch.equal(mine, theirs)


# ---- Resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_resumed_run_ends_like_an_uninterrupted_one(
    make_trainer: MakeTrainer, tmp_path: Path, optim: str
) -> None:
    arguments: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 3,
        "max_steps": 7,
        "optim": optim,
        "update_proj_gap": 2,
        "refresh_moments": "reset",
    }
    whole = make_trainer(**arguments)
    whole.train()
    resumed = make_trainer(**arguments)
    checkpoint = tmp_path / "out" / "checkpoint-3"
    output = resumed.train(resume_from_checkpoint=str(checkpoint))
    assert output.global_step == 7
    assert resumed.privacy_record()["epsilon"] == whole.privacy_record()["epsilon"]


def test_resume_continues_exactly_without_randomness(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    arguments = everything(
        save_strategy="steps",
        save_steps=3,
        max_steps=6,
        optim="adamw_torch",
        update_proj_gap=2,
        refresh_moments="reset",
    )

    def model() -> Any:
        made = make_model("roberta", CLASSIFY).float()
        for module in made.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return made

    whole = make_trainer(model=model(), **arguments)
    whole.train()
    resumed = make_trainer(model=model(), **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert max(change(weights(whole), weights(resumed)).values()) < 1e-4


@pytest.mark.parametrize(
    "changed",
    [
        {"noise_multiplier": 0.5},
        {"l2_clip_norm": 3.0},
        {"expected_batch_size": 12},
        {"max_steps": 9},
        {"more": {"train_dataset": examples(30)}},
    ],
)
def test_changed_plan_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, changed: dict[str, Any]
) -> None:
    make_trainer(save_strategy="steps", save_steps=2).train()
    resumed = make_trainer(save_strategy="steps", save_steps=2, **changed)
    with pytest.raises(ValueError, match="must keep its privacy plan"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_checkpoint_without_record_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    (checkpoint / "privacy.json").unlink()
    with pytest.raises(ValueError, match="already spent is unknown"):
        make_trainer().train(resume_from_checkpoint=str(checkpoint))


# ---- Refusals ----------------------------------------------------------------------------------


def test_refuses_batch_norm(make_trainer: MakeTrainer) -> None:
    model = make_model("roberta", CLASSIFY).float()
    model.classifier.dense = torch.nn.Sequential(model.classifier.dense, torch.nn.BatchNorm1d(24))
    with pytest.raises(ValueError, match=r"`classifier.dense.1`: BatchNorm1d mixes the samples"):
        make_trainer(model=model)


def test_refuses_float16_weights(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"load the model with `dtype=torch\.float32`"):
        make_trainer(model=make_model("roberta", CLASSIFY).half())


def test_refuses_layers_that_hide_the_batch_before_training(make_trainer: MakeTrainer) -> None:
    model = make_model("deberta-v2", CLASSIFY).float()
    trainer = make_trainer(model=model, capture="batched")
    with pytest.raises(ValueError, match=r"not broadcast.*set `capture=\"single\"`"):
        trainer.train()


def test_refuses_iterable_datasets(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="must have a length and indexed access"):
        make_trainer(more={"train_dataset": examples().to_iterable_dataset()})


def test_refuses_ordinary_arguments(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    with pytest.raises(TypeError, match="must be DPGrapeTrainingArguments"):
        DPGrapeTrainer(
            make_model("roberta", CLASSIFY).float(),
            TrainingArguments(output_dir=str(tmp_path), report_to=[]),
            train_dataset=examples(),
        )


def test_given_optimizer_is_not_silently_replaced(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    model = make_model("roberta", CLASSIFY).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        model=model, save_strategy="steps", save_steps=2, more={"optimizers": (optimizer, None)}
    )
    trainer.train()
    with pytest.raises(ValueError, match="new trainer and a new optimizer"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_refuses_head_options_without_head(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="name the head by `head_modules`"):
        make_trainer(head_only_steps=1)


def test_newly_initialized_head_is_found(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    from transformers import RobertaForSequenceClassification

    made = make_model("roberta", CLASSIFY).float()
    made.roberta.save_pretrained(tmp_path / "body")
    model = RobertaForSequenceClassification.from_pretrained(tmp_path / "body", num_labels=3)
    trainer = make_trainer(model=model, head_clip_share=0.5, max_steps=1)
    assert {n.split(".")[0] for n in head_tensors(trainer.model, None)} == {"classifier"}
    trainer.train()
    projections = trainer.private_training.subspace.projections
    assert projections["classifier.dense.weight"].side is None
    assert projections["roberta.embeddings.word_embeddings.weight"].side == "right"


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_that_was_loaded_and_resized_is_not_new(tmp_path: Path, is_tied: bool) -> None:
    """Nor is one that the checkpoint lacks taken for its own."""
    from transformers import GPT2LMHeadModel, GPT2Model

    config = make_config("gpt2")
    config.tie_word_embeddings = is_tied
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "whole")
    GPT2Model(config).save_pretrained(tmp_path / "body")
    for folder, new in (("whole", []), ("body", [] if is_tied else ["lm_head.weight"])):
        model = GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        assert sorted(head_tensors(model, None)) == new
        model.resize_token_embeddings(config.vocab_size + 5)
        assert model.get_output_embeddings().weight.shape[0] == config.vocab_size + 5
        assert sorted(head_tensors(model, None)) == new


@pytest.mark.parametrize("causal", [False, True])
def test_outputs_without_names(make_trainer: MakeTrainer, causal: bool) -> None:
    """`return_dict=False` is about what others see; gpt2 itself cannot run under it."""
    metrics = []
    for is_named in (True, False):
        model = make_model(*(("gpt2", CAUSAL) if causal else ("roberta", CLASSIFY))).float()
        model.config.return_dict = is_named
        trainer = make_trainer(model=model, causal=causal, more={"eval_dataset": examples(7)})
        trainer.train()
        metrics.append((trainer.evaluate()["eval_loss"], trainer.predict(examples(7))))
        assert model.config.return_dict == is_named
    assert metrics[0][0] == metrics[1][0]
    assert (metrics[0][1].predictions == metrics[1][1].predictions).all()
