"""Several runs of one trainer, and choices made by results: what they add to the record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.hyperparameter_search import default_hp_search_backend
from transformers.trainer_utils import HPSearchBackend, SaveStrategy

from hf_dpgrape.artifacts.record import finite, run_to_dict
from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.trainer_part import TrainerPart
from hf_dpgrape.privacy.ledger import RunLedger

logger = logging.getLogger(__name__)

_STOPPED = "a callback ended it"


class TellsEndsOfEpochs(TrainerCallback):
    """Tells the ledger that a callback ended an epoch, which the Trainer forgets at the next."""

    def __init__(self, ledger: Callable[[], RunLedger | None]) -> None:
        self._ledger = ledger

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks at the flags."""
        if (control.should_epoch_stop or control.should_training_stop) and (led := self._ledger()):
            led.end(_STOPPED)


class TuningMixin(TrainerPart):
    """The part of a private Trainer that tells the ledger where results may decide.

    Guarantees:
        Epsilon at a number of steps holds if that number was fixed beforehand. Where results may
        decide on the last step, or on the one that is kept, all planned steps count; and so do
        those of a run that ended before them, whatever ended it, and of every run before the
        present one in the total of a search.
    """

    args: DPGrapeTrainingArguments
    _ledger: RunLedger | None
    _recorded: Mapping[str, Any]
    _rates_were_set = False

    def _begin_run(self) -> None:
        """Forgets the flags of the run before, and warns of what epsilon does not cover."""
        self.control.should_training_stop = self.control.should_epoch_stop = False
        choices = self._choices_by_validation()
        if choices and self.args.validation_data_is_private is not False:
            logger.warning(
                "Evaluation data decide about %s: epsilon does not cover that choice if they are "
                "private (say so by `validation_data_is_private`).",
                " and ".join(choices),
            )

    def _told_ledger(self) -> RunLedger:
        """The ledger, told what the Trainer knows at this moment."""
        assert self._ledger is not None
        facts = {
            "early stopping": bool(self._early_stopping()),
            "the best checkpoint is kept": self._keeps_the_best(),
            "a search may prune it": self.hp_search_backend is not None,
        }
        for reason, is_so in facts.items():
            if is_so:
                self._ledger.results_may_decide(reason)
        if self.control.should_training_stop or self.control.should_epoch_stop:
            self._ledger.end(_STOPPED)
        return self._ledger

    def _keeps_the_best(self) -> bool:
        """Whether results decide which checkpoints there are, or which one is loaded."""
        args = self.args
        is_limited = args.save_total_limit is not None and args.eval_strategy != "no"
        return (
            args.load_best_model_at_end
            or args.save_strategy == SaveStrategy.BEST
            or (is_limited and args.metric_for_best_model is not None)
        )

    def _early_stopping(self) -> list[Any]:
        callbacks = self.callback_handler.callbacks
        return [c for c in callbacks if isinstance(c, EarlyStoppingCallback)]

    def _choices_by_validation(self) -> list[str]:
        """What the Trainer itself decides by metrics of the evaluation data."""
        args = self.args
        choices = {
            "the best checkpoint": self._keeps_the_best(),
            "when to stop": bool(self._early_stopping()),
            "the learning rate": args.lr_scheduler_type == "reduce_lr_on_plateau",
            "the hyperparameters": self.hp_search_backend is not None or self._num_runs() > 1,
        }
        return [name for name, is_made in choices.items() if is_made]

    def tuning_record(self) -> dict[str, Any]:
        """What `privacy.json` says about choices, and about all runs of this trainer."""
        return {
            "num_tuning_trials": self.args.num_tuning_trials,
            "validation_data_is_private": self.args.validation_data_is_private,
            "chosen_by_validation_data": self._choices_by_validation(),
            "all_runs": self._all_runs() if self._num_runs() > 1 else None,
        }

    def _num_runs(self) -> int:
        return 0 if self._ledger is None else len(self._ledger.runs)

    def _all_runs(self) -> dict[str, Any]:
        """The runs of this trainer, each with its whole plan, and what they spend together."""
        assert self._ledger is not None
        return {
            "num_runs": self._num_runs(),
            "target_delta": self._ledger.plan.target_delta,
            "epsilon_by_accountant": {
                name: finite(self._ledger.total_epsilon(name)) for name in self._ledger.accountants
            },
            "runs": [run_to_dict(run) for run in self._ledger.runs],
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
        if self._num_runs() > 1:
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
