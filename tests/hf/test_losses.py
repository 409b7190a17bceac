"""Losses of samples: the user's own row by row, and the model's own for every task head.

Covers: hf/trainers_losses.py, hf/task_losses.py, hf/row_by_row.py, hf/own_loss.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import datasets
import pytest
import torch
import transformers
from conftest_trainer import NUM_EXAMPLES, MakeTrainer, collate, examples, make_trainer
from families import (
    CAUSAL,
    CLASSIFY,
    IMAGE,
    MASKED,
    QA,
    SEQ2SEQ,
    TOKENS,
    make_config,
    make_inputs,
    make_model,
)
from oracle import batch_size, select
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_dpgrape import DPGrapeMixin, DPGrapeTrainer
from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.hf.refusals import refuse_bypasses
from hf_dpgrape.hf.row_by_row import RowByRow, rows_of
from hf_dpgrape.hf.task_losses import (
    candidate_losses,
    causal_lm,
    loss_of,
    seq2seq_lm,
    token_level,
)

__all__ = ["make_trainer"]


# ---- The user's loss sees one row at a time ------------------------------------------------------


def largest_eight(outputs: Any, labels: Tensor) -> Tensor:
    """A loss across the batch: the eight largest count, and the others not at all."""
    losses = F.cross_entropy(outputs.logits, labels, reduction="none")
    return losses.topk(min(8, len(losses))).values.sum()


def test_a_loss_cannot_look_across_the_batch() -> None:
    g = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(12, 5, generator=g), torch.arange(12) % 5
    found = RowByRow(largest_eight)(SimpleNamespace(logits=logits), labels, 12)
    assert torch.equal(found, F.cross_entropy(logits, labels, reduction="none"))
    logits[1:] *= 9
    again = RowByRow(largest_eight)(SimpleNamespace(logits=logits), labels, 12)
    assert torch.equal(again[0], found[0]) and not torch.equal(again[1:], found[1:])


def test_gradients_are_those_of_the_vectorized_loss() -> None:
    def each(outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 7, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (4, 6), generator=g)
    (own,) = torch.autograd.grad(RowByRow(each)({"logits": logits}, labels, 4).sum(), logits)
    together = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    (want,) = torch.autograd.grad(together.view(4, 6).mean(1).sum(), logits)
    assert torch.allclose(own, want, rtol=1e-12)


class Pair(NamedTuple):
    logits: Tensor
    extra: Any


@dataclasses.dataclass
class Record:
    logits: Tensor
    extra: Any


@pytest.mark.parametrize("kind", [Pair, Record, SimpleNamespace, dict])
def test_containers_stay_what_they_are(kind: Callable[..., Any]) -> None:
    logits = torch.arange(6.0).view(3, 2)
    row = rows_of(kind(logits=logits, extra=(logits + 1, 0.5, torch.tensor(7.0))), 3)[1]
    fields = row if kind is dict else {"logits": row.logits, "extra": row.extra}
    assert type(row) is kind and torch.equal(fields["logits"], logits[1:2])
    state, number, mixed = fields["extra"]
    assert torch.equal(state, logits[1:2] + 1) and number == 0.5
    assert mixed is None  # what belongs to no row may be made of all of them


def test_outputs_of_transformers() -> None:
    logits = torch.randn(3, 4, 5)
    outputs = CausalLMOutputWithPast(
        loss=torch.tensor(1.0),
        logits=logits,
        past_key_values=DynamicCache(),
        hidden_states=(logits,),
    )
    row = rows_of(outputs, 3)[2]
    assert type(row) is CausalLMOutputWithPast and torch.equal(row.hidden_states[0], logits[2:])
    assert row.loss is None and row.past_key_values is None
    assert torch.equal(rows_of((logits,), 3)[0][0], logits[:1])
    assert torch.equal(rows_of(logits, 3)[0], logits[:1])


def test_num_items_in_batch_is_none_where_it_is_taken() -> None:
    seen: list[Any] = []

    def plain(outputs: Any, labels: Any) -> Tensor:
        return outputs.sum()

    def documented(outputs: Any, labels: Any, num_items_in_batch: Any) -> Tensor:
        seen.append(num_items_in_batch)
        return outputs.sum()

    def options(outputs: Any, labels: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs["num_items_in_batch"])
        return outputs.sum()

    for function in (plain, documented, options):
        assert RowByRow(function)(torch.ones(2, 3), None, 2).tolist() == [3, 3]
    assert seen == [None] * 4


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number_of_any_shape(shape: tuple[int, ...]) -> None:
    found = RowByRow(lambda outputs, labels: outputs.sum().view(shape))(torch.ones(2, 3), None, 2)
    assert found.tolist() == [3, 3]


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(0), 1.5, (torch.zeros(()),)])
def test_something_else_than_one_number_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="`compute_loss_func` to return one number"):
        RowByRow(lambda outputs, labels: wrong)(torch.ones(2, 3), None, 2)


def test_outputs_without_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="got object; return a dictionary"):
        RowByRow(lambda outputs, labels: outputs)(object(), None, 2)


def two_arguments(outputs: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, labels, label_smoothing=0.1)


def test_evaluation_with_the_users_loss(make_trainer: MakeTrainer) -> None:
    data = examples()
    trainer = make_trainer(max_steps=1, more={"compute_loss_func": two_arguments})
    trainer.train()
    metrics = trainer.evaluate(data)
    trainer.model.eval()
    with torch.no_grad():
        inputs = collate([data[i] for i in range(NUM_EXAMPLES)])
        labels = inputs.pop("labels")
        want = two_arguments(trainer.model(**inputs), labels)
    assert metrics["eval_loss"] == pytest.approx(float(want), rel=1e-5)
    prediction = trainer.predict(data)
    assert prediction.predictions.shape == (NUM_EXAMPLES, 3)
    assert prediction.metrics["test_loss"] == pytest.approx(float(want), rel=1e-5)


class Tuples(nn.Module):
    """A model that returns its logits in a tuple, without a loss before them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layer(x),)


def test_predictions_of_a_model_that_returns_tuples(make_trainer: MakeTrainer) -> None:
    def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        labels = torch.tensor([e["label"] for e in batch])
        return {"x": F.one_hot(labels, 7).float(), "labels": labels}

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], labels)

    more = {"compute_loss_func": loss, "data_collator": collate}
    options = {"remove_unused_columns": False, "label_names": ["labels"], "max_steps": 1}
    trainer = make_trainer(model=Tuples(), more=more, **options)
    trainer.train()
    assert trainer.predict(examples()).predictions.shape == (NUM_EXAMPLES, 3)


def test_labels_of_several_columns(make_trainer: MakeTrainer) -> None:
    def loss(outputs: Any, labels: dict[str, Tensor]) -> Tensor:
        start = F.cross_entropy(outputs.start_logits, labels["start_positions"])
        return start + F.cross_entropy(outputs.end_logits, labels["end_positions"])

    def pad(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = collate([{"input_ids": e["input_ids"]} for e in batch])
        ends = {
            k: torch.tensor([e[k] for e in batch]) for k in ("start_positions", "end_positions")
        }
        return {**rows, **ends}

    places = {"start_positions": [0] * 40, "end_positions": [2] * 40}
    ids = [row[:3] for row in examples()["input_ids"]]
    data = datasets.Dataset.from_dict({"input_ids": ids, **places})
    more = {"compute_loss_func": loss, "data_collator": pad, "train_dataset": data}
    trainer = make_trainer(model=make_model("bert", QA).float(), more=more, max_steps=1)
    trainer.train()
    assert trainer.evaluate(data)["eval_loss"] > 0


# ---- Overrides by which the private part is not reached ------------------------------------------


class Loss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class Step(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


class Loader(Trainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class OwnLoss(DPGrapeTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class OwnStep(DPGrapeTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss


class OwnLoader(DPGrapeTrainer):
    def get_train_dataloader(self) -> Any:
        return Trainer.get_eval_dataloader(self, self.train_dataset)


class OwnOptimizer(DPGrapeTrainer):
    def create_optimizer(self, model: Any = None) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=1.0)


class Polite(DPGrapeTrainer):
    """Overrides what may be, and calls what it overrides."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return next(super(Polite, self).training_step(*args, **kwargs) for _ in range(1))

    def create_optimizer(self, *args: Any) -> Any:
        return super().create_optimizer(*args)

    def get_train_dataloader(self) -> Any:
        return DPGrapeTrainer.get_train_dataloader(self)


def private(base: type) -> Any:
    return type("Private", (DPGrapeMixin, base), {})


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (OwnLoss, r"`OwnLoss\.compute_loss` is not possible .*compute_loss_func"),
        (private(Loss), r"`Loss\.compute_loss` is not possible .*compute_loss_func"),
        (OwnStep, r"`OwnStep\.training_step` does not call `super\(\)\.training_step`"),
        (private(Step), r"`Step\.training_step` would not be called .*callbacks"),
        (OwnLoader, r"`OwnLoader\.get_train_dataloader` does not call"),
        (private(Loader), r"`Loader\.get_train_dataloader` would not be called"),
        (OwnOptimizer, r"`OwnOptimizer\.create_optimizer` does not call"),
    ],
)
def test_overrides_are_refused(make_trainer: MakeTrainer, trainer: Any, message: str) -> None:
    options = make_trainer()
    with pytest.raises(ValueError, match=message):
        trainer(model=options.model, args=options.args, train_dataset=options.train_dataset)


def test_overrides_that_call_what_they_override(make_trainer: MakeTrainer) -> None:
    options = make_trainer(max_steps=1)
    trainer = Polite(
        model=options.model,
        args=options.args,
        train_dataset=options.train_dataset,
        data_collator=collate,
    )
    assert trainer.train().global_step == 1


def test_trainers_whose_loss_is_the_models_own() -> None:
    for base in (Trainer, transformers.Seq2SeqTrainer):
        refuse_bypasses(private(base), DPGrapeMixin)
    trl = pytest.importorskip("trl", reason="the optional extra `trl` is not installed")
    for base in (trl.SFTTrainer, trl.DPOTrainer, trl.RewardTrainer):
        refuse_bypasses(private(base), DPGrapeMixin)
    with pytest.raises(ValueError, match=r"`KTOTrainer\.compute_loss` is not possible"):
        refuse_bypasses(private(trl.KTOTrainer), DPGrapeMixin)


def test_the_private_part_comes_first() -> None:
    with pytest.raises(TypeError, match=r"write `class Reversed\(DPGrapeMixin, \.\.\.\)`"):
        type("Reversed", (Trainer, DPGrapeMixin), {})


# torch's own, from what `compile` imports.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", ["in place", "a layer", "wrapped"])
def test_compiled_models_are_refused(make_trainer: MakeTrainer, how: str) -> None:
    model = make_model("roberta", CLASSIFY).float()
    if how == "in place":
        model.compile()
    elif how == "a layer":
        model.roberta.encoder.layer[0].compile()
    else:
        model.classifier.dense = torch.compile(model.classifier.dense)
    with pytest.raises(ValueError, match="Expected a model that is not compiled"):
        make_trainer(model=model, capture="batched")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_model_compiled_before_training_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(capture="batched")
    trainer.model.compile()
    with pytest.raises(ValueError, match="Expected a model that is not compiled"):
        trainer.train()


# ---- The model's own loss, sample by sample ------------------------------------------------------

SIZES = {
    "vocab_size": 53,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 28,
    "max_position_embeddings": 37,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
WINDOW = {
    "attention_window": 4,
    "max_encoder_position_embeddings": 40,
    "max_decoder_position_embeddings": 37,
}
SPEECH_2_TEXT = {
    "input_feat_per_channel": 9,
    "conv_channels": 16,
    "max_source_positions": 40,
    "max_target_positions": 37,
}
WHISPER = {"num_mel_bins": 9, "max_source_positions": 14, "max_target_positions": 37}
SEQ2SEQ_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "T5ForConditionalGeneration": ("T5", {"num_layers": 1, "num_heads": 2, "d_kv": 7, "d_ff": 40}),
    "BartForConditionalGeneration": ("Bart", {}),
    "MBartForConditionalGeneration": ("MBart", {}),
    "MvpForConditionalGeneration": ("Mvp", {}),
    "PLBartForConditionalGeneration": ("PLBart", {}),
    "PegasusForConditionalGeneration": ("Pegasus", {}),
    "MarianMTModel": ("Marian", {}),
    "M2M100ForConditionalGeneration": ("M2M100", {}),
    "LEDForConditionalGeneration": ("LED", WINDOW),
    "WhisperForConditionalGeneration": ("Whisper", WHISPER),
    "Speech2TextForConditionalGeneration": ("Speech2Text", SPEECH_2_TEXT),
}
DECODERS = ("Bart", "MBart", "Mvp", "PLBart", "Pegasus", "Marian", "Whisper", "TrOCR")


def build(name: str, kind: str, **changes: Any) -> Any:
    """A random model in float64 and evaluation mode."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, name)(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def own_losses(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The model's own loss of every sample alone; what has no label has loss 0."""
    problem_type = getattr(model.config, "problem_type", None)
    found = [model(**select(inputs, [i])).loss.double() for i in range(batch_size(inputs))]
    model.config.problem_type = problem_type
    return torch.stack(found).nan_to_num(0.0)


def labels_of_another_length(kind: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    labels = torch.randint(3, 53, (3, 17), generator=g)
    labels[1, 9:] = -100
    if kind in ("Whisper", "Speech2Text"):
        shape = (3, 9, 28) if kind == "Whisper" else (3, 28, 9)
        return {
            "input_features": torch.randn(shape, generator=g, dtype=torch.float64),
            "labels": labels,
        }
    ids = torch.randint(3, 53, (3, 12), generator=g)
    mask = torch.ones_like(ids)
    ids[2, 8:], mask[2, 8:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.filterwarnings("ignore:.*decoder_start_token_id.*:UserWarning")
@pytest.mark.parametrize("name", SEQ2SEQ_MODELS)
def test_labels_of_another_length_than_the_inputs(name: str) -> None:
    kind, changes = SEQ2SEQ_MODELS[name]
    model, inputs = build(name, kind, **changes), labels_of_another_length(kind)
    loss = PerSampleLoss(model)
    assert loss_of(model) is seq2seq_lm
    with torch.no_grad():
        assert torch.allclose(loss(model, inputs), own_losses(model, inputs), rtol=1e-6)
    assert loss.settle(model, select(inputs, [1])) == ""


@pytest.mark.parametrize(
    ("family", "head"), [("gpt2", CAUSAL), ("bert", TOKENS), ("roberta", MASKED)]
)
@pytest.mark.parametrize("change", [-2, 2])
def test_labels_that_do_not_fit_are_refused(family: str, head: str, change: int) -> None:
    model, inputs = make_model(family, head), make_inputs(family, head)
    inputs["labels"] = F.pad(inputs["labels"], (0, change), value=2)
    with pytest.raises(ValueError, match="one label for every position"):
        PerSampleLoss(model)(model, inputs)


def test_seq2seq_labels_that_do_not_fit_given_decoder_inputs_are_refused() -> None:
    model, inputs = make_model("t5", SEQ2SEQ), make_inputs("t5", SEQ2SEQ)
    inputs["decoder_input_ids"] = inputs["labels"][:, :-1].clamp(min=0)
    with pytest.raises(ValueError, match="one label for every position"):
        PerSampleLoss(model)(model, inputs)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("method", ["prompt", "prefix"])
def test_virtual_tokens_have_no_labels(method: str) -> None:
    peft = pytest.importorskip("peft")
    make = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[method]
    torch.manual_seed(0)
    model = peft.get_peft_model(
        make_model("gpt2", CAUSAL), make(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    model, inputs = model.double().eval(), make_inputs("gpt2", CAUSAL)
    loss = PerSampleLoss(model.get_base_model())
    with torch.no_grad():
        assert torch.allclose(loss(model, inputs), own_losses(model, inputs), rtol=2e-6)
        inputs["labels"] = inputs["labels"][:, 1:]
        with pytest.raises(ValueError, match="one label for every position"):
            loss(model, inputs)


@pytest.mark.parametrize(
    ("family", "head"),
    [("roberta", CLASSIFY), ("gpt2", CAUSAL), ("bert", QA), ("t5", SEQ2SEQ), ("vit", IMAGE)],
)
def test_a_configuration_that_asks_for_tuples(family: str, head: str) -> None:
    model, inputs = make_model(family, head), make_inputs(family, head)
    loss = PerSampleLoss(model)
    with torch.no_grad():
        want = loss(model, inputs)
        model.config.return_dict = False
        assert torch.equal(loss(model, inputs), want)
        assert loss.settle(model, select(inputs, [0])) == ""
    assert model.config.return_dict is False


def test_speech_models_without_a_decoder_of_their_own() -> None:
    text = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 2}
    sound = {"encoder_layers": 1, "d_model": 24, "encoder_attention_heads": 2}
    config = transformers.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **text}, audio_config=sound
    )
    with torch.device("meta"):
        model = transformers.Qwen2AudioForConditionalGeneration(config)
    assert candidate_losses(model) == (causal_lm, token_level)


# ---- Which of the candidates is the model's own --------------------------------------------------


def causal_inputs() -> dict[str, Tensor]:
    ids = torch.randint(3, 53, (3, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decoders_do_not_shift_their_labels(kind: str, dtype: torch.dtype) -> None:
    model = build(f"{kind}ForCausalLM", kind, max_target_positions=37).to(dtype)
    inputs = causal_inputs()
    if kind == "Whisper":  # its decoder never masks padding
        del inputs["attention_mask"]
    assert candidate_losses(model) == (causal_lm, token_level)
    loss = PerSampleLoss(model)
    assert loss.settle(model.train(), select(inputs, [0])) == ""
    model = model.eval()
    with torch.no_grad():
        found, own = loss(model, inputs).double(), own_losses(model, inputs)
    assert torch.allclose(found, own, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_xlm_does_not_shift_its_labels() -> None:
    torch.manual_seed(0)
    config = transformers.XLMConfig(
        vocab_size=53, emb_dim=24, n_layers=1, n_heads=2, max_position_embeddings=37, pad_index=1
    )
    model = transformers.XLMWithLMHeadModel(config).double().train()
    loss, inputs = PerSampleLoss(model), causal_inputs()
    assert loss.settle(model, select(inputs, [0])) == ""
    with torch.no_grad():
        assert torch.allclose(loss(model.eval(), inputs), own_losses(model, inputs), rtol=1e-6)


@pytest.mark.parametrize(("family", "head"), [("gpt2", CAUSAL), ("bert", MASKED), ("t5", SEQ2SEQ)])
def test_the_usual_loss_stays(family: str, head: str) -> None:
    config = make_config(family)
    config.dropout_rate = config.attn_pdrop = config.hidden_dropout_prob = 0.4
    model, inputs = make_model(family, head), make_inputs(family, head)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.4
    state = torch.get_rng_state()
    loss = PerSampleLoss(model)
    with torch.no_grad():
        before = loss(model, inputs)
        assert loss.settle(model.train(), select(inputs, [0])) == ""
        assert torch.equal(loss(model.eval(), inputs), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_knows_nothing_yet() -> None:
    # All its logits are equal, so that a shift of the labels does not show in their mean.
    bart, gpt2 = build("BartForCausalLM", "Bart"), make_model("gpt2", CAUSAL)
    for model, want in [(bart, token_level), (gpt2, causal_lm)]:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        loss = PerSampleLoss(model)
        assert loss.settle(model, select(causal_inputs(), [0])) == ""
        assert loss._loss is want


class Smoothed(transformers.GPT2LMHeadModel):
    """A loss of its own, under a name that the table knows."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, labels=labels, **kwargs)
        outputs.loss = None if labels is None else 0.9 * outputs.loss + 0.4
        return outputs


def test_another_loss_is_refused() -> None:
    torch.manual_seed(0)
    smoothed = type("GPT2LMHeadModel", (Smoothed,), {})
    model = smoothed(make_config("gpt2")).eval()
    inputs = select(causal_inputs(), [0])
    assert "pass `compute_loss_func=f`" in PerSampleLoss(model).settle(model, inputs)
    own = PerSampleLoss(model, lambda outputs, labels: outputs.logits.mean())
    assert own.settle(model, inputs) == ""


@pytest.mark.parametrize("how", ["option", "silently"])
def test_losses_of_routers_are_refused(how: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    config = transformers.MixtralConfig(**sizes, **heads, router_aux_loss_coef=0.001)
    model, inputs = transformers.MixtralForCausalLM(config).eval(), select(causal_inputs(), [0])
    assert PerSampleLoss(model).settle(model, inputs) == ""
    if how == "option":
        config.output_router_logits = True
        assert "`config.output_router_logits=False`" in PerSampleLoss(model).settle(model, inputs)
    else:  # as an input: the part is 2e-4 of the loss
        inputs["output_router_logits"] = True
        assert "pass `compute_loss_func=f`" in PerSampleLoss(model).settle(model, inputs)


def test_without_a_loss_of_its_own_the_likeliest_stays() -> None:
    model, inputs = make_model("gpt2", CAUSAL), select(causal_inputs(), [0])
    loss = PerSampleLoss(model)
    original = type(model).forward
    for silent in (lambda self, **kwargs: original(self, **{**kwargs, "labels": None}), None):
        model.forward = (  # a model of whose loss nothing is known, and one that fails with labels
            silent.__get__(model) if silent else lambda labels, **kwargs: kwargs["none of these"]
        )
        assert loss.settle(model, inputs) == "" and loss._loss is causal_lm


def test_settling_leaves_the_problem_type_open() -> None:
    model, inputs = make_model("roberta", CLASSIFY), make_inputs("roberta", CLASSIFY)
    assert PerSampleLoss(model).settle(model, select(inputs, [0])) == ""
    assert model.config.problem_type is None


# ---- Classification and question answering -------------------------------------------------------


@pytest.mark.parametrize(
    ("num_labels", "problem_type", "labels"),
    [
        (3, None, torch.tensor([0, 2, 1, 2])),
        (3, None, torch.tensor([[0], [2], [1], [2]])),
        (3, None, torch.tensor([0, -100, 1, 2])),
        (1, None, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        (1, None, torch.tensor([[0.5], [-1.0], [2.0], [0.0]])),
        (3, "regression", torch.tensor([[0.5, 1, 2], [1, 2, 3], [0, 0, 1], [2, 1, 0.0]])),
        (3, None, torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])),
        (3, "multi_label_classification", torch.tensor([[1.0, 0, 1]] * 4)),
        (3, "single_label_classification", torch.tensor([2, 2, 0, 1])),
    ],
)
def test_classification(num_labels: int, problem_type: str | None, labels: Tensor) -> None:
    config = make_config("roberta")
    config.num_labels, config.problem_type = num_labels, problem_type
    torch.manual_seed(0)
    model = transformers.RobertaForSequenceClassification(config).double().eval()
    labels = labels.double() if labels.is_floating_point() else labels
    inputs = {**make_inputs("roberta", CLASSIFY), "labels": labels}
    loss = PerSampleLoss(model)
    with torch.no_grad():
        assert torch.allclose(loss(model, inputs), own_losses(model, inputs), rtol=1e-6)
        before = loss(model, inputs)
        model(**inputs)  # notes down the problem's type
        assert torch.equal(loss(model, inputs), before)


def test_yes_and_no_as_booleans() -> None:
    model = make_model("roberta", CLASSIFY)
    inputs = make_inputs("roberta", CLASSIFY)
    answers = torch.tensor([[True, False, True]] * 4)
    loss = PerSampleLoss(model)
    found = loss(model, {**inputs, "labels": answers})
    assert torch.equal(found, loss(model, {**inputs, "labels": answers.double()}))


def test_positions_outside_the_input() -> None:
    model, inputs = make_model("bert", QA), make_inputs("bert", QA)
    inputs["start_positions"] = torch.tensor([1, -3, 3, 10])
    inputs["end_positions"] = torch.tensor([4, 6, 0, 10])
    with torch.no_grad():
        want = own_losses(model, inputs)
        assert torch.allclose(PerSampleLoss(model)(model, inputs), want, rtol=2e-6)
        column = {k: v[:, None] if "positions" in k else v for k, v in inputs.items()}
        assert torch.allclose(PerSampleLoss(model)(model, column), want, rtol=2e-6)
        # Where the answer is cut off, the model's own loss is NaN for the sample alone.
        inputs["end_positions"][0] = 999
        outputs = model(**select({k: v for k, v in inputs.items() if "positions" not in k}, [0]))
        start = F.cross_entropy(outputs.start_logits, inputs["start_positions"][:1])
        assert torch.allclose(PerSampleLoss(model)(model, inputs)[0], start / 2, rtol=2e-6)
        inputs["start_positions"][0] = 999
        assert PerSampleLoss(model)(model, inputs)[0] == 0
