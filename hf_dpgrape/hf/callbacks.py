"""What a private run shows while it runs: epsilon beside the steps of the progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import ProgressCallback, Trainer

#: How often epsilon is computed anew in a run; it takes up to a third of a second each time.
_NUM_UPDATES = 50


class EpsilonProgressCallback(ProgressCallback):
    """The Trainer's progress bar over optimizer steps in a terminal, with the epsilon spent.

    Args:
        epsilon_at: epsilon that counts after a number of steps.
    """

    def __init__(self, epsilon_at: Callable[[int], float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._is_shown = False
        self._epsilon_at = epsilon_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar; from time to time shows epsilon at the step until which it then stands."""
        super().on_step_end(args, state, control, **kwargs)  # type: ignore[no-untyped-call]
        every = max(1, state.max_steps // _NUM_UPDATES)
        step = state.global_step
        is_due = not self._is_shown or step % every == 0 or step == state.max_steps
        if self.training_bar is not None and is_due:
            until = min(step - step % every + every - 1, state.max_steps)
            self.training_bar.set_postfix_str(
                f"epsilon {'=' if until == step else '<='} {self._epsilon_at(until):.4g}"
            )
            self._is_shown = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the bar."""
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]
        self._is_shown = False


def show_epsilon(trainer: Trainer, epsilon_at: Callable[[int], float]) -> None:
    """Exchanges the stock progress bar of a trainer, if it has one; that of a notebook stays."""
    callbacks = trainer.callback_handler.callbacks
    for index, callback in enumerate(callbacks):
        if type(callback) is ProgressCallback:
            callbacks[index] = EpsilonProgressCallback(epsilon_at, max_str_len=callback.max_str_len)
