"""`hf-dpgrape train`: the scripts, from wherever the package is installed.

Scripts and presets lie beside the package in its repository, and inside it in a wheel.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

#: The word of the command line -> the script.
SCRIPTS = {
    "glue": "run_glue.py",
    "clm": "run_clm.py",
    "images": "run_image_classification.py",
}

#: The first line of a preset names its script.
_SCRIPT_OF_PRESET = re.compile(r"# scripts/(\w+\.py)\b")

_PACKAGE = Path(__file__).parents[1]


def shipped(folder: str) -> Path:
    """A folder that is shipped with the package, as `scripts`."""
    inside = _PACKAGE / "shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    train = commands.add_parser(
        "train",
        help="fine-tune privately, from a preset or arguments",
        description="Runs a script with a preset and arguments that override it. Without any "
        "word it lists the presets.",
        epilog="hf-dpgrape train ours/minilm_sst2.yaml --train_file train.tsv | "
        "hf-dpgrape train glue --help",
    )
    train.set_defaults(run=_run)
    train.add_argument(
        "words",
        metavar="[glue|clm|images] [PRESET] [--ARGUMENT VALUE]",
        nargs=argparse.REMAINDER,
        help="script (read from the preset if left out), a preset (a file, or one of those "
        "listed), the script's arguments",
    )


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.words:
        _list()
        return 0
    script, words = command_of(arguments.words)
    # As `python SCRIPT WORDS` does: what lies beside the script is imported by its own name.
    sys.argv[:] = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    return 0


def command_of(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The script of a command line, and what it is given.

    Raises:
        ValueError: the words name neither a script nor a preset that names one.
    """
    first, *rest = words
    if first in SCRIPTS:
        if rest and rest[0].endswith((".yaml", ".yml")):
            rest[0] = str(preset(rest[0]))
        return shipped("scripts") / SCRIPTS[first], rest
    if not first.endswith((".yaml", ".yml")):
        raise ValueError(
            f"Expected {', '.join(SCRIPTS)} or a preset ending in .yaml first, got {first!r}; "
            "`hf-dpgrape train` alone lists the presets."
        )
    file = preset(first)
    found = _SCRIPT_OF_PRESET.match(file.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(
            f"Expected a first line `# scripts/run_glue.py` or the like in {file}, found none; "
            f"name the script before the preset: {', '.join(SCRIPTS)}."
        )
    script = shipped("scripts") / found[1]
    if script.name not in SCRIPTS.values():
        raise ValueError(
            f"Expected one of {', '.join(SCRIPTS.values())} in the first line of {file}, got "
            f"{found[1]}."
        )
    return script, [str(file), *rest]


def preset(name: str) -> Path:
    """A preset by its file, or by its name among those shipped.

    Raises:
        ValueError: there is none.
    """
    for file in (Path(name), shipped("training_args") / name):
        if file.is_file():
            return file
    raise ValueError(
        f"Expected a preset file, found nothing at {name}, nor a shipped preset of that name; "
        "`hf-dpgrape train` alone lists those."
    )


def _list() -> None:
    folder, console = shipped("training_args"), Console()
    for file in sorted(folder.rglob("*.yaml")):
        name = file.relative_to(folder).as_posix()
        console.print(name, markup=False, highlight=False, soft_wrap=True)
