"""The table of `docs/coverage.md`, made of the rows of `every_model.py`."""

from __future__ import annotations

import collections
import dataclasses
import re
import textwrap
from collections.abc import Iterable, Sequence

EXACT = ("batched", "single")
REFUSED, NOT_TRIED = "refused", "not tried"


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one head of one model type."""

    model_type: str
    head: str
    outcome: str
    detail: str = ""
    error: float | None = None


def written(rows: Iterable[Row], version: str, tolerance: float) -> str:
    """The document: counts, one line per model type, and the reasons."""
    ordered = sorted(rows, key=lambda row: (row.model_type, row.head))
    return "\n".join(
        [
            "# Coverage",
            "",
            *(textwrap.fill(text, 100) for text in _introduction(ordered, version, tolerance)),
            "",
            *_by_type(ordered),
            "",
            "## One example at a time, because of",
            "",
            *_reasons(ordered, "single"),
            "",
            "## Refused, because of",
            "",
            *_reasons(ordered, REFUSED),
            "",
            "## Not tried",
            "",
            "What could not be built small, or given an input, by rules that know no model type.",
            "",
            *_reasons(ordered, NOT_TRIED),
            "",
        ]
    )


def _introduction(rows: Sequence[Row], version: str, tolerance: float) -> list[str]:
    """What was compared, and how it came out."""
    counts = collections.Counter(row.outcome for row in rows)
    families = {row.model_type for row in rows if row.outcome in EXACT}
    tried = {row.model_type for row in rows if row.outcome != NOT_TRIED}
    worst = max(row.error for row in rows if row.error is not None)
    return [
        f"Written by `python tests/every_model.py --write` with transformers {version}: every "
        "model type and head that its auto classes list, small and random, everything trained, "
        '`capture="auto"`. Each synthetic example\'s projected gradient is compared with one '
        "backward pass of the loss that the model itself returns for that example alone, in "
        f"float32, relative to the norm of the whole gradient. More than {tolerance:.0e} would be "
        f"an error of ours and fails `make test-slow`; the largest is {worst:.0e}.",
        "",
        f"**{len(families)} of the {len(tried)} model types that were tried are exact on at least "
        f"one head.** Of {len(rows)} heads, {counts['batched']} are taken from whole batches, "
        f"{counts['single']} one example at a time, {counts[REFUSED]} are refused, and "
        f"{counts[NOT_TRIED]} were not tried. CTC is speech to text; the error is the largest of "
        "a model type's heads.",
    ]


def _by_type(rows: Sequence[Row]) -> list[str]:
    """One line per model type."""
    lines = ["| model type | batched | single | refused | error |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row.model_type for row in rows):
        mine = [row for row in rows if row.model_type == name and row.outcome != NOT_TRIED]
        if not mine:
            continue
        cells = [
            ", ".join(row.head for row in mine if row.outcome == outcome)
            for outcome in (*EXACT, REFUSED)
        ]
        errors = [row.error for row in mine if row.error is not None]
        cells.append(f"{max(errors):.0e}" if errors else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _reasons(rows: Sequence[Row], outcome: str) -> list[str]:
    """The reasons of one outcome, each with the heads it holds for."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row.outcome == outcome:
            reason = _shortened(row.detail)
            found.setdefault(reason, {}).setdefault(row.model_type, []).append(row.head)
    lines = ["| reason | model types |", "|---|---|"]
    by_number = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    for reason, types in by_number:
        names = ", ".join(f"{name} ({', '.join(heads)})" for name, heads in types.items())
        lines.append(f"| {reason} | {names} |")
    return lines


def _shortened(reason: str) -> str:
    """A reason without the names of this one model's modules, so that equal ones are counted."""
    text = re.sub(r"^`[^`]*`: ", "", reason)
    text = re.sub(r"`[A-Z]\w+`", "the model", text)
    text = re.sub(r"\(\d+(, \d+)*,?\) ", "", text).replace("|", "\\|")
    return text if len(text) <= 160 else f"{text[:157]}..."
