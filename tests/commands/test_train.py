"""`hf-dpgrape train` finds scripts and presets, and passes everything else on."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from families import CLASSIFY
from test_run_glue import rows, write
from test_scripts import save_model

import hf_dpgrape
from hf_dpgrape.commands.cli import main
from hf_dpgrape.commands.train import SCRIPTS, command_of, shipped


def test_every_shipped_preset_names_a_script_that_is_shipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train"]) == 0
    names = capsys.readouterr().out.split()
    assert "ours/minilm_sst2.yaml" in names and len(names) > 30
    for name in names:
        script, words = command_of([name, "--seed", "1"])
        assert script.is_file() and script.name in SCRIPTS.values()
        assert words == [str(shipped("training_args") / name), "--seed", "1"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["text"], "Expected glue, clm, images or a preset ending in .yaml first, got 'text'"),
        (["no/such.yaml"], "found nothing at no/such.yaml, nor a shipped preset of that name"),
        (["glue", "none.yaml"], "found nothing at none.yaml"),
        (["bare.yaml"], "Expected a first line `# scripts/run_glue.py` or the like in bare.yaml"),
        (["other.yaml"], "in the first line of other.yaml, got demo.py"),
    ],
)
def test_wrong_words_are_one_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare.yaml").write_text("model_name_or_path: x\n")
    (tmp_path / "other.yaml").write_text("# scripts/demo.py\n")
    assert main(["train", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_mistyped_argument_is_one_sentence(tmp_path: Path) -> None:
    words = ["glue", "--learningrate", "1", "--model_name_or_path", "x", "--target_epsilon", "3"]
    run = train(*words, "--target_delta", "1e-5", cwd=tmp_path)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1] == (
        "Expected an argument that is known, got '--learningrate'; did you mean `--learning_rate`?"
    )
    assert "Traceback" not in run.stderr


def train(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hf_dpgrape.commands.cli", "train", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_preset_of_ones_own_trains(tmp_path: Path) -> None:
    file = write(tmp_path / "data.csv", rows())
    model = save_model(tmp_path / "model", "roberta", CLASSIFY)
    preset = tmp_path / "mine.yaml"
    preset.write_text(
        "# scripts/run_glue.py: mine\n"
        f"model_name_or_path: {model}\ntrain_file: {file}\ntask_name: rte\n"
        "target_epsilon: 3\ntarget_delta: 0.01\nmax_steps: 1\nexpected_batch_size: 8\n"
        "report_to: none\n"
    )
    out = tmp_path / "out"
    words = ["--output_dir", str(out), "--use_cpu", "--dataloader_pin_memory", "False"]
    run = train(str(preset), *words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (out / "privacy.json").is_file() and (out / "model.safetensors").is_file()


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"hf-dpgrape {hf_dpgrape.__version__}"
    assert hf_dpgrape.__version__ == version("hf-dpgrape")
