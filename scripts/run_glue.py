"""Fine-tunes a text classifier privately: a GLUE task, or one's own files; one sentence or two.

    python scripts/run_glue.py --task_name sst2 --model_name_or_path roberta-base \
        --target_epsilon 3 --target_delta 1e-5 --output_dir runs/sst2
    accelerate launch scripts/run_glue.py training_args/roberta_large/sst2_epsilon_2.yaml

Real-valued labels make it a regression. Classes that no public list names are named by
`--class_names`, for their names are saved with the model. With `--prompt_template`, words of a
language model stand for the classes (`prompt_model.py`). One row is one example, which is what the
guarantee protects.
"""

import sys
from dataclasses import dataclass, field

import datasets
import prompt_model
import script_data
from script_data import GLUE_TASKS, or_exit
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    set_seed,
)

from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments


@dataclass
class ModelArguments:
    """Which model, and how it classifies."""

    model_name_or_path: str = field(metadata={"help": "Folder or hub name of the model."})
    dtype: str = field(default="float32", metadata={"help": "Of the weights: or bfloat16."})
    prompt_template: str | None = field(
        default=None,
        metadata={"help": 'As "{sentence1} It was {mask}."; without {mask} for causal models.'},
    )
    label_words: list[str] | None = field(
        default=None, metadata={"help": "One word per class, in the order of the classes."}
    )


@dataclass
class DataArguments(script_data.LabeledArguments):
    """Which data: a GLUE task, another hub data set, or local files."""

    task_name: str | None = field(
        default=None, metadata={"help": f"One of {', '.join(GLUE_TASKS)}."}
    )
    validation_mismatched_file: str | None = field(
        default=None, metadata={"help": "The second validation file of mnli."}
    )
    sentence1_column: str | None = field(
        default=None, metadata={"help": "Default: the task's, or the first column of text."}
    )
    sentence2_column: str | None = field(
        default=None, metadata={"help": "Default: the task's, or the second column of text."}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Tokens after which it is cut."})
    train_samples_per_class: int | None = field(
        default=None, metadata={"help": script_data.FIRST_OF_EACH_CLASS}
    )


def load_data(data: DataArguments) -> dict[str, datasets.Dataset]:
    """The splits train, validation and, of mnli, its two validation splits."""
    if data.task_name and data.task_name not in GLUE_TASKS:
        sys.exit(f"Expected a `--task_name` of {', '.join(GLUE_TASKS)}, got {data.task_name}.")
    if data.task_name and not (data.train_file or data.dataset_name):
        data.dataset_name, data.dataset_config_name = script_data.GLUE, data.task_name
    splits = script_data.load_splits(data)
    if data.validation_mismatched_file:
        splits["validation_mismatched"] = script_data.read_file(data.validation_mismatched_file)
    return splits


def prepare(splits: dict, data: DataArguments, template: str | None, tokenizer) -> list | None:
    """Turns the splits into token ids and labels, in place; names of the classes, if any."""
    train, label = splits["train"], data.label_column
    given = [column for column in (data.sentence1_column, data.sentence2_column) if column]
    columns, known = GLUE_TASKS.get(data.task_name, ([], []))
    columns = given or columns or script_data.text_columns(train, without=label)
    if template:
        prompt_model.check_template(template, len(columns))
    for split in splits.values():
        script_data.require_columns(split, [*columns, label])
    names = None if data.task_name == "stsb" else script_data.class_names(train, data, known)

    def encode(row: dict) -> dict:
        sentences = [row[column] or "" for column in columns]
        if template:
            return prompt_model.encode_prompt(sentences, template, tokenizer, data.max_seq_length)
        return tokenizer(*sentences, truncation=True, max_length=data.max_seq_length)

    for name, split in splits.items():
        labeled = script_data.with_labels(split, label, names)
        if name == "train" and data.train_samples_per_class:
            labeled = script_data.first_per_class(labeled, data.train_samples_per_class)
        unused = [column for column in labeled.column_names if column != "labels"]
        splits[name] = script_data.mapped(labeled, encode, remove_columns=unused)
    return names


def load_model(arguments: ModelArguments, names: list[str] | None, tokenizer):
    """A classifier with a new head, a prompt model, or (without classes) a regression."""
    name, template = arguments.model_name_or_path, arguments.prompt_template
    options = script_data.class_options(names) | {"dtype": arguments.dtype}
    if template is None:
        options |= {"pad_token_id": tokenizer.pad_token_id, "ignore_mismatched_sizes": True}
        return AutoModelForSequenceClassification.from_pretrained(name, **options)
    words = arguments.label_words or []
    if len(words) != len(names or []):
        sys.exit(f"Expected one of `--label_words` for each class ({names}), got {words}.")
    return prompt_model.load_prompt_model(
        name, tokenizer, template=template, label_words=words, **options
    )


def main() -> None:
    """Trains, evaluates, and writes the model, its privacy record and its card."""
    kinds = (ModelArguments, DataArguments, DPGrapeTrainingArguments)
    model_args, data, args = script_data.command_line(kinds)
    set_seed(args.seed)
    name, prompt = model_args.model_name_or_path, model_args.prompt_template
    splits = load_data(data)
    tokenizer = or_exit(lambda: AutoTokenizer.from_pretrained(name), "model", name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    names = prepare(splits, data, prompt, tokenizer)
    metrics = data.task_name or ("classification" if names else "regression")
    train = splits.pop("train")
    validation = {n.partition("_")[2] or "matched": split for n, split in splits.items()}
    trainer = DPGrapeTrainer(
        model=or_exit(lambda: load_model(model_args, names, tokenizer), "model", name),
        args=args,
        train_dataset=train,
        eval_dataset=validation if len(validation) > 1 else splits.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=script_data.metrics_of(metrics),
        compute_loss_func=prompt_model.per_sample_loss if prompt else None,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    script_data.report(trainer, trainer.evaluate() if validation else {})


if __name__ == "__main__":
    main()
