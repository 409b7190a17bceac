"""The arguments that say who is protected as a whole: every row, or all rows of one owner."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_dpgrape.privacy.unit import DEFAULT_ROWS_PER_UNIT, drawn_by, require_unit


@dataclass
class UnitArguments:
    """The unit of privacy."""

    privacy_unit_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of the training set whose values are the units of privacy (patients, "
            "customers): units are drawn instead of rows, all rows of a unit are clipped together, "
            "and epsilon is that of a unit with all of its rows. The model does not see the "
            "column. Default: every row is a unit of its own."
        },
    )
    max_rows_per_unit: int | None = field(
        default=None,
        metadata={
            "help": "With `privacy_unit_column`, most rows of a unit that one step takes, drawn at "
            "random anew at every step if it has more. It bounds time and costs no epsilon. "
            f"Default: {DEFAULT_ROWS_PER_UNIT}."
        },
    )

    @property
    def rows_per_unit(self) -> int | None:
        """Most rows of a unit that one step takes; None without units of several rows."""
        if self.privacy_unit_column is None or self.max_rows_per_unit is not None:
            return self.max_rows_per_unit
        return DEFAULT_ROWS_PER_UNIT

    @property
    def drawn(self) -> str:
        """What a step draws, in the plural."""
        return drawn_by(self.privacy_unit_column)

    def check_unit(self, examples_per_unit: int) -> None:
        """Refuses a unit that is no column, and two units at once.

        Args:
            examples_per_unit: most rows of an owner where every row is drawn by itself.

        Raises:
            ValueError: in one sentence.
        """
        require_unit(self.privacy_unit_column, self.rows_per_unit)
        if self.privacy_unit_column is not None and examples_per_unit > 1:
            raise ValueError(
                "Expected `privacy_unit_column` or `examples_per_unit`, got both "
                f"({self.privacy_unit_column!r} and {examples_per_unit}): with a column epsilon is "
                "that of a unit with all of its rows already; leave `examples_per_unit` out."
            )
