"""Coordinate check: a few private steps at several widths, and what they did to every layer.

If rates transfer, a step changes activations as much in a wide model as in a narrow one: the
slope of log(change) against log(width) is near 0 (Yang et al. 2022, arXiv 2203.03466, appendix D;
here with private steps). The runs are those of `DPGrapeTrainer`, on random inputs.
"""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hf_dpgrape.artifacts.plots import new_figure
from hf_dpgrape.commands.width.changes import RunSetting, changes_of_a_run
from hf_dpgrape.hf.dpmup import width_transfer
from hf_dpgrape.hf.models import build_model, build_on_meta, load_config
from hf_dpgrape.width.initialization import initialize_mup_
from hf_dpgrape.width.shapes import layers_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Parametrizations that are compared.
METHODS = {"dpmup": "DP-muP", "standard": "standard"}

#: Sizes in configurations that grow with the width; numbers of heads do, so that heads keep theirs.
_WIDTHS = (
    *("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"),
    *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim"),
    *("decoder_ffn_dim", "num_attention_heads", "n_head", "n_heads", "num_heads"),
    *("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"),
)


@dataclass(frozen=True, kw_only=True)
class CoordinateSetting(RunSetting):
    """What is run.

    Attributes:
        models: folder, config.json or Hub name of the narrow model, whose widths over it are
            `factors`; or checkpoints of several widths, from narrow to wide, with their weights.
        task: head, as "causal-lm"; "auto" for the configuration's own.
        factors: widths over the narrow one's, ascending from 1; not used with checkpoints.
        noise_multiplier: at the widest.
    """

    models: list[str]
    task: str = "auto"
    factors: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    noise_multiplier: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what gives no slope."""
        super().__post_init__()
        ascending = sorted(set(self.factors))
        if self.factors != ascending or len(ascending) < 2 or ascending[0] != 1:
            raise ValueError(
                "`factors` must be different, ascending and start with 1, got "
                f"{self.factors}; 1 2 4 8 for instance."
            )


@dataclass(frozen=True)
class CoordinateReport:
    """Changes of activations and weights, by parametrization, quantity, layer and width.

    Attributes:
        setting: what was run.
        factors: widths over the narrow model's.
        layers: names of the layers, in the model's order.
        values: (method, "activation" or "update", layer) -> one value per factor.
        notes: what to know when reading it.
    """

    setting: CoordinateSetting
    factors: list[float]
    layers: list[str]
    values: dict[tuple[str, str, str], list[float]]
    notes: list[str] = field(default_factory=list)

    def slope(self, method: str, quantity: str, layer: str) -> float | None:
        """Slope of log(value) over log(factor); None where there is no value."""
        values = self.values.get((method, quantity, layer))
        if values is None or len(values) != len(self.factors):
            return None
        if not all(0 < v < math.inf for v in values):
            return None
        return float(np.polyfit(np.log(self.factors), np.log(values), 1)[0])

    def largest_slope(self, method: str, quantity: str) -> float:
        """The slope that is farthest from 0, over all layers."""
        slopes = [self.slope(method, quantity, layer) for layer in self.layers]
        return max((s for s in slopes if s is not None), key=abs, default=math.nan)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "factors": self.factors,
            "slopes": {
                method: {
                    quantity: {name: self.slope(method, quantity, name) for name in self.layers}
                    for quantity in ("activation", "update")
                }
                for method in METHODS
            },
            "notes": self.notes,
        }


def widened(config: Any, factor: int) -> Any:
    """A configuration with `factor` times the width, by more heads of the same size."""
    wide = copy.deepcopy(config)
    for name in _WIDTHS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            setattr(wide, name, factor * value)
    return wide


@dataclass(frozen=True)
class _Width:
    """A model at one width."""

    factor: float
    config: Any
    make: Callable[[], Any]


def coordinate_check(setting: CoordinateSetting) -> CoordinateReport:
    """Runs all widths in both parametrizations.

    Raises:
        ValueError: a model cannot be built or trained privately.
    """
    is_pretrained = len(setting.models) > 1
    widths = _checkpoints(setting) if is_pretrained else _widened(setting)
    values: dict[tuple[str, str, str], list[float]] = {}
    notes: list[str] = []
    layers = list(layers_of(build_on_meta(widths[0].config, setting.task)))
    with tempfile.TemporaryDirectory() as folder:
        widths[0].config.save_pretrained(folder)
        noises = _noises(setting, [width.config for width in widths])
        for method in METHODS:
            for width, noise in zip(widths, noises, strict=True):
                model = width.make()
                is_dpmup = method == "dpmup"
                if is_dpmup and not is_pretrained:
                    notes = _initialize(model)
                found = changes_of_a_run(
                    model,
                    setting,
                    noise_multiplier=noise if is_dpmup else setting.noise_multiplier,
                    dpmup_base_model=folder if is_dpmup else None,
                )
                for key, value in found.items():
                    values.setdefault((method, *key), []).append(value)
    if setting.rank:
        notes.append(
            "Norms are divided by the factor that noise in few directions adds to them, which "
            "outputs do not see: 1 + sqrt(n_out n_in / R) / (sqrt(n_out) + sqrt(n_in)), with R = "
            "rank x number of projections (docs/dpmup.md)."
        )
    return CoordinateReport(setting, [w.factor for w in widths], layers, values, notes)


def _widened(setting: CoordinateSetting) -> list[_Width]:
    """The model of one configuration with random weights, at several times its width."""
    (source,) = setting.models
    configs = [widened(_supported(source), factor) for factor in setting.factors]
    ends = [build_on_meta(config, setting.task) for config in (configs[0], configs[-1])]
    sizes = [{n: layer.shape for n, layer in layers_of(end).items()} for end in ends]
    if sizes[0] == sizes[1]:
        raise ValueError(
            f"Expected a model with one width to grow, such as `hidden_size`, but none of "
            f"{configs[0].model_type!r} is known; give checkpoints of several widths."
        )
    makes = [functools.partial(build_seeded, config, setting.task) for config in configs]
    return [_Width(*args) for args in zip(setting.factors, configs, makes, strict=True)]


def _checkpoints(setting: CoordinateSetting) -> list[_Width]:
    """Checkpoints of several widths."""
    configs = [_supported(source) for source in setting.models]
    sizes = [config.get_text_config().hidden_size for config in configs]
    if sizes != sorted(set(sizes)):
        raise ValueError(
            "Expected checkpoints of different widths from narrow to wide, got hidden sizes "
            f"{sizes}; give one configuration to have it widened."
        )
    kinds = [type(build_on_meta(config, setting.task)) for config in configs]
    makes = [
        functools.partial(kind.from_pretrained, source, dtype=torch.float32)  # type: ignore[attr-defined]
        for kind, source in zip(kinds, setting.models, strict=True)
    ]
    factors = [size / sizes[0] for size in sizes]
    return [_Width(*args) for args in zip(factors, configs, makes, strict=True)]


def _supported(source: str) -> Any:
    """A configuration of which inputs can be made."""
    config = load_config(source)
    if any(getattr(config, name, None) for name in ("vision_config", "audio_config")):
        raise ValueError(
            "`coord-check` makes inputs for text and image models, got "
            f"{config.model_type!r}; check its text or vision part alone."
        )
    return config


def build_seeded(config: Any, task: str) -> nn.Module:
    """A model on the CPU with the same random weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_model(config, task, device="cpu")


def _initialize(model: nn.Module) -> list[str]:
    """Puts a model into muP where that is possible; what to know otherwise."""
    try:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            initialize_mup_(model)
    except ValueError as error:
        return [f"Weights are initialized as usual, not in muP. {error}"]
    return []


def _noises(setting: CoordinateSetting, configs: list[Any]) -> list[float]:
    """Noise multipliers that keep the ratio of signal to noise, the last one as given."""
    models = [build_on_meta(config, setting.task) for config in configs]
    ratios = [
        width_transfer(
            model,
            models[0],
            optim=setting.optim,
            rank=setting.rank,
            head=frozenset(),
        ).rules.noise_ratio
        for model in models
    ]
    return [setting.noise_multiplier * ratios[-1] / ratio for ratio in ratios]


def plot(report: CoordinateReport) -> Figure:
    """Both quantities over the width, a line per layer, a column per parametrization."""
    import matplotlib

    figure = new_figure(10, 7)
    axes = figure.subplots(2, len(METHODS), sharex=True, sharey="row")
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, max(len(report.layers), 2)))
    titles = {"activation": "RMS change of the output", "update": "norm of the update, scaled"}
    for row, (quantity, title) in zip(axes, titles.items(), strict=True):
        for axis, (method, name) in zip(row, METHODS.items(), strict=True):
            for layer, color in zip(report.layers, colors, strict=False):
                values = report.values.get((method, quantity, layer))
                if values and report.slope(method, quantity, layer) is not None:
                    axis.plot(report.factors, values, ".-", color=color, lw=1)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_title(f"{name}: largest slope {report.largest_slope(method, quantity):+.2f}")
        row[0].set_ylabel(title)
    for axis in axes[-1]:
        axis.set_xlabel("width over the narrow model's")
    optimizer = f"{report.setting.optim}, {report.setting.num_steps} private steps"
    projected = f", rank {report.setting.rank}" if report.setting.rank else ""
    figure.suptitle(f"{optimizer}{projected}; a line per layer, inputs dark, outputs bright")
    return figure
