"""CONTRIBUTING names what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_room_has_one_line_in_the_order_of_the_layers() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if "layers" in contract)
    rooms = [room.strip() for line in layers for room in line.split("|")]
    section = TEXT.partition("## The rooms")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == rooms


def test_files_and_tables_that_it_names_exist() -> None:
    named = re.findall(r"`([A-Z_]+)` (?:in|of) `([\w/]+\.py)`", TEXT)
    assert len(named) >= 6
    for table, path in named:
        folders = (ROOT, ROOT / "hf_dpgrape")
        (text,) = ((f / path).read_text("utf-8") for f in folders if (f / path).is_file())
        assert re.search(rf"^{table}\b", text, re.MULTILINE), (table, path)
