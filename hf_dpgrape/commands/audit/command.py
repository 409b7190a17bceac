"""`hf-dpgrape audit`: its arguments, its table and its picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hf_dpgrape.artifacts.plots import new_figure, save_figure
from hf_dpgrape.artifacts.record import finite
from hf_dpgrape.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_dpgrape.commands.audit.audited import Audit, Outcome

#: Claims of the runs that a picture compares.
_CLAIMS = (0.5, 1.0, 2.0, 4.0, 8.0)

#: Noise if neither it nor epsilon is given.
_NOISE = 3.0

#: Below, no guess could refute anything.
_FEWEST_CANARIES = 100

_NOTE = (
    "A lower bound shows faults, and proves no privacy: it stays below the truth, the further "
    "the fewer canaries there are. Every example is a canary, in or out by a fair coin."
)


def add_parser(commands: Any) -> None:
    """Adds the sub-command."""
    audit = commands.add_parser("audit", help="what a run with canaries gives away, at least")
    audit.set_defaults(run=run)
    add = audit.add_argument
    add("--access", default="gradients", help="gradients: all releases are seen; loss: the model")
    add("--num_canaries", type=int, default=4000, help="examples, all canaries (default: 4000)")
    add("--expected_batch_size", type=int, help="mean examples per step (default: half of them)")
    add("--max_steps", type=int, default=4, help="steps of the run (default: 4)")
    add("--target_epsilon", type=float, help="epsilon that is claimed, or:")
    add("--noise_multiplier", type=float, help=f"noise over clip norm (default: {_NOISE:g})")
    add("--target_delta", type=float, default=1e-5, help="delta (default: 1e-5)")
    add("--l2_clip_norm", type=float, default=1.0, help="clip norm (default: 1)")
    add("--secure_noise", action="store_true", help="draw the noise as `secure_noise` does")
    add("--confidence", type=float, default=0.95, help="of the lower bound (default: 0.95)")
    add("--plot", metavar="FILE.png", help="also draw claims of 0.5 to 8 against their bounds")


def run(arguments: argparse.Namespace) -> int:
    """Runs the sub-command; 1 if more is given away than is claimed."""
    # Here, so that other sub-commands start without torch.
    from hf_dpgrape.commands.audit.audited import audit

    noise, target = arguments.noise_multiplier, arguments.target_epsilon
    asked = _audit(arguments, target, _NOISE if noise is None and target is None else noise)
    if arguments.plot:
        new_figure(1, 1)  # refuses a missing matplotlib before the time is spent
    outcomes = [audit(asked)]
    if arguments.plot:
        outcomes += [audit(_audit(arguments, claim, None)) for claim in _CLAIMS]
        save_figure(_drawn(outcomes[1:], arguments.confidence), arguments.plot)
    report = _report(asked, outcomes[0])
    if arguments.json:
        further = {"settings": [_numbers(outcome) for outcome in outcomes[1:]]}
        print(json.dumps({**report, **further}, indent=2, allow_nan=False))
    else:
        Console().print(_table(report), _NOTE)
    return 1 if any(outcome.is_violation for outcome in outcomes) else 0


def _audit(
    arguments: argparse.Namespace, target_epsilon: float | None, noise_multiplier: float | None
) -> Audit:
    """The audit that is asked for.

    Raises:
        ValueError: the numbers describe no run, or no audit.
    """
    from hf_dpgrape.commands.audit.audited import Audit

    a = arguments
    if a.num_canaries < _FEWEST_CANARIES:
        raise ValueError(
            f"`num_canaries` must be at least {_FEWEST_CANARIES}, got {a.num_canaries}; some "
            "thousands find small faults."
        )
    plan = PrivacyPlan.calibrated(
        target_epsilon=target_epsilon,
        noise_multiplier=noise_multiplier,
        num_examples=a.num_canaries,
        expected_batch_size=a.expected_batch_size or a.num_canaries // 2,
        num_steps=a.max_steps,
        l2_clip_norm=a.l2_clip_norm,
        target_delta=a.target_delta,
        secure_noise=a.secure_noise,
    )
    return Audit(plan=plan, access=a.access, confidence=a.confidence)


def _numbers(outcome: Outcome) -> dict[str, Any]:
    """What one run claims, and what was found."""
    return {
        "claimed_epsilon": finite(outcome.claimed),
        "audited_epsilon": outcome.bound.epsilon,
        "num_guesses": outcome.bound.num_guesses,
        "num_correct": outcome.bound.num_correct,
        "is_violation": outcome.is_violation,
    }


def _report(of: Audit, outcome: Outcome) -> dict[str, Any]:
    """The audit and its outcome, as plain data."""
    plan = of.plan
    return {
        **_numbers(outcome),
        "target_delta": plan.target_delta,
        "confidence": of.confidence,
        "access": of.access,
        "num_canaries": plan.num_examples,
        "expected_batch_size": plan.expected_batch_size,
        "num_steps": plan.num_steps,
        "noise_multiplier": plan.noise_multiplier,
        "secure_noise": plan.secure_noise,
    }


def _table(report: dict[str, Any]) -> Table:
    table = Table(title="Audit of one run", show_header=False)
    claimed = report["claimed_epsilon"]
    rows = {
        "epsilon claimed": "infinite" if claimed is None else f"{claimed:.4g}",
        f"at least, with confidence {report['confidence']:g}": f"{report['audited_epsilon']:.4g}",
        "verdict": "VIOLATION: more is given away than is claimed"
        if report["is_violation"]
        else "no violation found",
        "delta": f"{report['target_delta']:g}",
        "guesses, right": f"{report['num_guesses']:,}, {report['num_correct']:,}",
        "canaries": f"{report['num_canaries']:,}",
        "access": report["access"],
        "expected batch, steps": f"{report['expected_batch_size']:,}, {report['num_steps']:,}",
        "noise multiplier": f"{report['noise_multiplier']:.4g}",
        "noise": "secure" if report["secure_noise"] else "float64",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _drawn(outcomes: Sequence[Outcome], confidence: float) -> Figure:
    """Claims against lower bounds, below the line on which they would be equal."""
    figure = new_figure(5.2, 4.4)
    axes = figure.subplots()
    claims = [outcome.claimed for outcome in outcomes]
    axes.plot([0, max(claims)], [0, max(claims)], "--", color="tab:gray", label="claimed")
    axes.plot(
        claims,
        [outcome.bound.epsilon for outcome in outcomes],
        "o-",
        color="tab:red",
        label=f"at least, with confidence {confidence:g}",
    )
    axes.set(xlabel="epsilon claimed", ylabel="epsilon", title="Audits of five runs")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
