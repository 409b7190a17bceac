"""Fine-tunes MiniLM privately on film reviews, and tests it on films it has not seen.

Run `python scripts/demo.py`, or `python scripts/demo.py --help` for the options.
"""

import json
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from demo_data import load_snippets
from demo_model import load_minilm
from rich.console import Console
from rich.table import Table
from transformers import EvalPrediction, HfArgumentParser, PreTrainedTokenizerBase, set_seed

from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments

# Nearly all snippets are shorter: their median is 26 tokens, their 99th percentile 55.
MAX_TOKENS = 64
# Below 1 / num_examples, with about 10,000 examples.
TARGET_DELTA = 1e-5

# Four layers of six: on movies set aside for tuning, the means of the fourth told most.
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODEL: dict[str, Any] = {"num_layers": 4, **DROPOUT}
# One rate schedule spans the run: the body starts late, at about a fifth of its rate.
SHORT = {"max_steps": 80, "head_only_steps": 65}
LONG = {"max_steps": 240, "head_only_steps": 200}
SETTINGS: dict[str, Any] = {
    "expected_batch_size": 512,
    "l2_clip_norm": 1.0,
    "clipping": "flat",
    "rank": 16,
    "head_clip_share": 0.7,
    "learning_rate": 5e-4,
    "head_learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 64,
    "logging_steps": 10,
}


@dataclass
class DemoArguments:
    """Options of the demo."""

    output_dir: str = field(default="runs/demo", metadata={"help": "Folder of model and figures."})
    epsilon: float = field(default=3.0, metadata={"help": "Privacy budget of the whole run."})
    seed: int = field(
        default=0, metadata={"help": "Seed of the new head's weights; the noise has none."}
    )
    long: bool = field(default=False, metadata={"help": "Three times as many steps."})


def main() -> None:
    """Trains, evaluates on held-out movies, and writes the model, its card and `result.json`."""
    (demo,) = HfArgumentParser(DemoArguments).parse_args_into_dataclasses()
    start = time.perf_counter()
    set_seed(demo.seed)
    model, tokenizer = load_minilm(num_labels=2, **MODEL)
    train, test = (tokenize(snippets, tokenizer) for snippets in load_snippets())
    trainer = DPGrapeTrainer(
        model=model,
        args=training_arguments(demo),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()

    steps, fresh = trainer.state.global_step, sum(test["label"]) / len(test)
    result = {
        "accuracy": metrics["eval_accuracy"],
        "majority": max(fresh, 1 - fresh),
        "epsilon": trainer.privacy_record()["epsilon"],
        "delta": trainer.plan.target_delta,
        "noise_multiplier": trainer.plan.noise_multiplier,
        "steps": steps,
        "seconds": time.perf_counter() - start,
        "peak_mib": peak_mib(),
    }
    folder = Path(demo.output_dir)
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    Console().print(result_table(result, folder))


def training_arguments(demo: DemoArguments) -> DPGrapeTrainingArguments:
    """The settings of the demo's short or long run."""
    return DPGrapeTrainingArguments(
        output_dir=demo.output_dir,
        target_epsilon=demo.epsilon,
        target_delta=TARGET_DELTA,
        seed=demo.seed,
        save_strategy="no",
        report_to="none",
        **SETTINGS,
        **(LONG if demo.long else SHORT),
    )


def tokenize(snippets: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Replaces the texts by token ids, short ones first, so that evaluation pads little."""
    rows = snippets.map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=MAX_TOKENS),
        batched=True,
        remove_columns=["text"],
    )
    lengths = [len(ids) for ids in rows["input_ids"]]
    return rows.select(sorted(range(len(rows)), key=lengths.__getitem__))


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of snippets whose more likely class is the right one."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def peak_mib() -> float:
    """The largest memory this process had, in MiB."""
    units_per_mib = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mib


def result_table(result: dict[str, float], folder: Path) -> Table:
    """What came out, for people."""
    table = Table(title="Private fine-tuning on film reviews", show_header=False)
    table.add_row("accuracy on held-out movies", f"{result['accuracy']:.1%}")
    table.add_row("always guessing the larger class", f"{result['majority']:.1%}")
    spent = f"epsilon = {result['epsilon']:.2f} at delta = {result['delta']:g}"
    table.add_row("privacy spent", spent)
    table.add_row("noise multiplier", f"{result['noise_multiplier']:.3f}")
    table.add_row("steps", f"{result['steps']:.0f}")
    table.add_row("seconds", f"{result['seconds']:.0f}")
    table.add_row("peak memory", f"{result['peak_mib']:.0f} MiB")
    table.add_row("model and its card", f"{folder}, {folder / 'README.md'}")
    return table


if __name__ == "__main__":
    main()
