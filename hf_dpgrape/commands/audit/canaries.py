"""A small model and examples that are canaries: everyone has a row of a table that only they read.

An example is one number, its row. What else the model knows of it (features and a label, drawn at
random) is public and part of the model. A canary that is out is an example of no loss: it adds
zero to every sum, as if it were not there, and the number of examples stays what the plan says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Features of an example, width of the hidden layer, classes.
_FEATURES, _WIDTH, _CLASSES = 24, 32, 4

#: Name of the tensor that holds a row for every canary.
TABLE = "table.weight"

#: Modules whose tensors are projected.
PROJECTED = ["hidden", "out"]

#: What a row counts beside the classifier: so much that a label's gradient is mostly in its row.
_OWN_SCALE = 64.0

#: Slope of a gradient canary's loss in its row: so large that clipping leaves it the clip norm.
_SLOPE = 1e4


class CanaryModel(nn.Module):
    """A classifier of the features of an example, corrected by the row of the table it owns.

    Nobody else reads that row, as nobody else has a word that occurs once: its gradient comes from
    one example alone, through the ordinary forward and backward pass.

    Args:
        num_canaries: rows of the table, but for one of those that are out.
        seed: public seed of weights, features and labels.
    """

    features: Tensor
    labels: Tensor

    def __init__(self, num_canaries: int, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.hidden = nn.Linear(_FEATURES, _WIDTH)
            self.norm = nn.LayerNorm(_WIDTH)
            self.out = nn.Linear(_WIDTH, _CLASSES)
            self.table = nn.Embedding(num_canaries + 1, _CLASSES)
            nn.init.zeros_(self.table.weight)
            labels = torch.randint(_CLASSES, (num_canaries + 1,))
            self.register_buffer("features", torch.randn(num_canaries + 1, _FEATURES))
            self.register_buffer("labels", labels)

    @property
    def nobody(self) -> int:
        """The row of examples that are out."""
        return len(self.labels) - 1

    def forward(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, classes), and the example's own part of them."""
        own = _OWN_SCALE * self.table(row)
        features = self.norm(torch.tanh(self.hidden(self.features[row])))
        return self.out(features) + own, own


def label_losses(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """One loss per sample: of the classifier, for the example's label."""
    assert isinstance(model, CanaryModel)
    row: Tensor = inputs["row"]
    logits, _ = model(row)
    losses: Tensor = F.cross_entropy(logits, model.labels[row], reduction="none")
    return losses * (row != model.nobody)


def gradient_losses(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """One loss per sample, whose gradient is nearly all in the first number of its own row."""
    assert isinstance(model, CanaryModel)
    row: Tensor = inputs["row"]
    logits, own = model(row)
    losses: Tensor = F.cross_entropy(logits, model.labels[row], reduction="none")
    losses = losses + _SLOPE * own[:, 0]
    return losses * (row != model.nobody)


def rows_of(coins: Tensor) -> list[int]:
    """The examples: the own row of a canary that is in, and nobody's for one that is out."""
    return [i if is_in else len(coins) for i, is_in in enumerate(coins.tolist())]


def collate(batch: list[int]) -> dict[str, Tensor]:
    """The model's inputs."""
    return {"row": torch.tensor(batch)}
