"""`hf-dpgrape`: what a private run would cost, and what it would do to a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_dpgrape.artifacts.record import finite
from hf_dpgrape.commands.budget import add_run_arguments, plan_of
from hf_dpgrape.commands.check import add_parser as add_check
from hf_dpgrape.commands.memory.command import add_parser as add_memory
from hf_dpgrape.commands.width.command import add_parsers as add_widths
from hf_dpgrape.privacy.plan import PrivacyPlan, steps_per_epoch
from hf_dpgrape.privacy.sampling.base import Accountant

#: Rows of the table of epochs; longer runs show evenly spaced epochs.
_MAX_EPOCH_ROWS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command.

    Returns:
        0; 1 if `check` found something that cannot be trained; 2 for wrong input.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except ValueError as error:
        print(f"hf-dpgrape {arguments.command}: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-dpgrape", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_budget(commands)
    add_check(commands)
    add_memory(commands)
    _add_report(commands)
    add_widths(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


# ---- budget --------------------------------------------------------------------------------


def _add_budget(commands: Any) -> None:
    budget = commands.add_parser("budget", help="the privacy plan of a run, without data or model")
    budget.set_defaults(run=_budget)
    add_run_arguments(budget)
    budget.add_argument(
        "--plot", metavar="FILE.png", help="also draw epsilon and noise (needs matplotlib)"
    )


def _budget(arguments: argparse.Namespace) -> int:
    plans: dict[Accountant, PrivacyPlan] = {"pld": plan_of(arguments, accountant="pld")}
    for name in plans["pld"].sampling.accountants[1:]:
        plans[name] = plan_of(arguments, accountant=name)
    report = budget_report(plans)
    if arguments.plot:
        from hf_dpgrape.artifacts.plots import plot_budget, save_figure  # matplotlib is optional

        save_figure(plot_budget(plans["pld"], _budget_title(plans["pld"])), arguments.plot)
    if arguments.json:
        print(json.dumps(report, indent=2, allow_nan=False))
        return 0
    console = Console()
    console.print(_plan_table(report), _noise_table(report), _epoch_table(report))
    for warning in report["warnings"]:
        console.print(f"Warning: {warning}", highlight=False)
    return 0


def budget_report(plans: Mapping[Accountant, PrivacyPlan]) -> dict[str, Any]:
    """The plan of a run under each of its accountants, as plain data."""
    plan = plans["pld"]
    return {
        "num_examples": plan.num_examples,
        "expected_batch_size": plan.expected_batch_size,
        "sampling": plan.sampling.describe(),
        "sampling_prob": plan.sampling_prob,
        "steps_per_epoch": steps_per_epoch(plan.num_examples, plan.expected_batch_size),
        "num_steps": plan.num_steps,
        "target_epsilon": plan.target_epsilon,
        "target_delta": plan.target_delta,
        "noise_multiplier": {name: p.noise_multiplier for name, p in plans.items()},
        "epsilon": {name: finite(p.epsilon()) for name, p in plans.items()},
        "epochs": _epochs(plan),
        "warnings": plan.warnings(),
    }


def _epochs(plan: PrivacyPlan) -> list[dict[str, Any]]:
    """Epsilon by each accountant after some epochs, under the PLD plan's noise."""
    per_epoch = steps_per_epoch(plan.num_examples, plan.expected_batch_size)
    whole = plan.num_steps // per_epoch
    rows = min(whole, _MAX_EPOCH_ROWS)
    steps = [per_epoch * (whole * (i + 1) // rows) for i in range(rows)]
    if not steps or steps[-1] != plan.num_steps:
        steps.append(plan.num_steps)
    return [
        {
            "epoch": round(step / per_epoch, 2),
            "step": step,
            "epsilon": {
                name: finite(plan.epsilon(step, name)) for name in plan.sampling.accountants
            },
        }
        for step in steps
    ]


def _budget_title(plan: PrivacyPlan) -> str:
    return (
        f"{plan.num_examples:,} examples, {plan.expected_batch_size:,} per step expected, "
        f"{plan.num_steps:,} steps, delta {plan.target_delta:g}"
    )


def _plan_table(report: dict[str, Any]) -> Table:
    table = Table(title="Plan", show_header=False)
    table.add_row("examples", f"{report['num_examples']:,}")
    table.add_row("expected batch size", f"{report['expected_batch_size']:,}")
    table.add_row("sampling", report["sampling"])
    table.add_row("sampling probability", f"{report['sampling_prob']:.6g}")
    table.add_row("steps", f"{report['num_steps']:,} ({report['steps_per_epoch']:,} per epoch)")
    table.add_row("delta", f"{report['target_delta']:g}")
    return table


def _noise_table(report: dict[str, Any]) -> Table:
    table = Table("accountant", "noise multiplier", "epsilon", title="Noise and epsilon")
    for name, sigma in report["noise_multiplier"].items():
        table.add_row(name.upper(), f"{sigma:.6g}", _number(report["epsilon"][name]))
    return table


def _epoch_table(report: dict[str, Any]) -> Table:
    sigma = report["noise_multiplier"]["pld"]
    names = [name.upper() for name in report["epsilon"]]
    table = Table("epoch", "step", *names, title=f"Epsilon at noise {sigma:.6g}")
    for row in report["epochs"]:
        spent = map(_number, row["epsilon"].values())
        table.add_row(f"{row['epoch']:g}", f"{row['step']:,}", *spent)
    return table


def _number(epsilon: float | None) -> str:
    return "infinite" if epsilon is None else f"{epsilon:.4f}"


# ---- report --------------------------------------------------------------------------------


def _add_report(commands: Any) -> None:
    report = commands.add_parser("report", help="evaluation and epsilon over a run's steps")
    report.set_defaults(run=_report)
    add = report.add_argument
    add("folder", metavar="FOLDER", help="output folder of a run, or one of its checkpoints")
    add("--output", metavar="FILE", help="report.html in FOLDER (default), or a picture's name")


def _report(arguments: argparse.Namespace) -> int:
    from hf_dpgrape.artifacts.report import RunReport  # matplotlib is optional

    report = RunReport(arguments.folder)
    path = arguments.output or str(report.folder / "report.html")
    report.write(path)
    if arguments.json:
        print(json.dumps({"file": path, "evaluations": report.rows()}, indent=2, allow_nan=False))
    else:
        Console().print(f"Written: {path}", soft_wrap=True, markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
