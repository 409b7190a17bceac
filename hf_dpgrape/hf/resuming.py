"""Resuming from a checkpoint: what it was made with stays on the record, and stays the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from hf_dpgrape.artifacts.record import read_record
from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.planning import head_tensors
from hf_dpgrape.mechanism.private_training import PrivateTraining
from hf_dpgrape.privacy.accounting import Run
from hf_dpgrape.privacy.ledger import RunLedger, run_from_dict
from hf_dpgrape.privacy.plan import PrivacyPlan

#: Arguments and other values, by section of the record and name.
Facts = dict[str, dict[str, Any]]

_ADVICE = "Restore these arguments, or start a new run (whose epsilon adds to what was spent)."


def resumed(
    ledger: RunLedger,
    checkpoint: str,
    plan: PrivacyPlan,
    facts: Facts,
) -> Mapping[str, Any]:
    """Continues the run of a checkpoint that was made in the same way.

    Guarantees:
        A run is continued under its own plan, and in the trainer that made it never from before
        a step that was taken. What its record says of the part before stays on the record.
        Everything that the optimizer's state depends on is what it was, or nothing is loaded.

    Args:
        ledger: of the trainer; it goes on where the record ends.
        checkpoint: folder of the checkpoint.
        plan: of the run that is to continue.
        facts: what `run_facts` returns.

    Returns:
        The record of the checkpoint.

    Raises:
        ValueError: there is no record, or files are missing, something was changed since, or steps
            would be repeated.
    """
    recorded = read_record(checkpoint)
    _refuse_changes(recorded, plan, facts)
    done = recorded["steps_done"]
    _refuse_incomplete(Path(checkpoint), done)
    ledger.set_plan(plan)
    ledger.resume(done, reasons=_reasons(recorded), earlier_runs=_earlier_runs(recorded))
    return recorded


def already_spent(ledger: RunLedger) -> ValueError:
    """Why a trained model is not trained as if it were new."""
    return ValueError(
        f"This trainer has already spent epsilon={ledger.epsilon():.4g} in "
        f"{ledger.num_releases} steps; a second `train()` would spend more. Resume from a "
        "checkpoint with `resume_from_checkpoint`, or make a new trainer and add up what both "
        "spend."
    )


def refuse_other_groups(recorded: Mapping[str, Any], training: PrivateTraining) -> None:
    """Refuses an optimizer to whose tensors torch would give the moments of others."""
    if recorded["optimizer"]["groups"] != groups_of(training):
        raise ValueError(
            "The optimizer's groups hold other tensors than those of the checkpoint, whose "
            "state would reach the wrong ones: keep `head_learning_rate`, "
            "`muon_learning_rate`, `weight_decay` and the optimizer that is passed as they "
            "were."
        )


# ---- What the optimizer's state depends on -------------------------------------------------


def run_facts(
    args: DPGrapeTrainingArguments, model: nn.Module, plan: PrivacyPlan, given: str | None
) -> Facts:
    """What the state of a run's optimizer depends on, before the optimizer exists.

    Args:
        args: the arguments.
        model: whose tensors are trained.
        plan: of the run.
        given: class of the optimizer that the user passed, if any.

    Returns:
        By section of the record: the arguments that determine every projection, and the rest.
    """
    tensors = [
        (name, list(p.shape), str(p.dtype))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    projection = {
        "method": args.method,
        "num_directions": args.num_directions,
        "perturbation_scale": args.perturbation_scale,
        "rank": args.rank,
        "scale": args.projection_scale,
        "update_proj_gap": args.refresh_gap(plan.num_steps),
        "seed": args.seed,
    }
    optimizer = {
        "optim": given or args.optim_name,
        "refresh_moments": args.refresh_moments,
        "optim_target_modules": args.optim_target_modules,
        "clip_grouping": args.clip_grouping,
        "trainable_tensors": f"{len(tensors)} of sha256 {_digest(tensors)}",
        "head_tensors": sorted(head_tensors(model, args.head_modules)),
    }
    return {"projection": projection, "optimizer": optimizer}


def groups_of(training: PrivateTraining) -> str:
    """Which tensors the optimizer's groups hold, in their order."""
    names = {id(stand_in): name for name, stand_in in training.subspace.stand_ins.items()}
    groups = [[names[id(p)] for p in g["params"]] for g in training.optimizer.param_groups]
    return f"{len(groups)} of sha256 {_digest(groups)}"


def _refuse_changes(recorded: Mapping[str, Any], plan: PrivacyPlan, facts: Facts) -> None:
    """Refuses to resume with another plan, other projections or another optimizer.

    Args:
        recorded: the record of the checkpoint.
        plan: of the run that is to continue it.
        facts: on which its optimizer's state depends.

    Raises:
        ValueError: naming everything that changed, or that the record does not tell.
    """
    changed = plan.differences(PrivacyPlan.from_dict(recorded["plan"]))
    unknown = []
    for section, present in facts.items():
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
