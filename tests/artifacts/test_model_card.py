"""The card says what the record says, in full, and what is not guaranteed.

Covers: artifacts/record.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hf_dpgrape.artifacts.model_card import last_evaluation, privacy_facts, render_card
from hf_dpgrape.artifacts.record import counts_in_full, privacy_record, with_earlier_part
from hf_dpgrape.privacy.plan import PrivacyPlan


def plan(**changes: Any) -> PrivacyPlan:
    numbers: dict[str, Any] = {
        "noise_multiplier": 1.25,
        "num_examples": 701,
        "expected_batch_size": 90,
        "num_steps": 24,
        "l2_clip_norm": 0.5,
        "target_delta": 1e-4,
    }
    return PrivacyPlan(**{**numbers, **changes})


PROJECTION = {
    "rank": 16,
    "scale": "1/sqrt(r)",
    "update_proj_gap": 3,
    "num_projected": 12,
    "num_tensors": 20,
    "unprojected_matrices": ["classifier.weight"],
    "seed": 7,
    "randomness": "generators seeded by the operating system",
}


def record(**changes: Any) -> dict[str, Any]:
    given = {"plan": plan(), "steps_done": 24, "projection": PROJECTION, **changes}
    return privacy_record(**given)


def card(of: dict[str, Any], **options: Any) -> str:
    return str(render_card(of, model_name="m", task="text-classification", **options))


def test_facts_for_an_auditor() -> None:
    text, p = card(record()), plan()
    for row in (
        f"| epsilon | **{p.epsilon():.4g}** at delta 0.0001 |",
        f"PLD {p.epsilon(24, 'pld'):.4g}, RDP {p.epsilon(24, 'rdp'):.4g} |",
        "| unit of privacy | one row of the training set |",
        "| neighboring relation | add or remove one |",
        "| sampling | Poisson, probability 0.128388 |",
        "| steps | 24 of 24 planned |",
        "| noise multiplier | 1.25 |",
        "| noise | float64 draws of torch's generators, not exact and not cryptographic |",
        "| clip norm per example | 0.5 (flat) |",
        "| processes | 1 |",
        "| projection | rank 16, entries of standard deviation 1/sqrt(r), new every 3 steps, "
        "public seed 7; 12 of 20 tensors are projected. Not projected: tensors of one dimension, "
        "classifier.weight |",
        "| randomness of noise and sampling | generators seeded by the operating system |",
        "dp-accounting 0.",
        "| tuning trials on the same data | not stated |",
        "| validation data | not stated |",
    ):
        assert row in text, row
    assert "DP-muP" not in text and "Evaluation" not in text and "no privacy" not in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"update_proj_gap": 0}, "never renewed"),
        ({"update_proj_gap": 1}, "new at every step"),
        ({"rank": 0}, "| projection | none |"),
        (
            {"unprojected_matrices": [f"w{i}" for i in range(9)]},
            "w0, w1, w2, w3, w4, w5 and 3 more |",
        ),
    ],
)
def test_projections(changes: dict[str, Any], says: str) -> None:
    assert says in card(record(projection={**PROJECTION, **changes}))


def test_many_clip_groups_are_summed_up() -> None:
    shares = {f"layer.{i}": 0.25 for i in range(16)}
    text = card(record(plan=plan(clip_shares=shares)))
    assert "| clip groups | 16 groups, shares of the clip norm from 0.25 to 0.25 |" in text


def test_released_loss() -> None:
    shares = {"body": 0.8, "loss": 0.6}
    text = card(record(plan=plan(clip_shares=shares, private_loss_bound=2.5)))
    row = "with the gradients, share 0.6 of the clip norm, clamped to 2.5"
    assert f"| training loss, released with noise | {row} |" in text
    assert "| clip groups | body 0.8, loss 0.6 |" in text
    old = record(plan=plan(clip_shares=shares))  # a layer of that name, before there was a bound
    del old["plan"]["private_loss_bound"]
    assert "released with noise" not in card(old) + card(record())


def test_runs_without_privacy_say_so() -> None:
    fixed = record(projection={**PROJECTION, "randomness": "FIXED TEST SEED: NOT PRIVATE"})
    for text in (card(fixed), card(record(plan=plan(noise_multiplier=0.0)))):
        assert "**without any privacy**" in text and "Fine-tuned with differential" not in text
        assert "It gives no privacy at all." in text
    assert "Raw training losses or metrics were logged" in card(
        record(raw_metrics_were_logged=True)
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"noise_multiplier": 0.3}, "is above 20, a bound so loose that it promises next to"),
        ({"target_delta": 0.3}, "**Delta 0.3 is not below 1 / num_examples = 0.0014; at that size"),
    ],
)
def test_a_budget_that_means_little_is_said_at_once(changes: dict[str, Any], says: str) -> None:
    """One function decides for the card, the report's table and the trainer."""
    of = plan(**changes)
    (sentence,) = of.warnings()
    text = card(record(plan=of), tags=["mine"])
    assert says in text and f": **{sentence}**" in text.split("## Privacy")[0]
    assert ("what this budget is worth", sentence) in privacy_facts(record(plan=of))
    assert "with differential privacy" not in text
    tags = yaml.safe_load(text.split("---")[1])["tags"]
    assert tags == ["dp-grape", "mine"]
    assert plan().warnings() == () and "what this budget" not in card(record())
    assert "Fine-tuned with differential privacy" in card(record())


def test_what_one_example_is() -> None:
    of = record(example_unit="one e-mail")
    assert of["unit_of_privacy"] == "one e-mail"
    assert "| unit of privacy | one e-mail |" in card(of)
    assert (
        with_earlier_part({**of, "tuning": {"chosen_by_validation_data": []}}, record())[
            "unit_of_privacy"
        ]
        == "one e-mail; in the part before, one row of the training set"
    )


def test_what_an_owner_of_several_examples_spends() -> None:
    assert "owner" not in record() and "who owns" not in card(record())
    of = record(examples_per_unit=3)
    spent = plan().unit_epsilon(3, of["steps_counted"])
    assert of["owner"] == {"examples": 3, "epsilon": spent} and spent > of["epsilon"]
    assert "| epsilon of who owns 3 examples | " in card(of)
    now = {**of, "tuning": {"chosen_by_validation_data": []}}
    before = record(examples_per_unit=5)
    assert with_earlier_part(now, before)["owner"]["examples"] == 5


def test_class_weights_of_the_part_before_stay_on_the_record() -> None:
    now = {**record(), "tuning": {"chosen_by_validation_data": []}}
    loss = {"class_weights": [0.5, 2.0], "label_smoothing_factor": 0.0}
    told = with_earlier_part(now, {**record(), "loss": loss})
    assert told["loss"] == loss and "a count of training labels is not covered" in card(told)
    assert "loss" not in with_earlier_part(now, record())


def test_width_transfer() -> None:
    dpmup = {"base_model": "tiny", "optimizer": "muon", "proxy_noise_multiplier": 0.40625}
    text = card({**record(), "dpmup": dpmup})
    rows = (
        "| tuned on | tiny |\n| rule for optimizer | muon |\n| noise multiplier there | 0.40625 |"
    )
    assert rows in text
    assert "The tuning runs on the narrow model spend their own epsilon" in text


def test_evaluation_is_machine_readable() -> None:
    text = card(record(), metrics={"accuracy": 0.75}, license="mit", base_model="some/base")
    facts = yaml.safe_load(text.split("---")[1])
    (result,) = facts["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "accuracy", "value": 0.75}]
    assert (facts["license"], facts["base_model"]) == ("mit", "some/base")
    assert "| accuracy | 0.75 |" in text


def test_text_from_outside_stays_in_its_cell() -> None:
    text = card(
        {
            **record(),
            "dpmup": {"base_model": "a|b\nc", "optimizer": "sgd", "proxy_noise_multiplier": 1.0},
        }
    )
    assert "| tuned on | a\\|b c |" in text


def test_only_quality_metrics_of_the_last_evaluation() -> None:
    logs = [
        {"eval_accuracy": 0.1, "step": 1},
        {
            "eval_accuracy": 0.4,
            "eval_runtime": 3.0,
            "eval_samples_per_second": 9.0,
            "eval_model_preparation_time": 0.1,
            "eval_num_tokens": 400.0,
            "eval_broken": float("nan"),
            "eval_words": "many",
            "epoch": 1.0,
        },
        {"epsilon": 1.0},
    ]
    assert last_evaluation(logs) == {"accuracy": 0.4}
    assert last_evaluation([]) == {}


def test_steps_that_results_chose() -> None:
    text = card(record(steps_done=9, steps_counted=24))
    assert "| steps | 9 of 24 planned; epsilon counts all 24, because results could" in text
    assert f"| epsilon | **{plan().epsilon():.4g}** at" in text
    assert counts_in_full(record(steps_done=9, steps_counted=24))
    assert not counts_in_full(record(steps_done=9))


@pytest.mark.parametrize(
    ("before", "now", "together"), [(None, None, None), (True, False, True), (False, None, False)]
)
def test_statements_about_a_run_in_two_parts(before: Any, now: Any, together: Any) -> None:
    def part(is_private: Any, trials: Any, chosen: list[str], **changes: Any) -> dict[str, Any]:
        tuning = {
            "num_tuning_trials": trials,
            "validation_data_is_private": is_private,
            "chosen_by_validation_data": chosen,
        }
        return record(tuning=tuning, **changes)

    dpmup = {"base_model": "tiny", "optimizer": "muon", "proxy_noise_multiplier": 0.40625}
    earlier, later = part(before, 4, ["a", "b"], dpmup=dpmup), part(now, None, ["b", "c"])
    merged = with_earlier_part(later, earlier)
    assert merged["tuning"]["validation_data_is_private"] is together
    assert merged["tuning"]["num_tuning_trials"] == 4
    assert merged["tuning"]["chosen_by_validation_data"] == ["a", "b", "c"]
    assert merged["dpmup"] == dpmup
    assert with_earlier_part(later, {}) == later
