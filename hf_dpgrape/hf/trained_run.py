"""One run of a trainer: its `PrivateTraining`, wired from arguments, and what its record says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dpgrape.artifacts.record import (
    FIXED,
    SECRET,
    privacy_record,
    projection_record,
    with_earlier_part,
)
from hf_dpgrape.gradients.recording import AUTO, SINGLE
from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.choices import Choices
from hf_dpgrape.hf.disclosure import Disclosure
from hf_dpgrape.hf.dpmup import WidthTransfer
from hf_dpgrape.hf.methods import method_of, method_record
from hf_dpgrape.hf.pairs import PairLosses
from hf_dpgrape.hf.planning import clip_groups, head_tensors
from hf_dpgrape.hf.rates import set_rates
from hf_dpgrape.hf.resuming import Facts, groups_of, run_facts
from hf_dpgrape.mechanism.logical_batches import TrainingData
from hf_dpgrape.mechanism.private_training import PerSampleLosses, PrivateTraining, Synthetic
from hf_dpgrape.privacy.ledger import RunLedger


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """What trains the present run, and facts about it that do not change while it goes on.

    Attributes:
        training: the private training.
        width_transfer: DP-muP's rules; None without them.
        rates_were_set: whether tensors were given rates of their own.
        facts: on which the optimizer's state depends, by section of the record.
        method: what the record says of it.
    """

    training: PrivateTraining
    width_transfer: WidthTransfer | None
    rates_were_set: bool
    facts: Facts
    method: Mapping[str, Any]

    def record(
        self,
        ledger: RunLedger,
        args: DPGrapeTrainingArguments,
        choices: Choices,
        disclosure: Disclosure,
        earlier: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What `privacy.json` says about the model as it is now.

        Args:
            ledger: of the run, told what is known at this moment.
            args: the arguments.
            choices: what results decide about.
            disclosure: tells whether logs hold anything that epsilon does not cover.
            earlier: the record of the checkpoint that the run continues; empty without one.
        """
        training, width = self.training, self.width_transfer
        logs_are_raw = disclosure.raw_metrics_were_logged or args.log_non_private_metrics
        present = privacy_record(
            ledger.plan,
            ledger.num_releases,
            {
                **self.facts["projection"],
                **projection_record(training.projections.values(), training.capture),
                "randomness": SECRET if training.is_secret else FIXED,
            },
            method=self.method,
            steps_counted=ledger.steps_counted(),
            counted_because=ledger.reasons,
            optimizer=self.facts["optimizer"],
            example_unit=args.example_unit,
            examples_per_unit=args.examples_per_unit,
            num_processes=args.world_size,
            tuning=choices.record(),
            raw_metrics_were_logged=logs_are_raw,
            dpmup=None if width is None else width.record(ledger.plan.noise_multiplier),
        )
        return with_earlier_part({**present, **args.loss_record()}, earlier)


def trained_run(
    args: DPGrapeTrainingArguments,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    given_optimizer: str | None,
    losses: PerSampleLosses,
    data: TrainingData,
    ledger: RunLedger,
    synthetic: Synthetic,
    width_transfer: WidthTransfer | None,
) -> TrainedRun:
    """A run as the arguments ask for, before its first step.

    Args:
        args: the arguments.
        model: the model.
        optimizer: on the model's own tensors; it is made to step in the subspace.
        given_optimizer: class of the optimizer if the user passed it.
        losses: one per sample.
        data: the training set.
        ledger: which has the run's plan.
        synthetic: makes the examples of the rehearsal.
        width_transfer: DP-muP's rules, by which the plan was made; None without them.

    Raises:
        ValueError: model or optimizer cannot be trained privately as they are.
    """
    head = head_tensors(model, args.head_modules)
    rates_were_set = set_rates(args, optimizer, model, head, width_transfer)
    is_paired = isinstance(losses, PairLosses)  # two rows an example: no batch of several
    training = PrivateTraining(
        model,
        optimizer,
        ledger.plan,
        losses,
        **data,
        capture=SINGLE if is_paired and args.capture == AUTO else args.capture,
        estimator=method_of(args).estimator,
        num_directions=args.num_directions,
        perturbation_scale=args.perturbation_scale,
        rank=args.rank,
        head=head,
        clip_groups=clip_groups(args, model, head, width_transfer),
        update_proj_gap=args.refresh_gap(ledger.plan.num_steps),
        refresh_moments=args.refresh_moments,  # type: ignore[arg-type]
        projection_scale=args.projection_scale,  # type: ignore[arg-type]
        target_modules=args.optim_target_modules,
        seed=args.seed,
        ledger=ledger,
        synthetic=synthetic,
    )
    facts = run_facts(args, model, ledger.plan, given_optimizer)
    facts["optimizer"]["groups"] = groups_of(training)
    return TrainedRun(
        training=training,
        width_transfer=width_transfer,
        rates_were_set=rates_were_set,
        facts=facts,
        method=method_record(args),
    )
