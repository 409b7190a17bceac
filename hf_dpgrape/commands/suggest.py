"""`hf-dpgrape suggest`: settings to start a private run with, from public numbers."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hf_dpgrape.hf.suggestions import Suggestion, TrainedSizes

#: Columns of a terminal, for whoever reads the output of a program.
_WIDTH = 80

#: Tasks whose head the checkpoint has already.
_WITHOUT_NEW_HEAD = ("causal-lm", "masked-lm", "seq2seq-lm")


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser("suggest", help="settings to start with, from public numbers")
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add("--num_examples", type=int, required=True, help="size of the training set")
    add("--target_epsilon", type=float, required=True, help="epsilon of the whole run")
    add("--target_delta", type=float, required=True, help="delta; below 1 / num_examples")
    add("--model", metavar="MODEL_OR_CONFIG", help="folder, config.json or name on the Hub")
    add("--task", default="auto", help="head, as `causal-lm` (default: the model's own, or a new)")
    add("--head_modules", nargs="+", help="parts of names of the tensors that form a new head")
    add("--seconds_per_epoch", type=float, help="measured, for --max_hours")
    add("--max_hours", type=float, help="longest run (default: 30 epochs)")
    add("--output", metavar="FILE.yaml", help="also write a preset, which the scripts run")


def _run(arguments: argparse.Namespace) -> int:
    # Here, so that other sub-commands start without torch and transformers.
    from hf_dpgrape.hf.models import TASKS
    from hf_dpgrape.hf.suggestions import suggest

    a = arguments
    if a.task not in ("auto", *TASKS):
        raise ValueError(f"`task` must be auto or one of {', '.join(TASKS)}, got {a.task!r}.")
    if a.output and not a.output.endswith((".yaml", ".yml")):
        raise ValueError(f"`output` must end in .yaml, as presets do, got {a.output!r}.")
    sizes = _sizes(a) if a.model else None
    found = suggest(
        num_examples=a.num_examples,
        target_epsilon=a.target_epsilon,
        target_delta=a.target_delta,
        max_epochs=_max_epochs(a),
        has_head=bool(sizes.head) if sizes else a.task not in _WITHOUT_NEW_HEAD,
        has_body=sizes is None or sizes.body > 0,
        sizes=sizes,
    )
    preset = preset_of(found, a)
    if a.output:
        Path(a.output).write_text(preset, encoding="utf-8")
    if a.json:
        print(json.dumps({**asdict(found), "arguments": found.arguments()}, indent=2))
        return 0
    console = Console(width=_WIDTH)
    console.print(_table(found, a), markup=False)
    for reason in found.reasons:
        console.print(f"* {reason}", markup=False, highlight=False)
    for warning in found.warnings:
        console.print(f"Warning: {warning}", markup=False, highlight=False)
    told = f"Written: {a.output}" if a.output else f"\n{preset.rstrip()}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    return 0


def _max_epochs(arguments: argparse.Namespace) -> float:
    """The computing that is allowed, in epochs."""
    from hf_dpgrape.hf.suggestions import DEFAULT_MAX_EPOCHS

    hours, seconds = arguments.max_hours, arguments.seconds_per_epoch
    if hours is None and seconds is None:
        return DEFAULT_MAX_EPOCHS
    if hours is None or seconds is None:
        raise ValueError(
            "Expected both of `max_hours` and `seconds_per_epoch`, which make the number of epochs "
            f"together, got {'the latter' if hours is None else 'the former'} alone."
        )
    for name, number in (("max_hours", hours), ("seconds_per_epoch", seconds)):
        if not 0 < number < math.inf:
            raise ValueError(f"`{name}` must be positive and finite, got {number:g}.")
    return float(hours * 3600 / seconds)


def _sizes(arguments: argparse.Namespace) -> TrainedSizes:
    """Floats of one example's gradient, of a model that is made without storage."""
    from hf_dpgrape.hf.methods import DEFAULT_RANK
    from hf_dpgrape.hf.models import build_on_meta, inspect_model, load_config
    from hf_dpgrape.hf.suggestions import TrainedSizes

    model = build_on_meta(load_config(arguments.model), arguments.task)
    report = inspect_model(model, rank=DEFAULT_RANK, head_modules=arguments.head_modules)
    floats = {t.name: math.prod(t.projected_shape) for t in report.tensors}
    head = sum(floats.get(name, 0) for name in report.head)
    return TrainedSizes(head=head, body=sum(floats.values()) - head)


def preset_of(found: Suggestion, arguments: argparse.Namespace) -> str:
    """A preset file: what was asked for, then the settings."""
    a = arguments
    lines = [
        "# By `hf-dpgrape suggest`; scripts take this file as their first argument.",
        f"# For {a.num_examples:,} examples; noise multiplier about {found.noise_multiplier:.3g}.",
    ]
    values: dict[str, Any] = {
        "target_epsilon": a.target_epsilon,
        "target_delta": a.target_delta,
        **found.arguments(),
        **({"head_modules": a.head_modules} if a.head_modules else {}),
    }
    lines += [f"{name}: {_yaml(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """One value as YAML reads it back; 1e-05, without a point, would be a word there."""
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text


def _table(found: Suggestion, arguments: argparse.Namespace) -> Table:
    """The settings, one a row."""
    table = Table(title="Suggested settings", show_header=False)
    table.add_row("examples", f"{arguments.num_examples:,}")
    table.add_row("epsilon, delta", f"{arguments.target_epsilon:g}, {arguments.target_delta:g}")
    for name, value in found.arguments().items():
        table.add_row(name, str(value))
    table.add_row("epochs", f"{found.num_epochs:.3g}")
    table.add_row("noise multiplier", f"{found.noise_multiplier:.4g}")
    table.add_row("signal over noise", f"at most {found.signal_to_noise:,.3g}")
    return table
