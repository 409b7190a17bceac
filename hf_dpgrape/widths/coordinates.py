"""Coordinate check: a few private steps at several widths, and what they did to every layer.

If rates transfer, a step changes activations as much in a wide model as in a narrow one: the
slope of log(change) against log(width) is near 0 (Yang et al. 2022, arXiv 2203.03466, appendix D;
here with private steps). The runs are those of `DPGrapeTrainer`, on random inputs.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hf_dpgrape.arguments import DPGrapeTrainingArguments
from hf_dpgrape.dpmup import width_transfer
from hf_dpgrape.inspection import build_model, build_on_meta, load_config
from hf_dpgrape.mup.initialization import initialize_mup_
from hf_dpgrape.mup.rules import LayerShape
from hf_dpgrape.mup.shapes import layers_of
from hf_dpgrape.plots import new_figure
from hf_dpgrape.trainer import DPGrapeTrainer

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

_NUM_EXAMPLES, _BATCH_SIZE, _LENGTH, _NUM_PATTERNS = 256, 64, 12, 8


@dataclass(frozen=True, kw_only=True)
class CoordinateSetting:
    """What is run.

    Attributes:
        model: folder, config.json or Hub name of the narrow model.
        task: head, as "causal-lm"; "auto" for the configuration's own.
        factors: widths over the narrow one's, ascending from 1.
        optim: value of the argument `optim`.
        rank: rank of the projection; 0 for none.
        learning_rate: at factor 1, and everywhere in the standard parametrization.
        noise_multiplier: at the widest.
        num_steps: private steps of a run.
        update_proj_gap: steps between projections; 0 for one.
    """

    model: str
    task: str = "auto"
    factors: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    optim: str = "adamw_torch"
    rank: int = 0
    learning_rate: float = 2**-6
    noise_multiplier: float = 1.0
    num_steps: int = 8
    update_proj_gap: int = 0

    def __post_init__(self) -> None:
        """Refuses what gives no slope."""
        ascending = sorted(set(self.factors))
        if self.factors != ascending or len(ascending) < 2 or ascending[0] != 1:
            raise ValueError(
                "`factors` must be different, ascending and start with 1, got "
                f"{self.factors}; 1 2 4 8 for instance."
            )
        if self.num_steps < 1:
            raise ValueError(f"`steps` must be 1 or more, got {self.num_steps}.")


@dataclass(frozen=True)
class CoordinateReport:
    """Changes of activations and weights, by parametrization, quantity, layer and width.

    Attributes:
        setting: what was run.
        layers: names of the layers, in the model's order.
        values: (method, "activation" or "update", layer) -> one value per factor.
        notes: what to know when reading it.
    """

    setting: CoordinateSetting
    layers: list[str]
    values: dict[tuple[str, str, str], list[float]]
    notes: list[str] = field(default_factory=list)

    def slope(self, method: str, quantity: str, layer: str) -> float | None:
        """Slope of log(value) over log(factor); None where there is no value."""
        values = self.values.get((method, quantity, layer))
        if values is None or not all(0 < v < math.inf for v in values):
            return None
        return float(np.polyfit(np.log(self.setting.factors), np.log(values), 1)[0])

    def largest_slope(self, method: str, quantity: str) -> float:
        """The slope that is farthest from 0, over all layers."""
        slopes = [self.slope(method, quantity, layer) for layer in self.layers]
        return max((s for s in slopes if s is not None), key=abs, default=math.nan)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "factors": self.setting.factors,
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


class _Patterns(Dataset[dict[str, Tensor]]):
    """Random inputs from a few patterns, whose label is the pattern."""

    def __init__(self, model: Any) -> None:
        config, g = model.config, torch.Generator().manual_seed(0)
        self.labels = torch.randint(_NUM_PATTERNS, (_NUM_EXAMPLES,), generator=g)
        if model.main_input_name == "pixel_values":
            size = config.image_size
            sides = size if isinstance(size, (list, tuple)) else (size, size)
            shape = (_NUM_PATTERNS, getattr(config, "num_channels", 3), *sides)
            patterns = torch.randn(shape, generator=g)
            self.inputs = {"pixel_values": patterns[self.labels]}
        else:
            patterns = torch.randint(config.vocab_size, (_NUM_PATTERNS, _LENGTH), generator=g)
            ids = patterns[self.labels]
            self.inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if type(model).__name__.endswith(("Classification", "Classifier")):
            self.inputs["labels"] = self.labels % config.num_labels
        else:
            self.inputs["labels"] = self.inputs["input_ids"]

    def __len__(self) -> int:
        return _NUM_EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.inputs.items()}

    def probe(self) -> dict[str, Tensor]:
        """One example of each pattern, without labels."""
        first = [int((self.labels == label).nonzero()[0]) for label in range(_NUM_PATTERNS)]
        return {name: tensor[first] for name, tensor in self.inputs.items() if name != "labels"}


def coordinate_check(setting: CoordinateSetting) -> CoordinateReport:
    """Runs all widths in both parametrizations.

    Raises:
        ValueError: the model cannot be built or trained privately.
    """
    config = load_config(setting.model)
    if any(getattr(config, name, None) for name in ("vision_config", "audio_config")):
        raise ValueError(
            "`coord-check` makes inputs for text and image models, got "
            f"{config.model_type!r}; check its text or vision part alone."
        )
    configs = [widened(config, factor) for factor in setting.factors]
    values: dict[tuple[str, str, str], list[float]] = {}
    notes: list[str] = []
    layers = list(layers_of(build_on_meta(config, setting.task)))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        noises = _noises(setting, configs)
        for method in METHODS:
            for wide, noise in zip(configs, noises, strict=True):
                model = build_seeded(wide, setting.task)
                if method == "dpmup":
                    notes = _initialize(model)
                used = noise if method == "dpmup" else setting.noise_multiplier
                for key, value in _changes(setting, method, model, used, folder).items():
                    values.setdefault((method, *key), []).append(value)
    if setting.rank:
        notes.append(
            "Norms are divided by the factor that noise in few directions adds to them, which "
            "outputs do not see: 1 + sqrt(n_out n_in / R) / (sqrt(n_out) + sqrt(n_in)), with R = "
            "rank x number of projections (docs/dpmup.md)."
        )
    return CoordinateReport(setting, layers, values, notes)


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
            proxy_rank=setting.rank,
            scale="1/sqrt(r)",
        ).rules.noise_ratio
        for model in models
    ]
    return [setting.noise_multiplier * ratios[-1] / ratio for ratio in ratios]


def _changes(
    setting: CoordinateSetting, method: str, model: Any, noise: float, base: str
) -> dict[tuple[str, str], float]:
    """What a private run changes: (quantity, layer) -> value."""
    data = _Patterns(model)
    layers = layers_of(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with _outputs(model, list(layers)) as old, torch.no_grad():
        model.eval()(**data.probe())
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPGrapeTrainingArguments(
            output_dir=folder,
            noise_multiplier=noise,
            target_delta=1e-5,
            clipping="automatic",
            clip_grouping="layer",
            dpmup_base_model=base if method == "dpmup" else None,
            expected_batch_size=_BATCH_SIZE,
            per_device_train_batch_size=2 * _BATCH_SIZE,
            max_steps=setting.num_steps,
            optim=setting.optim,
            learning_rate=setting.learning_rate,
            lr_scheduler_type="constant",
            rank=setting.rank,
            update_proj_gap=setting.update_proj_gap,
            accountant="rdp",
            unsafe_test_seed=0,  # the inputs are random numbers
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        _QuietTrainer(model=model, args=arguments, train_dataset=data).train()
    with _outputs(model, list(layers)) as new, torch.no_grad():
        model.eval()(**data.probe())
    found = {("activation", name): _rms(new[name] - old[name]) for name in old if name in new}
    for name, layer in layers.items():
        if layer.shape.kind != "vector":
            largest = max(layer.tensors, key=lambda n: before[n].numel())
            moved = model.get_parameter(largest).detach() - before[largest]
            found["update", name] = _update_norm(moved, layer.shape, setting)
    return found


class _QuietTrainer(DPGrapeTrainer):
    """Logs nothing: a check is not about losses."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Says nothing."""


def _update_norm(update: Tensor, shape: LayerShape, setting: CoordinateSetting) -> float:
    """Spectral norm of an update over sqrt(n_out / n_in); of a lookup, the RMS of its entries.

    For a projected matrix it is divided by what the projection adds to the norm of noise.
    """
    if shape.kind == "lookup":
        return _rms(update)
    norm = float(torch.linalg.matrix_norm(update.flatten(1), 2))
    norm /= math.sqrt(shape.n_out / shape.n_in)
    if not 0 < setting.rank < min(shape.n_out, shape.n_in):
        return norm
    gap = setting.update_proj_gap or setting.num_steps
    projected = dataclasses.replace(shape, rank=setting.rank)
    bound = projected.accumulated_noise_metric(math.ceil(setting.num_steps / gap))
    return norm * shape.accumulated_noise_metric(1) / bound


def _rms(tensor: Tensor) -> float:
    return float(tensor.float().square().mean().sqrt())


@contextmanager
def _outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Collects the first output of some modules during a forward pass."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and name not in found:
                found[name] = first.detach().clone()

        return hook

    handles = [model.get_submodule(n).register_forward_hook(keep(n)) for n in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


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
                if values and all(v > 0 for v in values):
                    axis.plot(report.setting.factors, values, ".-", color=color, lw=1)
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
