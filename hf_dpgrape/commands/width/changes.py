"""A few private steps on random inputs, and what they changed in every layer of a model."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.trainer import DPGrapeTrainer
from hf_dpgrape.width.rules import LayerShape
from hf_dpgrape.width.shapes import layers_of

_NUM_EXAMPLES, _BATCH_SIZE, _LENGTH, _NUM_PATTERNS = 256, 64, 12, 8

_TARGETS = ("labels", "start_positions", "end_positions")


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """How a run is done.

    Attributes:
        optim: value of the argument `optim`.
        rank: rank of the projection; 0 for none.
        learning_rate: at the narrow model, and everywhere in the standard parametrization.
        num_steps: private steps.
        update_proj_gap: steps between projections; 0 for one.
    """

    optim: str = "adamw_torch"
    rank: int = 0
    learning_rate: float = 2**-6
    num_steps: int = 8
    update_proj_gap: int = 0

    def __post_init__(self) -> None:
        """Refuses what is no run."""
        if self.num_steps < 1:
            raise ValueError(f"`steps` must be 1 or more, got {self.num_steps}.")
        if self.rank < 0:
            raise ValueError(f"`rank` must be 0 (no projection) or positive, got {self.rank}.")


def changes_of_a_run(
    model: Any, run: RunSetting, *, noise_multiplier: float, dpmup_base_model: str | None
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
            noise_multiplier=noise_multiplier,
            target_delta=1e-5,
            clipping="automatic",
            clip_grouping="layer",
            dpmup_base_model=dpmup_base_model,
            expected_batch_size=_BATCH_SIZE,
            per_device_train_batch_size=2 * _BATCH_SIZE,
            max_steps=run.num_steps,
            optim=run.optim,
            learning_rate=run.learning_rate,
            lr_scheduler_type="constant",
            rank=run.rank,
            update_proj_gap=run.update_proj_gap,
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
            found["update", name] = _update_norm(moved, layer.shape, run)
    return found


class _QuietTrainer(DPGrapeTrainer):
    """Logs nothing: a check is not about losses."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Says nothing."""


def _update_norm(update: Tensor, shape: LayerShape, run: RunSetting) -> float:
    """Spectral norm of an update over sqrt(n_out / n_in); of a lookup, the RMS of its entries.

    For a projected matrix it is divided by what the projection adds to the norm of noise.
    """
    if shape.kind == "lookup":
        return _rms(update)
    norm = float(torch.linalg.matrix_norm(update.flatten(1), 2))
    norm /= math.sqrt(shape.n_out / shape.n_in)
    if not 0 < run.rank < min(shape.n_out, shape.n_in):
        return norm
    gap = run.update_proj_gap or run.num_steps
    projected = dataclasses.replace(shape, rank=run.rank)
    bound = projected.accumulated_noise_metric(math.ceil(run.num_steps / gap))
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
        self.inputs |= self._targets(type(model).__name__, config)
        self._is_seq2seq = bool(getattr(config, "is_encoder_decoder", False))

    def _targets(self, kind: str, config: Any) -> dict[str, Tensor]:
        """Labels that follow from the pattern, as the model's head takes them."""
        if kind.endswith("TokenClassification"):
            return {"labels": self.inputs["input_ids"] % config.num_labels}
        if kind.endswith("Classification"):
            return {"labels": self.labels % config.num_labels}
        if kind.endswith("QuestionAnswering"):
            position = self.labels % _LENGTH
            return {"start_positions": position, "end_positions": position}
        return {"labels": self.inputs["input_ids"]}

    def __len__(self) -> int:
        return _NUM_EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.inputs.items()}

    def probe(self) -> dict[str, Tensor]:
        """One example of each pattern, without labels."""
        first = [int((self.labels == label).nonzero()[0]) for label in range(_NUM_PATTERNS)]
        probe = {name: tensor[first] for name, tensor in self.inputs.items()}
        targets = {name: probe.pop(name) for name in _TARGETS if name in probe}
        if self._is_seq2seq:
            probe["decoder_input_ids"] = targets["labels"]
        return probe
