"""Several runs of one trainer, and choices made by results: what they add to the record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl
from transformers.hyperparameter_search import default_hp_search_backend
from transformers.trainer_utils import HPSearchBackend, SaveStrategy

from hf_dpgrape.artifacts.record import finite
from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.privacy.ledger import RunLedger, run_to_dict

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


class Choices:
    """What results decide about in a trainer as it is now, and what several of its runs spend.

    Guarantees:
        Epsilon at a number of steps holds if that number was fixed beforehand. Where results may
        decide on the last step, or on the one that is kept, all planned steps count; and so do
        those of a run that ended before them, whatever ended it, and of every run before the
        present one in the total of a search.

    Args:
        args: the trainer's arguments.
        callbacks: the trainer's callbacks.
        is_search: whether a search of hyperparameters is on.
        has_searched: whether there was one, whose outcome the present run may have.
        ledger: of the trainer's runs; None without a training set.
    """

    def __init__(
        self,
        args: DPGrapeTrainingArguments,
        callbacks: Sequence[TrainerCallback],
        *,
        is_search: bool,
        has_searched: bool = False,
        ledger: RunLedger | None,
    ) -> None:
        self._args = args
        self._has_searched = has_searched or is_search
        self._is_search = is_search
        self._ledger = ledger
        self._stops_early = any(isinstance(c, EarlyStoppingCallback) for c in callbacks)

    def tell(self, control: TrainerControl) -> RunLedger:
        """The ledger, told what is known at this moment.

        Args:
            control: the flags by which callbacks end a run or an epoch.
        """
        assert self._ledger is not None
        facts = {
            "early stopping": self._stops_early,
            "the best checkpoint is kept": self._keeps_the_best(),
            "a search may prune it": self._is_search,
        }
        for reason, is_so in facts.items():
            if is_so:
                self._ledger.results_may_decide(reason)
        if control.should_training_stop or control.should_epoch_stop:
            self._ledger.end(_STOPPED)
        return self._ledger

    def _keeps_the_best(self) -> bool:
        """Whether results decide which checkpoints there are, or which one is loaded."""
        args = self._args
        is_limited = args.save_total_limit is not None and args.eval_strategy != "no"
        return (
            args.load_best_model_at_end
            or args.save_strategy == SaveStrategy.BEST
            or (is_limited and args.metric_for_best_model is not None)
        )

    def by_validation(self) -> list[str]:
        """What the Trainer itself decides by metrics of the evaluation data."""
        choices = {
            "the best checkpoint": self._keeps_the_best(),
            "when to stop": self._stops_early,
            "the learning rate": self._args.lr_scheduler_type == "reduce_lr_on_plateau",
            "the hyperparameters": self._has_searched,
        }
        return [name for name, is_made in choices.items() if is_made]

    def warn_of_validation(self) -> None:
        """Says what epsilon does not cover."""
        choices = self.by_validation()
        if choices and self._args.validation_data_is_private is not False:
            logger.warning(
                "Evaluation data decide about %s: epsilon does not cover that choice if they are "
                "private (say so by `validation_data_is_private`).",
                " and ".join(choices),
            )

    def record(self) -> dict[str, Any]:
        """What `privacy.json` says about choices, and about all runs of this trainer."""
        return {
            "num_tuning_trials": self._args.num_tuning_trials,
            "validation_data_is_private": self._args.validation_data_is_private,
            "chosen_by_validation_data": self.by_validation(),
            "all_runs": self._all_runs() if self._num_runs() > 1 else None,
        }

    def warn_of_total(self) -> None:
        """Says what several runs spend together."""
        if self._num_runs() > 1:
            spent = self._all_runs()
            by = spent["epsilon_by_accountant"]
            logger.warning(
                "%d runs on the same data have spent epsilon=%s together, at delta=%g (PLD).",
                spent["num_runs"],
                "infinite" if by["pld"] is None else f"{by['pld']:.4g}",
                spent["target_delta"],
            )

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


def search_arguments(
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    compute_objective: Callable[[dict[str, float]], float] | None = None,
    n_trials: int = 20,
    direction: str | list[str] = "minimize",
    backend: Any = None,
    hp_name: Callable[[Any], str] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The arguments of `Trainer.hyperparameter_search` by name, for trials that are added up.

    Raises:
        ValueError: trials would run in other processes, or at the same time.
    """
    return {
        "hp_space": hp_space,
        "compute_objective": compute_objective,
        "n_trials": n_trials,
        "direction": direction,
        "backend": _search_backend(backend, kwargs.get("n_jobs", 1)),
        "hp_name": hp_name,
        **kwargs,
    }


def _search_backend(backend: Any, num_jobs: int) -> HPSearchBackend:
    """The backend of a search, whose trials are added up.

    Raises:
        ValueError: trials would run in other processes, or at the same time.
    """
    chosen = HPSearchBackend(backend or default_hp_search_backend() or HPSearchBackend.OPTUNA)
    if chosen == HPSearchBackend.RAY:
        raise ValueError(
            "`backend='ray'` runs trials in other processes, where nobody adds up what they "
            "spend; use `backend='optuna'`."
        )
    if num_jobs != 1:
        raise ValueError(
            f"`n_jobs` must be 1, got {num_jobs}: trials at the same time would share this trainer."
        )
    return chosen
