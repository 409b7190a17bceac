"""Estimators by name, one row each."""

from __future__ import annotations

from collections.abc import Callable

from hf_dpgrape.mechanism.estimators.backward import backward
from hf_dpgrape.mechanism.estimators.base import Made, Setup
from hf_dpgrape.mechanism.estimators.galore import galore
from hf_dpgrape.mechanism.estimators.zeroth_order import zeroth_order

#: Names of estimators.
BACKWARD, ZEROTH_ORDER, GALORE = "backward", "zeroth_order", "galore"

#: By value of the argument `estimator`.
ESTIMATORS: dict[str, Callable[[Setup], Made]] = {
    BACKWARD: backward,
    ZEROTH_ORDER: zeroth_order,
    GALORE: galore,
}


def make_estimator(setup: Setup) -> Made:
    """The estimator that the setup's arguments name.

    Raises:
        ValueError: there is none of that name, or it does not fit the plan.
    """
    name = setup.arguments.estimator
    if name not in ESTIMATORS:
        raise ValueError(f"Expected `estimator` to be one of {list(ESTIMATORS)}, got {name!r}.")
    return ESTIMATORS[name](setup)
