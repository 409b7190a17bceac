"""Documents that run, and documents that point to tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_first_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = ROOT / "README.md"
    block = re.search(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(block[1], str(readme), "exec"), {"__name__": "__main__"})
    spent = re.search(r"^epsilon = (\S+) at delta = 0.0001$", capsys.readouterr().out, re.MULTILINE)
    assert spent is not None
    assert 0 < float(spent[1]) <= 3.0


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
