"""The optimizer of a Trainer: passed by the user, or one of transformers' or of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import Trainer

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.methods import refuse_given_optimizer
from hf_dpgrape.hf.rates import own_optimizer
from hf_dpgrape.hf.trained_run import TrainedRun
from hf_dpgrape.privacy.plan import PrivacyPlan


class GivenOptimizer:
    """What a trainer was given as its optimizer when it was made, if anything.

    Args:
        trainer: the trainer, just made.
        args: its arguments.

    Attributes:
        name: class of the optimizer that was passed, as an object or as a class with arguments;
            None without one.

    Raises:
        ValueError: the method has an optimizer of its own.
    """

    def __init__(self, trainer: Trainer, args: DPGrapeTrainingArguments) -> None:
        self._trainer = trainer
        self.name: str | None = None
        if trainer.optimizer is not None:
            self.name = type(trainer.optimizer).__name__
        elif trainer.optimizer_cls_and_kwargs is not None:
            self.name = trainer.optimizer_cls_and_kwargs[0].__name__
        refuse_given_optimizer(args, self.name)

    def drop_(self) -> None:
        """Makes the trainer forget optimizer and schedule of the run before.

        Raises:
            ValueError: the user passed that optimizer, so there is no other to make.
        """
        if self.name is not None and self._trainer.optimizer_cls_and_kwargs is None:
            raise ValueError(
                "The optimizer that was passed belongs to the run before; resume with a new "
                "trainer and a new optimizer."
            )
        self._trainer.optimizer = self._trainer.lr_scheduler = None

    @contextmanager
    def or_own(self, args: DPGrapeTrainingArguments, plan: PrivacyPlan) -> Iterator[None]:
        """Meanwhile the trainer makes what was passed, else an optimizer of this package.

        It holds for one run: the next one's noise and rates may differ.

        Args:
            args: the arguments, which may name such an optimizer.
            plan: of the run.
        """
        given = self._trainer.optimizer_cls_and_kwargs
        self._trainer.optimizer_cls_and_kwargs = given or own_optimizer(args, plan)
        try:
            yield
        finally:
            self._trainer.optimizer_cls_and_kwargs = given

    def refuse_early_schedule(self, run: TrainedRun | None) -> None:
        """Refuses a schedule that was made for other rates.

        Args:
            run: the present one, in which tensors may have been given rates of their own.

        Raises:
            ValueError: the given schedule was made before the learning rates were set.
        """
        is_early = run is not None and run.rates_were_set
        if self._trainer.lr_scheduler is not None and is_early:
            raise ValueError(
                "The schedule in `optimizers` was made before `head_learning_rate`, Muon or DP-muP "
                "gave tensors rates of their own; pass `optimizers=(optimizer, None)` with "
                "`lr_scheduler_type`, or override `create_scheduler`, which is called later."
            )
