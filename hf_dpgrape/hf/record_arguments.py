"""The arguments that change nothing in the training, and are told by record and card."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_dpgrape.artifacts.unit_words import ONE_ROW


@dataclass
class RecordArguments:
    """What only the user knows of the data and of other runs."""

    num_tuning_trials: int | None = field(
        default=None,
        metadata={
            "help": "How many other runs on the same data led to these settings, for the record "
            "and the card; each has spent an epsilon of its own. 0 for none. Default: not stated."
        },
    )
    validation_data_is_private: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the evaluation data must be protected too, for the record and the "
            "card: epsilon does not cover it. Default: not stated."
        },
    )
    example_unit: str = field(
        default=ONE_ROW,
        metadata={
            "help": "What one example (or unit) is, for the record and the card: whatever the "
            "guarantee protects as a whole, as `one e-mail`. Text only; it changes nothing in the "
            "training."
        },
    )
    examples_per_unit: int = field(
        default=1,
        metadata={
            "help": "Most examples that one owner (a patient, a customer) has in the data; above 1 "
            "the record and the card state the epsilon of such an owner, too."
        },
    )
