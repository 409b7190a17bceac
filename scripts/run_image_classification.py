"""Trains an image classifier privately: from scratch, or from a checkpoint.

    python scripts/run_image_classification.py --dataset_name cifar10 --model_type vit \
        --target_epsilon 8 --target_delta 2e-5 --output_dir runs/cifar10
    accelerate launch scripts/run_image_classification.py \
        training_args/vit_base/cifar10_epsilon_1.yaml --train_dir pictures/train

Pictures come from the hub, from folders with one folder per class, or from parquet files with a
column of images. One picture is one example, which is what the guarantee protects. Names of folders
and values of labels are taken for private: with them, name the classes by `--class_names`.
"""

import sys
from dataclasses import dataclass, field

import datasets
import script_data
from script_data import or_exit
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    ViTImageProcessor,
    default_data_collator,
    set_seed,
)

from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments

# Where the well-known data sets are on the hub.
HUB = {"mnist": "ylecun/mnist", "cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}


@dataclass
class ModelArguments:
    """A checkpoint, or what a new model is made of."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name of a checkpoint to fine-tune."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Folder or hub name of a new model's configuration."}
    )
    mup_init: bool = field(
        default=False, metadata={"help": "Initialize a new model in muP, see docs/dpmup.md."}
    )
    model_type: str = field(
        default="vit", metadata={"help": "Kind of a new model without either, as vit or deit."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes, as hidden_size=192,num_hidden_layers=6."}
    )
    dtype: str = field(default="float32", metadata={"help": "Of the weights: or bfloat16."})


@dataclass
class DataArguments(script_data.LabeledArguments):
    """Which pictures, and where their classes are."""

    train_dir: str | None = field(
        default=None, metadata={"help": "Folder with one folder of pictures per class."}
    )
    validation_dir: str | None = field(default=None, metadata={"help": "Such a folder too."})
    image_column: str | None = field(
        default=None, metadata={"help": "Default: the first column of images, or `image`."}
    )


def prepare(split: datasets.Dataset, data: DataArguments, names, processor) -> datasets.Dataset:
    """Pixels, made when they are asked for, and class numbers."""
    images = [c for c, f in split.features.items() if isinstance(f, datasets.Image)]
    column = data.image_column or (images or ["image"])[0]
    script_data.require_columns(split, [column, data.label_column])
    split = script_data.with_labels(split, data.label_column, names)
    split = split.cast_column(column, datasets.Image(decode=False))

    def transform(rows: dict) -> dict:
        pictures = [script_data.decoded(picture).convert("RGB") for picture in rows[column]]
        pixels = processor(pictures, return_tensors="pt")["pixel_values"]
        return {"pixel_values": list(pixels), "labels": rows["labels"]}

    return split.with_transform(transform)


def load_config(arguments: ModelArguments, names: list[str]) -> PreTrainedConfig:
    """The configuration, with its overrides and the classes of the data."""
    if name := arguments.config_name or arguments.model_name_or_path:
        config = or_exit(lambda: AutoConfig.from_pretrained(name), "model", name)
    elif arguments.model_type in CONFIG_MAPPING:
        config = AutoConfig.for_model(arguments.model_type)
    else:
        sys.exit(
            f"Expected a `--model_type` such as vit, deit or swin, got {arguments.model_type}."
        )
    if arguments.config_overrides:
        config.update_from_string(arguments.config_overrides)
    config.update(script_data.class_options(names))
    return config


def main() -> None:
    """Trains, evaluates, and writes the model, its privacy record and its card."""
    kinds = (ModelArguments, DataArguments, DPGrapeTrainingArguments)
    model_args, data, args = script_data.command_line(kinds)
    set_seed(args.seed)
    args.remove_unused_columns = False  # the transform needs the column of images
    data.dataset_name = HUB.get(data.dataset_name, data.dataset_name)
    data.train_file = data.train_dir or data.train_file
    data.validation_file = data.validation_dir or data.validation_file
    splits = script_data.load_splits(data)
    script_data.require_columns(splits["train"], [data.label_column])
    names = script_data.class_names(splits["train"], data)
    if names is None:
        sys.exit(f"Expected classes in the column `{data.label_column}`, got real numbers.")
    config, checkpoint = load_config(model_args, names), model_args.model_name_or_path
    if checkpoint is None:
        side = {"height": config.image_size, "width": config.image_size}
        processor = ViTImageProcessor(size=side)
        model = AutoModelForImageClassification.from_config(config, dtype=model_args.dtype)
        script_data.initialized(model, in_mup=model_args.mup_init)
    else:
        processor = or_exit(
            lambda: AutoImageProcessor.from_pretrained(checkpoint), "model", checkpoint
        )
        options = {"config": config, "dtype": model_args.dtype, "ignore_mismatched_sizes": True}
        model = or_exit(
            lambda: AutoModelForImageClassification.from_pretrained(checkpoint, **options),
            "model",
            checkpoint,
        )
    splits = {k: prepare(split, data, names, processor) for k, split in splits.items()}
    trainer = DPGrapeTrainer(
        model=model,
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        processing_class=processor,
        data_collator=default_data_collator,
        compute_metrics=script_data.metrics_of("classification"),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    script_data.report(trainer, trainer.evaluate() if "validation" in splits else {})


if __name__ == "__main__":
    main()
