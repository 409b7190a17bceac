"""Both halves of a width transfer: how to tune the proxy, and what the target then uses."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_dpgrape.hf.dpmup import WidthTransfer, width_transfer
from hf_dpgrape.hf.models import build_on_meta, load_config, new_head
from hf_dpgrape.privacy.accounting import composed_epsilon
from hf_dpgrape.privacy.plan import PrivacyPlan


@dataclass(frozen=True, kw_only=True)
class TransferRequest:
    """What the user asks for.

    Attributes:
        base: folder, config.json or Hub name of the narrow model.
        target: the same of the wide one.
        task: head, as "causal-lm"; "auto" for the configuration's own.
        optim: value of the argument `optim`.
        rank: rank of the projection at the target; 0 for none.
        base_rank: rank at the proxy.
        projection_scale: standard deviation of the projection's entries, at both.
        learning_rate: the rate that was tuned on the proxy; None before tuning.
        num_tuning_trials: private runs on the proxy.
    """

    base: str
    target: str
    task: str = "auto"
    optim: str = "adamw_torch"
    rank: int = 16
    base_rank: int | None = None
    projection_scale: str = "1/sqrt(r)"
    learning_rate: float | None = None
    num_tuning_trials: int = 10


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """What to use at both widths, and what it spends.

    Attributes:
        request: what was asked for.
        plan: the target's plan.
        width: the transfer.
    """

    request: TransferRequest
    plan: PrivacyPlan
    width: WidthTransfer

    @property
    def base_rank(self) -> int:
        """Rank of the projection at the proxy."""
        return self.request.rank if self.request.base_rank is None else self.request.base_rank

    @property
    def proxy_noise_multiplier(self) -> float:
        """Noise multiplier of the runs on the proxy."""
        return self.width.rules.noise_ratio * self.plan.noise_multiplier

    def epsilon(self, *, trials: int, targets: int) -> float:
        """What some runs on the same data spend together, by PLD at the plan's delta."""
        sampling, steps = self.plan.sampling, self.plan.num_steps
        on_proxy = (self.proxy_noise_multiplier, sampling, steps * trials)
        on_target = (self.plan.noise_multiplier, sampling, steps * targets)
        return composed_epsilon((on_proxy, on_target), delta=self.plan.target_delta)

    def proxy_arguments(self) -> dict[str, Any]:
        """Training arguments of the runs on the proxy, but for the rate that they look for."""
        return {
            "noise_multiplier": self.proxy_noise_multiplier,
            "clip_grouping": "layer",
            **self._common(),
            "rank": self.base_rank,
        }

    def target_arguments(self) -> dict[str, Any]:
        """Training arguments of the run on the target."""
        budget = "noise_multiplier" if self.plan.target_epsilon is None else "target_epsilon"
        arguments = {
            budget: getattr(self.plan, budget),
            "dpmup_base_model": self.request.base,
            **self._common(),
            "rank": self.request.rank,
        }
        if self.base_rank != self.request.rank:
            arguments["dpmup_base_rank"] = self.base_rank
        if self.request.learning_rate is not None:
            arguments["learning_rate"] = self.request.learning_rate
        return arguments

    def _common(self) -> dict[str, Any]:
        bound = self.plan.max_logical_batch_size
        return {
            "clipping": "automatic",
            "optim": self.request.optim,
            "projection_scale": self.request.projection_scale,
            "expected_batch_size": self.plan.expected_batch_size,
            "max_steps": self.plan.num_steps,
            "target_delta": self.plan.target_delta,
            **({} if bound is None else {"max_logical_batch_size": bound}),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "proxy": {
                "arguments": self.proxy_arguments(),
                "epsilon_per_trial": self.epsilon(trials=1, targets=0),
                "num_tuning_trials": self.request.num_tuning_trials,
                "epsilon_of_trials": self.epsilon(trials=self.request.num_tuning_trials, targets=0),
            },
            "target": {
                "arguments": self.target_arguments(),
                "noise_multiplier": self.plan.noise_multiplier,
                "epsilon": self.epsilon(trials=0, targets=1),
                "clip_shares": dict(self.width.rules.clip_shares),
                "rate_ratios": dict(self.width.rules.rate_ratios),
            },
            "epsilon_of_all": self.epsilon(trials=self.request.num_tuning_trials, targets=1),
            "conventions": list(self.width.conventions),
        }


def transfer_report(request: TransferRequest, plan: PrivacyPlan) -> TransferReport:
    """The report on a request.

    Args:
        request: the two models and the settings.
        plan: the target's plan; its clip shares are not used.

    Raises:
        ValueError: a configuration cannot be found, the two have no layer in common, or there is
            no rule for the optimizer.
    """
    if request.num_tuning_trials < 1:
        raise ValueError(f"`num_tuning_trials` must be 1 or more, got {request.num_tuning_trials}.")
    for rank in (request.rank, request.base_rank):
        if rank is not None and rank < 0:
            raise ValueError(f"A rank must be 0 (no projection) or positive, got {rank}.")
    model = build_on_meta(load_config(request.target), request.task)
    width = width_transfer(
        model,
        build_on_meta(load_config(request.base), request.task),
        base_model=request.base,
        optim=request.optim,
        rank=request.rank,
        proxy_rank=request.base_rank,
        projection_scale=request.projection_scale,  # type: ignore[arg-type]
        head=new_head(model),
    )
    return TransferReport(request=request, plan=plan, width=width)


def write_preset(report: TransferReport, path: str) -> None:
    """Writes the target's arguments as a preset, `script.py preset.yaml`.

    Raises:
        ValueError: the file cannot be written.
    """
    lines = [
        f"# DP-muP from {report.request.base} to {report.request.target}; tuned under noise "
        f"multiplier {report.proxy_noise_multiplier:.6g} with `clip_grouping: layer`."
    ]
    arguments = {**_model_arguments(report.request.target), **report.target_arguments()}
    if "learning_rate" not in arguments:
        lines.append("# Add `learning_rate`: the best one of the proxy, as it is.")
    text = "\n".join(lines) + "\n" + yaml.safe_dump(arguments, sort_keys=False)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"`output`={path!r} cannot be written ({error.strerror}).") from error


def _model_arguments(target: str) -> dict[str, Any]:
    """How our scripts make the model: from its checkpoint, or new and in muP."""
    is_local = Path(target).exists()
    if is_local and not any(Path(target).glob("*.safetensors*")):
        return {"config_name": target, "mup_init": True}
    return {"model_name_or_path": target}


def similar_layers(width: WidthTransfer) -> list[tuple[str, int, float, float]]:
    """Layers that share a kind and all numbers: first name, how many, clip share, rate ratio."""
    rows: dict[tuple[Any, ...], list[str]] = {}
    for name, layer in width.layers.items():
        share, ratio = width.rules.clip_shares[name], width.rules.rate_ratios[name]
        rows.setdefault((layer.shape, round(share, 9), round(ratio, 9)), []).append(name)
    return [(names[0], len(names), key[1], key[2]) for key, names in rows.items()]


def command_line(arguments: dict[str, Any]) -> str:
    """Arguments as they are typed."""
    return " ".join(f"--{name} {_typed(value)}" for name, value in arguments.items())


def _typed(value: Any) -> str:
    return shlex.quote(f"{value:.7g}" if isinstance(value, float) else str(value))
