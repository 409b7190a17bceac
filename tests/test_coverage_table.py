"""README's table of models is what `tests/gradients/test_exactness.py` runs.

`python tests/test_coverage_table.py` writes the table into README.md.
"""

from __future__ import annotations

from pathlib import Path

from families import CASES, HEADS
from gradients.test_exactness import IN_FLOAT32, REFUSED, SPINE

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- coverage -->", "<!-- end of coverage -->"


def table() -> str:
    """One row per task head, with the families that are exact on it."""
    lines = ["| task head | exact (1e-10 in float64, default inputs) |", "|---|---|"]
    for head in HEADS:
        names = [family for family, h in CASES if h == head and family not in REFUSED]
        lines.append(f"| {head} | {', '.join(names)} |")
    exact = {family for family, _ in CASES} - REFUSED.keys()
    named = sorted({family for family, _ in SPINE})
    refused = "; ".join(f"{name} ({reason})" for name, reason in REFUSED.items())
    coarse = ", ".join(f"{name} ({tolerance:.0e})" for name, tolerance in IN_FLOAT32.items())
    lines += [
        "",
        f"{len(exact)} families. Dropout and gradient checkpointing (off, reentrant, not "
        f"reentrant) are tested on {', '.join(named)}. Not from whole batches, but one "
        f"example at a time: {refused}. Attention in float32 whatever the dtype: {coarse}.",
    ]
    return "\n".join(lines)


def test_readme_holds_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    assert f"{START}\n{table()}\n{END}" in text


if __name__ == "__main__":
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2] if END in rest else rest
    README.write_text(f"{before}{START}\n{table()}\n{END}{after}", encoding="utf-8")
