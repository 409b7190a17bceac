"""`hf-dpgrape memory`: its arguments, its tables and its picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_dpgrape.artifacts.plots import new_figure, save_figure

#: Order in which parts are stacked.
_PARTS = (
    "weights",
    "projections",
    "optimizer state",
    "gradients",
    "per-sample gradients",
    "activations and temporaries",
)

_NOTE = (
    "Bytes of live tensors, GiB = 2^30 bytes. A GPU needs about half a GiB more for its context, "
    "and some room for what the allocator cannot give back."
)


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    memory = commands.add_parser("memory", help="peak memory of a training step, before renting")
    memory.set_defaults(run=run)
    add = memory.add_argument
    add("model", metavar="MODEL_OR_CONFIG", help="folder, config.json or name on the Hub")
    add("--task", default="auto", help="head, as `causal-lm` (default: the configuration's own)")
    add("--batch", dest="batch_size", type=int, default=8, help="examples at once (default: 8)")
    add("--seq_len", type=int, default=128, help="tokens per example (default: 128)")
    add("--rank", type=int, default=16, help="rank of the projection and of LoRA (default: 16)")
    add("--dtype", default="float32", help="of the weights: float32 or bfloat16")
    add("--gradient_checkpointing", action="store_true", help="run layers again in backward")
    add("--optim", default="adamw_torch_fused", help="adamw_torch_fused, adamw_torch or sgd")
    add("--clip_grouping", default="joint", help="joint, or layer to free gradients in backward")
    add("--device", default="gpu", help="gpu or cpu: what kernels keep for backward (default: gpu)")
    add("--methods", nargs="+", help="which methods, as `dp-grape adamw` (default: all)")
    add("--plot", metavar="FILE.png", help="also draw the table (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the sub-command."""
    # Here, so that other sub-commands start without torch and transformers.
    from hf_dpgrape.commands.memory.account import METHODS, Account, available_methods, predict
    from hf_dpgrape.commands.memory.setting import Setting
    from hf_dpgrape.hf.models import load_config

    setting = Setting(**{f.name: getattr(arguments, f.name) for f in fields(Setting)})
    methods = arguments.methods or available_methods()
    if unknown := set(methods) - set(METHODS):
        raise ValueError(
            f"`methods` must be some of {', '.join(METHODS)}, got {', '.join(sorted(unknown))}."
        )
    accounts: list[Account] = predict(
        load_config(arguments.model), setting, task=arguments.task, methods=methods
    )
    rows = [(METHODS[account.method], account.to_dict()) for account in accounts]
    title = describe(Path(arguments.model).name, setting)
    if arguments.plot:
        plot(rows, title, arguments.plot)
    if arguments.json:
        print(json.dumps({account["method"]: account for _, account in rows}, indent=2))
        return 0
    Console().print(table(rows, title), _NOTE)
    if not arguments.methods and "lora" not in methods:
        print("LoRA is left out: install `hf-dpgrape[peft]` to compare.", file=sys.stderr)
    return 0


def describe(model: str, setting: Any) -> str:
    """One line that says what is trained and how."""
    checkpointing = ", gradient checkpointing" if setting.gradient_checkpointing else ""
    layer = ", clipped by layer" if setting.clip_grouping == "layer" else ""
    return (
        f"{model}: batch {setting.batch_size} x {setting.seq_len}, rank {setting.rank}, "
        f"{setting.dtype}, {setting.optim}{layer}{checkpointing}, {setting.device}"
    )


def _gib(size: int) -> float:
    return size / 2**30


def table(rows: Sequence[tuple[str, dict[str, Any]]], title: str) -> Table:
    """What the peak of each method is made of, and the peak of each phase, in GiB."""
    out = Table("GiB at the peak", title=title)
    for label, _ in rows:
        out.add_column(label, justify="right")
    for part in _PARTS:
        sizes = [account["parts"].get(part, 0) for _, account in rows]
        out.add_row(part, *(f"{_gib(size):.2f}" if size else "-" for size in sizes))
    out.add_section()
    out.add_row("peak", *(f"{_gib(account['peak']):.2f}" for _, account in rows), style="bold")
    out.add_section()
    for phase in rows[0][1]["phases"]:
        sizes = [account["phases"][phase] for _, account in rows]
        out.add_row(f"most in {phase}", *(f"{_gib(size):.2f}" for size in sizes))
    sizes = [account["activations"] for _, account in rows]
    out.add_row("kept by forward", *(f"{_gib(size):.2f}" for size in sizes))
    return out


def plot(rows: Sequence[tuple[str, dict[str, Any]]], title: str, path: str) -> None:
    """Draws one stacked bar per method.

    Raises:
        ValueError: matplotlib is not installed, or there is no such folder or format.
    """
    figure = new_figure(9, 1.6 + 0.7 * len(rows))
    axes = figure.add_subplot()
    labels = [label for label, _ in rows]
    left = [0.0] * len(rows)
    for part in _PARTS:
        sizes = [_gib(account["parts"].get(part, 0)) for _, account in rows]
        if any(sizes):
            axes.barh(labels, sizes, left=left, label=part, height=0.62)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 0.01 * max(left), row, f"{total:.2f} GiB", va="center")
    axes.invert_yaxis()
    axes.set(xlabel="peak memory of tensors in one training step (GiB)", xlim=(0, 1.15 * max(left)))
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, path)
