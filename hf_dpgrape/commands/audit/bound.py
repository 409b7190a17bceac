"""What guesses about canaries say of epsilon (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846).

Each of m canaries is in the training set or not, by a fair coin of its own. After one run somebody
guesses some of these coins. Under (epsilon, delta)-DP few guesses can be right (theorem 5.2): the
number of right ones among r is at least v with probability at most

    P[Binomial(r, q) >= v] + 2 m delta alpha,    q = e^epsilon / (1 + e^epsilon),

    alpha = max over i >= 1 of P[v > Binomial(r, q) >= v - i] / i.

Where that is below 1 - confidence, an epsilon is refuted at this delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.special
import scipy.stats

Scores = npt.NDArray[np.float64]
Coins = npt.NDArray[np.bool_]

#: Shares of the canaries that are guessed to be in, and to be out: those of the highest and of the
#: lowest scores. They are fixed beforehand; the bounds share the error probability.
GUESSES: tuple[tuple[float, float], ...] = ((0.01, 0.01), (0.03, 0.0), (0.04, 0.04), (0.2, 0.2))

#: Largest epsilon that is looked at, and how finely.
_MOST_EPSILON, _TOLERANCE = 50.0, 1e-4


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound on epsilon.

    Attributes:
        epsilon: with the stated confidence, the mechanism has no smaller one at this delta.
        num_guesses: guesses that it comes from.
        num_correct: those that are right.
    """

    epsilon: float
    num_guesses: int
    num_correct: int


def p_value(
    *, num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, delta: float
) -> float:
    """Most probability of so many right guesses, or more, under (epsilon, delta)-DP.

    >>> round(p_value(num_canaries=100, num_guesses=10, num_correct=10, epsilon=0.0, delta=0.0), 6)
    0.000977
    """
    accuracy = float(scipy.special.expit(epsilon))
    counts = np.arange(num_correct - 1, -1, -1)
    below = np.cumsum(scipy.stats.binom.pmf(counts, num_guesses, accuracy))
    alpha = float(np.max(below / np.arange(1, num_correct + 1), initial=0.0))
    tail = float(scipy.stats.binom.sf(num_correct - 1, num_guesses, accuracy))
    return min(1.0, tail + 2 * num_canaries * delta * alpha)


def epsilon_refuted(
    *, num_canaries: int, num_guesses: int, num_correct: int, delta: float, error: float
) -> float:
    """The largest epsilon whose p-value is at most `error`; 0 if there is none.

    >>> of = {"num_canaries": 1000, "delta": 0.0, "error": 0.05}
    >>> round(epsilon_refuted(num_guesses=100, num_correct=100, **of), 2)
    3.49
    """

    def is_refuted(epsilon: float) -> bool:
        value = p_value(
            num_canaries=num_canaries,
            num_guesses=num_guesses,
            num_correct=num_correct,
            epsilon=epsilon,
            delta=delta,
        )
        return value <= error

    if not is_refuted(0.0):
        return 0.0
    lower, upper = 0.0, _MOST_EPSILON
    while upper - lower > _TOLERANCE:  # the p-value grows with epsilon
        middle = (lower + upper) / 2
        lower, upper = (middle, upper) if is_refuted(middle) else (lower, middle)
    return lower


def lower_bound(
    scores: Scores,
    coins: Coins,
    *,
    delta: float,
    confidence: float,
    guesses: Sequence[tuple[float, float]] = GUESSES,
) -> Bound:
    """The best bound of several ways of guessing.

    Guarantees:
        Under (epsilon, delta)-DP of what the scores were computed from, the bound exceeds epsilon
        with probability at most 1 - `confidence`.

    Args:
        scores: one per canary; higher where it is more likely in.
        coins: whether each was in.
        delta: of the statement.
        confidence: of all ways of guessing together (each has its share of the error).
        guesses: shares that are guessed to be in and to be out.
    """
    order, found = np.argsort(-scores, kind="stable"), []
    for share_in, share_out in guesses:
        num_in, num_out = (round(share * len(scores)) for share in (share_in, share_out))
        correct = coins[order[:num_in]].sum() + (~coins[order[len(order) - num_out :]]).sum()
        epsilon = epsilon_refuted(
            num_canaries=len(scores),
            num_guesses=num_in + num_out,
            num_correct=int(correct),
            delta=delta,
            error=(1 - confidence) / len(guesses),
        )
        found.append(Bound(epsilon=epsilon, num_guesses=num_in + num_out, num_correct=int(correct)))
    return max(found, key=lambda bound: bound.epsilon)
