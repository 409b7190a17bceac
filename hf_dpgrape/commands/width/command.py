"""`hf-dpgrape transfer` and `hf-dpgrape coord-check`: their arguments and tables."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hf_dpgrape.artifacts.plots import save_figure
from hf_dpgrape.commands.budget import add_run_arguments, plan_of

if TYPE_CHECKING:
    from hf_dpgrape.commands.width.coordinates import CoordinateReport
    from hf_dpgrape.commands.width.transfer import TransferReport


def _full_name(optim: str) -> str:
    """An optimizer under the name that the argument `optim` knows."""
    return {"adamw": "adamw_torch", "adam": "adamw_torch"}.get(optim, optim)


def add_parsers(commands: Any) -> None:
    """Adds the sub-commands."""
    _add_transfer(commands)
    _add_coordinates(commands)


# ---- transfer ------------------------------------------------------------------------------


def _add_transfer(commands: Any) -> None:
    transfer = commands.add_parser("transfer", help="tune a narrow model, train the wide one")
    transfer.set_defaults(run=_transfer)
    add = transfer.add_argument
    add("--base", required=True, help="the narrow model: folder, config.json or name on the Hub")
    add("--target", required=True, help="the wide one, of the same architecture")
    add("--task", default="auto", help="head, as `causal-lm` (default: the configuration's own)")
    add("--optim", type=_full_name, default="adamw_torch", help="adamw_torch, sgd, muon, ...")
    add("--rank", type=int, default=16, help="rank of the projection, 0 for none (default: 16)")
    add("--base_rank", type=int, help="rank in the runs on the narrow model (default: rank)")
    add("--projection_scale", default="1/sqrt(r)", choices=["1/sqrt(r)", "1/r"], help="at both")
    add_run_arguments(transfer)
    add("--learning_rate", type=float, help="the narrow model's best rate, once it is known")
    add("--num_tuning_trials", type=int, default=10, help="runs on it (default: 10)")
    add("--output", metavar="FILE.yaml", help="write a preset for the wide model")


def _transfer(arguments: argparse.Namespace) -> int:
    # Here, so that other sub-commands start without torch and transformers.
    from hf_dpgrape.commands.width.transfer import TransferRequest, transfer_report, write_preset

    a = arguments
    request = TransferRequest(**{f.name: getattr(a, f.name) for f in fields(TransferRequest)})
    plan = plan_of(a, clipping="automatic")
    report = transfer_report(request, plan)
    if a.output:
        write_preset(report, a.output)
    if a.json:
        print(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    else:
        _print_transfer(report, a.output)
    return 0


def _print_transfer(report: TransferReport, output: str | None) -> None:
    from hf_dpgrape.commands.width.transfer import command_line, similar_layers

    console, told = Console(), report.to_dict()
    proxy, target, num_trials = told["proxy"], told["target"], report.request.num_tuning_trials
    spent = Table("", "noise multiplier", "epsilon (PLD)", title="What it spends on the same data")
    noise = f"{report.proxy_noise_multiplier:.6g}"
    spent.add_row("one run on the narrow model", noise, f"{proxy['epsilon_per_trial']:.4f}")
    spent.add_row(f"{num_trials} such runs", noise, f"{proxy['epsilon_of_trials']:.4f}")
    noise = f"{target['noise_multiplier']:.6g}"
    spent.add_row("the run on the wide model", noise, f"{target['epsilon']:.4f}")
    spent.add_row("all of them together", "", f"{told['epsilon_of_all']:.4f}")
    layers = Table(title="Layers: number, share of the clip norm, rate over the narrow one's")
    layers.add_column("first of its kind", overflow="fold")
    for column in ("number", "clip share", "rate"):
        layers.add_column(column, justify="right")
    for name, number, share, ratio in similar_layers(report.width):
        layers.add_row(name, str(number), f"{share:.5f}", f"{ratio:.5g}")
    console.print(spent, layers)
    for convention in report.width.conventions:
        console.print(f"- {convention}", highlight=False)
    console.print("\nTune the narrow model with", style="bold")
    console.print(command_line(report.proxy_arguments()), soft_wrap=True, highlight=False)
    console.print("and train the wide one with the best rate, as it is:", style="bold")
    console.print(command_line(report.target_arguments()), soft_wrap=True, highlight=False)
    if output:
        print(f"The second line is also the preset {output}.")


# ---- coord-check ---------------------------------------------------------------------------


def _add_coordinates(commands: Any) -> None:
    check = commands.add_parser("coord-check", help="do activations stay as large at every width?")
    check.set_defaults(run=_check)
    add = check.add_argument
    add(
        "models",
        metavar="MODEL_OR_CONFIG",
        nargs="+",
        help="the narrow model (folder, config.json or name on the Hub), which is widened; or "
        "checkpoints of several widths, narrow to wide, whose weights are used",
    )
    add("--task", default="auto", help="head, as `causal-lm` (default: the configuration's own)")
    add("--factors", type=int, nargs="+", default=[1, 2, 4, 8], help="widths over the narrow one's")
    add("--optim", type=_full_name, default="adamw_torch", help="adamw_torch, sgd, muon, ...")
    add("--rank", type=int, default=0, help="rank of the projection, 0 for none (default: 0)")
    add("--learning_rate", type=float, default=2**-6, help="the narrow model's (default: 1/64)")
    add("--noise_multiplier", type=float, default=1.0, help="at the widest model (default: 1)")
    add("--steps", dest="num_steps", type=int, default=8, help="private steps (default: 8)")
    add("--refresh", dest="update_proj_gap", type=int, default=0, help="steps between projections")
    add("--plot", metavar="FILE.png", help="also draw it (needs matplotlib)")


def _check(arguments: argparse.Namespace) -> int:
    from hf_dpgrape.commands.width.coordinates import CoordinateSetting, coordinate_check, plot

    names = [f.name for f in fields(CoordinateSetting)]
    setting = CoordinateSetting(**{name: getattr(arguments, name) for name in names})
    report = coordinate_check(setting)
    if arguments.plot:
        save_figure(plot(report), arguments.plot)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    else:
        _print_coordinates(report)
    return 0


def _print_coordinates(report: CoordinateReport) -> None:
    from hf_dpgrape.commands.width.coordinates import METHODS

    table = Table(
        title="Slopes against width, log-log (0 is right): RMS change of a layer's output, "
        "spectral norm of its update over sqrt(n_out / n_in)"
    )
    table.add_column("layer", overflow="fold")
    for quantity in ("output", "update"):
        for title in METHODS.values():
            table.add_column(f"{quantity}\n{title}", justify="right")
    for name in report.layers:
        cells = []
        for quantity in ("activation", "update"):
            for method in METHODS:
                slope = report.slope(method, quantity, name)
                cells.append("-" if slope is None else f"{slope:+.2f}")
        table.add_row(name, *cells)
    Console().print(table)
    for method, title in METHODS.items():
        largest = report.largest_slope(method, "activation")
        print(f"{title}: largest slope of an output {largest:+.2f}")
    for note in report.notes:
        print(f"Note: {note}")
