"""Several runs of one trainer, and choices made by validation data: what they add to the record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer
from transformers.hyperparameter_search import default_hp_search_backend
from transformers.trainer_utils import HPSearchBackend, SaveStrategy

from hf_dpgrape.arguments import DPGrapeTrainingArguments
from hf_dpgrape.privacy.accounting import composed_epsilon
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.record import finite

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    _TrainerBase = Trainer
else:
    _TrainerBase = object


class TuningMixin(_TrainerBase):
    """The part of a private Trainer that knows of its earlier runs and of validation data.

    Guarantees:
        A run that was stopped before its planned steps counts with all of them: when to stop was
        chosen by results, and epsilon at a number of steps holds if that number was fixed. So
        does every run before the present one in the total of a search.
    """

    args: DPGrapeTrainingArguments
    _private_step: Any
    _has_trained: bool
    _rates_were_set = False
    _earlier_plans: tuple[PrivacyPlan, ...] = ()
    _was_stopped_early = False

    def _begin_run(self) -> None:
        """Remembers the run before, and warns of what epsilon does not cover."""
        if self._has_trained and self.model_init is not None:
            self._earlier_plans += (self._private_step.plan,)
        self._was_stopped_early = False
        choices = self._choices_by_validation()
        if choices and self.args.validation_data_is_private is not False:
            logger.warning(
                "Evaluation data decide about %s: epsilon does not cover that choice if they are "
                "private (say so by `validation_data_is_private`).",
                " and ".join(choices),
            )

    def _end_run(self) -> None:
        """Notes whether something stopped the run before its planned steps."""
        self._was_stopped_early = self.state.global_step < self._private_step.plan.num_steps

    def _steps_counted(self) -> int:
        """Steps that epsilon has to count: those done, unless results decided on their number."""
        planned: int = self._private_step.plan.num_steps
        may_stop = self._was_stopped_early or bool(self._early_stopping())
        return planned if may_stop else self.state.global_step

    def _early_stopping(self) -> list[Any]:
        callbacks = self.callback_handler.callbacks
        return [c for c in callbacks if isinstance(c, EarlyStoppingCallback)]

    def _choices_by_validation(self) -> list[str]:
        """What the Trainer itself decides by metrics of the evaluation data."""
        args = self.args
        choices = {
            "the best checkpoint": args.load_best_model_at_end
            or args.save_strategy == SaveStrategy.BEST,
            "when to stop": bool(self._early_stopping()),
            "the learning rate": args.lr_scheduler_type == "reduce_lr_on_plateau",
            "the hyperparameters": self.hp_search_backend is not None or bool(self._earlier_plans),
        }
        return [name for name, is_made in choices.items() if is_made]

    def tuning_record(self) -> dict[str, Any]:
        """What `privacy.json` says about choices, and about all runs of this trainer."""
        return {
            "num_tuning_trials": self.args.num_tuning_trials,
            "validation_data_is_private": self.args.validation_data_is_private,
            "chosen_by_validation_data": self._choices_by_validation(),
            "all_runs": self._all_runs() if self._earlier_plans else None,
        }

    def _all_runs(self) -> dict[str, Any]:
        """The runs of this trainer, each with its whole plan, and what they spend together."""
        plans = (*self._earlier_plans, self._private_step.plan)
        runs = tuple((p.noise_multiplier, p.sampling_prob, p.num_steps) for p in plans)
        delta = plans[-1].target_delta
        names = ("noise_multiplier", "sampling_prob", "num_steps")
        return {
            "num_runs": len(runs),
            "target_delta": delta,
            "epsilon_by_accountant": {
                "pld": finite(composed_epsilon(runs, delta=delta, accountant="pld")),
                "rdp": finite(composed_epsilon(runs, delta=delta, accountant="rdp")),
            },
            "runs": [dict(zip(names, run, strict=True)) for run in runs],
        }

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: Any = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Trainer.hyperparameter_search`; says what all trials spend together.

        Every trial is a private run with an epsilon of its own. The total holds if the number of
        trials, and their noise, sampling and steps, do not depend on results.
        """
        chosen = HPSearchBackend(backend or default_hp_search_backend() or HPSearchBackend.OPTUNA)
        if chosen == HPSearchBackend.RAY:
            raise ValueError(
                "`backend='ray'` runs trials in other processes, where nobody adds up what they "
                "spend; use `backend='optuna'`."
            )
        if kwargs.get("n_jobs", 1) != 1:
            raise ValueError(
                f"`n_jobs` must be 1, got {kwargs['n_jobs']}: trials at the same time would share "
                "this trainer."
            )
        best = super().hyperparameter_search(
            hp_space, compute_objective, n_trials, direction, chosen, hp_name, **kwargs
        )
        if self._earlier_plans:
            spent = self._all_runs()
            by = spent["epsilon_by_accountant"]
            logger.warning(
                "%d runs on the same data have spent epsilon=%s together, at delta=%g (PLD).",
                spent["num_runs"],
                "infinite" if by["pld"] is None else f"{by['pld']:.4g}",
                spent["target_delta"],
            )
        return best

    def _hp_search_setup(self, trial: Any) -> None:
        """Checks the arguments again, which a trial or the user may have changed since."""
        super()._hp_search_setup(trial)
        self.args.check()
        if self.args.gradient_accumulation_steps != 1:
            raise ValueError(
                "`gradient_accumulation_steps` must not be changed after the arguments were made, "
                f"got {self.args.gradient_accumulation_steps}; change `expected_batch_size`."
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The Trainer's schedule, or that of `optimizers` if it fits.

        Raises:
            ValueError: the given schedule was made before the learning rates were set.
        """
        if self.lr_scheduler is not None and self._rates_were_set:
            raise ValueError(
                "The schedule in `optimizers` was made before `head_learning_rate`, Muon or DP-muP "
                "gave tensors rates of their own; pass `optimizers=(optimizer, None)` with "
                "`lr_scheduler_type`, or override `create_scheduler`, which is called later."
            )
        return super().create_scheduler(num_training_steps, optimizer)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A fresh model in the precision that the arguments ask for."""
        model = super().call_model_init(trial)
        return model.to(torch.bfloat16) if self.args.bf16_weights else model
