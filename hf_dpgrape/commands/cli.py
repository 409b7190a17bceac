"""`hf-dpgrape`: what a private run would cost, and what it would do to a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from hf_dpgrape import __version__
from hf_dpgrape.commands.audit.command import add_parser as add_audit
from hf_dpgrape.commands.budget import add_parser as add_budget
from hf_dpgrape.commands.check import add_parser as add_check
from hf_dpgrape.commands.memory.command import add_parser as add_memory
from hf_dpgrape.commands.suggest import add_parser as add_suggest
from hf_dpgrape.commands.train import add_parser as add_train
from hf_dpgrape.commands.width.command import add_parsers as add_widths


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command.

    Returns:
        0; 1 if `check` found something that cannot be trained, or `audit` more leakage than is
        claimed; 2 for wrong input.
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
    parser.add_argument("--version", action="version", version=f"hf-dpgrape {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_audit(commands)
    add_budget(commands)
    add_check(commands)
    add_memory(commands)
    _add_report(commands)
    add_suggest(commands)
    add_train(commands)
    add_widths(commands)
    for name, command in commands.choices.items():
        if name == "train":  # its words are its script's
            continue
        command.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


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
