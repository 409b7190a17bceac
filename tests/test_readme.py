"""Documents that run, and documents that point to tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def python_blocks() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_blocks(num: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the first blocks leave behind."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in python_blocks()[:num]:
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_first_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_blocks(1, tmp_path, monkeypatch)
    spent = re.search(r"^epsilon = (\S+) at delta = 0.0001$", capsys.readouterr().out, re.MULTILINE)
    assert spent is not None
    assert 0 < float(spent[1]) <= 3.0


def test_a_loop_of_ones_own_spends_what_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = run_blocks(2, tmp_path, monkeypatch)["plan"]
    assert f"epsilon spent = {plan.epsilon():.4f}\n" in capsys.readouterr().out


def test_a_loop_of_ones_own_is_short() -> None:
    assert len([line for line in python_blocks()[1].splitlines() if line]) <= 15


def test_pitfalls_names_tests_that_exist() -> None:
    named = re.findall(r"`[\w/.]*(?:::)?(test_\w+)`", (ROOT / "docs" / "pitfalls.md").read_text())
    files = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"def (test_\w+)", "\n".join(files)))
    assert len(named) > 60
    assert not set(named) - existing


#: Sections of docs/pitfalls.md in which everything has a test.
TESTED = (
    "Losses, accumulation, scale",
    "Sampling",
    "Devices and processes",
    "Living inside the Trainer",
    "Callbacks, searches, the Hub",
    "Accounting",
)


@pytest.mark.parametrize("section", TESTED)
def test_every_pitfall_of_a_section_has_a_test(section: str) -> None:
    text = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    items = re.split(r"^- ", body, flags=re.MULTILINE)[1:]
    assert len(items) > 2
    for item in items:
        assert re.search(r"`[\w/.]*(?:::)?test_\w+`", item), item
