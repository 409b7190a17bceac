"""`privacy.json`: the machine-readable privacy record beside the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpgrape.artifacts.unit_words import ONE_ROW, unit_of_privacy
from hf_dpgrape.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from hf_dpgrape.subspace.projection import Projection


#: File name of the record, in every checkpoint and in the output folder.
RECORD_NAME = "privacy.json"

#: Where noise and sampling came from.
SECRET, FIXED = "generators seeded by the operating system", "FIXED TEST SEED: NOT PRIVATE"

#: How the noise was drawn.
SECURE = "exact normal numbers on a grid, from AES-256 in counter mode"
FLOATING = "float64 draws of torch's generators, not exact and not cryptographic"

_PACKAGES = ("hf-dpgrape", "dp-accounting", "torch", "transformers")


def privacy_record(
    plan: PrivacyPlan,
    steps_done: int,
    projection: Mapping[str, Any],
    *,
    method: Mapping[str, Any] | None = None,
    steps_counted: int | None = None,
    counted_because: Sequence[str] = (),
    optimizer: Mapping[str, Any] | None = None,
    example_unit: str = ONE_ROW,
    examples_per_unit: int = 1,
    num_processes: int = 1,
    tuning: Mapping[str, Any] | None = None,
    raw_metrics_were_logged: bool = False,
    dpmup: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Plan, steps done, epsilon and versions: public numbers only.

    Neither seeds of noise or sampling nor any loss or norm is in it.

    Args:
        plan: the run's plan.
        steps_done: releases behind the present weights, an interrupted one included.
        projection: what `projection_record` returned, and where randomness came from.
        method: name, sentence, estimator and numbers of the method, if it is told.
        steps_counted: steps that epsilon counts, if more than those done: where results decide
            on the last step or on the one that is kept, all planned steps count.
        counted_because: why all planned steps count.
        optimizer: what the optimizer's state depends on beside the projection.
        example_unit: what one example, or one unit, is, in words.
        examples_per_unit: most examples that one owner has; above 1 their epsilon is told, too.
        num_processes: how many processes trained together.
        tuning: other runs, and choices by validation data.
        raw_metrics_were_logged: whether anything was logged under `log_non_private_metrics`.
        dpmup: what was transferred from a narrow model, if anything.
    """
    counted = steps_done if steps_counted is None else steps_counted
    return {
        "epsilon": finite(plan.epsilon(counted)),
        "target_delta": plan.target_delta,
        "steps_done": steps_done,
        "steps_counted": counted,
        "all_steps_count_because": list(counted_because),
        "epsilon_by_accountant": {
            name: finite(plan.epsilon(counted, name)) for name in plan.sampling.accountants
        },
        "unit_of_privacy": unit_of_privacy(plan, example_unit),
        **_owner(plan, counted, examples_per_unit),
        "sampling": plan.sampling.describe(plan.drawn),
        "sampling_prob": plan.sampling_prob,
        "plan": plan.to_dict(),
        "noise": SECURE if plan.secure_noise else FLOATING,
        **({"method": dict(method)} if method else {}),
        "num_processes": num_processes,
        "projection": dict(projection),
        "optimizer": dict(optimizer or {}),
        "tuning": dict(tuning or {}),
        "raw_metrics_were_logged": raw_metrics_were_logged,
        **({"dpmup": dict(dpmup)} if dpmup else {}),
        "versions": {name: version(name) for name in _PACKAGES},
    }


def _owner(plan: PrivacyPlan, steps_counted: int, examples_per_unit: int) -> dict[str, Any]:
    """What somebody spends who owns several examples; nothing if nobody does."""
    if examples_per_unit == 1:
        return {}
    spent = finite(plan.unit_epsilon(examples_per_unit, steps_counted))
    return {"owner": {"examples": examples_per_unit, "epsilon": spent}}


def with_earlier_part(record: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a resumed run, with what weakens the guarantee in the part before.

    Args:
        record: of the run as it is now; its steps and `all_runs` cover the part before already.
        earlier: the record of the checkpoint, or nothing.
    """
    if not earlier:
        return dict(record)
    randomness = (earlier["projection"]["randomness"], record["projection"]["randomness"])
    before, now = earlier.get("tuning", {}), record["tuning"]
    trials = [t.get("num_tuning_trials") for t in (before, now)]
    is_private = [t.get("validation_data_is_private") for t in (now, before)]
    chosen = [*before.get("chosen_by_validation_data", []), *now["chosen_by_validation_data"]]
    kept = {name: record.get(name) or earlier.get(name) for name in ("dpmup", "loss")}
    most = max(part.get("owner", {}).get("examples", 1) for part in (record, earlier))
    plan = PrivacyPlan.from_dict(record["plan"])
    units = dict.fromkeys((record["unit_of_privacy"], earlier["unit_of_privacy"]))
    return {
        **record,
        "unit_of_privacy": "; in the part before, ".join(units),
        **_owner(plan, record["steps_counted"], most),
        "projection": {
            **record["projection"],
            "randomness": FIXED if FIXED in randomness else randomness[-1],
        },
        "tuning": {
            **now,
            "num_tuning_trials": max((t for t in trials if t is not None), default=None),
            "validation_data_is_private": True in is_private
            or next((said for said in is_private if said is not None), None),
            "chosen_by_validation_data": list(dict.fromkeys(chosen)),
        },
        "raw_metrics_were_logged": record["raw_metrics_were_logged"]
        or earlier.get("raw_metrics_were_logged", False),
        **{name: value for name, value in kept.items() if value},
    }


def counts_in_full(record: Mapping[str, Any]) -> bool:
    """Whether results may have decided on the last step, or on the one that was kept."""
    chosen = record.get("tuning", {}).get("chosen_by_validation_data", [])
    may_stop = record.get("steps_counted", 0) > record["steps_done"]
    return (
        bool(record.get("all_steps_count_because"))
        or may_stop
        or "the best checkpoint" in chosen
        or "when to stop" in chosen
    )


def projection_record(projections: Collection[Projection], capture: str) -> dict[str, Any]:
    """How gradients are taken, how many are projected, and which matrices are not.

    Args:
        projections: of all trained tensors.
        capture: "batched" or "single".
    """
    whole = [p for p in projections if p.side is None]
    return {
        "capture": capture,
        "num_projected": len(projections) - len(whole),
        "num_tensors": len(projections),
        "unprojected_matrices": [p.name for p in whole if len(p.full_shape) > 1],
    }


def finite(epsilon: float) -> float | None:
    """Epsilon, or None if there is no guarantee: JSON has no infinity."""
    return epsilon if math.isfinite(epsilon) else None


def write_record(folder: str | Path, record: Mapping[str, Any]) -> None:
    """Writes the record into a folder."""
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    (Path(folder) / RECORD_NAME).write_text(text, encoding="utf-8")


def read_record(folder: str | Path) -> dict[str, Any]:
    """The record of a checkpoint.

    Raises:
        ValueError: the folder has none, so nothing is known about what was spent.
    """
    path = Path(folder) / RECORD_NAME
    if not path.is_file():
        raise ValueError(
            f"Expected `{RECORD_NAME}` in the checkpoint {folder}, found none: without it the "
            "privacy already spent is unknown. Resume from a checkpoint of DPGrapeTrainer."
        )
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record
