"""`hf-dpgrape transfer`: both halves of a width transfer.

Covers: commands/width/command.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from families import make_config

from hf_dpgrape import DPGrapeTrainingArguments
from hf_dpgrape.commands.cli import main
from hf_dpgrape.commands.presets import parse_arguments
from hf_dpgrape.privacy.accounting import epsilon
from hf_dpgrape.privacy.sampling.poisson import Poisson


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command line with a narrow and a wide GPT-2."""
    for name, factor in (("narrow", 1), ("wide", 8)):
        config = make_config("gpt2")
        config.n_embd, config.n_head, config.n_inner = 24 * factor, 2 * factor, 40 * factor
        config.architectures = ["GPT2LMHeadModel"]
        config.save_pretrained(tmp_path / name)
    return [
        *("transfer", "--base", str(tmp_path / "narrow"), "--target", str(tmp_path / "wide")),
        *("--num_examples", "10000", "--expected_batch_size", "100", "--max_steps", "50"),
        *("--target_epsilon", "3", "--target_delta", "1e-5", "--optim", "adamw"),
    ]


def test_both_halves(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--num_tuning_trials", "7", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    proxy, target = told["proxy"], told["target"]
    sigma = proxy["arguments"]["noise_multiplier"]
    assert sigma > 2 * target["noise_multiplier"]
    setting = {"sampling": Poisson(sampling_prob=0.01), "delta": 1e-5}
    assert proxy["epsilon_per_trial"] == epsilon(noise_multiplier=sigma, num_steps=50, **setting)
    assert proxy["epsilon_of_trials"] == epsilon(noise_multiplier=sigma, num_steps=350, **setting)
    assert 2.9 < target["epsilon"] <= 3
    assert any("extrapolates" in line for line in told["conventions"])
    together = told["epsilon_of_all"]
    assert max(target["epsilon"], proxy["epsilon_of_trials"]) < together
    assert together < target["epsilon"] + proxy["epsilon_of_trials"]
    assert sum(share**2 for share in target["clip_shares"].values()) == pytest.approx(1)
    assert proxy["arguments"]["clip_grouping"] == "layer"


def test_tables_and_preset(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = tmp_path / "preset.yaml"
    assert main([*words, "--learning_rate", "0.02", "--output", str(preset)]) == 0
    printed = capsys.readouterr().out
    assert "transformer.h.0.attn.c_attn" in printed
    assert "--clip_grouping layer" in printed and f"preset {preset}" in printed
    written = yaml.safe_load(preset.read_text())
    assert written.pop("config_name") == str(tmp_path / "wide") and written.pop("mup_init")
    preset.write_text(yaml.safe_dump(written))
    (args,) = parse_arguments(
        [DPGrapeTrainingArguments], [str(preset), "--output_dir", str(tmp_path)]
    )
    assert args.dpmup_base_model == str(tmp_path / "narrow")
    assert (args.learning_rate, args.optim_name) == (0.02, "adamw_torch")
    assert 2.9 < args.make_plan(10_000).epsilon() <= 3


def test_noise_must_be_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["transfer", "--base", str(tmp_path), "--target", str(tmp_path), "--max_steps", "5"]
    words += ["--num_examples", "100", "--expected_batch_size", "10", "--target_delta", "1e-3"]
    assert main([*words, "--noise_multiplier", "0", "--json"]) == 2
    assert "gives no privacy to speak of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--base", "/nowhere"], "Expected a model folder"),
        (["--optim", "adagrad"], "DP-muP knows rules for sgd"),
        (["--num_tuning_trials", "0"], "`num_tuning_trials` must be 1 or more, got 0"),
        (["--optim", "galore_adamw"], "DP-muP knows rules for sgd"),
        (["--rank", "-1"], "must be 0 (no projection) or positive"),
        (["--max_steps", "0"], "`max_steps` must be one or more, got 0"),
        (["--output", "/nowhere/preset.yaml"], "cannot be written"),
        (["--noise_multiplier", "1"], "exactly one of"),
    ],
)
def test_wrong_input(
    words: list[str], changes: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *changes]) == 2
    assert message in capsys.readouterr().err


def test_a_base_wider_than_the_target_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    narrow, wide = words[2], words[4]
    assert main([*words, "--base", wide, "--target", narrow]) == 2
    said = capsys.readouterr().err
    assert "Expected the narrow model as the base" in said and "exchange the two" in said
    assert main([*words, "--base", wide]) == 0  # of one width, nothing changes
    assert main([*words, "--target", narrow]) == 0
