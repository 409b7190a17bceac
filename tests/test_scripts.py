"""The scripts run end to end on tiny models and local files."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import yaml
from families import CAUSAL, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dpgrape.presets import parse_arguments, preset_arguments

ROOT = Path(__file__).parents[1]
WORDS = list("abcdefghijklmnopqrstuvwxyz")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny causal language model with a word tokenizer."""
    folder = tmp_path / "model"
    make_model("gpt2", CAUSAL).float().save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<pad>": 1, "<eos>": 2} | {w: i + 3 for i, w in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


def run(script: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", [script, *words])
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_run_clm(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    train = tmp_path / f"train.{kind}"
    if kind == "txt":
        lines = [" ".join(WORDS[i % 20 : i % 20 + 3 + i % 4]) for i in range(30)]
    else:
        lines = [json.dumps({"meaning": f"a b {w}", "said": f"{w} c d"}) for w in WORDS]
    train.write_text("\n".join(lines) + "\n")
    preset = tmp_path / "preset.yaml"
    arguments = {
        "model_name_or_path": str(model_folder),
        "train_file": str(train),
        "validation_file": str(train),
        "output_dir": str(tmp_path / "out"),
        "target_epsilon": 3,
        "target_delta": 1e-2,
        "max_steps": 9,
        "per_device_train_batch_size": 4,
        "rank": 4,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if kind == "jsonl":
        arguments |= {"prompt_column": "meaning", "target_column": "said"}
    preset.write_text(yaml.safe_dump(arguments))
    run("run_clm.py", [str(preset), "--max_steps", "2"], monkeypatch, tmp_path)
    record = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert record["steps_done"] == record["plan"]["num_steps"] == 2
    assert 2.9 < record["epsilon"] <= 3
    assert "perplexity" in json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert (tmp_path / "out" / "README.md").is_file()


def test_run_clm_says_what_is_missing(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model_name_or_path", str(model_folder), "--output_dir", str(tmp_path / "out")]
    words += ["--noise_multiplier", "1", "--target_delta", "1e-3", "--report_to", "none"]
    with pytest.raises(SystemExit, match="got neither"):
        run("run_clm.py", words, monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="found nothing at nowhere"):
        run("run_clm.py", [*words, "--train_file", "nowhere.txt"], monkeypatch, tmp_path)


@pytest.mark.parametrize("preset", sorted((ROOT / "training_args").glob("*.yaml")), ids=str)
def test_presets_parse_and_calibrate(preset: Path, tmp_path: Path) -> None:
    namespace = runpy.run_path(str(ROOT / "scripts" / "run_clm.py"), run_name="imported")
    kinds = [namespace["ModelArguments"], namespace["DataArguments"]]
    from hf_dpgrape import DPGrapeTrainingArguments

    words = [str(preset), "--output_dir", str(tmp_path)]
    _, _, args = parse_arguments([*kinds, DPGrapeTrainingArguments], words)
    plan = args.make_plan(10_000)
    assert plan.epsilon() <= args.target_epsilon
    assert preset.read_text().startswith("#")


def test_wrong_presets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected a preset file"):
        preset_arguments(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match="lines `name: value`"):
        preset_arguments(tmp_path / "list.yaml")
