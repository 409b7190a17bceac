"""Who is drawn, clipped, and added or removed as a whole: one row, or all rows of one owner."""

from __future__ import annotations

#: Most rows of one unit that a step takes, if nothing else is said.
DEFAULT_ROWS_PER_UNIT = 8


def drawn_by(privacy_unit_column: str | None) -> str:
    """What is drawn, in the plural: "examples", or "units" of several rows."""
    return "examples" if privacy_unit_column is None else "units"


def require_unit(privacy_unit_column: str | None, max_rows_per_unit: int | None) -> None:
    """Refuses a column without a bound on its units' rows, or a bound without a column."""
    if (privacy_unit_column is None) != (max_rows_per_unit is None):
        raise ValueError(
            "Expected `privacy_unit_column` and `max_rows_per_unit` together, got "
            f"{privacy_unit_column!r} and {max_rows_per_unit}; give both, or neither if every row "
            "is a unit of its own."
        )
    if max_rows_per_unit is not None and max_rows_per_unit < 1:
        raise ValueError(
            f"`max_rows_per_unit` must be one or more, got {max_rows_per_unit}; it is how many "
            "rows of one unit a step takes at most."
        )
    if privacy_unit_column == "":
        raise ValueError("`privacy_unit_column` must be the name of a column, got an empty one.")
