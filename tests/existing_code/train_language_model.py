"""A program for `transformers.Trainer`: fine-tunes a causal language model on lines of text.

python train_language_model.py MODEL FILE FOLDER
"""

import math
import sys

import datasets
import transformers
from transformers import Trainer, TrainingArguments


def main() -> None:
    model_name, file, folder = sys.argv[1:]
    training_args = TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        warmup_steps=1,
        lr_scheduler_type="cosine",
        weight_decay=0.01,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    transformers.set_seed(training_args.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_name)
    rows = datasets.load_dataset("text", data_files=file, split="train")

    def tokenize(examples):
        return tokenizer(examples["text"], truncation=True, max_length=16)

    rows = rows.map(tokenize, batched=True, remove_columns=["text"]).train_test_split(0.25, seed=0)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    train_result = trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", train_result.metrics)
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(finetuned_from=model_name, tasks="text-generation")


if __name__ == "__main__":
    main()
