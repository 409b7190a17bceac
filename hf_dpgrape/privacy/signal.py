"""How much of what examples agree on a plan lets through its noise: rules of thumb, no guarantees.

A clipped gradient has norm at most C. Where all examples pull into one direction, the mean gradient
of a step has length C there, and noise of standard deviation sigma C / B. Over T steps the first
adds up to T C, the second to sqrt(T) sigma C / B, so that at best

    signal_to_noise = sqrt(T) B / sigma.

The number of trained weights is not in it: more of them take noise into more directions, but a
prediction looks along those that its example shares with others. What a task has of it depends on
how far its examples agree: from a twentieth to a quarter of C in the runs below.

`LEAST_SIGNAL` and `LEAST_REACH` are from 130 settings of small runs, two seeds each, which
`benchmarks/little_signal.py` repeats: two balanced classes, far apart or near, a linear head (514
or 1,538 weights) or one of two layers (9,506), Adam under automatic clipping, batches from 8 to
256, 60 to 900 steps. Their accuracy, classes near and far apart: with a signal of 30 at most .55
and .75; with 300 .55 to .73 and .69 to .98 at the best rate; with a reach below 1 at most .55 and
.78, whatever the signal. So below either expect the majority class, or next to nothing more; above,
nothing is promised.
"""

from __future__ import annotations

import functools
import math

import scipy.optimize
import scipy.stats

#: Of `signal_to_noise`: with less, a classifier hardly differs from the majority class.
LEAST_SIGNAL = 30.0

#: Of `reach`: with less, the learning rate is too small for a new head to matter.
LEAST_REACH = 1.0

#: Numbers of steps that are looked at, the fewest first, and the largest sampling probability.
STEPS, MOST_PROB = (50, 100, 200), 0.5

#: Share of the most signal with which fewer examples are enough.
_ENOUGH = 0.9


def signal_to_noise(
    *, num_steps: int, expected_batch_size: float, noise_multiplier: float
) -> float:
    """The most that a direction's signal can be over its noise in a whole run.

    >>> signal_to_noise(num_steps=100, expected_batch_size=50, noise_multiplier=2.0)
    250.0
    """
    if noise_multiplier == 0:
        return math.inf
    return math.sqrt(num_steps) * expected_batch_size / noise_multiplier


def reach(*, sum_of_rates: float, expected_batch_size: float, noise_multiplier: float) -> float:
    """How far Adam can carry the weights along the signal, in a run that noise dominates.

    Its step divides by the gradient's size, which is that of the noise, sigma C / B: each step
    moves by at most its rate times B / sigma.

    Args:
        sum_of_rates: learning rates of all steps together.
        expected_batch_size: of a step.
        noise_multiplier: of the run.
    """
    if noise_multiplier == 0:
        return math.inf
    return sum_of_rates * expected_batch_size / noise_multiplier


def rough_noise_multiplier(
    *, target_epsilon: float, target_delta: float, sampling_prob: float, num_steps: int
) -> float:
    """The noise for an epsilon, by the central limit: to compare settings, never to train with.

    Many steps together are about one Gaussian mechanism with
    mu = q sqrt(T (exp(1 / sigma^2) - 1)) (Bu et al. 2020, arXiv 1911.11607, theorem 5).
    """
    mu = _gaussian_mu(target_epsilon, target_delta)
    return 1 / math.sqrt(math.log1p((mu / sampling_prob) ** 2 / num_steps))


@functools.lru_cache
def _gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu of a Gaussian mechanism that is (epsilon, delta)-DP (Dong et al. 2019)."""
    normal = scipy.stats.norm

    def excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        # The second term as one exponential: exp(epsilon) alone overflows.
        second = math.exp(epsilon + normal.logcdf(-epsilon / mu - mu / 2))
        return float(normal.cdf(-epsilon / mu + mu / 2)) - second - delta

    return math.exp(scipy.optimize.brentq(excess, math.log(1e-15), math.log(1e6)))


def best_batch(
    *, num_examples: int, target_epsilon: float, target_delta: float, max_epochs: float
) -> tuple[int, int]:
    """Expected batch and number of steps with much signal for their work.

    Of the settings that process at most `max_epochs * num_examples` examples, those with nine
    tenths of the most signal are good enough; of these the one with the most steps is taken, which
    gives an optimizer time, and among them that with the smallest batch.

    Args:
        num_examples: size of the training set.
        target_epsilon: of the whole run.
        target_delta: delta.
        max_epochs: how often an example may be drawn on average.

    Raises:
        ValueError: the numbers allow no run.
    """
    if num_examples < 1 or not 0 < max_epochs < math.inf:
        raise ValueError(
            "A run needs one example or more, and epochs that are positive and finite, got "
            f"`num_examples`={num_examples} and {max_epochs:g} epochs."
        )
    if not 0 < target_epsilon < math.inf or not 0 < target_delta < 1:
        raise ValueError(
            "`target_epsilon` must be positive and finite and `target_delta` between 0 and 1, got "
            f"{target_epsilon:g} and {target_delta:g}."
        )

    def signal(batch: int, num_steps: int) -> float:
        sigma = rough_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sampling_prob=batch / num_examples,
            num_steps=num_steps,
        )
        return signal_to_noise(
            num_steps=num_steps, expected_batch_size=batch, noise_multiplier=sigma
        )

    choices: list[tuple[float, int, int]] = []
    for num_steps in STEPS:
        most = num_examples * min(MOST_PROB, max_epochs / num_steps)
        while most >= 1:
            batch = _two_digits(int(most))
            choices.append((signal(batch, num_steps), num_steps, batch))
            most /= 1.25
    if not choices:  # a handful of examples
        return 1, max(1, int(num_examples * max_epochs))
    enough = _ENOUGH * max(choices)[0]
    _, steps, batch = min(
        (c for c in choices if c[0] >= enough), key=lambda choice: (-choice[1], choice[2])
    )
    return batch, steps


def _two_digits(number: int) -> int:
    """A number rounded down to two digits."""
    digits = str(number)
    return int(digits[:2].ljust(len(digits), "0"))
