"""Model types of transformers, small: exact by the capture that is chosen, or refused by reason."""

from __future__ import annotations

import pytest
from every_model import Row, cases, row_of

#: A fixed sample, with the way each must take.
SAMPLE = {
    ("bert", "masked LM"): "batched",
    ("bert", "next sentence"): "single",
    ("gpt2", "token classification"): "batched",
    ("deberta-v2", "multiple choice"): "single",
    ("mixtral", "causal LM"): "single",
    ("t5", "seq2seq LM"): "batched",
    ("vit", "image classification"): "batched",
    ("wav2vec2", "CTC"): "single",
}

# transformers' and torch's remarks on single model types; none is about a private run.
pytestmark = pytest.mark.filterwarnings("ignore")


def check(row: Row) -> None:
    if row.outcome in ("batched", "single"):
        assert row.error is not None and row.error < 2e-3, row
    else:
        assert row.detail, row


@pytest.mark.parametrize("case", SAMPLE)
def test_a_sample(case: tuple[str, str]) -> None:
    row = row_of(*case)
    check(row)
    assert row.outcome == SAMPLE[case], row


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in cases() if c not in SAMPLE], ids="-".join)
def test_every_model_type(case: tuple[str, str]) -> None:
    check(row_of(*case))
