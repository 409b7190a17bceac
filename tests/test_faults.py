"""Planted faults: the table is up to date, and every fault is caught."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from fault_table import FAULTS, Fault
from faults import ROOT, planted, show

TRUST = ROOT / "docs" / "trust.md"


each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@functools.cache
def default_tests(file: Path) -> frozenset[str]:
    """The tests of a file that are run when nothing is asked for."""
    functions = (
        node
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )
    return frozenset(
        node.name
        for node in functions
        if not any(ast.unparse(mark) == "pytest.mark.slow" for mark in node.decorator_list)
    )


def test_a_slow_test_is_no_default_test() -> None:
    assert "test_every_fault_is_caught" not in default_tests(Path(__file__))
    assert "test_a_slow_test_is_no_default_test" in default_tests(Path(__file__))


@each_fault
def test_a_fault_can_be_planted_and_its_tests_exist(fault: Fault) -> None:
    text = (ROOT / "hf_dpgrape" / fault.file).read_text("utf-8")
    with_fault = planted(fault, text)
    assert with_fault != text
    compile(with_fault, fault.file, "exec")
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert name in default_tests(ROOT / "tests" / file), test


def test_every_fault_has_its_row_in_the_document() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    text = TRUST.read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    rows = [line for line in rows if not line.startswith("| ---")]
    found = [tuple(cell.strip() for cell in line.strip("|").split("|"))[:2] for line in rows]
    assert found == [(f.name, ", ".join(f"`{test}`" for test in f.tests)) for f in FAULTS]


def test_text_that_is_not_there_once_is_refused() -> None:
    for old in ("no such text", "Tensor"):
        fault = Fault("wrong", "privacy/noise.py", {old: ""}, ())
        with pytest.raises(ValueError, match=r"once in privacy/noise\.py, found it \d+ times"):
            planted(fault, (ROOT / "hf_dpgrape" / fault.file).read_text("utf-8"))


@pytest.mark.slow
@each_fault
def test_every_fault_is_caught(fault: Fault) -> None:
    assert not show(fault).problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ({"_CHUNK = 2**20": "_CHUNK = 2**19"}, "test_scale passes"),
        ({"if noise_stddev > 0:": "if noise_stdev > 0:"}, "does not run"),
    ],
)
def test_what_is_no_fault_is_not_caught(edit: dict[str, str], problem: str) -> None:
    fault = Fault("none", "privacy/noise.py", edit, ("privacy/test_noise.py::test_scale",))
    assert problem in show(fault).problem
