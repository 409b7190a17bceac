"""How accuracy follows signal and reach, from which `hf_dpgrape.privacy.signal` has its thresholds.

Small private runs on made-up data, without the library: two balanced classes that lie far apart or
near, a linear head or one of two layers, Adam under automatic clipping, rates that fall to zero.
Noise is set so that a run has a given signal, whatever epsilon that is.

    python benchmarks/little_signal.py                  # 130 settings, two seeds each: minutes
    python benchmarks/little_signal.py --small          # a few of them
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from hf_dpgrape.privacy.signal import LEAST_REACH, LEAST_SIGNAL, reach

NUM_EXAMPLES, NUM_TEST, SEEDS = 4000, 1000, (0, 1)
#: By what part of a feature's spread the classes' means differ.
APART = {"near": 0.8, "far": 2.0}


@dataclass(frozen=True)
class Setting:
    """One run."""

    apart: str
    net: str
    width: int
    batch: int
    num_steps: int
    signal: float
    rate: float

    @property
    def noise_multiplier(self) -> float:
        """That which leaves this signal."""
        return math.sqrt(self.num_steps) * self.batch / self.signal

    @property
    def reach(self) -> float:
        """Of rates that fall to zero."""
        return reach(
            sum_of_rates=self.rate * self.num_steps / 2,
            expected_batch_size=self.batch,
            noise_multiplier=self.noise_multiplier,
        )


def settings() -> list[Setting]:
    """All of them."""
    found = []
    # The first grid was laid out by signal over sqrt(number of weights), which did not order runs.
    for (net, width), (batch, steps), share, rate in itertools.product(
        (("linear", 256), ("two layers", 96)),
        ((256, 60), (32, 240)),
        (0.3, 1.0, 3.0, 10.0, 30.0),
        (1e-3, 1e-2),
    ):
        signal = share * math.sqrt(_num_weights(net, width))
        found.append(Setting("far", net, width, batch, steps, signal, rate))
    for apart, (net, width, batch, steps), signal, rate in itertools.product(
        APART,
        (("two layers", 96, 256, 60), ("two layers", 96, 8, 900), ("linear", 768, 256, 60)),
        (30.0, 100.0, 300.0, 1000.0, 3000.0),
        (5e-5, 1e-3, 1e-2),
    ):
        found.append(Setting(apart, net, width, batch, steps, signal, rate))
    return found


def _num_weights(net: str, width: int) -> int:
    return sum(p.numel() for p in _make(net, width).parameters())


def _make(net: str, width: int) -> nn.Module:
    head = nn.Linear(width, 2)
    return head if net == "linear" else nn.Sequential(nn.Linear(width, width), nn.Tanh(), head)


def made_up(width: int, apart: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features (N, width), whose spread falls as in those of a language model, and classes (N,)."""
    number = NUM_EXAMPLES + NUM_TEST
    spread = torch.arange(1, width + 1).float() ** -0.5
    direction = torch.randn(width, generator=generator)
    labels = torch.randint(2, (number,), generator=generator)
    features = torch.randn(number, width, generator=generator) * spread
    features += (2 * labels - 1)[:, None] * apart * direction / direction.norm() * spread.mean()
    return features * math.sqrt(width) / features.norm(dim=1).mean(), labels


def accuracy(setting: Setting, seed: int) -> float:
    """On examples of its own, after a run."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x, y = made_up(setting.width, APART[setting.apart], generator)
    net = _make(setting.net, setting.width)
    weights = {
        name: (torch.randn(p.shape) * 0.02 if p.ndim > 1 else torch.zeros_like(p)).requires_grad_()
        for name, p in net.named_parameters()
    }

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    optimizer = torch.optim.Adam(weights.values(), lr=setting.rate)
    for step in range(setting.num_steps):
        drawn = (torch.rand(NUM_EXAMPLES) < setting.batch / NUM_EXAMPLES).nonzero().flatten()
        frozen = {name: weight.detach() for name, weight in weights.items()}
        gradients = per_sample(frozen, x[drawn], y[drawn])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        for name, weight in weights.items():
            total = (gradients[name].flatten(1) / (norms + 0.01)[:, None]).sum(0)
            noise = torch.randn(total.shape) * setting.noise_multiplier
            weight.grad = ((total + noise) / setting.batch).view_as(weight)
        optimizer.param_groups[0]["lr"] = setting.rate * (1 - step / setting.num_steps)
        optimizer.step()
    with torch.no_grad():
        logits = functional_call(net, weights, (x[NUM_EXAMPLES:],))
    return float((logits.argmax(1) == y[NUM_EXAMPLES:]).float().mean())


def summary(rows: list[dict[str, float | str]]) -> dict[str, dict[str, float]]:
    """The most that was reached with little signal, and with little reach, by distance."""
    found: dict[str, dict[str, float]] = {"little signal": {}, "little reach": {}}
    for apart in APART:
        own = [row for row in rows if row["apart"] == apart]
        parts = {
            "little signal": [r["accuracy"] for r in own if float(r["signal"]) <= LEAST_SIGNAL],
            "little reach": [r["accuracy"] for r in own if float(r["reach"]) < LEAST_REACH],
        }
        for name, accuracies in parts.items():
            if accuracies:
                found[name][apart] = max(map(float, accuracies))
    return found


def main() -> None:
    """Prints a table, and the figures as one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="every 40th setting")
    options = parser.parse_args()
    rows: list[dict[str, float | str]] = []
    for setting in settings()[:: 40 if options.small else 1]:
        found = sum(accuracy(setting, seed) for seed in SEEDS) / len(SEEDS)
        rows.append({**asdict(setting), "reach": setting.reach, "accuracy": found})
    table = Table(title="Accuracy of two balanced classes, mean of two seeds")
    for column in ("classes", "net", "batch x steps", "rate", "signal", "reach", "accuracy"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["apart"]),
            f"{row['net']}, {row['width']}",
            f"{row['batch']} x {row['num_steps']}",
            *(f"{float(row[name]):.3g}" for name in ("rate", "signal", "reach", "accuracy")),
        )
    Console().print(table)
    print(json.dumps({"summary": summary(rows), "rows": rows}))


if __name__ == "__main__":
    main()
