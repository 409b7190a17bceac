"""Fine-tunes a causal language model privately, on text or on prompts with targets.

    python scripts/run_clm.py --model_name_or_path gpt2 --train_file train.jsonl \
        --target_epsilon 3 --target_delta 1e-5 --output_dir runs/clm
    accelerate launch scripts/run_clm.py training_args/opt_6.7b_24gb.yaml --train_file train.jsonl

One line or record is one example, and one example is what the guarantee protects. Texts are never
joined: with blocks made of several records, one record would change them all. What is longer than
`block_size` is cut off; with `--split_texts` it makes several examples, and the card says so.
Prompts and targets come from columns, or from templates over columns.
"""

import functools
import math
import sys
from dataclasses import dataclass, field

import script_data
from clm_data import IGNORED, DataArguments, tokenize
from script_data import or_exit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    set_seed,
)

from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or hub name of the model."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Folder or hub name of a new model's configuration."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Folder or hub name of a new model's tokenizer."}
    )
    mup_init: bool = field(
        default=False, metadata={"help": "Initialize a new model in muP, see docs/dpmup.md."}
    )
    dtype: str = field(
        default="float32",
        metadata={"help": "Of the loaded weights: float32 or bfloat16 (half the memory)."},
    )


def load_model(arguments: ModelArguments) -> tuple:
    """The model, from a checkpoint or new, and its tokenizer."""
    name = arguments.config_name or arguments.model_name_or_path
    if name is None or (arguments.config_name and not arguments.tokenizer_name):
        sys.exit("Expected `--model_name_or_path`, or `--config_name` with `--tokenizer_name`.")
    named = arguments.tokenizer_name or name
    tokenizer = or_exit(lambda: AutoTokenizer.from_pretrained(named), "tokenizer", named)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if arguments.config_name:
        config = or_exit(lambda: AutoConfig.from_pretrained(name), "configuration", name)
        model = AutoModelForCausalLM.from_config(config, dtype=arguments.dtype)
        return script_data.initialized(model, in_mup=arguments.mup_init), tokenizer
    options = {"dtype": arguments.dtype, "low_cpu_mem_usage": True}
    load = functools.partial(AutoModelForCausalLM.from_pretrained, name, **options)
    return or_exit(load, "model", name), tokenizer


def main() -> None:
    """Trains, evaluates, and writes the model, its privacy record and its card."""
    kinds = (ModelArguments, DataArguments, DPGrapeTrainingArguments)
    model_args, data_args, args = script_data.command_line(kinds)
    set_seed(args.seed)
    splits = script_data.load_splits(data_args)
    model, tokenizer = load_model(model_args)
    splits = {kind: tokenize(split, data_args, tokenizer) for kind, split in splits.items()}
    if data_args.split_texts:
        size, whole = data_args.block_size, args.example_unit
        args.example_unit = f"one block of {size} tokens out of {whole}, which may have several"
    trainer = DPGrapeTrainer(
        model=model,
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate() if "validation" in splits else {}
    if metrics:
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
    script_data.report(trainer, metrics)


if __name__ == "__main__":
    main()
