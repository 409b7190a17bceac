"""`scripts/run_image_classification.py` end to end on tiny models and local pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from families import IMAGE, make_model
from PIL import Image
from test_scripts import command_line, results, run
from transformers import AutoImageProcessor, AutoModelForImageClassification

CLASSES = ("ant", "bee", "cow")
TINY = "hidden_size=24,num_hidden_layers=2,num_attention_heads=2,intermediate_size=44,"
TINY += "image_size=12,patch_size=4"

RunImages = Callable[..., tuple[dict[str, Any], dict[str, float]]]


def picture(number: int, mode: str = "RGB") -> Image.Image:
    """A random picture that is not square, in color or gray."""
    shape = (9, 14) if mode == "L" else (9, 14, 3)
    pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels)


def folder(path: Path, classes: tuple[str, ...] = CLASSES, num: int = 6) -> str:
    """Pictures, one folder per class; every second one is gray."""
    for name in classes:
        (path / name).mkdir(parents=True)
        for i in range(num):
            picture(i, "RGB" if i % 2 else "L").save(path / name / f"{i}.png")
    return str(path)


@pytest.fixture
def run_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunImages:
    """Runs the script; keyword arguments are its arguments."""

    def run_it(**arguments: Any) -> Any:
        given = {"config_overrides": TINY, **arguments}
        words = command_line(given, tmp_path)
        run("run_image_classification.py", words, monkeypatch, tmp_path)
        return results(tmp_path)

    return run_it


def test_from_scratch_on_folders(
    run_images: RunImages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation folders that lack a class keep the numbers of the others."""
    train, validation = folder(tmp_path / "t"), folder(tmp_path / "v", ("bee", "cow"))
    record, scores = run_images(
        train_dir=train, validation_dir=validation, max_train_samples=16, class_names=[*CLASSES]
    )
    assert record["plan"]["num_examples"] == 16
    assert scores["eval_accuracy"] in {i / 12 for i in range(13)}
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == dict(enumerate(CLASSES))
    assert (model.config.hidden_size, model.config.image_size) == (24, 12)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert (processor.size["height"], processor.size["width"]) == (12, 12)
    assert "eval_accuracy=" in capsys.readouterr().out.strip().splitlines()[-1]


def test_fine_tuning_on_parquet(run_images: RunImages, tmp_path: Path) -> None:
    """Images as bytes under any name; the head of other classes is replaced by a new one."""
    features = datasets.Features(
        {"img": datasets.Image(), "fine": datasets.Value("string"), "n": datasets.Value("int64")}
    )
    rows = {
        "img": [picture(i) for i in range(20)],
        "fine": [("left", "right")[i % 2] for i in range(20)],
        "n": list(range(20)),
    }
    file = str(tmp_path / "pictures.parquet")
    datasets.Dataset.from_dict(rows, features=features).to_parquet(file)
    checkpoint = tmp_path / "checkpoint"
    make_model("vit", IMAGE).float().save_pretrained(checkpoint)
    (checkpoint / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": 12})
    )
    given = {"train_file": file, "validation_file": file, "label_column": "fine"}
    given |= {"class_names": ["left", "right"]}
    given |= {"model_name_or_path": str(checkpoint), "head_learning_rate": 0.1}
    _, scores = run_images(**given, config_overrides=None)
    assert "eval_accuracy" in scores
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "left", "1": "right"}


WRONG = {
    "folder": ({"train_dir": "nowhere"}, r"Expected data, found nothing at nowhere"),
    "no data": ({}, r"Expected `--train_file` or the hub name .* got neither"),
    "no network": (
        {"dataset_name": "cifar10"},
        r"The data set `uoft-cs/cifar10` is no local folder and could not be had from the hub",
    ),
    "type": ({"model_type": "vitt"}, r"Expected a `--model_type` such as vit, .* got vitt"),
    "model": ({"model_name_or_path": "nobody/none"}, r"The model `nobody/none` is no local"),
    "label": ({"label_column": "class"}, r"Expected the columns \['class'\] .* 2 others"),
    "names": ({}, r"Expected `--class_names`, .* not taken from the training rows"),
    "other names": ({"class_names": ["ant", "bee"]}, r"the classes ant, bee .* found others"),
    "image": (
        {"image_column": "photo"},
        r"Expected the columns \['photo'\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence(run_images: RunImages, tmp_path: Path, case: str) -> None:
    arguments, sentence = WRONG[case]
    needs_none = case in ("folder", "no data", "no network")
    data: dict[str, Any] = {} if needs_none else {"train_dir": folder(tmp_path / "t", num=2)}
    if case not in ("names", "other names"):
        data["class_names"] = [*CLASSES]
    with pytest.raises(SystemExit, match=sentence) as exit_:
        run_images(**{**data, **arguments})
    assert "\n" not in str(exit_.value)


def test_numbers_and_empty_folders_are_refused(run_images: RunImages, tmp_path: Path) -> None:
    rows = {"image": [picture(i) for i in range(4)], "label": [0.5, 1.0, 2.0, 2.5]}
    file = str(tmp_path / "numbers.parquet")
    datasets.Dataset.from_dict(rows).to_parquet(file)
    with pytest.raises(SystemExit, match=r"Expected classes in the column `label`, got real"):
        run_images(train_file=file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"could not read it as imagefolder"):
        run_images(train_dir=str(tmp_path / "empty"))


def test_names_of_folders_and_files_are_not_shown(
    run_images: RunImages, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder may be named for a person, and a file, too."""
    train = folder(tmp_path / "t", ("ant", "zqxsecret"), num=4)
    for names in ({}, {"class_names": ["ant", "bee"]}):
        with pytest.raises(SystemExit) as exit_:
            run_images(train_dir=train, **names)
        assert "zqxsecret" not in str(exit_.value)
    train = folder(tmp_path / "u", ("ant", "bee"), num=1)
    for name in ("ant", "bee"):
        (tmp_path / "u" / name / "zqxsecret.png").write_bytes(b"no picture")
    given = {"expected_batch_size": 4, "class_names": ["ant", "bee"]}
    with pytest.raises(ValueError, match=r"Expected pictures in all rows, but one") as raised:
        run_images(train_dir=train, **given)
    assert "zqxsecret" not in str(raised.value) and raised.value.__suppress_context__
    streams = capfd.readouterr()
    assert "zqxsecret" not in streams.out + streams.err
