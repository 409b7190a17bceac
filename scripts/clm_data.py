"""The examples of `run_clm.py`: one text or prompt each, or one block of a text; never several."""

import functools
import re
import sys
from dataclasses import dataclass, field
from string import Formatter

import datasets
import script_data

IGNORED = -100


@dataclass
class DataArguments(script_data.SourceArguments):
    """Which data; a hub data set or local files."""

    text_column: str = field(default="text", metadata={"help": "Column of whole texts."})
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column of prompts, on which there is no loss."}
    )
    target_column: str | None = field(default=None, metadata={"help": "Column of targets."})
    prompt_template: str | None = field(
        default=None,
        metadata={"help": 'Prompt made of columns, as "Question: {question} Answer:".'},
    )
    target_template: str | None = field(
        default=None, metadata={"help": 'Target made of columns, as " {answers[text][0]}".'}
    )
    block_size: int = field(
        default=512, metadata={"help": "Tokens after which texts are cut, and prompts before."}
    )
    split_texts: bool = field(
        default=False,
        metadata={"help": "Each block of a long text is an example, protected by itself alone."},
    )


def templates(data: DataArguments, split: datasets.Dataset) -> tuple[str, str]:
    """How the columns make a prompt (maybe an empty one) and the text with the loss."""
    prompt = data.prompt_template or (f"{{{data.prompt_column}}}" if data.prompt_column else "")
    target = data.target_template or f"{{{data.target_column or data.text_column}}}"
    parsed = [part for template in (prompt, target) for part in Formatter().parse(template)]
    columns = [re.split(r"[.\[]", field)[0] for _, field, _, _ in parsed if field]
    script_data.require_columns(split, columns)
    return prompt, target


def tokenize(split: datasets.Dataset, data: DataArguments, tokenizer) -> datasets.Dataset:
    """Token ids and labels; prompts have no labels, and lose their beginning if too long."""
    prompt, target = templates(data, split)
    if prompt and data.split_texts:
        sys.exit("Expected whole texts for `--split_texts`, got prompts; a prompt has one target.")
    size, to_ids = data.block_size, functools.partial(tokenizer, verbose=False)

    def encode(rows: dict) -> dict:
        row = {name: values[0] for name, values in rows.items()}
        before = to_ids(prompt.format(**row))["input_ids"] if prompt else []
        after = to_ids(target.format(**row), add_special_tokens=not before)["input_ids"]
        after = [*after, tokenizer.eos_token_id]
        starts = range(0, len(after) if data.split_texts else 1, size)
        blocks = [after[start : start + size] for start in starts]
        before = before[max(0, len(before) + len(blocks[0]) - size) :]
        ids = [before + block for block in blocks]
        labels = [[IGNORED] * len(before) + block for block in blocks]
        return {"input_ids": ids, "attention_mask": [[1] * len(i) for i in ids], "labels": labels}

    options = {"batched": True, "batch_size": 1, "remove_columns": split.column_names}
    return script_data.mapped(split, encode, **options)
