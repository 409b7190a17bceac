"""Single capture equals one plain backward per example, for models that batches do not suit.

Covers: gradients/single_rehearsal.py, gradients/recording.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers as hf
from oracle import enable_checkpointing
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpgrape.gradients.forms import PerSampleGradients
from hf_dpgrape.gradients.rehearsal import CONSTANT, PADDED
from hf_dpgrape.gradients.single import SingleRecorder, single_gradients
from hf_dpgrape.gradients.single_rehearsal import SingleRehearser
from hf_dpgrape.mechanism.private_step import ClippedSum
from hf_dpgrape.mechanism.tensors import make_projections
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.subspace.projection import Projection

VOCAB, LENGTH = 53, 12
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
ROUTED = {**TEXT, "num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2}
T5 = {"vocab_size": VOCAB, "d_model": 24, "d_kv": 7, "d_ff": 40, "num_layers": 2, "num_heads": 3}
SPEECH = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 11,
    "conv_dim": (16, 16),
    "conv_kernel": (5, 3),
    "conv_stride": (3, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}

#: Makes a model; its inputs besides token ids are found by its kind.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "deberta": lambda: hf.DebertaForSequenceClassification(
        hf.DebertaConfig(**TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"])
    ),
    "deberta-v2": lambda: hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(**TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"])
    ),
    "longformer": lambda: hf.LongformerForSequenceClassification(
        hf.LongformerConfig(**TEXT, attention_window=4)
    ),
    "xlnet": lambda: hf.XLNetForSequenceClassification(
        hf.XLNetConfig(vocab_size=VOCAB, d_model=24, n_layer=2, n_head=2, d_inner=40)
    ),
    "funnel": lambda: hf.FunnelForSequenceClassification(
        hf.FunnelConfig(
            vocab_size=VOCAB, d_model=24, n_head=2, d_head=12, d_inner=40, block_sizes=[1, 1]
        )
    ),
    "fnet": lambda: hf.FNetForSequenceClassification(
        hf.FNetConfig(**{k: v for k, v in TEXT.items() if "heads" not in k})
    ),
    "convbert": lambda: hf.ConvBertForSequenceClassification(
        hf.ConvBertConfig(**TEXT, embedding_size=16, conv_kernel_size=3)
    ),
    "umt5": lambda: hf.UMT5ForConditionalGeneration(
        hf.UMT5Config(**T5, decoder_start_token_id=0, pad_token_id=0)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(
            **TEXT,
            num_key_value_heads=1,
            num_local_experts=3,
            output_router_logits=True,
        )
    ),
    "qwen2-moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**ROUTED, moe_intermediate_size=20, shared_expert_intermediate_size=28)
    ),
    "olmoe, tied": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**ROUTED, tie_word_embeddings=True)),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, state_size=5)
    ),
    "multiple choice": lambda: hf.BertForMultipleChoice(hf.BertConfig(**TEXT)),
    "ctc": lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SPEECH)),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind]()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped kernels have no float64
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.double().eval()


def example_of(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """One example with labels."""
    g = torch.Generator().manual_seed(seed)
    name = type(model).__name__
    if name.endswith("CTC"):
        sound = torch.randn(1, 120, generator=g, dtype=torch.float64)
        return {"input_values": sound, "labels": torch.randint(1, 11, (1, 4), generator=g)}
    shape = (1, 2, LENGTH) if name.endswith("MultipleChoice") else (1, LENGTH)
    ids = torch.randint(3, VOCAB, shape, generator=g)
    if name.endswith(("Classification", "MultipleChoice")):
        return {"input_ids": ids, "labels": torch.tensor([1])}
    return {"input_ids": ids, "labels": ids.clone()}


def projections_of(model: nn.Module, rank: int) -> dict[str, Projection]:
    return make_projections(model, rank=rank, scale="1/sqrt(r)", seed=7, head=frozenset())


def loss_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    return model(**inputs).loss


def plain(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of one ordinary backward."""
    model.zero_grad()
    loss_of(model, inputs).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def captured(
    model: nn.Module, inputs: Mapping[str, Tensor], projections: Mapping[str, Projection]
) -> PerSampleGradients:
    with SingleRecorder(model, projections).record(1) as gradients:
        loss_of(model, inputs).backward()
    return gradients


def worst(
    got: PerSampleGradients, want: Mapping[str, Tensor], projections: Mapping[str, Projection]
) -> float:
    """Largest deviation, relative to the whole gradient; no tensor may be missing."""
    assert set(got) == set(want)
    total = torch.stack([g.norm() for g in want.values()]).norm()
    assert total > 0
    gaps = [(got.of_sample(n, 0) - projections[n].on_gradient(g)).norm() for n, g in want.items()]
    return float(max(gaps) / total)


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_equals_one_plain_backward(kind: str, rank: int) -> None:
    model = made(kind)
    projections, inputs = projections_of(model, rank), example_of(model)
    want = plain(model, inputs)
    assert worst(captured(model, inputs, projections), want, projections) < 1e-10


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["deberta-v2", "olmoe, tied", "qwen2-moe"])
def test_checkpointing_changes_nothing(kind: str, reentrant: bool) -> None:
    model = made(kind)
    projections, inputs = projections_of(model, 5), example_of(model)
    want = plain(model, inputs)
    enable_checkpointing(model.train(), {"use_reentrant": reentrant})
    for module in model.modules():
        if isinstance(module, nn.Dropout) or "Dropout" in type(module).__name__:
            module.eval()
    assert worst(captured(model, inputs, projections), want, projections) < 1e-10


@pytest.mark.parametrize("kind", ["deberta-v2", "qwen2-moe"])
def test_under_autocast_it_is_the_gradient_of_that_backward(kind: str) -> None:
    model = made(kind).float()
    projections, inputs = projections_of(model, 0), example_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(model, inputs)
        got = captured(model, inputs, projections)
    assert worst(got, want, projections) == 0


# Dynamo's own, when it looks at tensors with hooks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers() -> None:
    model = made("deberta-v2")
    projections, inputs = projections_of(model, 5), example_of(model)
    want = plain(model, inputs)
    for layer in model.deberta.encoder.layer:
        layer.compile(backend="eager")
    assert worst(captured(model, inputs, projections), want, projections) < 1e-10


class Shared(nn.Module):
    """One layer in two checkpointed parts, which reentrant backward passes reach one by one."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(VOCAB, 6), nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for _ in range(2):
            part = lambda x: torch.tanh(self.layer(x))  # noqa: E731
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=self.reentrant)
        return x.square().sum((1, 2))


def clipped(model: Shared, num_passes: Mapping[str, int]) -> tuple[list[str], dict[str, Tensor]]:
    """Names in the order of completion, and the sum, where every layer is a clip group."""
    projections = projections_of(model, 0)
    groups = {n: [n] for n in projections}
    share = len(groups) ** -0.5
    plan = PrivacyPlan(
        num_examples=10,
        expected_batch_size=1,
        num_steps=1,
        noise_multiplier=1.0,
        l2_clip_norm=1.0,
        target_delta=1e-3,
        clip_shares=dict.fromkeys(groups, share),
    )
    sums = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in projections.items()}
    clipping, order = ClippedSum(plan, groups, plan.shares_at(0), sums), []

    def note(gradients: PerSampleGradients, name: str) -> None:
        order.append(name)
        clipping(gradients, name)
        assert name not in list(gradients)  # freed at once

    recorder = SingleRecorder(model, projections, num_passes)
    with recorder.record(1, when_complete=note) as gradients:
        model(torch.tensor([[3, 4, 5]])).sum().backward()
    clipping.finish(gradients)
    for name, total in sums.items():
        assert 0 < total.norm() <= share, name
    return order, sums


def passes_of(model: Shared) -> Mapping[str, int]:
    def batch(samples: Any) -> Tensor:
        return torch.stack([torch.arange(4) + number for number in samples])

    found = SingleRehearser(model, projections_of(model, 0), model)([batch])
    assert not found.problems
    return found.num_passes


def test_clip_groups_are_freed_in_the_middle_of_backward() -> None:
    model = Shared(reentrant=False).double()
    order, _ = clipped(model, passes_of(model))
    assert order.index("layer.weight") < order.index("table.weight") and len(order) == 3


def test_a_tensor_that_backward_reaches_twice_is_clipped_once() -> None:
    model = Shared(reentrant=True).double()
    passes = passes_of(model)
    assert passes["layer.weight"] == 2
    order, sums = clipped(model, passes)
    assert not order
    _, want = clipped(once := Shared(reentrant=False).double(), passes_of(once))
    assert all(torch.allclose(sums[n], want[n], rtol=1e-12) for n in want)
    with pytest.raises(RuntimeError, match="clipped before it was complete"):
        clipped(model, {})


def test_several_examples_are_refused_before_the_model_runs() -> None:
    model = Shared(False)
    with (
        pytest.raises(ValueError, match="physical batches of one example"),
        SingleRecorder(model, projections_of(model, 0)).record(2),
    ):
        raise AssertionError("the model would run here")


def test_nothing_is_left_behind() -> None:
    model = made("deberta-v2")
    weight = model.classifier.weight
    weight.grad = torch.ones_like(weight)
    model.classifier.bias.requires_grad_(False)
    captured(model, example_of(model), projections_of(model, 5))
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert not model.classifier.bias.requires_grad and weight.requires_grad
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


# ---- The rehearsal -----------------------------------------------------------------------------


class Faulty(nn.Module):
    """A table and a layer, with something wrong in between."""

    def __init__(self, fault: Callable[[Faulty, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(60, 6), nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        self.memory, self.fault = torch.zeros(()), fault
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.fault(self, self.table(ids).mean(1))
        return F.cross_entropy(self.out(x), ids[:, 0] % 3, reduction="none")


def counting(m: Faulty, x: Tensor) -> Tensor:
    m.count.add_(1)
    return x


def replaced(m: Faulty, x: Tensor) -> Tensor:
    m.count = x.detach().sum()
    return x


def carried(m: Faulty, x: Tensor) -> Tensor:
    before, m.memory = m.memory, x.detach().mean()
    return x + before


def own_generator(m: Faulty, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=m.generator)


def cut_off(m: Faulty, x: Tensor) -> Tensor:
    for p in (m.out.weight, m.out.bias):
        p.requires_grad_(False)
    return x.detach()


def shared_mask(m: Faulty, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) * (random.random() < 2) * torch.empty(1, 6).bernoulli_(0.5)


def batch_mean(m: Faulty, x: Tensor) -> Tensor:
    return torch.tanh(x - 0.5 * x.mean(0, keepdim=True))


def rehearse(fault: Callable[[Faulty, Tensor], Tensor]) -> str:
    def batch(samples: Any) -> Tensor:
        rows = [torch.arange(4) + {PADDED: 7, CONSTANT: 13}.get(n, 3 * n) for n in samples]
        return torch.stack(rows)

    model = Faulty(fault)
    try:
        found = SingleRehearser(model, projections_of(model, 2), model)([batch])
    except RuntimeError as error:
        return str(error)
    return "; ".join(f"{name}: {why}" for name, why in found.problems.items())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (counting, "`count` changed"),
        (replaced, "`count` changed"),
        (carried, "depends on the examples before"),
        (own_generator, "a generator of its own"),
        (cut_off, "no gradient for one example alone"),
    ],
)
def test_what_passes_from_one_example_to_the_next_is_found(fault: Any, reason: str) -> None:
    assert reason in rehearse(fault)


@pytest.mark.parametrize("harmless", [shared_mask, batch_mean])
def test_what_samples_would_share_is_harmless(harmless: Any) -> None:
    assert rehearse(harmless) == ""


def test_a_contrastive_loss_is_refused() -> None:
    def losses(inputs: Tensor) -> Tensor:
        x = table(inputs).mean(1)
        return F.cross_entropy(x @ x.T, torch.arange(len(x)), reduction="none")

    table = nn.Embedding(60, 6)
    model = nn.ModuleList([table])
    rehearser = SingleRehearser(model, projections_of(model, 0), losses)
    found = rehearser([lambda samples: torch.stack([torch.arange(4) + n for n in samples])])
    assert "pairs of examples" in found.problems[""]


def test_each_place_of_a_tied_tensor_is_projected_on_its_own_and_tied_again_afterwards() -> None:
    """No gradient of full size waits for another, and an error leaves the model as it was."""
    model = made("olmoe, tied")
    tied = "model.embed_tokens.weight"
    projections = make_projections(model, rank=4, scale="1/sqrt(r)", seed=0, head=frozenset())
    seen: list[Tensor] = []
    whole = projections[tied].on_gradient

    def on_gradient(gradient: Tensor) -> Tensor:
        seen.append(gradient[0].clone())
        return whole(gradient)

    projections[tied].on_gradient = on_gradient  # type: ignore[method-assign]
    with pytest.raises(KeyError), single_gradients(model, projections) as found:
        model(**example_of(model)).loss.backward()
        raise KeyError
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    model(**example_of(model)).loss.backward()
    full = dict(model.named_parameters())[tied].grad
    assert full is not None
    assert len(seen) == 2
    torch.testing.assert_close(seen[0] + seen[1], full)
    torch.testing.assert_close(found[tied], whole(full[None])[0])
