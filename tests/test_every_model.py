"""Model types of transformers, small: exact by the capture that is chosen, or refused by reason."""

from __future__ import annotations

import re

import pytest
import transformers
from every_model import PATH, TOLERANCE, cases, row_of
from every_model_table import EXACT, REFUSED, Row, written

#: A fixed sample, with the way each must take.
SAMPLE = {
    ("bert", "masked LM"): "batched",
    ("bert", "next sentence"): "single",
    ("bros", "token classification"): "single",
    ("deberta-v2", "multiple choice"): "single",
    ("gpt2", "token classification"): "batched",
    ("lilt", "question answering"): "batched",
    ("llava", "image and text"): "batched",
    ("longformer", "question answering"): "single",
    ("mixtral", "causal LM"): "single",
    ("qwen3_next", "sequence classification"): "single",
    ("resnet", "image classification"): REFUSED,
    ("t5", "seq2seq LM"): "batched",
    ("vit", "image classification"): "batched",
    ("wav2vec2", "CTC"): "single",
}

#: Why a head that has a loss may be refused: no gradient of one example exists, or something of an
#: example would stay behind for the next.
OF_PRINCIPLE = (
    "mixes the samples of a batch",
    "buffer .* changed in a forward pass",
    "a forward pass in training changes this buffer",
    "balances experts over a batch",
    "has no gradient for one example alone",
    "depends on the examples before",
)

# transformers' and torch's remarks on single model types; none is about a private run.
pytestmark = pytest.mark.filterwarnings("ignore")


def check(row: Row) -> None:
    if row.outcome in EXACT:
        assert row.error is not None and row.error < TOLERANCE, row
    elif row.outcome == REFUSED:
        assert any(re.search(reason, row.detail) for reason in OF_PRINCIPLE), row
    else:
        assert row.detail, row


@pytest.mark.parametrize("case", SAMPLE, ids="-".join)
def test_a_sample(case: tuple[str, str]) -> None:
    row = row_of(case)
    check(row)
    assert row.outcome == SAMPLE[case], row


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in cases() if c not in SAMPLE], ids="-".join)
def test_every_model_type(case: tuple[str, str]) -> None:
    check(row_of(case))


def test_the_document_was_written_with_the_sample_as_it_is() -> None:
    text = PATH.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}:" not in text:
        pytest.skip("written with another release of transformers")
    for (model_type, head), way in SAMPLE.items():
        (line,) = re.findall(rf"^\| {model_type} \|(.*)\|$", text, re.MULTILINE)
        cells = dict(zip(("batched", "single", REFUSED), line.split("|"), strict=False))
        assert head in cells[way].strip().split(", "), (model_type, head, line)


def test_the_document_counts_what_it_is_given() -> None:
    rows = [
        Row("one", "causal LM", "batched", error=1e-7),
        Row("one", "masked LM", REFUSED, "`norm`: it mixes the samples of a batch"),
        Row("two", "CTC", "not tried", "no input fits"),
    ]
    text = written(rows, "5.0", 1e-4)
    assert "**1 of the 1 model types that were tried" in text
    assert "| one | causal LM |  | masked LM | 1e-07 |" in text
    assert "| it mixes the samples of a batch | one (masked LM) |" in text
    assert "| no input fits | two (CTC) |" in text
