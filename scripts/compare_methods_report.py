"""Table and pictures of a comparison of methods, from its cells."""

import csv
import math
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

#: (method, epsilon, seed) -> the cell's row; a later row of the same cell stands for it.
Cells = dict[tuple[str, float, int], dict[str, Any]]

RESULTS = ("accuracy", "majority_share", "seconds", "peak_mib")
#: A model that answers alike that often has learned nothing but the larger class.
NEARLY_ALL = 0.98

HEADER = (
    "| method | epsilon | runs | accuracy | larger class among predictions | seconds | peak MiB |",
    "|---|---|---|---|---|---|---|",
)
NOTE = (
    "Accuracy is the mean over seeds with its standard deviation. Every run spends an epsilon of "
    "its own: had the data been private, all runs together would have spent far more."
)


def read_cells(file: Path) -> Cells:
    """The cells of a file, the last row of each; none if there is no file."""
    if not file.exists():
        return {}
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        row.update({name: float(row[name]) for name in RESULTS if row[name]})
    return {(row["method"], float(row["epsilon"]), int(row["seed"])): row for row in rows}


def by_setting(cells: Cells) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """The cells with a result of each method and epsilon, over seeds."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for (method, epsilon, _), row in cells.items():
        if not row["error"]:
            found.setdefault((method, epsilon), []).append(row)
    return found


def markdown(cells: Cells) -> str:
    """The table, and what failed."""
    lines = ["# Comparison of methods", "", NOTE, "", *HEADER]
    for (method, epsilon), rows in by_setting(cells).items():
        scores, shares = ([row[name] for row in rows] for name in ("accuracy", "majority_share"))
        warning = " (**nearly all**)" if mean(shares) >= NEARLY_ALL else ""
        lines.append(
            f"| {method} | {'none' if math.isinf(epsilon) else f'{epsilon:g}'} | {len(rows)} "
            f"| {mean(scores):.1%} ± {pstdev(scores):.1%} | {mean(shares):.1%}{warning} "
            f"| {median(row['seconds'] for row in rows):.1f} "
            f"| {max(row['peak_mib'] for row in rows):.0f} |"
        )
    failed = [
        f"* {method}, {epsilon:g}, {seed}: {row['error']}"
        for (method, epsilon, seed), row in cells.items()
        if row["error"]
    ]
    if failed:
        lines += ["", "Failed (method, epsilon, seed):", "", *failed]
    return "\n".join(lines) + "\n"


def write_report(cells: Cells, folder: Path) -> None:
    """Writes and prints the table; draws accuracy over epsilon, and seconds."""
    text = markdown(cells)
    (folder / "comparison.md").write_text(text, encoding="utf-8")
    print(text)
    settings = by_setting(cells)
    if settings:
        draw(settings, folder)


def draw(settings: dict[tuple[str, float], list[dict[str, Any]]], folder: Path) -> None:
    """Draws `accuracy.png` and `seconds.png`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = list(dict.fromkeys(method for method, _ in settings))
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for number, method in enumerate(methods):
        of_it = {epsilon: rows for (m, epsilon), rows in settings.items() if m == method}
        points = [(e, [row["accuracy"] for row in of_it[e]]) for e in sorted(of_it)]
        means, spread = [mean(s) for _, s in points], [pstdev(s) for _, s in points]
        if math.isinf(points[0][0]):
            axis.axhline(means[0], color=f"C{number % 10}", ls=":", label=method)
            continue
        epsilons = [epsilon for epsilon, _ in points]
        axis.errorbar(epsilons, means, spread, marker="o", capsize=3, label=method)
    axis.set_xscale("log")
    axis.set_xlabel("epsilon")
    axis.set_ylabel("accuracy (mean and deviation over seeds)")
    axis.legend(fontsize=8)
    figure.savefig(folder / "accuracy.png", dpi=120)
    plt.close(figure)

    figure, axis = plt.subplots(figsize=(6, 0.4 * len(methods) + 1), layout="constrained")
    seconds = [
        median(row["seconds"] for (m, _), rows in settings.items() if m == method for row in rows)
        for method in methods
    ]
    axis.barh(methods, seconds)
    axis.invert_yaxis()
    axis.set_xlabel("seconds of training (median)")
    figure.savefig(folder / "seconds.png", dpi=120)
    plt.close(figure)
