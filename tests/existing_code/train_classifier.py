"""A program for `transformers.Trainer`: fine-tunes a text classifier on a CSV file.

python train_classifier.py MODEL FILE FOLDER
"""

import sys

import datasets
import numpy as np
import transformers
from transformers import Trainer, TrainingArguments


def main() -> None:
    model_name, file, folder = sys.argv[1:]
    training_args = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
        use_cpu=True,
    )
    transformers.set_seed(training_args.seed)
    rows = datasets.load_dataset("csv", data_files=file, split="train").train_test_split(
        0.25, seed=0
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_name)

    def preprocess(examples):
        return tokenizer(examples["sentence"], truncation=True, max_length=16)

    def compute_metrics(prediction):
        return {"accuracy": np.mean(prediction.predictions.argmax(1) == prediction.label_ids)}

    rows = rows.map(preprocess, batched=True)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=5)],
    )
    train_result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(finetuned_from=model_name, tasks="text-classification")


if __name__ == "__main__":
    main()
