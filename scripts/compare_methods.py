"""Compares methods of private training: same model, data, batches and budget, one run per cell.

    python scripts/compare_methods.py --model_name_or_path minilm --task_name sst2 \
        --train_file train.tsv --validation_file dev.tsv --target_delta 1e-5 --max_steps 100 \
        --expected_batch_size 256 --methods dp-grape dp-adam dpzero non-private --epsilons 1 8

Takes what `run_glue.py` takes besides. A cell is a method, an epsilon and a seed, in a process of
its own, so that its peak memory is its own and its failure ends nothing. Cells that `cells.csv` in
the output folder has a result for are not run again. `--method_args` is a YAML file with arguments
of single methods, as `dpzero: {learning_rate: 0.01}`: rates have to be tuned for each, and those
of `RATES` are places to start from. Every cell spends an epsilon of its own: on private data they
add up, so compare on public data.
"""

import csv
import json
import math
import multiprocessing
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import compare_methods_report
import numpy as np
import run_glue
import torch
import yaml
from demo_model import load_minilm
from rich.progress import track
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments
from hf_dpgrape.commands.presets import preset_arguments
from hf_dpgrape.hf.methods import METHODS, NON_PRIVATE

KINDS = [run_glue.ModelArguments, run_glue.DataArguments, DPGrapeTrainingArguments]
MINILM = "minilm"
FIELDS = ("method", "epsilon", "seed", *compare_methods_report.RESULTS, "error")
#: Where the search for each method's rate begins.
RATES = dict.fromkeys([*METHODS, NON_PRIVATE], 5e-4) | {"dp-sgd": 0.5, "dpzero": 1e-2}
#: What ordinary training has in common with private training.
SHARED = (
    *("output_dir", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay"),
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "seed", "use_cpu", "bf16"),
    *("per_device_eval_batch_size", "save_strategy", "report_to", "disable_tqdm"),
    *("dataloader_pin_memory", "adam_beta1", "adam_beta2", "adam_epsilon"),
)


@dataclass
class ComparisonArguments:
    """What is compared."""

    methods: list[str] = field(
        default_factory=lambda: [*METHODS],
        metadata={"help": f"Any of {', '.join([*METHODS, NON_PRIVATE])}."},
    )
    epsilons: list[float] = field(default_factory=lambda: [1.0, 3.0, 8.0])
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    method_args: str | None = field(
        default=None, metadata={"help": "YAML file with arguments of single methods, by name."}
    )
    comparison_dir: str = field(
        default="runs/comparison", metadata={"help": "Folder of table, pictures and `cells.csv`."}
    )


class Cell(NamedTuple):
    """One run."""

    method: str
    epsilon: float  # infinite without privacy
    seed: int


def cells_of(comparison: ComparisonArguments) -> list[Cell]:
    """All cells; ordinary training has no epsilon, so it is run once per seed."""
    if unknown := [name for name in comparison.methods if name not in RATES]:
        sys.exit(f"Expected `--methods` of {', '.join(RATES)}, got {unknown[0]}.")
    return [
        Cell(method, epsilon, seed)
        for method in comparison.methods
        for epsilon in ([math.inf] if method == NON_PRIVATE else comparison.epsilons)
        for seed in comparison.seeds
    ]


def run_cell(cell: Cell, words: list[str]) -> dict[str, float]:
    """Trains and evaluates one cell; runs in a process of its own."""
    method = "dp-adam" if cell.method == NON_PRIVATE else cell.method
    budget = 1.0 if math.isinf(cell.epsilon) else cell.epsilon
    with tempfile.TemporaryDirectory() as folder:
        own = ["--method", method, "--target_epsilon", str(budget), "--seed", str(cell.seed)]
        own += ["--output_dir", folder, "--save_strategy", "no", "--report_to", "none"]
        parsed = HfArgumentParser(KINDS).parse_args_into_dataclasses([*words, *own])
        model_args, data, args = parsed
        set_seed(args.seed)
        splits = run_glue.load_data(data)
        model, tokenizer = model_of(model_args, data, splits)
        kind: type[Trainer] = DPGrapeTrainer
        if cell.method == NON_PRIVATE:
            kind, args = Trainer, ordinary(args)
        trainer = kind(
            model=model,
            args=args,
            train_dataset=splits["train"],
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        found = trainer.predict(splits["validation"])
    guessed = np.argmax(found.predictions, -1)
    counts = np.bincount(guessed)
    return {
        "accuracy": float((guessed == found.label_ids).mean()),
        "majority_share": float(counts.max() / counts.sum()),
        "seconds": seconds,
        "peak_mib": peak_mib(),
    }


def model_of(model_args: Any, data: Any, splits: dict[str, Any]) -> tuple[Any, Any]:
    """Model and tokenizer; the splits are encoded in place."""
    name = model_args.model_name_or_path
    if "validation" not in splits:
        sys.exit("Expected `--validation_file`, on which methods are compared, got none.")
    if name != MINILM:
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        names = run_glue.prepare(splits, data, None, tokenizer)
        return run_glue.load_model(model_args, names, tokenizer), tokenizer
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    _, tokenizer = load_minilm(2, num_layers=1, **dropout)
    names = run_glue.prepare(splits, data, None, tokenizer)
    return load_minilm(len(names or []), num_layers=4, **dropout)[0], tokenizer


def ordinary(args: DPGrapeTrainingArguments) -> TrainingArguments:
    """The same training without privacy: as many examples per step, drawn without replacement."""
    accumulated = max(1, round(args.expected_batch_size / args.per_device_train_batch_size))
    shared = {name: getattr(args, name) for name in SHARED}
    return TrainingArguments(**shared, gradient_accumulation_steps=accumulated)


def peak_mib() -> float:
    """The most memory that this process had: of the accelerator if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    units_per_mib = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mib


def outcome_of(cell: Cell, words: list[str]) -> dict[str, Any]:
    """A row of the table of cells; what went wrong is a row, too."""
    row = {"method": cell.method, "epsilon": cell.epsilon, "seed": cell.seed, "error": ""}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        try:
            return row | pool.submit(_run_cell, cell, words).result()
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            return row | {"error": f"{type(error).__name__}: {first}"}


def _run_cell(cell: Cell, words: list[str]) -> dict[str, float]:
    """As `run_cell`; a script's own sentence is an error that reaches the other process."""
    try:
        return run_cell(cell, words)
    except SystemExit as error:
        raise ValueError(str(error)) from None


def same_options(folder: Path, options: dict[str, Any]) -> None:
    """Refuses to add cells to those of another comparison."""
    file, text = folder / "options.json", json.dumps(options, indent=2)
    if file.exists() and file.read_text() != text:
        sys.exit(
            f"Expected the options of the cells in {folder}, which `options.json` there has, got "
            "others; choose another `--comparison_dir`."
        )
    file.write_text(text)


def words_of(method: str, common: list[str], own: dict[str, Any]) -> list[str]:
    """The command line of a method: its rate, what all have in common, what is its own."""
    words = ["--learning_rate", str(RATES[method]), *common]
    for name, value in own.get(method, {}).items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def main() -> None:
    """Runs the cells that have no result, then writes table and pictures."""
    words = sys.argv[1:]
    if words and words[0].endswith((".yaml", ".yml")):
        words = preset_arguments(words[0]) + words[1:]
    parser = HfArgumentParser(ComparisonArguments)
    comparison, common = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    own = yaml.safe_load(Path(comparison.method_args).read_text()) if comparison.method_args else {}
    folder = Path(comparison.comparison_dir)
    folder.mkdir(parents=True, exist_ok=True)
    cells = cells_of(comparison)
    same_options(folder, {"arguments": common, "own": own})
    file = folder / "cells.csv"
    known = compare_methods_report.read_cells(file)
    waiting = [cell for cell in cells if known.get(tuple(cell), {"error": "-"})["error"]]
    with file.open("a", newline="") as stream:
        table = csv.DictWriter(stream, FIELDS)
        if not known:
            table.writeheader()
        for cell in track(waiting, "Cells"):
            table.writerow(outcome_of(cell, words_of(cell.method, common, own)))
            stream.flush()
    compare_methods_report.write_report(compare_methods_report.read_cells(file), folder)


if __name__ == "__main__":
    main()
