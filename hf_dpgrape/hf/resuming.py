"""Resuming from a checkpoint: what it was made with stays on the record, and stays the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_dpgrape.artifacts.record import read_record, run_from_dict
from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.trainer_part import TrainerPart
from hf_dpgrape.mechanism.private_training import PrivateTraining
from hf_dpgrape.privacy.accounting import Run
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.plan import PrivacyPlan

_ADVICE = "Restore these arguments, or start a new run (whose epsilon adds to what was spent)."


class ResumingMixin(TrainerPart):
    """The part of a private Trainer that continues a run.

    Guarantees:
        A run is continued under its own plan, and in the trainer that made it never from before
        a step that was taken. What its record says of the part before stays on the record.
        Everything that the optimizer's state depends on is what it was, or nothing is loaded.
    """

    args: DPGrapeTrainingArguments
    model: Any
    _make_plan: Any
    _head: Any
    _ledger: RunLedger | None
    _given_optimizer: str | None
    private_training: PrivateTraining | None
    _told_ledger: Any
    _recorded: Mapping[str, Any] = {}  # of the checkpoint that the present run continues

    def _refuse_repetition(self, resume_from_checkpoint: str | bool | None) -> None:
        """Refuses to train a trained model as if it were new, and to reuse an optimizer."""
        done = 0 if self._ledger is None else self._ledger.num_releases
        if done and self.model_init is None and not resume_from_checkpoint:
            raise ValueError(
                f"This trainer has already spent epsilon={self._told_ledger().epsilon():.4g} in "
                f"{done} steps; a second `train()` would spend more. Resume from a checkpoint with "
                "`resume_from_checkpoint`, or make a new trainer and add up what both spend."
            )
        was_passed = self._given_optimizer is not None and self.optimizer_cls_and_kwargs is None
        if self.private_training is not None and was_passed:
            raise ValueError(
                "The optimizer that was passed belongs to the run before; resume with a new "
                "trainer and a new optimizer."
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint that was made in the same way.

        Raises:
            ValueError: there is no record, or files are missing, something was changed since, or
                steps would be repeated.
        """
        recorded = read_record(resume_from_checkpoint)
        plan: PrivacyPlan = self._make_plan()
        refuse_changes(recorded, plan, self._projection_arguments(plan), self._optimizer_record())
        done = recorded["steps_done"]
        _refuse_incomplete(Path(resume_from_checkpoint), done)
        assert self._ledger is not None
        self._ledger.set_plan(plan)
        self._ledger.resume(done, reasons=_reasons(recorded), earlier_runs=_earlier_runs(recorded))
        self._recorded = recorded
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the optimizer's state, if its groups hold the tensors that they held.

        Raises:
            ValueError: torch would give a tensor the moments of another.
        """
        if checkpoint is not None and self._recorded["optimizer"]["groups"] != self._groups():
            raise ValueError(
                "The optimizer's groups hold other tensors than those of the checkpoint, whose "
                "state would reach the wrong ones: keep `head_learning_rate`, "
                "`muon_learning_rate`, `weight_decay` and the optimizer that is passed as they "
                "were."
            )
        super()._load_optimizer_and_scheduler(checkpoint)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model, to which nothing that was taken or loaded before belongs."""
        self._recorded = {}
        if getattr(self, "_ledger", None) is not None:  # none yet in the Trainer's constructor
            assert self._ledger is not None
            self._ledger.begin_run()
        return super().call_model_init(trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves nothing: the generators are secret, and tell how many examples were drawn."""
        os.makedirs(output_dir, exist_ok=True)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads nothing: a resumed run draws fresh secret randomness."""

    # ---- What the optimizer's state depends on ---------------------------------------------

    def _projection_arguments(self, plan: PrivacyPlan) -> dict[str, Any]:
        """The arguments that determine every projection of a run."""
        return {
            "rank": self.args.rank,
            "scale": self.args.projection_scale,
            "update_proj_gap": self.args.refresh_gap(plan.num_steps),
            "seed": self.args.seed,
        }

    def _name_of_given_optimizer(self) -> str | None:
        """Class of the optimizer that the user passed, or whose class was passed."""
        if self.optimizer is not None:
            return type(self.optimizer).__name__
        return self.optimizer_cls_and_kwargs and self.optimizer_cls_and_kwargs[0].__name__

    def _optimizer_record(self) -> dict[str, Any]:
        """What the optimizer's state depends on beside the projections, before it exists."""
        tensors = [
            (name, list(p.shape), str(p.dtype))
            for name, p in self.model.named_parameters()
            if p.requires_grad
        ]
        return {
            "optim": self._given_optimizer or self.args.optim_name,
            "refresh_moments": self.args.refresh_moments,
            "optim_target_modules": self.args.optim_target_modules,
            "clip_grouping": self.args.clip_grouping,
            "trainable_tensors": f"{len(tensors)} of sha256 {_digest(tensors)}",
            "head_tensors": sorted(self._head()),
        }

    def _groups(self) -> str:
        """Which tensors the optimizer's groups hold, in their order."""
        training = self.private_training
        assert training is not None
        names = {id(t.stand_in): name for name, t in training.subspace.tensors.items()}
        groups = [[names[id(p)] for p in g["params"]] for g in training.optimizer.param_groups]
        return f"{len(groups)} of sha256 {_digest(groups)}"


def refuse_changes(
    recorded: Mapping[str, Any],
    plan: PrivacyPlan,
    projection: Mapping[str, Any],
    optimizer: Mapping[str, Any],
) -> None:
    """Refuses to resume with another plan, other projections or another optimizer.

    Args:
        recorded: the record of the checkpoint.
        plan: of the run that is to continue it.
        projection: its arguments, under the names of the record.
        optimizer: what else its optimizer's state depends on, likewise.

    Raises:
        ValueError: naming everything that changed, or that the record does not tell.
    """
    changed = plan.differences(PrivacyPlan.from_dict(recorded["plan"]))
    unknown = []
    for section, present in (("projection", projection), ("optimizer", optimizer)):
        before = recorded.get(section, {})
        for key, now in present.items():
            name = "projection_scale" if key == "scale" else key
            if key not in before:
                unknown.append(f"`{name}`")
            elif before[key] != now:
                changed.append(f"`{name}` was {before[key]}, is now {now}")
    if changed:
        raise ValueError(
            "A resumed run must keep its privacy plan and all that the optimizer's state depends "
            f"on, but {'; '.join(changed)}. {_ADVICE}"
        )
    if unknown:
        raise ValueError(
            f"The checkpoint's record does not tell {', '.join(unknown)}, on which the optimizer's "
            "state depends, as an earlier version wrote it: resume with that version (see "
            "`versions` in the record), or start a new run."
        )


def _refuse_incomplete(checkpoint: Path, steps_done: int) -> None:
    """Refuses a folder that lacks what a run goes on with, or that holds two steps' files."""
    names = (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME)
    if missing := [f"`{name}`" for name in names if not (checkpoint / name).is_file()]:
        raise ValueError(
            f"Expected {', '.join(missing)} in {checkpoint}, found none: the optimizer and the "
            "learning rate would start anew in the middle of the plan; resume from a folder "
            "`checkpoint-...` that was saved without `save_only_model`."
        )
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    if state.global_step != steps_done:
        raise ValueError(
            f"Expected a checkpoint of one step, but in {checkpoint} the privacy record is of step "
            f"{steps_done} and `{TRAINER_STATE_NAME}` of another; resume from a folder "
            "`checkpoint-...` as it was saved."
        )


def _reasons(recorded: Mapping[str, Any]) -> list[str]:
    """Why all planned steps count, by the record; an earlier version's tells only that they do."""
    reasons = list(recorded.get("all_steps_count_because", []))
    if not reasons and recorded.get("steps_counted", 0) > recorded["steps_done"]:
        reasons = ["results decided in the part before"]
    return reasons


def _earlier_runs(recorded: Mapping[str, Any]) -> list[Run]:
    """The whole runs that a record adds up with its own, which is the last."""
    runs = (recorded.get("tuning", {}).get("all_runs") or {}).get("runs", [])
    return [run_from_dict(run) for run in runs[:-1]]


def _digest(value: Any) -> str:
    """Tells whether two lists are the same."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
