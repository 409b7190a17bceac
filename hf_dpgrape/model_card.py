"""The model card: what an auditor has to know about a privately trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

_TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

{{ summary }}

## Privacy

| | |
|---|---|
{% for name, value in facts -%}
| {{ name }} | {{ value }} |
{% endfor %}
The same facts stand in `privacy.json` for programs.

## Not guaranteed

{% for line in limits -%}
* {{ line }}
{% endfor %}
{% if results -%}
## Evaluation

| metric | value |
|---|---|
{% for name, value in results -%}
| {{ name }} | {{ value }} |
{% endfor %}
{% endif -%}
"""

_LIMITS = (
    "Nothing is claimed about validation data: metrics on it, and choices made by them, are not "
    "covered by epsilon.",
    "Epsilon is that of this one run. Tuning runs on the same data spend their own.",
    "The number of training examples is treated as public.",
    "Floating-point and timing side channels are not covered.",
)


def _shown(epsilon: float | None) -> str:
    """Epsilon for people."""
    return "infinite (no privacy)" if epsilon is None else f"{epsilon:.4g}"


def privacy_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The record as rows of a table."""
    plan, by = record["plan"], record["epsilon_by_accountant"]
    projection = record["projection"]
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
    rank = projection["rank"]
    return [
        ("epsilon", f"**{_shown(record['epsilon'])}** at delta {record['target_delta']:g}"),
        ("epsilon by accountant", f"PLD {_shown(by['pld'])}, RDP {_shown(by['rdp'])}"),
        ("unit of privacy", record["unit_of_privacy"]),
        ("neighboring relation", plan["neighboring_relation"].replace("_", " ")),
        ("sampling", f"{record['sampling']}, probability {record['sampling_prob']:.6g}"),
        ("steps", f"{record['steps_done']} of {plan['num_steps']} planned"),
        ("noise multiplier", f"{plan['noise_multiplier']:.6g}"),
        ("clip norm per example", f"{plan['l2_clip_norm']:g} ({plan['clipping']})"),
        ("clip groups", ", ".join(f"{g} {s:.4g}" for g, s in plan["clip_shares"].items())),
        ("head alone first", f"{plan['head_only_steps']} steps"),
        ("examples, expected batch", f"{plan['num_examples']}, {plan['expected_batch_size']}"),
        (
            "projection",
            "none"
            if not rank
            else f"rank {rank}, {projection['num_projected']} of {projection['num_tensors']} "
            f"tensors, new every {projection['update_proj_gap']} steps, public seed "
            f"{projection['seed']}",
        ),
        ("randomness", projection["randomness"]),
        ("versions", versions),
    ]


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
    tags = ["differential-privacy", "dp-grape", *(metadata.pop("tags", None) or [])]
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
    data = ModelCardData(
        model_name=model_name,
        base_model=base_model,
        library_name="transformers",
        pipeline_tag=None if task == "other" else task,
        tags=tags,
        eval_results=results or None,
        **metadata,
    )
    summary = (
        f"Fine-tuned with differential privacy by hf_dpgrape: (epsilon "
        f"{_shown(record['epsilon'])}, delta {record['target_delta']:g}) for each example."
    )
    card: ModelCard = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        title=model_name,
        summary=summary,
        facts=privacy_facts(record),
        limits=[*_LIMITS, *limits],
        results=[(name, f"{value:.4g}") for name, value in metrics.items()],
    )
    return card


def last_evaluation(log_history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Quality metrics of the last evaluation in a Trainer's logs: no times, rates or counts."""
    logs = [log for log in log_history if any(key.startswith("eval_") for key in log)]
    return {
        key.removeprefix("eval_"): value
        for key, value in (logs[-1] if logs else {}).items()
        if key.startswith("eval_") and not key.endswith(("runtime", "per_second"))
    }
