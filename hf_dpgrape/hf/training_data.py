"""A Trainer's training set as logical batches, and the randomness that draws them."""

from __future__ import annotations

from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.input_limits import longest_input
from hf_dpgrape.mechanism.logical_batches import LogicalBatches, TrainingData
from hf_dpgrape.mechanism.private_step import LogicalBatch
from hf_dpgrape.mechanism.units import Units
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.randomness import SecretSource


def secret_source(args: DPGrapeTrainingArguments) -> SecretSource:
    """The randomness of this process, from the operating system unless a test fixes it."""
    fixed = args.unsafe_test_seed
    # Processes must not share coins or dropout masks, in tests neither.
    return SecretSource(unsafe_seed=None if fixed is None else fixed + args.process_index)


def training_data(
    trainer: Trainer,
    args: DPGrapeTrainingArguments,
    source: SecretSource,
    units: Units | None,
) -> TrainingData:
    """The training set with the columns that the model takes, and how it is collated.

    Args:
        trainer: which has data set, collator and model.
        args: its arguments.
        source: of the collator's draws and of the sample's.
        units: of the training set, by which the plan was made.
    """
    model = trainer.model
    assert isinstance(model, nn.Module)  # it is None only inside the Trainer's constructor
    dataset, collate = trainer.train_dataset, trainer.data_collator
    if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
        dataset = trainer._remove_unused_columns(dataset, description="training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="training")
    return {
        "examples": dataset,
        "collate": collate,
        "physical_batch_size": args.per_device_train_batch_size,
        "source": source,
        "length_grid": args.length_grid,
        "longest": longest_input(model, trainer.processing_class),
        "units": units,
    }


def planned_loader(
    batches: LogicalBatches, plan: PrivacyPlan, args: DPGrapeTrainingArguments
) -> DataLoader[LogicalBatch]:
    """One epoch of logical batches, by the workers that the arguments ask for.

    Args:
        batches: the training set.
        plan: tells how they are drawn.
        args: a Trainer's arguments.
    """
    return batches.loader(
        plan,
        args.steps_per_epoch(plan.num_examples),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
    )
