"""`capture`: batched where that is exact, single elsewhere, and what is refused in either."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import datasets
import pytest
import torch
import transformers as hf
from conftest_trainer import MakeTrainer, collate, examples
from families import CAUSAL, CLASSIFY, VOCAB, make_model
from torch import Tensor, nn

from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.gradients.single import SingleRecorder
from hf_dpgrape.hf.losses import PerSampleLoss

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 37,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def is_single(trainer: Any) -> bool:
    """How a trainer that has trained took gradients."""
    recorder = trainer.private_training._private_step._estimator._recorder
    assert isinstance(recorder, SingleRecorder | Recorder)
    return isinstance(recorder, SingleRecorder)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hf_dpgrape.mechanism.checks"]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def distance(before: Mapping[str, Tensor], model: nn.Module) -> float:
    """Norm of the whole change."""
    gaps = [(before[n] - p.detach()).double().norm() for n, p in model.named_parameters()]
    return float(torch.stack(gaps).norm())


def test_auto_takes_batches_where_they_are_exact(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.train()
    assert not is_single(trainer) and not lines(caplog)


def test_auto_takes_one_at_a_time_elsewhere_and_names_the_module(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(model=make_model("deberta-v2", CLASSIFY).float(), max_steps=2)
    trainer.train()
    (line,) = lines(caplog)
    assert is_single(trainer) and "\n" not in line
    assert "one example at a time" in line and "`deberta.encoder.layer.0.attention.self" in line


def one_example_run(make_trainer: MakeTrainer, model: nn.Module, **changes: Any) -> Any:
    """One step without noise of a batch that is one example for sure."""
    return make_trainer(
        model=model,
        more={"train_dataset": examples(1), **changes.pop("more", {})},
        rank=0,
        noise_multiplier=0.0,
        allow_zero_noise=True,
        expected_batch_size=1,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        **changes,
    )


@pytest.mark.parametrize("clip_grouping", ["joint", "layer"])
@pytest.mark.parametrize("bf16", [False, True])
def test_one_example_moves_the_weights_by_at_most_the_clip_norm(
    make_trainer: MakeTrainer, clip_grouping: str, bf16: bool
) -> None:
    model = make_model("deberta-v2", CLASSIFY).float()
    before, bound = weights_of(model), 1e-3
    trainer = one_example_run(
        make_trainer,
        model,
        l2_clip_norm=bound,
        clip_grouping=clip_grouping,
        bf16=bf16,
        use_cpu=bf16,
    )
    trainer.train()
    assert is_single(trainer)
    # What is subtracted from weights near 1 is rounded to 2^-24 of them.
    assert 0.9 * bound < distance(before, model) < bound * (1 + 1e-3)


def test_both_ways_take_the_same_step(make_trainer: MakeTrainer) -> None:
    found = {}
    for capture in ("batched", "single"):
        model = make_model("roberta", CLASSIFY).float()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.config.attention_probs_dropout_prob = 0.0
        trainer = make_trainer(model=model, capture=capture, max_steps=2)
        trainer.train()
        assert is_single(trainer) == (capture == "single")
        found[capture] = weights_of(model)
    for name, weight in found["batched"].items():
        assert torch.allclose(weight, found["single"][name], atol=2e-5), name


def test_batch_norm_is_refused_in_every_capture(make_trainer: MakeTrainer) -> None:
    for capture in ("auto", "batched", "single"):
        model = make_model("roberta", CLASSIFY).float()
        model.classifier.dense = nn.Sequential(model.classifier.dense, nn.BatchNorm1d(24))
        with pytest.raises(ValueError, match="BatchNorm1d mixes the samples"):
            make_trainer(model=model, capture=capture)


class Counting(nn.Linear):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(24, 24)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("capture", ["auto", "single"])
def test_buffers_that_move_are_refused(make_trainer: MakeTrainer, capture: str) -> None:
    model = make_model("roberta", CLASSIFY).float()
    model.classifier.dense = Counting()
    with pytest.raises(ValueError, match=r"`classifier.dense.calls`"):
        make_trainer(model=model, capture=capture).train()


# Dynamo's own, when it looks at tensors with hooks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("roberta", CLASSIFY).float()
    before = weights_of(model)
    for layer in model.roberta.encoder.layer:
        layer.compile(backend="eager")
    trainer = make_trainer(model=model, max_steps=2)
    trainer.train()
    (line,) = lines(caplog)
    assert is_single(trainer) and "not compiled" in line and distance(before, model) > 0


class PythonDraws(nn.Linear):
    """Leaves itself out half the time, by Python's generator, as LayerDrop and SpecAugment do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


def test_draws_that_samples_would_share(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("roberta", CLASSIFY).float()
    model.classifier.dense = PythonDraws(24, 24)
    trainer = make_trainer(model=model, max_steps=1)
    trainer.train()
    (line,) = lines(caplog)
    assert is_single(trainer) and "draws from Python's" in line


# ---- The model's own loss ----------------------------------------------------------------------


def choices() -> datasets.Dataset:
    g = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, VOCAB, (2, 9), generator=g).tolist() for _ in range(12)]
    return datasets.Dataset.from_dict({"input_ids": ids, "label": [i % 2 for i in range(12)]})


def test_a_head_without_a_loss_of_ours_needs_nothing(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = hf.BertForMultipleChoice(hf.BertConfig(**TEXT))
    more = {"train_dataset": choices(), "data_collator": hf.default_data_collator}
    trainer = make_trainer(model=model, more=more, max_steps=2)
    before = weights_of(model)
    trainer.train()
    (line,) = lines(caplog)
    assert is_single(trainer) and "`BertForMultipleChoice`: the loss of" in line
    assert distance(before, model) > 0
    with pytest.raises(ValueError, match=r"one example at a time only; set `capture=\"single\"`"):
        make_trainer(model=model, more=more, capture="batched")


def test_its_gradient_is_that_of_the_models_own_loss(make_trainer: MakeTrainer) -> None:
    torch.manual_seed(0)
    config = hf.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = hf.BertForMultipleChoice(config)
    before, one = weights_of(model), choices().select([0])
    model(**hf.default_data_collator([one[0]])).loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    more = {"train_dataset": one, "data_collator": hf.default_data_collator}
    one_example_run(make_trainer, model, more=more, l2_clip_norm=1e3).train()
    for name, p in model.named_parameters():
        assert torch.allclose(before[name] - p, want[name], atol=1e-6), name


class Smoothed(hf.GPT2LMHeadModel):
    """Returns a loss that is none of the known ones."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        outputs = super().forward(input_ids, attention_mask=attention_mask, labels=labels)
        outputs.loss = None if labels is None else 0.5 * outputs.loss
        return outputs


def test_a_loss_that_is_not_known_is_taken_as_it_is(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    kind = type("GPT2LMHeadModel", (Smoothed,), {})
    model = kind(make_model("gpt2", CAUSAL).config)
    trainer = make_trainer(model=model, causal=True, max_steps=1)
    trainer.train()
    (line,) = lines(caplog)
    assert is_single(trainer) and "none that is known here" in line
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[3, 4, 5]])}
    model.eval()
    with torch.no_grad():
        losses = trainer.private_training._losses
        loss = losses(model, inputs)
        assert torch.equal(loss, model(**inputs).loss.reshape(1))
        two = {k: v.expand(2, -1) for k, v in inputs.items()}
        with pytest.raises(ValueError, match="got a batch of several"):
            losses(model, two)


def test_labels_that_examples_cannot_share(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """As the boxes of object detection: a list with a dictionary per example."""

    def boxed(batch: list[dict[str, Any]]) -> dict[str, Any]:
        inputs = collate(batch)
        inputs["labels"] = [{"class_labels": label[None]} for label in inputs["labels"]]
        return inputs

    torch.manual_seed(0)
    model = Boxes(hf.BertConfig(**TEXT))
    trainer = make_trainer(model=model, more={"data_collator": boxed}, max_steps=1)
    trainer.train()
    (line,) = lines(caplog)
    assert is_single(trainer) and "`labels` as list" in line


class Boxes(hf.BertPreTrainedModel):
    """A head whose labels come as detection models take them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = hf.BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(24, 3)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> Any:
        logits = self.classifier(self.bert(input_ids, attention_mask)[0][:, 0])
        target = torch.cat([one["class_labels"] for one in labels])
        loss = nn.functional.cross_entropy(logits, target)
        return hf.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def test_ctc_with_spec_augment(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = hf.Wav2Vec2Config(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        vocab_size=11,
        conv_dim=(16, 16),
        conv_kernel=(5, 3),
        conv_stride=(3, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.3,
        mask_time_length=2,
    )
    model = hf.Wav2Vec2ForCTC(config)
    sounds = torch.randn(8, 150, generator=torch.Generator().manual_seed(0))
    rows = {"input_values": sounds.tolist(), "labels": [[3, 5, 4]] * 8}
    more = {
        "train_dataset": datasets.Dataset.from_dict(rows),
        "data_collator": hf.default_data_collator,
    }
    trainer = make_trainer(model=model, more=more, max_steps=2, expected_batch_size=4)
    before = weights_of(model)
    trainer.train()
    assert is_single(trainer) and len(lines(caplog)) == 1 and distance(before, model) > 0


def test_heads_without_any_loss_are_refused_when_the_trainer_is_made() -> None:
    for kind, config in ((hf.BertModel, hf.BertConfig(**TEXT)), (hf.Wav2Vec2ForPreTraining, None)):
        with torch.device("meta"):
            model = kind(config or hf.Wav2Vec2Config(num_hidden_layers=1))
        with pytest.raises(ValueError, match="has no loss of one example"):
            PerSampleLoss(model)
