"""The ledger of a run: what the mechanism has released, and how much of it epsilon counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hf_dpgrape.privacy.accounting import Run, composed_epsilon
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.privacy.sampling.base import Accountant
from hf_dpgrape.privacy.sampling.table import sampling_of


class RunLedger:
    """Counts the releases of a run, and knows whether all planned ones have to count.

    The mechanism itself counts each release here, before it draws its noise: nobody tells it which
    step it is. Whoever states what was spent reads it here. Others tell facts only: that results
    may decide on a step, that the run has ended.

    Epsilon at a number of steps holds if that number was fixed beforehand. Where results may decide
    which step is the last, or which one is kept, all planned steps count (they were free to be
    taken), and so they do once a run has ended before them, whatever ended it.

    Guarantees:
        A run has at most `plan.num_steps` releases, the part that it was resumed from included,
        and its plan does not change after the first. `steps_counted()` is never below
        `num_releases`; all planned releases count from the first reason on, for good. Every
        earlier run with a release counts in `runs` with its whole plan.

    Args:
        plan: of the run.
        num_releases: those of the part before, for a run that is resumed.
        earlier_runs: whole runs before this one that are to be added up with it.

    >>> plan = PrivacyPlan(
    ...     num_examples=100,
    ...     expected_batch_size=10,
    ...     num_steps=3,
    ...     noise_multiplier=1.0,
    ...     l2_clip_norm=1.0,
    ...     target_delta=1e-5,
    ... )
    >>> ledger = RunLedger(plan)
    >>> ledger.count_release(), ledger.count_release(), ledger.steps_counted()
    (0, 1, 2)
    >>> ledger.results_may_decide("early stopping")
    >>> ledger.steps_counted()
    3
    """

    def __init__(
        self, plan: PrivacyPlan, *, num_releases: int = 0, earlier_runs: Iterable[Run] = ()
    ) -> None:
        _require_planned(num_releases, plan)
        self._plan = plan
        self._num_releases = num_releases
        self._earlier_runs = tuple(earlier_runs)
        self._reasons: tuple[str, ...] = ()

    # ---- The mechanism ---------------------------------------------------------------------

    def count_release(self) -> int:
        """Counts one release, which is about to be made; its index, from 0.

        Raises:
            RuntimeError: the planned steps are used up.
        """
        index, planned = self._num_releases, self._plan.num_steps
        if index >= planned:
            raise RuntimeError(
                f"The plan's {planned} steps are done; another step would spend more than "
                f"epsilon={self._plan.epsilon():.4g}. Plan a longer run from the start."
            )
        self._num_releases += 1
        return index

    # ---- Facts -----------------------------------------------------------------------------

    def results_may_decide(self, reason: str) -> None:
        """Notes that results may decide which step is the last, or which one is kept."""
        if reason not in self._reasons:
            self._reasons = (*self._reasons, reason)

    def end(self, reason: str) -> None:
        """Notes that the run takes no further steps; after the planned ones that says nothing."""
        if 0 < self._num_releases < self._plan.num_steps:
            self.results_may_decide(reason)

    def begin_run(self) -> None:
        """Turns to a fresh model; the run so far, if it released anything, becomes an earlier one.

        It counts there with its whole plan, as results may have ended it.
        """
        if self._num_releases:
            self._earlier_runs = self.runs
        self._num_releases, self._reasons = 0, ()

    def set_plan(self, plan: PrivacyPlan) -> None:
        """Plans the run anew, before its first release.

        Raises:
            ValueError: there were releases, and the plan differs.
        """
        if self._num_releases and (changed := plan.differences(self._plan)):
            raise ValueError(
                f"{self._num_releases} steps were taken under another plan: {'; '.join(changed)}. "
                "Restore these arguments, or start a new run (whose epsilon adds to what was "
                "spent)."
            )
        self._plan = plan

    def resume(
        self, num_releases: int, *, reasons: Iterable[str] = (), earlier_runs: Iterable[Run] = ()
    ) -> None:
        """Continues a run that was recorded after `num_releases`, under the same plan.

        Args:
            num_releases: what the record counts.
            reasons: why all planned steps count, as the record says.
            earlier_runs: whole runs that the record adds up with the run.

        Raises:
            ValueError: releases counted here are not in the record, so they would be repeated.
        """
        if num_releases < self._num_releases:
            raise ValueError(
                f"This trainer has taken {self._num_releases} steps, so continuing after step "
                f"{num_releases} would release some twice and count them once; resume from a later "
                "checkpoint, or in a new trainer, and add the repeated steps to what was spent."
            )
        _require_planned(num_releases, self._plan)
        self._num_releases = num_releases
        self._earlier_runs = (*earlier_runs, *self._earlier_runs)
        for reason in reasons:
            self.results_may_decide(reason)

    # ---- What is read ----------------------------------------------------------------------

    @property
    def plan(self) -> PrivacyPlan:
        """The plan of the run."""
        return self._plan

    @property
    def num_releases(self) -> int:
        """Releases of the run until now, one that was interrupted included."""
        return self._num_releases

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why all planned steps count; empty if those taken do."""
        return self._reasons

    @property
    def runs(self) -> tuple[Run, ...]:
        """The earlier runs and this one, each with its whole plan."""
        plan = self._plan
        run = (plan.noise_multiplier, plan.sampling, plan.num_steps)
        return (*self._earlier_runs, run)

    @property
    def accountants(self) -> tuple[Accountant, ...]:
        """Those that know how every run draws."""
        samplings = [sampling for _, sampling, _ in self.runs]
        return tuple(
            name
            for name in self._plan.sampling.accountants
            if all(name in sampling.accountants for sampling in samplings)
        )

    def steps_counted(self, num_releases: int | None = None) -> int:
        """Releases that epsilon counts now, or when there will have been `num_releases`."""
        if self._reasons:
            return self._plan.num_steps
        return self._num_releases if num_releases is None else num_releases

    def epsilon(
        self, num_releases: int | None = None, accountant: Accountant | None = None
    ) -> float:
        """Epsilon of the run at the plan's delta, now or at a number of releases."""
        return self._plan.epsilon(self.steps_counted(num_releases), accountant)

    def total_epsilon(self, accountant: Accountant) -> float:
        """Epsilon of all runs together, at the plan's delta."""
        return composed_epsilon(self.runs, delta=self._plan.target_delta, accountant=accountant)


def _require_planned(num_releases: int, plan: PrivacyPlan) -> None:
    """Refuses a number of releases that the plan does not have."""
    if not 0 <= num_releases <= plan.num_steps:
        raise ValueError(
            f"`num_releases` must be between 0 and the {plan.num_steps} planned steps, got "
            f"{num_releases}."
        )


def run_to_dict(run: Run) -> dict[str, Any]:
    """A run in the record of several, as plain data."""
    noise_multiplier, sampling, num_steps = run
    return {
        "noise_multiplier": noise_multiplier,
        **sampling.numbers(),
        "num_steps": num_steps,
    }


def run_from_dict(data: Mapping[str, Any]) -> Run:
    """The run that `run_to_dict` wrote."""
    return data["noise_multiplier"], sampling_of(data), data["num_steps"]
