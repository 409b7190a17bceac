"""The README's first block of Python is a program that runs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_first_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        exec(compile(block[1], str(README), "exec"), {"__name__": "__main__"})
    spent = re.search(r"^epsilon = (\S+) at delta = 0.0001$", capsys.readouterr().out, re.MULTILINE)
    assert spent is not None
    assert 0 < float(spent[1]) <= 3.0
