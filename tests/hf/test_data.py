"""One example's tensors are the same whoever is drawn beside it, and one more moves sums by C.

Covers: hf/exact_lengths.py, hf/input_limits.py, hf/training_data.py, mechanism/collation.py,
mechanism/logical_batches.py.
"""

from __future__ import annotations

import functools
import logging
from collections import UserDict
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from conftest_trainer import collate, collate_lm, make_trainer  # noqa: F401 a fixture
from families import CAUSAL, CLASSIFY, FAMILIES, IMAGE, PAD, VOCAB, make_model
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedTokenizerFast,
    default_data_collator,
)
from transformers.trainer_utils import RemoveColumnsCollator

from hf_dpgrape.hf.exact_lengths import warn_of_exact_lengths
from hf_dpgrape.hf.input_limits import longest_input
from hf_dpgrape.mechanism.collation import AloneCollator, grid_step
from hf_dpgrape.mechanism.logical_batches import LogicalBatches
from hf_dpgrape.privacy.randomness import SecretSource

LENGTHS = [3, 21, 5, 9, 14, 30, 4, 37, 8, 16, 11, 26]


def tokenizer(side: str = "right", pad: str | None = "w1") -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        padding_side=side,
        pad_token=pad,
        mask_token="w2",
        cls_token="w0",
        sep_token="w0",
    )


def rows(kind: str = "text", lengths: list[int] = LENGTHS) -> list[dict[str, Any]]:
    """Examples for a kind of collator."""
    g = torch.Generator().manual_seed(5)
    found = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, VOCAB, (length,), generator=g).tolist()
        row: dict[str, Any] = {"input_ids": ids, "attention_mask": [1] * length}
        labels = {"text": i % 3, "tokens": [t % 4 for t in ids], "seq2seq": ids[: 1 + length // 3]}
        if kind in labels:
            row["labels"] = labels[kind]
        found.append(row)
    return found


def mixup(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Mixes each example with another of the batch, by a random share."""
    pixels = torch.stack([torch.tensor(e["pixels"]) for e in batch])
    share, order = torch.rand(()), torch.randperm(len(batch))
    # The share is drawn for one example as for many; mixed with itself nothing changes.
    return {"pixels": share * pixels + (1 - share) * pixels[order]}


def images(count: int = 12) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(6)
    return [{"pixels": torch.randn(3, 4, generator=g).tolist()} for _ in range(count)]


class Centered:
    """A `set_transform` that subtracts the mean over the rows that it is given."""

    def __call__(self, columns: dict[str, list[Any]]) -> dict[str, Any]:
        pixels = torch.tensor(columns["pixels"])
        return {"pixels": list(pixels - pixels.mean())}


def transformed() -> datasets.Dataset:
    found = datasets.Dataset.from_list(images())
    found.set_transform(Centered())
    return found


class Remembering:
    """Adds what it saw last, which it keeps as an attribute."""

    last = torch.zeros(1, 4)

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        now = torch.tensor([e["pixels"][0] for e in batch])
        inputs = {"pixels": now + self.last}
        self.last = now
        return inputs


BUFFER = torch.zeros(1, 3, 4)


def refilled(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Returns the same memory every time."""
    return {"pixels": BUFFER.copy_(torch.tensor([e["pixels"] for e in batch]))}


TOK, LEFT = tokenizer(), tokenizer("left")
CASES: dict[str, tuple[Any, Any]] = {
    "padding": (DataCollatorWithPadding(TOK), rows()),
    "padding, HF data set": (DataCollatorWithPadding(TOK), datasets.Dataset.from_list(rows())),
    "padding on the left": (DataCollatorWithPadding(LEFT), rows()),
    "padding, multiple given": (DataCollatorWithPadding(TOK, pad_to_multiple_of=3), rows()),
    "padding to a maximum": (
        DataCollatorWithPadding(TOK, padding="max_length", max_length=40),
        rows(),
    ),
    "tokens": (DataCollatorForTokenClassification(TOK), rows("tokens")),
    "tokens on the left": (DataCollatorForTokenClassification(LEFT), rows("tokens")),
    "seq2seq": (DataCollatorForSeq2Seq(TOK), rows("seq2seq")),
    "seq2seq on the left": (DataCollatorForSeq2Seq(LEFT), rows("seq2seq")),
    "causal LM": (DataCollatorForLanguageModeling(TOK, mlm=False), rows("none")),
    "causal LM, lists": (
        DataCollatorForLanguageModeling(TOK, mlm=False),
        [r["input_ids"] for r in rows()],
    ),
    "method": (DataCollatorForLanguageModeling(LEFT, mlm=False).torch_call, rows("none")),
    "partial": (functools.partial(DataCollatorWithPadding(TOK)), rows()),
    "columns removed": (
        RemoveColumnsCollator(
            DataCollatorWithPadding(TOK), ["input_ids", "attention_mask", "labels"]
        ),
        [{**r, "text": "private"} for r in rows()],
    ),
    "labels not padded": (DataCollatorWithPadding(TOK), rows("tokens")),
    "default": (default_data_collator, images()),
    "function": (collate, rows()),
    "MixUp": (mixup, images()),
    "set_transform": (default_data_collator, transformed()),
    "remembering": (Remembering(), images()),
    "refilled": (refilled, images()),
}


def batches(collator: Any, examples: Any, size: int = 4, **options: Any) -> LogicalBatches:
    options = {"length_grid": 8, "source": SecretSource(unsafe_seed=3), **options}
    return LogicalBatches(examples, collator, size, **options)


def key(inputs: dict[str, Tensor], row: int) -> tuple[Any, ...]:
    """All that the model is given of one example, bit by bit."""
    return tuple(
        (name, value.dtype, tuple(value.shape[1:]), value[row].numpy().tobytes())
        for name, value in sorted(inputs.items())
    )


def contents(logical: LogicalBatches, indices: list[int]) -> list[tuple[Any, ...]]:
    return sorted(
        (key(batch.inputs, row) for batch in logical[indices] for row in range(batch.num_samples)),
        key=repr,
    )


@pytest.mark.parametrize("name", CASES)
def test_tensors_do_not_depend_on_who_is_drawn_beside(name: str) -> None:
    collator, examples = CASES[name]
    logical = batches(collator, examples)
    if name == "MixUp":  # x * share + x * (1 - share) rounds with the share; the examples do not
        torch.testing.assert_close(
            logical[[4]][0].inputs["pixels"][0],
            torch.tensor(examples[4]["pixels"]),
            rtol=1e-6,
            atol=1e-6,
        )
        together = torch.cat([b.inputs["pixels"] for b in logical[list(range(12))]])
        torch.testing.assert_close(
            together, torch.tensor([e["pixels"] for e in examples]), rtol=1e-6, atol=1e-6
        )
        return
    alone = [contents(logical, [i])[0] for i in range(12)]
    assert len(set(alone)) == 12
    for drawn in (list(range(12)), [7, 0, 1], [0, 7], list(range(11, -1, -1))):
        assert contents(logical, drawn) == sorted((alone[i] for i in drawn), key=repr)


def masking() -> Any:
    return DataCollatorForLanguageModeling(TOK, mlm_probability=0.5)


def test_masks_of_an_example_do_not_move_with_those_before_it() -> None:
    def masked(indices: list[int]) -> set[tuple[Any, ...]]:
        logical = batches(masking(), rows("none"), source=SecretSource(unsafe_seed=3))
        return set(contents(logical, indices))

    alone = {i: masked([i]) for i in range(12)}
    assert masked(list(range(12))) == set.union(*alone.values())
    assert masked([7, 2, 9]) == alone[7] | alone[2] | alone[9]


def test_a_public_seed_does_not_make_masks_public() -> None:
    def masked(source: SecretSource) -> list[tuple[Any, ...]]:
        logical = batches(masking(), rows("none"), source=source)
        torch.manual_seed(0)
        return contents(logical, list(range(12)))

    with torch.random.fork_rng(devices=[]):
        assert masked(SecretSource()) != masked(SecretSource())
        assert masked(SecretSource(unsafe_seed=1)) == masked(SecretSource(unsafe_seed=1))


def test_an_empty_draw_has_no_physical_batches() -> None:
    assert batches(default_data_collator, images())[[]] == []


@given(st.lists(st.integers(0, 11), unique=True), st.integers(1, 5))
def test_physical_batches_are_full_but_for_one_of_each_shape(indices: list[int], size: int) -> None:
    found = batches(*CASES["padding"], size=size)[indices]
    assert sum(batch.num_samples for batch in found) == len(indices)
    assert all(1 <= batch.num_samples <= size for batch in found)
    assert all(len(v) == batch.num_samples for batch in found for v in batch.inputs.values())
    partly = [b.inputs["input_ids"].shape[1] for b in found if b.num_samples < size]
    assert len(set(partly)) == len(partly)


# ---- The grid ------------------------------------------------------------------------------


def rounded(length: int, base: int) -> int:
    return -(-length // grid_step(length, base)) * grid_step(length, base)


@given(st.integers(1, 10**6), st.integers(0, 9).map(lambda power: 2**power))
def test_grid_is_close_public_and_monotone(length: int, base: int) -> None:
    point = rounded(length, base)
    assert length <= point < length + max(base, length / 2)
    assert rounded(point, base) == point
    assert rounded(length + 1, base) >= point


def test_default_grid() -> None:
    grid = [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert sorted({rounded(n, 8) for n in range(1, 513)}) == grid
    shapes = {n: batches(*CASES["padding"])[[i]][0] for i, n in enumerate(LENGTHS)}
    assert {n: b.inputs["input_ids"].shape[1] for n, b in shapes.items()} == {
        n: rounded(n, 8) for n in LENGTHS
    }


def test_labels_of_seq2seq_are_rounded_by_the_same_step() -> None:
    (batch,) = batches(*CASES["seq2seq"])[[LENGTHS.index(37)]]
    assert batch.inputs["input_ids"].shape == (1, 48)
    assert batch.inputs["labels"].shape == (1, 16)


@pytest.mark.parametrize("name", ["labels not padded", "function", "padding, multiple given"])
def test_lengths_that_stay(name: str) -> None:
    (batch,) = batches(*CASES[name])[[LENGTHS.index(5)]]
    assert batch.inputs["input_ids"].shape[1] == (6 if "multiple" in name else 5)


def test_exact_lengths_if_asked_for_or_without_a_padding_token() -> None:
    exact = AloneCollator(DataCollatorWithPadding(TOK), length_grid=0)
    assert exact(rows()[2])["input_ids"].shape == (1, 5)
    plain = DataCollatorForLanguageModeling(tokenizer(pad=None), mlm=False)
    assert AloneCollator(plain, length_grid=8)([3, 4, 5])["input_ids"].shape == (1, 3)


@pytest.mark.parametrize(("longest", "length"), [(64, 48), (48, 48), (40, 40), (37, 37), (30, 37)])
def test_lengths_are_not_rounded_beyond_the_longest(longest: int, length: int) -> None:
    found = AloneCollator(DataCollatorWithPadding(TOK), length_grid=8, longest=longest)
    assert found(rows()[LENGTHS.index(37)])["input_ids"].shape == (1, length)


def test_a_collator_that_tokenizes_is_rounded_too() -> None:
    class Tokenizing(DataCollatorWithPadding):
        def __call__(self, features: list[dict[str, Any]]) -> Any:
            return super().__call__([{"input_ids": f["numbers"]} for f in features])

    collator = AloneCollator(Tokenizing(TOK), length_grid=8)
    assert collator({"numbers": [3] * 5})["input_ids"].shape == (1, 8)


LIMITS = {"bert": 37, "roberta": 35, "gpt2": 37, "opt": 37, "llama": 37, "t5": None}


@pytest.mark.parametrize("family", LIMITS)
def test_longest_input_of_models(family: str) -> None:
    head = CLASSIFY if family in ("bert", "roberta") else CAUSAL
    model = make_model(family, head if head in FAMILIES[family].heads else "seq2seq LM").float()
    limit = longest_input(model)
    assert limit == LIMITS[family]
    assert longest_input(model, tokenizer()) == limit  # it knows none
    short = tokenizer()
    short.model_max_length = 12
    assert longest_input(model, short) == 12
    if limit is not None and family != "llama":  # rotary positions have no end
        ids = torch.full((1, limit), 5)
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
        longer = torch.full((1, limit + 1), 5)
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            model(input_ids=longer, attention_mask=torch.ones_like(longer))


# ---- What collators return -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"x": torch.tensor(1.0)}, "`x`, with 0 dimensions"),
        ({"x": torch.zeros(5, 2)}, "`x`, with 2 dimensions"),
        ({"x": ["secret"]}, "got `x` as list"),
        ({"x": np.zeros((1, 2))}, "got `x` as ndarray"),
        ([torch.zeros(1)], "a dict of the model's inputs by name, got list"),
    ],
)
def test_what_cannot_be_joined_is_refused_without_its_content(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        batches(lambda _: returned, images())[[3]]
    assert "secret" not in str(refused.value)


def test_values_that_are_no_tensors_are_shared_only_by_equal_ones() -> None:
    values = [1, True, 1.0, 0.0, -0.0, None, "a", 1, None, "a"]
    found = batches(
        lambda batch: UserDict(x=torch.ones(1), value=values[batch[0]]), range(len(values))
    )[list(range(len(values)))]
    assert [(repr(b.inputs["value"]), b.num_samples) for b in found] == [
        *(("1", 2), ("True", 1), ("1.0", 1), ("0.0", 1), ("-0.0", 1), ("None", 2), ("'a'", 2))
    ]


def test_dtypes_are_not_mixed() -> None:
    dtypes = [torch.float32, torch.float64, torch.float32]
    found = batches(lambda b: {"x": torch.ones(1, 2, dtype=dtypes[b[0]])}, range(3))[[0, 1, 2]]
    assert [(b.inputs["x"].dtype, b.num_samples) for b in found] == [
        (torch.float32, 2),
        (torch.float64, 1),
    ]


@pytest.mark.parametrize(
    ("collator", "says"),
    [
        (collate, True),
        (functools.partial(collate), True),
        (DataCollatorWithPadding(TOK, padding=False), True),
        (DataCollatorWithPadding(TOK), False),
        (DataCollatorWithPadding(TOK, pad_to_multiple_of=8), False),
        (DataCollatorWithPadding(TOK, padding="max_length"), False),
        (default_data_collator, False),
        (DefaultDataCollator(), False),
    ],
)
def test_one_line_says_what_exact_lengths_cost(
    caplog: pytest.LogCaptureFixture, collator: Any, says: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_exact_lengths(collator, make_model("roberta", CLASSIFY), 8)
        warn_of_exact_lengths(collator, make_model("roberta", CLASSIFY), 0)
        warn_of_exact_lengths(collator, make_model("vit", IMAGE), 8)
    assert len(caplog.records) == says


# ---- One example more, end to end ----------------------------------------------------------

C = 0.05
Make = Callable[..., Any]


def clipped_sum(make_trainer: Make, model: Any, examples: Any, **more: Any) -> Tensor:  # noqa: F811
    """What one SGD step without noise, with every example drawn, has added up."""
    before = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    trainer = make_trainer(
        model=model,
        more={"train_dataset": examples, **more},
        noise_multiplier=0.0,
        allow_zero_noise=True,
        l2_clip_norm=C,
        rank=0,
        optim="sgd",
        learning_rate=1.0,
        max_steps=1,
        expected_batch_size=len(examples),
        per_device_train_batch_size=8,
    )
    assert trainer.plan.sampling_prob == 1
    trainer.train()
    after = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    return (before - after) * len(examples)


def roberta() -> Any:
    """Without dropout, and with weights so large that padding shows."""
    model = make_model("roberta", CLASSIFY).float()
    for name, p in model.named_parameters():
        if p.ndim == 2 and "LayerNorm" not in name:
            torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return without_dropout(model)


def gpt2() -> Any:
    return without_dropout(make_model("gpt2", CAUSAL).float())


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def zero_head() -> Any:
    model = roberta()
    torch.nn.init.zeros_(model.classifier.out_proj.weight)
    torch.nn.init.zeros_(model.classifier.out_proj.bias)
    return model


def sentences(lengths: list[int], labels: bool = True) -> datasets.Dataset:
    found = [{"input_ids": r["input_ids"], "label": r["labels"]} for r in rows(lengths=lengths)]
    return datasets.Dataset.from_list(found).select_columns(
        ["input_ids", "label"] if labels else ["input_ids"]
    )


def without_mask(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    inputs = collate(batch)
    del inputs["attention_mask"]
    return inputs


def on_the_left(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(e["input_ids"]) for e in batch)
    ids = torch.tensor([[PAD] * (longest - len(e["input_ids"])) + e["input_ids"] for e in batch])
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def by_first_length(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Cuts all examples to the length of the first."""
    return collate(
        [{**e, "input_ids": e["input_ids"][: len(batch[0]["input_ids"])]} for e in batch]
    )


def token_mixup(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Puts tokens of the next example into each, by a random share."""
    inputs = collate(batch)
    ids, mask = inputs["input_ids"], torch.rand(inputs["input_ids"].shape) < 0.5
    return {**inputs, "input_ids": torch.where(mask, ids, ids.roll(1, 0))}


class First:
    """A `set_transform` that gives all rows the tokens of the first."""

    def __call__(self, columns: dict[str, list[Any]]) -> dict[str, Any]:
        return {**columns, "input_ids": [columns["input_ids"][0]] * len(columns["input_ids"])}


#: Short rows, then a longer one beyond those that are looked at before training.
LATE = [4] * 260 + [12]

MOVES: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "no mask": (roberta, without_mask, sentences(LATE)),
    "left padding": (gpt2, on_the_left, sentences(LATE, labels=False)),
    "zero head": (zero_head, without_mask, sentences([6] * 23 + [12])),
    "cut to the first": (roberta, by_first_length, sentences([*LATE[:-1], 2])),
    "MixUp": (roberta, token_mixup, sentences([6] * 24)),
    "transform of rows": (roberta, collate, sentences([6] * 24)),
}


@pytest.mark.parametrize("name", MOVES)
def test_one_example_more_moves_the_sum_by_no_more_than_the_clip_norm(
    make_trainer: Make,  # noqa: F811
    name: str,
) -> None:
    build, collator, examples = MOVES[name]
    order = [len(examples) - 1, *range(len(examples) - 1)] if name == "transform of rows" else None
    more = examples if order is None else examples.select(order)
    fewer = examples.select(range(len(examples) - 1))
    if order is not None:
        more.set_transform(First())
        fewer.set_transform(First())
    with_one = clipped_sum(make_trainer, build(), more, data_collator=collator)
    without = clipped_sum(make_trainer, build(), fewer, data_collator=collator)
    moved = float((with_one - without).norm()) / C
    # Sums of up to 261 C are in float32, and so are the weights that tell them.
    assert 0.01 < moved <= 1 + 1e-3, moved


def test_a_seeded_masking_collator_is_refused(make_trainer: Make) -> None:  # noqa: F811
    seeded = DataCollatorForLanguageModeling(TOK, mlm=False, seed=0)
    trainer = make_trainer(causal=True, more={"data_collator": seeded})
    with pytest.raises(ValueError, match=r"`data_collator.seed=0`"):
        trainer.train()


def test_workers_give_the_same_tensors(make_trainer: Make) -> None:  # noqa: F811
    trainer = make_trainer(
        causal=True,
        more={"data_collator": collate_lm},
        expected_batch_size=40,
        dataloader_num_workers=2,
    )
    logical = LogicalBatches(**trainer._training_data())
    expected = contents(logical, list(range(40)))
    for found in trainer.get_train_dataloader():
        assert (
            sorted((key(b.inputs, r) for b in found for r in range(b.num_samples)), key=repr)
            == expected
        )
