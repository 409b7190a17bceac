"""`hf-dpgrape budget`: the privacy plan of a run, without data or model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_dpgrape.artifacts.record import finite
from hf_dpgrape.artifacts.unit_words import unit_of_privacy
from hf_dpgrape.privacy.plan import PrivacyPlan, planned_steps, steps_per_epoch
from hf_dpgrape.privacy.sampling.base import Accountant
from hf_dpgrape.privacy.unit import DEFAULT_ROWS_PER_UNIT, drawn_by

#: Rows of the table of epochs; longer runs show evenly spaced epochs.
_MAX_EPOCH_ROWS = 10


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `plan_of` reads."""
    add = parser.add_argument
    add(
        "--num_examples",
        type=int,
        required=True,
        help="size of the training set, or number of units",
    )
    add("--expected_batch_size", type=int, required=True, help="mean examples (units) per step")
    add("--max_logical_batch_size", type=int, help="most examples per step (default: no bound)")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--num_train_epochs", type=float, help="length of the run in epochs")
    length.add_argument("--max_steps", type=int, help="length of the run in steps")
    add("--target_epsilon", type=float, help="epsilon of the whole run, or:")
    add("--noise_multiplier", type=float, help="noise standard deviation over clip norm")
    add("--target_delta", type=float, required=True, help="delta; below 1 / num_examples")
    add("--privacy_unit_column", help="column whose values are the units, if rows are not")
    add("--max_rows_per_unit", type=int, help="most rows of a unit per step, which cost no epsilon")


def plan_of(arguments: argparse.Namespace, **numbers: Any) -> PrivacyPlan:
    """The calibrated plan.

    Args:
        arguments: what the parser found.
        numbers: other fields of the plan.

    Raises:
        ValueError: the numbers describe no private run.
    """
    a = arguments
    if a.max_steps is not None and a.max_steps < 1:
        raise ValueError(f"`max_steps` must be one or more, got {a.max_steps}.")
    if a.noise_multiplier is not None and 0 <= a.noise_multiplier < 0.01:
        raise ValueError(
            f"`noise_multiplier`={a.noise_multiplier} gives no privacy to speak of: expected at "
            "least 0.01; take more noise, or give `target_epsilon` instead."
        )
    rows = a.max_rows_per_unit
    if a.privacy_unit_column is not None and rows is None:
        rows = DEFAULT_ROWS_PER_UNIT
    return PrivacyPlan.calibrated(
        target_epsilon=a.target_epsilon,
        noise_multiplier=a.noise_multiplier,
        num_examples=a.num_examples,
        expected_batch_size=a.expected_batch_size,
        num_steps=planned_steps(
            a.num_examples,
            a.expected_batch_size,
            num_train_epochs=a.num_train_epochs or 0.0,
            max_steps=a.max_steps or -1,
            drawn=f"training {drawn_by(a.privacy_unit_column)}",
        ),
        l2_clip_norm=1.0,
        target_delta=a.target_delta,
        max_logical_batch_size=a.max_logical_batch_size,
        privacy_unit_column=a.privacy_unit_column,
        max_rows_per_unit=rows,
        **numbers,
    )


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    budget = commands.add_parser("budget", help="the privacy plan of a run, without data or model")
    budget.set_defaults(run=_run)
    add_run_arguments(budget)
    budget.add_argument(
        "--examples_per_unit",
        type=int,
        nargs="+",
        default=[],
        metavar="K",
        help="also epsilon of whoever owns so many examples, as `1 2 4 8`",
    )
    budget.add_argument(
        "--plot", metavar="FILE.png", help="also draw epsilon and noise (needs matplotlib)"
    )


def _run(arguments: argparse.Namespace) -> int:
    plans: dict[Accountant, PrivacyPlan] = {"pld": plan_of(arguments, accountant="pld")}
    for name in plans["pld"].sampling.accountants[1:]:
        plans[name] = plan_of(arguments, accountant=name)
    report = budget_report(plans, arguments.examples_per_unit)
    if arguments.plot:
        from hf_dpgrape.artifacts.plots import plot_budget, save_figure  # matplotlib is optional

        save_figure(plot_budget(plans["pld"], _title(plans["pld"])), arguments.plot)
    if arguments.json:
        print(json.dumps(report, indent=2, allow_nan=False))
        return 0
    console = Console()
    console.print(_plan_table(report), _noise_table(report), _epoch_table(report))
    if report["units"]:
        console.print(_unit_table(report))
    for warning in report["warnings"]:
        console.print(f"Warning: {warning}", highlight=False)
    return 0


def budget_report(
    plans: Mapping[Accountant, PrivacyPlan], examples_per_unit: Sequence[int] = ()
) -> dict[str, Any]:
    """The plan of a run under each of its accountants, as plain data.

    Args:
        plans: by accountant.
        examples_per_unit: numbers of examples for whose owner epsilon is wanted, too.
    """
    plan = plans["pld"]
    if examples_per_unit and plan.privacy_unit_column is not None:
        raise ValueError(
            "Expected `privacy_unit_column` or `examples_per_unit`, got both: with a column "
            "epsilon is that of a unit with all of its rows already; leave `examples_per_unit` out."
        )
    return {
        "unit_of_privacy": unit_of_privacy(plan),
        "drawn": plan.drawn,
        "num_examples": plan.num_examples,
        "expected_batch_size": plan.expected_batch_size,
        "sampling": plan.sampling.describe(plan.drawn),
        "sampling_prob": plan.sampling_prob,
        "steps_per_epoch": steps_per_epoch(plan.num_examples, plan.expected_batch_size),
        "num_steps": plan.num_steps,
        "target_epsilon": plan.target_epsilon,
        "target_delta": plan.target_delta,
        "noise_multiplier": {name: p.noise_multiplier for name, p in plans.items()},
        "epsilon": {name: finite(p.epsilon()) for name, p in plans.items()},
        "epochs": _epochs(plan),
        "units": [
            {"examples": k, "epsilon": finite(plan.unit_epsilon(k))} for k in examples_per_unit
        ],
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


def _title(plan: PrivacyPlan) -> str:
    return (
        f"{plan.num_examples:,} {plan.drawn}, {plan.expected_batch_size:,} per step expected, "
        f"{plan.num_steps:,} steps, delta {plan.target_delta:g}"
    )


def _plan_table(report: dict[str, Any]) -> Table:
    table = Table(title="Plan", show_header=False)
    if report["drawn"] != "examples":
        table.add_row("unit of privacy", report["unit_of_privacy"])
    table.add_row(report["drawn"], f"{report['num_examples']:,}")
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


def _unit_table(report: dict[str, Any]) -> Table:
    sigma = report["noise_multiplier"]["pld"]
    table = Table("examples", "PLD", title=f"Epsilon of who owns them at noise {sigma:.6g}")
    for row in report["units"]:
        table.add_row(f"{row['examples']:,}", _number(row["epsilon"]))
    return table


def _number(epsilon: float | None) -> str:
    return "infinite" if epsilon is None else f"{epsilon:.4f}"
