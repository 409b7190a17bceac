"""The model card: what an auditor has to know about a privately trained model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_dpgrape.artifacts.unit_words import each, has_units, limits_of, one
from hf_dpgrape.privacy.plan import LOSS, budget_warnings

_TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

{{ summary }}

## Privacy

{{ table(facts) }}

The same facts stand in `privacy.json` for programs.

## Tuning and validation data

{{ table(tuning) }}
{% if dpmup %}
## Width transfer (DP-muP)

{{ table(dpmup) }}

The tuning runs on the narrow model spend their own epsilon, which is not in the one above.
{% endif %}
## Not guaranteed

{% for line in limits -%}
* {{ line }}
{% endfor -%}
{% if results %}
## Evaluation

{{ table(results) }}
{% endif -%}
"""

_LIMITS = (
    "Nothing is claimed about validation data: metrics on it, and choices made by them, are not "
    "covered by epsilon.",
    "Epsilon is that of this one run. Tuning runs on the same data spend their own.",
    "Floating-point and timing side channels are not covered.",
)

_NOT_STATED = "not stated"

#: How many names a row of the card shows.
_MAX_NAMES = 6


def _shown(epsilon: float | None) -> str:
    """Epsilon for people."""
    return "infinite (no privacy)" if epsilon is None else f"{epsilon:.4g}"


def _by_accountant(by: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name.upper()} {_shown(epsilon)}" for name, epsilon in by.items())


def _names(names: Sequence[str]) -> str:
    """A list that stays readable."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """A table of Markdown with two columns; text from outside cannot break its cells."""
    lines = [
        " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {line} |" for line in lines)])


def privacy_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The record as rows of a table."""
    plan = record["plan"]
    return [
        ("epsilon", f"**{_shown(record['epsilon'])}** at delta {record['target_delta']:g}"),
        *(("what this budget is worth", warning) for warning in _budget_warnings(record)),
        *_method(record),
        ("epsilon by accountant", _by_accountant(record["epsilon_by_accountant"])),
        ("unit of privacy", record["unit_of_privacy"]),
        *_owner(record),
        ("neighboring relation", plan["neighboring_relation"].replace("_", " ")),
        ("sampling", f"{record['sampling']}, probability {record['sampling_prob']:.6g}"),
        ("steps", _steps(record)),
        ("noise multiplier", f"{plan['noise_multiplier']:.6g}"),
        ("noise", record.get("noise", _NOT_STATED)),
        (f"clip norm per {one(record)}", f"{plan['l2_clip_norm']:g} ({plan['clipping']})"),
        ("clip groups", _clip_groups(plan["clip_shares"])),
        *_loss(record),
        *_private_loss(plan),
        ("head alone first", f"{plan['head_only_steps']} steps"),
        (
            f"{one(record)}s, expected batch",
            f"{plan['num_examples']}, {plan['expected_batch_size']}",
        ),
        ("processes", str(record.get("num_processes", _NOT_STATED))),
        ("projection", _projection(record)),
        *_capture(record),
        ("randomness of noise and sampling", record["projection"]["randomness"]),
        ("versions", ", ".join(f"{name} {v}" for name, v in record["versions"].items())),
    ]


def _budget_warnings(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What makes the record's budget say little; nothing for a run that is not private at all."""
    if record["epsilon"] is None:
        return ()
    return budget_warnings(
        epsilon=record["epsilon"],
        target_delta=record["target_delta"],
        num_examples=record["plan"]["num_examples"],
    )


def _steps(record: Mapping[str, Any]) -> str:
    done, planned = record["steps_done"], record["plan"]["num_steps"]
    text = f"{done} of {planned} planned"
    if record.get("steps_counted", done) != done:
        text += (
            f"; epsilon counts all {planned}, because results could decide when to stop or which "
            "step to keep"
        )
    return text


def _clip_groups(shares: Mapping[str, float]) -> str:
    if len(shares) > _MAX_NAMES:
        least, most = min(shares.values()), max(shares.values())
        return f"{len(shares)} groups, shares of the clip norm from {least:.4g} to {most:.4g}"
    return ", ".join(f"{group} {share:.4g}" for group, share in shares.items())


def _private_loss(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the training loss was released; nothing if it was not."""
    bound = plan.get("private_loss_bound")
    if bound is None:
        return []
    share = plan["clip_shares"][LOSS]
    text = f"with the gradients, share {share:.4g} of the clip norm, clamped to {bound:g}"
    return [("training loss, released with noise", text)]


def _loss(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was changed about an example's loss; nothing if it was the model's own."""
    loss = record.get("loss", {})
    weights, smoothing = loss.get("class_weights"), loss.get("label_smoothing_factor")
    rows = []
    if weights:
        text = f"{_names([f'{w:g}' for w in weights])}; a count of training labels is not covered"
        rows.append(("class weights, chosen by the user", text))
    if smoothing:
        rows.append(("label smoothing", f"{smoothing:g}"))
    return rows


def _owner(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What somebody spends who owns several examples; nothing where nobody is said to."""
    owner = record.get("owner")
    if not owner:
        return []
    return [(f"epsilon of who owns {owner['examples']} examples", _shown(owner["epsilon"]))]


def _method(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and sentence of the method; nothing where the record does not say."""
    method = record.get("method")
    return [("method", f"{method['name']}: {method['says']}")] if method else []


def _projection(record: Mapping[str, Any]) -> str:
    projection, method = record["projection"], record.get("method", {})
    if method.get("estimator") == "zeroth_order":
        return (
            f"{method['num_directions']} random direction(s) a step, new at every step, looked at "
            f"{method['perturbation_scale']:g} along each, public seed {projection['seed']}"
        )
    if not projection["rank"]:
        return "none"
    if method.get("estimator") == "galore":
        return (
            f"after the noise, on {projection['rank']} singular vectors of the private gradient, "
            f"{_renewal(projection['update_proj_gap'])}"
        )
    gap, whole = projection["update_proj_gap"], projection.get("unprojected_matrices", [])
    return (
        f"rank {projection['rank']}, entries of standard deviation {projection['scale']}, "
        f"{_renewal(gap)}, public seed "
        f"{projection['seed']}; {projection['num_projected']} of {projection['num_tensors']} "
        f"tensors are projected. Not projected: tensors of one dimension"
        f"{', ' + _names(whole) if whole else ''}"
    )


def _capture(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How per-sample gradients were taken; nothing where the record does not say."""
    if "capture" not in record["projection"]:
        return []
    is_single = record["projection"]["capture"] == "single"
    how = "one example at a time" if is_single else "from batches, exactly for each example"
    if has_units(record):
        row = "one row at a time" if is_single else "from batches of one unit's rows"
        how = f"{row}; the mean over a unit's rows is clipped"
    return [("gradients taken", how)]


def _renewal(gap: int) -> str:
    if gap <= 1:
        return "new at every step" if gap else "never renewed"
    return f"new every {gap} steps"


def tuning_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Other runs on the same data, and the part that validation data had."""
    tuning = record.get("tuning", {})
    trials, is_private = tuning.get("num_tuning_trials"), tuning.get("validation_data_is_private")
    chosen = tuning.get("chosen_by_validation_data") or ["nothing by the Trainer itself"]
    rows = [
        ("tuning trials on the same data", _NOT_STATED if trials is None else str(trials)),
        (
            "validation data",
            _NOT_STATED if is_private is None else "private" if is_private else "public",
        ),
        ("chosen by validation data", ", ".join(chosen)),
    ]
    if runs := tuning.get("all_runs"):
        spent = _by_accountant(runs["epsilon_by_accountant"])
        rows.append(
            (
                f"all {runs['num_runs']} runs of this trainer together",
                f"epsilon {spent} at delta {runs['target_delta']:g}, if the number of runs, their "
                "noise, sampling and steps did not depend on results",
            )
        )
    return rows


def _dpmup_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """From which model settings were carried over; none without DP-muP."""
    dpmup = record.get("dpmup")
    if not dpmup:
        return []
    return [
        ("tuned on", str(dpmup["base_model"])),
        ("rule for optimizer", str(dpmup["optimizer"])),
        ("noise multiplier there", f"{dpmup['proxy_noise_multiplier']:.6g}"),
    ]


def _of_one_class(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The last evaluations in which nearly all predictions were one class."""
    found: Mapping[str, Any] = record.get("evaluations_of_one_class", {})
    return [
        (f"predictions ({prefix})", f"**at step {told['step']} the model {told['says']}**")
        for prefix, told in found.items()
    ]


def _is_private(record: Mapping[str, Any]) -> bool:
    fixed = "NOT PRIVATE" in record["projection"]["randomness"]
    return record["epsilon"] is not None and not fixed


def _limits_of(record: Mapping[str, Any]) -> list[str]:
    """What is not guaranteed in this run in particular."""
    tuning, lines = record.get("tuning", {}), []
    if chosen := tuning.get("chosen_by_validation_data"):
        is_public = tuning["validation_data_is_private"] is False
        lines.append(
            f"Validation data decided about {' and '.join(chosen)}: "
            + (
                "they are stated to be public."
                if is_public
                else "if they are private, epsilon does not cover that choice."
            )
        )
    if record.get("raw_metrics_were_logged"):
        lines.append(
            "Raw training losses or metrics were logged: who sees the logs is not bound by epsilon."
        )
    if not _is_private(record):
        lines.insert(0, "**This is a test or debugging run. It gives no privacy at all.**")
    return lines


def _summary(record: Mapping[str, Any]) -> str:
    """The card's first sentences; they say at once if there is no privacy, or next to none."""
    if not _is_private(record):
        return "A test or debugging run of hf_dpgrape, **without any privacy**."
    budget = f"(epsilon {_shown(record['epsilon'])}, delta {record['target_delta']:g})"
    if warnings := _budget_warnings(record):
        return (
            f"Trained by the private mechanism of hf_dpgrape, but with {budget} for "
            f"{each(record)}: **{' '.join(warnings)}**"
        )
    return f"Fine-tuned with differential privacy by hf_dpgrape: {budget} for {each(record)}."


def render_card(
    record: Mapping[str, Any],
    *,
    model_name: str,
    task: str,
    base_model: str | None = None,
    metrics: Mapping[str, float] | None = None,
    limits: tuple[str, ...] = (),
    **metadata: Any,
) -> ModelCard:
    """The card of a model from its privacy record.

    Args:
        record: what `privacy_record` returned.
        model_name: title of the card.
        task: what the Hub calls the model's task.
        base_model: what was fine-tuned, if it has a name.
        metrics: evaluation metrics; they are not training losses and go into the metadata as
            `EvalResult`s.
        limits: further sentences on what is not guaranteed in this run.
        metadata: further fields of `ModelCardData` (license, language, tags ...).
    """
    metrics = metrics or {}
    is_private = _is_private(record) and not _budget_warnings(record)
    metadata["tags"] = [
        *(["differential-privacy"] if is_private else []),
        "dp-grape",
        *(metadata.get("tags") or []),
    ]
    data = _metadata(model_name, task, base_model, metrics, **metadata)
    card: ModelCard = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        table=_table,
        title=model_name,
        summary=_summary(record),
        facts=privacy_facts(record),
        tuning=tuning_facts(record),
        dpmup=_dpmup_facts(record),
        limits=[*_limits_of(record), *_LIMITS, *limits_of(record), *limits],
        results=[*((n, f"{v:.4g}") for n, v in metrics.items()), *_of_one_class(record)],
    )
    return card


def _metadata(
    model_name: str,
    task: str,
    base_model: str | None,
    metrics: Mapping[str, float],
    **fields: Any,
) -> ModelCardData:
    """What programs read at the top of the card."""
    results = [
        EvalResult(
            task_type=task,
            dataset_type="evaluation",
            dataset_name="evaluation set of the run",
            metric_type=name,
            metric_value=value,
        )
        for name, value in metrics.items()
    ]
    fields.setdefault("library_name", "transformers")
    return ModelCardData(
        model_name=model_name,
        base_model=base_model,
        pipeline_tag=None if task == "other" else task,
        eval_results=results or None,
        **fields,
    )


def last_evaluation(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Quality metrics of the last evaluation in a Trainer's logs: no times, rates or counts."""
    logs = [log for log in log_history if any(key.startswith("eval_") for key in log)]
    return {
        key.removeprefix("eval_"): float(value)
        for key, value in (logs[-1] if logs else {}).items()
        if key.startswith("eval_")
        and not key.endswith(("runtime", "per_second", "_time", "num_tokens"))
        and isinstance(value, (int, float))
        and math.isfinite(value)
    }
