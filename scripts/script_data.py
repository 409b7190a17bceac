"""What the scripts share: data from the hub or files, labels, metrics, one-sentence errors.

What a record holds appears in no message and in no file that is saved. The names of columns belong
to that (a file without a header has its first record there), and so do the values of labels: a
class that one record alone has would tell of it. Class names are therefore given, or public.
"""

import csv
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import datasets
from datasets.exceptions import DatasetGenerationError
from transformers import EvalPrediction, PreTrainedModel

from hf_dpgrape import DPGrapeTrainer, parse_arguments
from hf_dpgrape.width.initialization import initialize_mup_

T = TypeVar("T")
UNLABELED = "(unlabeled)"
FIRST_OF_EACH_CLASS = (
    "Train on the first so many of each class; epsilon is for these rows. A row that is added to "
    "the file may push another one out, which epsilon does not cover."
)
METRICS = str(Path(__file__).parents[1] / "metrics" / "glue")

# Only an empty field is a missing one: "NA" and "null" are words.
_CSV = {"keep_default_na": False, "na_values": [""]}
# Fields of a .tsv file are not quoted, as in GLUE's.
_TSV = {"sep": "\t", "quoting": csv.QUOTE_NONE, **_CSV}
READERS = {
    "txt": ("text", {}),
    "csv": ("csv", _CSV),
    "tsv": ("csv", _TSV),
    "json": ("json", {}),
    "jsonl": ("json", {}),
    "parquet": ("parquet", {}),
}


# The GLUE tasks: columns of text, and the classes in their order; stsb has real numbers.
_PAIR, _NLI = ["sentence1", "sentence2"], ["entailment", "not_entailment"]
GLUE = "nyu-mll/glue"
GLUE_TASKS: dict[str, tuple[list[str], list[str]]] = {
    "cola": (["sentence"], ["unacceptable", "acceptable"]),
    "sst2": (["sentence"], ["negative", "positive"]),
    "mrpc": (_PAIR, ["not_equivalent", "equivalent"]),
    "stsb": (_PAIR, []),
    "qqp": (["question1", "question2"], ["not_duplicate", "duplicate"]),
    "mnli": (["premise", "hypothesis"], ["entailment", "neutral", "contradiction"]),
    "qnli": (["question", "sentence"], _NLI),
    "rte": (_PAIR, _NLI),
    "wnli": (_PAIR, ["not_entailment", "entailment"]),
}


@dataclass
class SourceArguments:
    """Where the data come from: the hub, or local files."""

    dataset_name: str | None = field(default=None, metadata={"help": "Hub name of a data set."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Its revision; `refs/convert/parquet` if it is a program."}
    )
    train_file: str | None = field(
        default=None, metadata={"help": f"Local file: {', '.join(READERS)}."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "Such a file too."})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on the first so many; epsilon is for those."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on the first so many."}
    )


@dataclass
class LabeledArguments(SourceArguments):
    """The same, where the rows have labels."""

    label_column: str = field(default="label", metadata={"help": "Classes, or real numbers."})
    class_names: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the classes, in their order, where no public list has them: they are "
            "saved with the model, and are not taken from the rows. With pictures in folders, "
            "`$(ls FOLDER)` if the folders' names are public."
        },
    )


def command_line(kinds: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments that the script was called with, or one sentence."""
    try:
        return parse_arguments(kinds, sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))


def or_exit(load: Callable[[], T], what: str, name: str) -> T:
    """What `load` returns, or one sentence if neither a folder nor the hub has it."""
    try:
        return load()
    except OSError as error:
        sys.exit(
            f"The {what} `{name}` is no local folder and could not be had from the hub "
            f"({type(error).__name__}); download it elsewhere and pass where it lies."
        )


def initialized(model: PreTrainedModel, *, in_mup: bool) -> PreTrainedModel:
    """A new model, whose weights are put into muP if that is asked for."""
    if in_mup:
        try:
            initialize_mup_(model)
        except ValueError as error:
            sys.exit(f"`--mup_init` is not possible: {error}")
    return model


def read_file(path: str) -> datasets.Dataset:
    """The rows of a local file, or the pictures of a folder with one folder per class."""
    suffix = Path(path).suffix.lstrip(".")
    if not Path(path).exists():
        sys.exit(f"Expected data, found nothing at {path}.")
    if Path(path).is_dir():
        kind, options = "imagefolder", {"data_dir": path}
    elif suffix in READERS:
        kind, options = READERS[suffix]
        options = {"data_files": path, **options}
    else:
        sys.exit(f"Expected a data file of type {', '.join(READERS)}, got {path}.")
    try:
        with silent_datasets():
            return datasets.load_dataset(kind, split="train", **options)
    except (DatasetGenerationError, OSError, TypeError, ValueError) as error:  # may show a record
        sys.exit(
            f"Expected rows of one shape in {path}, could not read it as {kind} "
            f"({type(error.__cause__ or error).__name__}); check its columns and separator."
        )


@contextmanager
def silent_datasets() -> Iterator[None]:
    """Keeps `datasets` from logging what it could not read, which would show a record."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def mapped(split: datasets.Dataset, encode: Callable[..., Any], **options: Any) -> datasets.Dataset:
    """The encoded rows without their columns; one sentence if a row is not as the others."""
    try:
        return split.map(encode, **options)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        sys.exit(
            "Expected rows that all have the texts that the arguments ask for, but one of them "
            f"could not be encoded ({type(error).__name__}); check the columns and templates."
        )


def load_splits(source: SourceArguments) -> dict[str, datasets.Dataset]:
    """Training and, if there are any, validation rows by split; test rows if there are no others.

    Raises:
        SystemExit: with one sentence, if there are none to be had.
    """
    if source.train_file:
        splits = {"train": read_file(source.train_file)}
        if source.validation_file:
            splits["validation"] = read_file(source.validation_file)
    elif source.dataset_name is None:
        sys.exit("Expected `--train_file` or the hub name of a data set, got neither.")
    else:
        splits = load_from_hub(source)
    limits = {"train": source.max_train_samples}
    return {
        name: first(split, limits.get(name, source.max_eval_samples))
        for name, split in splits.items()
    }


def load_from_hub(source: SourceArguments) -> dict[str, datasets.Dataset]:
    """The splits of a hub data set, "train" among them."""
    name = source.dataset_name

    def load() -> datasets.DatasetDict:
        with silent_datasets():
            return datasets.load_dataset(
                name, source.dataset_config_name, revision=source.dataset_revision
            )

    try:
        splits = dict(or_exit(load, "data set", name))
    except (DatasetGenerationError, TypeError, ValueError) as error:  # may show a record
        sys.exit(
            f"The data set `{name}` could not be read ({type(error.__cause__ or error).__name__}); "
            "check `--dataset_config_name` and `--dataset_revision`."
        )
    if "train" not in splits:
        sys.exit(f"Expected a split `train` in the data set `{name}`, found {sorted(splits)}.")
    if not any(split.startswith("validation") for split in splits) and "test" in splits:
        splits["validation"] = splits.pop("test")
    return {s: rows for s, rows in splits.items() if s == "train" or s.startswith("validation")}


def first(split: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    """The first so many rows; all without a limit."""
    return split if limit is None else split.select(range(min(limit, len(split))))


def require_columns(split: datasets.Dataset, columns: Sequence[str]) -> None:
    """Exits with a sentence if a column is missing; those that there are may be a record."""
    if missing := [column for column in columns if column not in split.column_names]:
        sys.exit(
            f"Expected the columns {missing} in the data, found {len(split.column_names)} others; "
            "name yours by the arguments that end in `_column`, and give a file without a first "
            "line of names such a line."
        )


def text_columns(split: datasets.Dataset, without: str) -> list[str]:
    """The first one or two columns of text, apart from one."""
    kinds = {name: str(getattr(f, "dtype", "")) for name, f in split.features.items()}
    found = [name for name, kind in kinds.items() if "string" in kind and name != without]
    if not found:
        sys.exit(
            f"Expected a column of text in the data, found none in {len(kinds)} columns; name it "
            "by `--sentence1_column`."
        )
    return found[:2]


def class_names(
    split: datasets.Dataset, data: LabeledArguments, known: Sequence[str] = ()
) -> list[str] | None:
    """Names of the classes in their order; None for real numbers. No row is read for them.

    Args:
        split: the training rows.
        data: the column of labels, and names if they are given.
        known: the classes, if it is agreed on what they are.
    """
    feature = split.features[data.label_column]
    if data.class_names:
        if len(set(data.class_names)) < len(data.class_names):
            sys.exit(f"Expected different `--class_names`, got {data.class_names}.")
        return list(data.class_names)
    is_declared = split.builder_name != "imagefolder"  # names of folders may be anything
    if isinstance(feature, datasets.ClassLabel) and is_declared:
        return list(feature.names)
    if known:
        return list(known)
    kind = str(getattr(feature, "dtype", ""))
    if "float" in kind:
        return None
    if kind == "bool":
        return ["False", "True"]
    sys.exit(
        f"Expected `--class_names`, the names of the classes in the column `{data.label_column}` "
        "in their order (as `--class_names no yes`, or `0 1` for numbers): they are saved with the "
        "model, so they are not taken from the training rows."
    )


def with_labels(split: datasets.Dataset, column: str, names: list[str] | None) -> datasets.Dataset:
    """The rows with a column `labels` of class numbers, or of real numbers if names is None.

    Whole numbers stand for the classes in their order, unless the names are numbers themselves.
    Rows that their data set marks as unlabeled (class -1) are left out.
    """
    feature, values = split.features[column], list(split[column])
    if any(value is None or value != value for value in values):
        sys.exit(f"Expected a label in every row, but some of the column `{column}` are empty.")
    kind = str(getattr(feature, "dtype", ""))
    if names is None:
        if "float" not in kind and "int" not in kind:
            sys.exit(f"Expected real numbers in the column `{column}`, found something else.")
        labels = [float(value) for value in values]
    else:
        if isinstance(feature, datasets.ClassLabel):
            values = [UNLABELED if value < 0 else feature.names[value] for value in values]
        numbers: dict[str, int] = {UNLABELED: -1}
        if "int" in kind and not any(name.lstrip("-").isdigit() for name in names):
            numbers |= {str(number): number for number in range(len(names))}
        numbers |= {name: number for number, name in enumerate(names)}
        if not all(str(value) in numbers for value in values):
            sys.exit(
                f"Expected the classes {', '.join(names)} in the column `{column}`, found others; "
                "name all of them by `--class_names`."
            )
        labels = [numbers[str(value)] for value in values]
    replaced = [name for name in (column, "labels") if name in split.column_names]
    labeled = split.remove_columns(replaced).add_column("labels", labels)
    kept = [row for row, label in enumerate(labels) if names is None or label >= 0]
    return labeled if len(kept) == len(labels) else labeled.select(kept)


def decoded(picture: dict[str, Any] | None) -> Any:
    """A picture out of its bytes or file; an error does not tell which one, names tell too much."""
    try:
        return datasets.Image().decode_example(picture)
    except (OSError, TypeError, ValueError):
        raise ValueError(
            "Expected pictures in all rows, but one could not be read; check the files beforehand."
        ) from None


def first_per_class(split: datasets.Dataset, num_per_class: int) -> datasets.Dataset:
    """The first so many rows of each class, in their order."""
    seen: dict[int, int] = {}
    kept = []
    for row, label in enumerate(split["labels"]):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] <= num_per_class:
            kept.append(row)
    return split.select(kept)


def class_options(names: list[str] | None) -> dict[str, Any]:
    """What a model's configuration holds about its classes; about a regression if names is None."""
    labels = ["score"] if names is None else names
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "regression" if names is None else "single_label_classification",
    }


def metrics_of(task: str) -> Callable[[EvalPrediction], dict[str, float]]:
    """The `compute_metrics` of a task, from the local GLUE metrics."""
    try:
        import evaluate  # not a dependency of the package

        metric = evaluate.load(METRICS, task, keep_in_memory=True)
    except ImportError:
        sys.exit("Expected `evaluate` and scikit-learn: `pip install 'hf-dpgrape[evaluate]'`.")

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        logits = prediction.predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        found = logits.squeeze(-1) if logits.shape[-1] == 1 else logits.argmax(-1)
        return metric.compute(predictions=found, references=prediction.label_ids)

    return compute


def report(trainer: DPGrapeTrainer, metrics: dict[str, float]) -> None:
    """Writes metrics, model, privacy record and card, and prints a last line."""
    if isinstance(trainer.eval_dataset, dict):
        trainer.log(metrics)  # the card shows what was logged last
    if metrics:
        trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()  # which `hf-dpgrape report` reads
    trainer.create_model_card()
    if trainer.is_world_process_zero():
        rest = ("runtime", "per_second", "epoch")
        shown = [f"{k}={v:.4g}" for k, v in metrics.items() if not k.endswith(rest)]
        record, folder = trainer.privacy_record(), trainer.args.output_dir
        epsilon = math.inf if record["epsilon"] is None else record["epsilon"]
        spent = f"epsilon={epsilon:.4g} at delta={record['target_delta']:g}"
        print(spent, *shown, f"model and card in {folder}")
