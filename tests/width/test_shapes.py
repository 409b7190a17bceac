"""What a model's layers look like to the width rules, and muP's initial weights.

Covers: width/initialization.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from families import CAUSAL, CLASSIFY, HEADS, IMAGE, make_config, make_model
from torch import nn

from hf_dpgrape.width.initialization import initialize_mup_
from hf_dpgrape.width.rules import LayerShape
from hf_dpgrape.width.shapes import hidden_matrices, layers_of, output_layers


def test_sides_of_every_kind() -> None:
    layers = layers_of(make_model("gpt2", CAUSAL))
    assert layers["transformer.wte"].shape == LayerShape(
        n_out=24, n_in=1, kind="lookup", is_hidden=False
    )
    assert layers["transformer.h.0.ln_1"].shape.kind == "vector"
    attention = layers["transformer.h.0.attn.c_attn"]  # Conv1D holds (n_in, n_out)
    assert (attention.shape.n_out, attention.shape.n_in) == (72, 24)
    assert attention.tensors[1].endswith("bias")
    vit = layers_of(make_model("vit", IMAGE))
    patches = vit["vit.embeddings.patch_embeddings.projection"].shape
    assert (patches.n_out, patches.n_in) == (24, 3 * 4 * 4)
    assert vit["vit.embeddings"].shape.kind == "lookup"


def test_frozen_tensors_are_no_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    assert list(layers_of(model)) == ["1"]


@pytest.mark.parametrize(
    ("family", "task", "output"),
    [
        ("gpt2", CAUSAL, "transformer.wte"),
        ("roberta", CLASSIFY, "classifier.out_proj"),
        ("vit", IMAGE, "classifier"),
    ],
)
def test_muon_takes_neither_lookups_nor_the_output(family: str, task: str, output: str) -> None:
    model = make_model(family, task)
    assert output_layers(model) == {output}
    hidden = hidden_matrices(model)
    assert hidden
    for name in hidden:
        assert model.get_parameter(name).ndim == 2
        assert "embed" not in name and not name.startswith(output)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    config = make_config("vit")
    config.hidden_size, config.intermediate_size = 96, 192
    model = HEADS[IMAGE].from_config(config)
    norms = model.vit.layernorm.weight.clone()
    done = initialize_mup_(model)
    layers = {name: model.get_submodule(name) for name in done}
    assert not layers["classifier"].weight.any()
    assert not layers["vit.layers.0.attention.q_proj"].weight.any()
    assert torch.equal(model.vit.layernorm.weight, norms)
    for name, n_in, divisor in [
        ("vit.layers.0.attention.k_proj", 96, 1),
        ("vit.layers.1.attention.o_proj", 96, 4),
        ("vit.layers.1.mlp.fc1", 96, 1),
        ("vit.layers.1.mlp.fc2", 192, 4),
        ("vit.embeddings.patch_embeddings.projection", 48, 1),
    ]:
        expected = 1 / math.sqrt(n_in * divisor)
        assert layers[name].weight.std().item() == pytest.approx(expected, rel=0.05), done[name]
        assert not layers[name].bias.any()


def test_fused_queries_are_zero_and_a_tied_output_is_refused() -> None:
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        initialize_mup_(make_model("gpt2", CAUSAL))
    config = make_config("gpt2")
    config.tie_word_embeddings = False
    model = HEADS[CAUSAL].from_config(config)
    initialize_mup_(model)
    queries, keys, _ = model.transformer.h[0].attn.c_attn.weight.chunk(3, dim=1)
    assert not queries.any() and keys.all()
