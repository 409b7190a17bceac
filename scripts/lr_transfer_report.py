"""Tables and pictures of the study: the best rate at every width, and what moving it costs."""

from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

#: (task, optim, method, rank, width) -> log2 of the rate -> seed -> (loss, CPU seconds).
Losses = dict[tuple[Any, ...], dict[float, dict[int, tuple[float, float]]]]

METHODS = {"dpmup": "DP-muP", "sp": "standard", "mup": "noise-free muP"}
OPTIMS = {"adamw_torch": "DP-Adam", "sgd": "DP-SGD", "muon": "DP-Muon"}


def mean_loss(runs: dict[int, tuple[float, float]]) -> float:
    return mean(loss for loss, _ in runs.values())


def refined(curve: dict[float, dict[int, tuple[float, float]]]) -> dict[float, float]:
    """Mean losses at the rates that all seeds ran at."""
    most = max(len(runs) for runs in curve.values())
    return {rate: mean_loss(runs) for rate, runs in sorted(curve.items()) if len(runs) == most}


def best_rate(curve: dict[float, dict[int, tuple[float, float]]]) -> float:
    """Log2 of the best rate: the vertex of a parabola in log(loss).

    It is fitted to the points within an octave of the best one, mostly five: seeds scatter less
    than through three points. The vertex is at most half an octave from the best point.
    """
    losses = refined(curve)
    best = min(losses, key=losses.__getitem__)
    near = [rate for rate in losses if abs(rate - best) <= 1]
    if len(near) < 3:
        return best
    a, b, _ = np.polyfit(near, [np.log(losses[rate]) for rate in near], 2)
    return float(np.clip(-b / (2 * a), best - 0.5, best + 0.5)) if a > 0 else best


def summarize(losses: Losses) -> dict[tuple[str, ...], dict[str, Any]]:
    """Per setting: best rate by width, drift, cost of the transferred rate, seconds."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for setting in dict.fromkeys(key[:4] for key in losses):
        curves = {key[4]: losses[key] for key in sorted(losses) if key[:4] == setting}
        widths = sorted(curves)
        best = {width: best_rate(curves[width]) for width in widths}
        moved = round(2 * best[widths[0]]) / 2
        extra = {}
        for width in widths:
            means = refined(curves[width])
            if moved in means:
                extra[width] = means[moved] / min(means.values()) - 1
        seconds = {
            width: sum(s for runs in curves[width].values() for _, s in runs.values())
            for width in widths
        }
        found[setting] = {
            "best": best,
            "drift": best[widths[-1]] - best[widths[0]],
            "extra_loss": extra,
            "loss": {width: min(refined(curves[width]).values()) for width in widths},
            "saved": 1 - seconds[widths[0]] / sum(seconds.values()),
        }
    return found


def write_report(losses: Losses, folder: Path) -> dict[str, Any]:
    """Prints the table, draws the pictures, and returns the drifts in octaves."""
    summary = summarize(losses)
    table = Table(
        "model", "optimizer", "rank", "parametrization", "best rate (log2) by width", "drift",
        "loss", "extra loss of the narrowest's rate", "time saved", title="Best learning rates",
    )  # fmt: skip
    drifts: dict[str, Any] = {}
    for (task, optim, method, rank), row in sorted(summary.items()):
        widest = max(row["best"])
        extra = row["extra_loss"].get(widest)
        table.add_row(
            task,
            OPTIMS[optim],
            rank,
            METHODS[method],
            "  ".join(f"{rate:.2f}" for rate in row["best"].values()),
            f"{row['drift']:+.2f}",
            f"{row['loss'][widest]:.3f}",
            "-" if extra is None else f"{extra:.1%}",
            f"{row['saved']:.0%}",
        )
        name = f"{task}/{OPTIMS[optim]}" + (f"/rank {rank}" if rank != "0" else "")
        drifts.setdefault(name, {})[f"drift_{method}"] = round(row["drift"], 3)
    Console(width=150).print(table)
    draw(losses, folder)
    return drifts


def draw(losses: Losses, folder: Path) -> None:
    """One picture per task and rank: panels for optimizer and method, a curve per width."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for task, rank in dict.fromkeys((key[0], key[3]) for key in sorted(losses)):
        keys = [key for key in sorted(losses) if (key[0], key[3]) == (task, rank)]
        optims = [name for name in OPTIMS if any(key[1] == name for key in keys)]
        methods = [name for name in METHODS if any(key[2] == name for key in keys)]
        figure, axes = plt.subplots(
            len(optims),
            len(methods),
            figsize=(4 * len(methods), 3 * len(optims)),
            squeeze=False,
            sharex="row",
            sharey="row",
            layout="constrained",
        )
        widths = sorted({key[4] for key in keys})
        colors = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(widths)))
        for row, optim in zip(axes, optims, strict=True):
            top, highest = 0.0, 0.0
            for axis, method in zip(row, methods, strict=True):
                axis.set_title(f"{OPTIMS[optim]}, {METHODS[method]}", fontsize=10)
                axis.set_xlabel("log2 of the learning rate")
                for width, color in zip(widths, colors, strict=True):
                    curve = losses.get((task, optim, method, rank, width))
                    if curve is None:
                        continue
                    rates = sorted(curve)
                    means = [mean_loss(curve[rate]) for rate in rates]
                    axis.plot(rates, means, ".-", color=color, label=f"width {width}")
                    axis.axvline(best_rate(curve), color=color, lw=1, ls=":")
                    top, highest = max(top, 2.5 * min(means)), max(highest, *means)
            row[0].set_ylabel("held-out loss")
            lowest = min(axis.dataLim.y0 for axis in row)
            top = min(top, highest)
            row[0].set_ylim(lowest - 0.05 * (top - lowest), top + 0.05 * (top - lowest))
        axes[0][0].legend(fontsize=8)
        name = task + (f"_rank_{rank.replace('/', '_over_')}" if rank != "0" else "")
        figure.savefig(folder / f"{name}.png", dpi=120)
        plt.close(figure)
