"""The GLUE metrics: numbers worked out by hand, and no network."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import evaluate
import pytest

FOLDER = str(Path(__file__).parents[1] / "metrics" / "glue")

#: Confusion of these: 3 true positives, 1 false positive, 2 false negatives, 2 true negatives.
REFERENCES = [1, 1, 1, 1, 1, 0, 0, 0]
PREDICTIONS = [1, 1, 1, 0, 0, 1, 0, 0]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any connection fails, and nothing is in the cache."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a metric tried to connect")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def compute(task: str, predictions: list[Any], references: list[Any]) -> dict[str, float]:
    metric = evaluate.load(FOLDER, task, keep_in_memory=True)
    return metric.compute(predictions=predictions, references=references)


@pytest.mark.parametrize("task", ["sst2", "mnli", "qnli", "rte", "wnli", "classification"])
def test_accuracy(task: str) -> None:
    assert compute(task, PREDICTIONS, REFERENCES) == {"accuracy": 5 / 8}


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_f1_of_class_one(task: str) -> None:
    scores = compute(task, PREDICTIONS, REFERENCES)
    # Precision 3/4, recall 3/5: F1 = 2 * 3 / (2 * 3 + 1 + 2).
    assert scores == {"accuracy": 5 / 8, "f1": pytest.approx(2 / 3)}


def test_matthews_correlation() -> None:
    scores = compute("cola", PREDICTIONS, REFERENCES)
    # (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN))
    want = (3 * 2 - 1 * 2) / math.sqrt(4 * 5 * 3 * 4)
    assert scores == {"matthews_correlation": pytest.approx(want)}


@pytest.mark.parametrize("task", ["stsb", "regression"])
def test_correlations(task: str) -> None:
    # Deviations from the means: (-2, -1, 0, 3) and (-1.5, -.5, .5, 1.5). The ranks agree.
    scores = compute(task, [1.0, 2.0, 3.0, 6.0], [0.0, 1.0, 2.0, 3.0])
    pearson = (3 + 0.5 + 0 + 4.5) / math.sqrt(14 * 5)
    assert scores == {"pearson": pytest.approx(pearson), "spearmanr": pytest.approx(1.0)}
    # Ranks 1 3 2 and 1 2 3 differ by 0, 1 and 1: 1 - 6 * 2 / (3 * 8).
    assert compute(task, [0.1, 0.9, 0.2], [1.0, 2.0, 3.0])["spearmanr"] == pytest.approx(0.5)


def test_what_is_undefined_counts_as_zero() -> None:
    assert compute("stsb", [2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == {"pearson": 0.0, "spearmanr": 0.0}
    assert compute("cola", [1, 1, 1], [0, 1, 0]) == {"matthews_correlation": 0.0}
    assert compute("mrpc", [0, 0], [1, 0]) == {"accuracy": 0.5, "f1": 0.0}


@pytest.mark.parametrize("task", ["sst", None, "STS-B"])
def test_unknown_configurations_are_named(task: str | None) -> None:
    with pytest.raises(ValueError, match=r"Expected one of the configurations .* got"):
        evaluate.load(FOLDER, task)
