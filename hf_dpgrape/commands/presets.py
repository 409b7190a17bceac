"""Command lines of scripts: an optional preset file first, then arguments that override it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser


def preset_arguments(path: str | Path) -> list[str]:
    """The command line that a flat YAML file of arguments stands for.

    Raises:
        ValueError: the file is missing or is not one flat mapping of names to values.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"Expected a preset file, found nothing at {file}; see `training_args/`.")
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"Expected lines `name: value` in {file}, got {type(values).__name__}.")
    arguments: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        arguments += [f"--{name}", *(_text(item) for item in items)]
    return arguments


def _text(value: Any) -> str:
    """One value as it would be typed."""
    return json.dumps(value) if isinstance(value, dict) else str(value)


def parse_arguments(kinds: Sequence[Any], command_line: Sequence[str]) -> tuple[Any, ...]:
    """Dataclasses from a command line such as `preset.yaml --learning_rate 1e-4`.

    Args:
        kinds: dataclass types, as `HfArgumentParser` takes them.
        command_line: the words after the program's name. A first word that ends in .yaml is a
            preset; later arguments override it.

    Raises:
        ValueError: there is no such preset, or a word is no argument of any of the dataclasses, or
            their values do not go together.
        SystemExit: a value is missing or of another type (argparse prints which).
    """
    words = list(command_line)
    if words and words[0].endswith((".yaml", ".yml")):
        words = preset_arguments(words[0]) + words[1:]
    # The usage of some two hundred arguments would push the sentence below it out of sight.
    parser = HfArgumentParser(list(kinds), usage="%(prog)s [PRESET.yaml] [--ARGUMENT VALUE ...]")
    *parsed, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    if unknown:
        known = [name for kind in kinds for name in kind.__dataclass_fields__]
        near = difflib.get_close_matches(unknown[0].lstrip("-").replace("-", "_"), known, 1)
        hint = f"did you mean `--{near[0]}`?" if near else "`--help` lists them."
        raise ValueError(f"Expected an argument that is known, got {unknown[0]!r}; {hint}")
    return tuple(parsed)
