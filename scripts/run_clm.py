"""Fine-tunes a causal language model privately, on text or on prompts with targets.

    python scripts/run_clm.py --model_name_or_path gpt2 --train_file train.jsonl \
        --target_epsilon 3 --target_delta 1e-5 --output_dir runs/clm
    accelerate launch scripts/run_clm.py training_args/opt_6.7b_24gb.yaml --train_file train.jsonl

One line or record is one example, and one example is what the guarantee protects. Texts are
therefore cut at `block_size`, never joined: a block made of several records would hide how often
each of them was used.
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, set_seed

from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments
from hf_dpgrape.presets import parse_arguments

IGNORED = -100


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str = field(metadata={"help": "Folder or hub name of the model."})
    dtype: str = field(
        default="float32",
        metadata={"help": "Of the loaded weights: float32 or bfloat16 (half the memory)."},
    )


@dataclass
class DataArguments:
    """Which data; a hub data set or local files."""

    dataset_name: str | None = field(default=None, metadata={"help": "Hub name of a data set."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(default=None, metadata={"help": "txt, csv, json or parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "Same kind of file."})
    text_column: str = field(default="text", metadata={"help": "Column of whole texts."})
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column of prompts, on which there is no loss."}
    )
    target_column: str | None = field(default=None, metadata={"help": "Column of targets."})
    block_size: int = field(default=512, metadata={"help": "Tokens after which texts are cut."})
    max_train_samples: int | None = field(default=None, metadata={"help": "For a quick look."})


def load_data(data: DataArguments) -> datasets.DatasetDict:
    """Training and validation examples.

    Raises:
        SystemExit: with one sentence, if there are none to be had.
    """
    files = {"train": data.train_file, "validation": data.validation_file}
    files = {split: path for split, path in files.items() if path}
    if missing := [path for path in files.values() if not Path(path).is_file()]:
        sys.exit(f"Expected data files, found nothing at {', '.join(missing)}.")
    if files:
        kind = Path(next(iter(files.values()))).suffix.lstrip(".")
        kind = {"txt": "text", "jsonl": "json"}.get(kind, kind)
        return datasets.load_dataset(kind, data_files=files)
    if data.dataset_name is None:
        sys.exit("Expected `--train_file` or `--dataset_name`, got neither.")
    try:
        return datasets.load_dataset(data.dataset_name, data.dataset_config_name)
    except (OSError, ConnectionError) as error:
        sys.exit(
            f"The hub could not be reached for `{data.dataset_name}` ({type(error).__name__}); "
            "download the data elsewhere and pass `--train_file`."
        )


def tokenize(split: datasets.Dataset, data: DataArguments, tokenizer) -> datasets.Dataset:
    """Token ids and labels; prompts have no labels."""

    def encode(row: dict) -> dict:
        prompt = row[data.prompt_column] if data.prompt_column else ""
        text = row[data.target_column] if data.target_column else row[data.text_column]
        before = tokenizer(prompt)["input_ids"] if prompt else []
        after = tokenizer(text, add_special_tokens=not before)["input_ids"]
        ids = (before + after + [tokenizer.eos_token_id])[: data.block_size]
        labels = ([IGNORED] * len(before) + ids[len(before) :])[: data.block_size]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}

    return split.map(encode, remove_columns=split.column_names)


def main() -> None:
    """Trains, evaluates, and writes the model, its privacy record and its card."""
    kinds = (ModelArguments, DataArguments, DPGrapeTrainingArguments)
    model_args, data_args, args = parse_arguments(kinds, sys.argv[1:])
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, dtype=model_args.dtype, low_cpu_mem_usage=True
    )
    splits = load_data(data_args)
    if data_args.max_train_samples:
        splits["train"] = splits["train"].select(range(data_args.max_train_samples))
    splits = {name: tokenize(split, data_args, tokenizer) for name, split in splits.items()}
    trainer = DPGrapeTrainer(
        model=model,
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if "validation" in splits:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.create_model_card()
    print(f"epsilon={trainer.privacy_record()['epsilon']}, model and card in {args.output_dir}")


if __name__ == "__main__":
    main()
