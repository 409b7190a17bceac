"""CONTRIBUTING names what there is, and a module's tests are found by its name."""

from __future__ import annotations

import ast
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


def test_a_modules_tests_are_found_by_its_name() -> None:
    """They are the file of its name, or the one whose first words list it under `Covers:`."""
    package, tests = ROOT / "hf_dpgrape", ROOT / "tests"
    modules = {str(f.relative_to(package)) for f in package.rglob("*.py")}
    covered = []
    for file in tests.rglob("test_*.py"):
        words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        covered += re.findall(r"[\w/]+\.py", words.partition("\nCovers: ")[2])
    assert set(covered) <= modules and len(covered) == len(set(covered))
    for module in modules - set(covered):
        folder, name = (tests / module).parent, Path(module).name
        assert name == "__init__.py" or (folder / f"test_{name}").is_file(), module
