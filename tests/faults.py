"""Plants faults into copies of the package, and shows that the tests see each of them.

    python tests/faults.py [NAME ...]

A fault is caught if each of its tests passes on an unaltered copy and fails on the faulty one, all
within `LIMIT` seconds, for a reason other than a fault that does not run. Names are parts of those
in `fault_table.py`; without any, all faults are planted. The last lines are a table for
`docs/trust.md`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from fault_table import FAULTS, Fault

ROOT = Path(__file__).parent.parent

#: Seconds that the tests of one fault may take together.
LIMIT = 120.0

#: Errors of a fault that was planted badly: its code cannot run.
_BROKEN = re.compile(r"\b(NameError|UnboundLocalError|SyntaxError|ImportError|AttributeError)\b")


class Outcome(NamedTuple):
    """What the tests said of one fault."""

    fault: Fault
    problem: str
    seconds: float


def planted(fault: Fault, text: str) -> str:
    """The text with the fault.

    Raises:
        ValueError: it does not have some old text exactly once.
    """
    for old, new in fault.edits.items():
        if (count := text.count(old)) != 1:
            raise ValueError(
                f"Expected the text of {fault.name!r} once in {fault.file}, found it {count} "
                f"times; bring `fault_table.py` up to date: {old!r}."
            )
        text = text.replace(old, new)
    return text


def _copy_to(folder: Path) -> None:
    """What the tests need to run there and not here."""
    for name in ("hf_dpgrape", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def _failures(folder: Path, tests: Sequence[str], limit: float) -> list[str] | None:
    """Messages of the tests that failed in a copy, up to the first; None if time was up.

    Raises:
        RuntimeError: the tests did not run.
    """
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *(f"tests/{test}" for test in tests)]
    settings = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that processes which a test has started end with it
    )
    try:
        output, _ = process.communicate(timeout=max(limit, 1.0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode not in (0, 1):  # neither passed nor failed, as if there were no such test
        raise RuntimeError(f"pytest ended with {process.returncode} on {tests}:\n{output}")
    cases = ElementTree.parse(report).iter("testcase")
    failed = (found for case in cases for found in case if found.tag in ("failure", "error"))
    return [f"{found.get('message')}\n{found.text}" for found in failed]


def show(fault: Fault) -> Outcome:
    """Plants one fault and runs its tests."""
    start = time.monotonic()
    problem = ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy_to(folder)
        file = folder / "hf_dpgrape" / fault.file
        file.write_text(planted(fault, file.read_text("utf-8")), "utf-8")
        for test in fault.tests:
            found = _failures(folder, [test], LIMIT - (time.monotonic() - start))
            if found is None:
                problem = f"time was up in {test}"
            elif not found:
                problem = f"{test} passes"
            elif _BROKEN.search(found[0].partition("\n")[0]):
                problem = f"the fault does not run: {found[0]}"
            if problem:
                break
    return Outcome(fault, problem, time.monotonic() - start)


def failing_without_fault(faults: Iterable[Fault]) -> str:
    """What fails on an unaltered copy, where nothing must."""
    tests = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    with tempfile.TemporaryDirectory() as name:
        _copy_to(Path(name))
        found = _failures(Path(name), tests, LIMIT * len(tests))
    return "time was up" if found is None else "".join(found)


def chosen(names: Sequence[str]) -> list[Fault]:
    """The faults whose names have one of these in them; all without any."""
    found = [f for f in FAULTS if not names or any(name in f.name for name in names)]
    if not found:
        raise SystemExit(f"No fault is called {names}; see `tests/fault_table.py`.")
    return found


def table(outcomes: Iterable[Outcome]) -> str:
    """Faults, the tests that catch them and seconds, in Markdown."""
    lines = ["| fault | caught by | seconds |", "| --- | --- | --- |"]
    for fault, problem, seconds in outcomes:
        tests = ", ".join(f"`{test}`" for test in fault.tests)
        by = f"**not caught**: {problem}" if problem else tests
        lines.append(f"| {fault.name} | {by} | {seconds:.0f} |")
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    """Plants the faults one by one; 1 if one of them was not caught."""
    faults, outcomes = chosen(names), []
    if failing := failing_without_fault(faults):
        print(f"Expected all tests to pass without a fault, but:\n{failing}")
        return 1
    for fault in faults:
        outcomes.append(outcome := show(fault))
        verdict = f"NOT caught, {outcome.problem}" if outcome.problem else "caught"
        print(f"{fault.name}: {verdict} ({outcome.seconds:.0f} s)", flush=True)
    print(f"\n{table(outcomes)}")
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
