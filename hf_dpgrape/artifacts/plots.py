"""Pictures: what a budget buys, and what a run has bought. They need matplotlib (`plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_dpgrape.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES: Mapping[str, Mapping[str, Any]] = {
    "pld": {"color": "tab:blue", "linestyle": "-"},
    "rdp": {"color": "tab:orange", "linestyle": "--"},
}

#: Points of a curve of epsilon; each takes up to a third of a second.
_NUM_POINTS = 14

#: Noise multipliers of a curve, over the plan's own.
_NOISE_RATIOS = [2 ** (i / 3) for i in range(-3, 7)]


def new_figure(width: float, height: float) -> Figure:
    """An empty figure.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("`plot` needs matplotlib; install `hf-dpgrape[plots]`.") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str) -> None:
    """Writes a picture; the file's ending says in which format.

    Raises:
        ValueError: there is no such folder or format.
    """
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ValueError(f"`plot`={path!r} cannot be written ({error.strerror}).") from error
    except ValueError as error:  # matplotlib lists the formats it knows
        raise ValueError(f"`plot`={path!r} cannot be written ({error}).") from error


def curve_steps(num_steps: int) -> list[int]:
    """Steps at which a curve of epsilon is drawn, from 0 on; dense where it bends.

    >>> curve_steps(4)
    [0, 1, 2, 3, 4]
    """
    steps = {round(num_steps * (i / _NUM_POINTS) ** 1.5) for i in range(_NUM_POINTS + 1)}
    return sorted(steps | {1})


def plot_budget(plan: PrivacyPlan, title: str) -> Figure:
    """Epsilon over the steps of a plan, and noise over the epsilon of a whole run."""
    figure = new_figure(10, 4.2)
    over_steps, over_epsilon = figure.subplots(1, 2)
    draw_epsilon(over_steps, plan, plan.num_steps)
    over_steps.set_title(f"spent during the run, at noise multiplier {plan.noise_multiplier:.4g}")

    sigmas = [ratio * plan.noise_multiplier for ratio in _NOISE_RATIOS]
    for name in plan.sampling.accountants:
        spent = [_with_noise(plan, sigma).epsilon(accountant=name) for sigma in sigmas]
        over_epsilon.plot(spent, sigmas, label=name.upper(), **_STYLES[name])
    spent_here = plan.epsilon(accountant="pld")
    over_epsilon.plot([spent_here], [plan.noise_multiplier], "o", color="tab:blue")
    over_epsilon.annotate(
        f"epsilon {spent_here:.3g}\nnoise {plan.noise_multiplier:.3g}",
        (spent_here, plan.noise_multiplier),
        xytext=(10, 8),
        textcoords="offset points",
    )
    over_epsilon.set(xscale="log", yscale="log", xlabel="epsilon", ylabel="noise multiplier")
    _plain_ticks(over_epsilon.xaxis)
    _plain_ticks(over_epsilon.yaxis)
    over_epsilon.set_title(f"what {plan.num_steps:,} steps cost")
    over_epsilon.legend(frameon=False)
    _tidy(over_epsilon)
    figure.suptitle(title, fontsize=10)
    return figure


def plot_run(
    plan: PrivacyPlan, num_steps: int, evaluations: Mapping[str, Sequence[tuple[int, float]]]
) -> Figure:
    """Metrics of a run's evaluations over its steps, above the epsilon spent until then."""
    figure = new_figure(8, 2.2 * len(evaluations) + 2.8)
    heights = [*(2.0 for _ in evaluations), 2.4]
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    for (name, points), (axes,) in zip(evaluations.items(), panels, strict=False):
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, "o-", color="tab:green", markersize=4)
        axes.annotate(
            f"{values[-1]:.4g}", (steps[-1], values[-1]), xytext=(6, 0), textcoords="offset points"
        )
        axes.set_ylabel(name)
        axes.margins(y=0.2)
        _tidy(axes)
    draw_epsilon(panels[-1][0], plan, num_steps)
    return figure


def draw_epsilon(axes: Any, plan: PrivacyPlan, num_steps: int) -> None:
    """Epsilon by the accountants of a plan over the first steps of a plan."""
    steps = curve_steps(num_steps)
    for name in plan.sampling.accountants:
        spent = [plan.epsilon(step, name) for step in steps]
        axes.plot(steps, spent, label=name.upper(), **_STYLES[name])
        axes.annotate(
            f"{spent[-1]:.3g}", (steps[-1], spent[-1]), xytext=(4, 0), textcoords="offset points"
        )
    axes.set(xlabel="optimizer steps", ylabel=f"epsilon at delta {plan.target_delta:g}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")
    _tidy(axes)


def _with_noise(plan: PrivacyPlan, sigma: float) -> PrivacyPlan:
    return PrivacyPlan.from_dict({**plan.to_dict(), "noise_multiplier": sigma})


def _plain_ticks(axis: Any) -> None:
    """Few round numbers in place of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
