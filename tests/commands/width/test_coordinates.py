"""`hf-dpgrape coord-check`: flat under DP-muP, rising under the standard parametrization.

Covers: commands/width/changes.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import CAUSAL, HEADS, MASKED, QA, SEQ2SEQ, TOKENS, make_config

from hf_dpgrape.commands.cli import main
from hf_dpgrape.commands.width.coordinates import widened
from hf_dpgrape.hf.models import build_on_meta


@pytest.fixture
def vit(tmp_path: Path) -> str:
    """A ViT narrow enough that three widths are quick."""
    config = make_config("vit")
    config.hidden_size, config.num_attention_heads, config.intermediate_size = 32, 2, 64
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path / "vit")
    return str(tmp_path / "vit")


FEW = ["--factors", "1", "2", "4", "--steps", "4", "--json"]
MATRIX = "vit.layers.1.mlp.fc1"


@pytest.mark.parametrize("more", [["--optim", "sgd", "--learning_rate", "0.5"], ["--rank", "8"]])
def test_slopes(vit: str, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coord-check", vit, *FEW, *more]) == 0
    slopes = json.loads(capsys.readouterr().out)["slopes"]
    for quantity in ("activation", "update"):
        flat, rising = (slopes[method][quantity] for method in ("dpmup", "standard"))
        assert all(abs(slope) < 0.3 for slope in flat.values() if slope is not None)
        assert rising[MATRIX] > 0.35 > 0.2 > abs(flat[MATRIX])


def test_table_and_picture(vit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "check.png"
    words = ["--factors", "1", "2", "--steps", "1", "--rank", "8", "--plot", str(picture)]
    assert main(["coord-check", vit, *words]) == 0
    printed = capsys.readouterr().out
    assert "largest slope of an output" in printed and "Norms are divided by" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_checkpoints_of_two_widths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for factor in (1, 2):
        config = widened(make_config("gpt2"), factor)
        torch.manual_seed(0)
        HEADS[CAUSAL].from_config(config).save_pretrained(tmp_path / str(factor))
        folders.append(str(tmp_path / str(factor)))
    assert main(["coord-check", *folders, "--steps", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["factors"] == [1, 2]
    slopes = told["slopes"]
    name = "transformer.h.1.mlp.c_fc"
    assert abs(slopes["dpmup"]["update"][name]) < 0.2 < slopes["standard"]["update"][name]
    assert main(["coord-check", *reversed(folders)]) == 2
    assert "from narrow to wide, got hidden sizes [48, 24]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("bert", QA),
        ("t5", SEQ2SEQ),
        pytest.param("bert", TOKENS, marks=pytest.mark.slow),
        pytest.param("roberta", MASKED, marks=pytest.mark.slow),
    ],
)
def test_inputs_of_other_heads(
    family: str, head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(family)
    config.num_labels = 2 if head == QA else 3
    with torch.device("meta"):
        config.architectures = [type(HEADS[head].from_config(config)).__name__]
    config.save_pretrained(tmp_path)
    words = ["--factors", "1", "2", "--steps", "1", "--optim", "adamw", "--json"]
    assert main(["coord-check", str(tmp_path), *words]) == 0
    slopes = json.loads(capsys.readouterr().out)["slopes"]["dpmup"]["activation"]
    assert sum(slope is not None for slope in slopes.values()) > 10


def test_what_cannot_be_widened_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("convnext")
    config.architectures = ["ConvNextForImageClassification"]
    config.save_pretrained(tmp_path)
    assert main(["coord-check", str(tmp_path)]) == 2
    assert "Expected a model with one width to grow" in capsys.readouterr().err


def test_heads_keep_their_size() -> None:
    for family in ("gpt2", "roberta", "t5", "opt", "vit"):
        config = make_config(family)
        config.architectures = None
        wide = widened(config, 4)
        assert wide.hidden_size == 4 * config.hidden_size
        assert wide.num_attention_heads == 4 * config.num_attention_heads
    task = "sequence-classification"
    narrow, large = (
        build_on_meta(widened(make_config("roberta"), factor), task) for factor in (1, 4)
    )
    name = "roberta.encoder.layer.0.output.dense.weight"
    assert large.get_parameter(name).numel() == 16 * narrow.get_parameter(name).numel()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--factors", "2", "4"], "start with 1"),
        (["--factors", "1"], "start with 1"),
        (["--steps", "0"], "`steps` must be 1 or more"),
        (["--rank", "-1"], "must be 0 (no projection) or positive, got -1"),
        (["--task", "image-captioning"], "`task` must be auto or one of"),
    ],
)
def test_wrong_input(
    vit: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coord-check", vit, *words]) == 2
    assert message in capsys.readouterr().err
