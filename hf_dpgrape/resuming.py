"""Resuming from a checkpoint: what it was made with stays on the record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.record import read_record, refuse_changed_plan
from hf_dpgrape.trainer_part import TrainerPart


class ResumingMixin(TrainerPart):
    """The part of a private Trainer that continues a run.

    Guarantees:
        A run is continued under its own plan, and in the trainer that made it never from before
        a step that was taken. What its record says of the part before stays on the record.
    """

    _make_plan: Any
    _recorded: Mapping[str, Any] = {}  # of the checkpoint that the present run continues
    _steps_begun = 0  # by this trainer, or by the run that it continues

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint that was made under the same plan.

        Raises:
            ValueError: there is no record, the plan differs, or steps would be repeated.
        """
        recorded = read_record(resume_from_checkpoint)
        plan: PrivacyPlan = self._make_plan()
        refuse_changed_plan(recorded, plan)
        done = recorded["steps_done"]
        if done < self._steps_begun:
            raise ValueError(
                f"This trainer has taken {self._steps_begun} steps, so continuing after step "
                f"{done} would release some twice and count them once; resume from a later "
                "checkpoint, or in a new trainer, and add the repeated steps to what was spent."
            )
        state = Path(resume_from_checkpoint) / TRAINER_STATE_NAME
        if state.is_file() and TrainerState.load_from_json(str(state)).global_step != done:
            raise ValueError(
                f"Expected a checkpoint of one step, but in {resume_from_checkpoint} the privacy "
                f"record is of step {done} and `{TRAINER_STATE_NAME}` of another; resume from a "
                "folder `checkpoint-...` as it was saved."
            )
        self._recorded, self._steps_begun = recorded, done
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model, to which nothing that was taken or loaded before belongs."""
        self._recorded, self._steps_begun = {}, 0
        return super().call_model_init(trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves nothing: the generators are secret, and tell how many examples were drawn."""
        os.makedirs(output_dir, exist_ok=True)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads nothing: a resumed run draws fresh secret randomness."""
