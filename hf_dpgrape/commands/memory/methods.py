"""The training methods that are compared: each as one real step, cut into its phases."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_dpgrape.commands.memory.setting import Setting, make_batch, make_optimizer
from hf_dpgrape.commands.memory.tracking import Parts, num_bytes
from hf_dpgrape.gradients.forms import Form, PerSampleGradients
from hf_dpgrape.gradients.observation import observe_layouts
from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.gradients.recording import BATCHED
from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.hf.models import new_head
from hf_dpgrape.mechanism.private_step import PhysicalBatch
from hf_dpgrape.mechanism.private_training import PrivateTraining
from hf_dpgrape.mechanism.tensors import sites_or_problems
from hf_dpgrape.privacy.plan import BODY, PrivacyPlan
from hf_dpgrape.subspace.projection import Projection

#: Examples that layouts are observed on.
_NUM_OBSERVED = 3


class Method(Protocol):
    """One training step of a method, as it is after the first steps of a run.

    Attributes:
        model: what is trained.
        optimizer: what steps.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def tensors(self) -> list[Tensor | None]:
        """What exists between steps, the optimizer's state excepted."""

    def zero_gradients(self) -> None:
        """Puts gradients of zero where the optimizer looks for them."""

    def after_step(self) -> None:
        """What the Trainer does after a step: it drops the model's gradients."""

    def forward_backward(self, after_forward: Callable[[], None]) -> None:
        """Runs forward, `after_forward`, and backward with all that comes before the optimizer."""

    def parts(self) -> Parts:
        """Bytes that are held at the moment, by purpose; not the activations."""


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's state."""
    entries = (entry.values() for entry in optimizer.state.values())
    return [value for values in entries for value in values if isinstance(value, Tensor)]


def _weights(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


# ---- private -------------------------------------------------------------------------------


class _Watched(Recorder):
    """A recorder that lets one look at the gradients while they are taken."""

    gradients: PerSampleGradients | None = None

    @contextmanager
    def record(self, *args: Any, **kwargs: Any) -> Iterator[PerSampleGradients]:
        """As the recorder's own."""
        with super().record(*args, **kwargs) as self.gradients:
            yield self.gradients


class _Measured(PrivateTraining):
    """Private training on tensors that may be without storage, so that nothing is rehearsed.

    Args:
        model: the model.
        optimizer: on its parameters.
        setting: the setting.
        full_space: see `PrivateMethod`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, full_space: bool
    ) -> None:
        self._setting = setting
        self.after_forward: Callable[[], None] = lambda: None
        self._form: Form = "dense" if full_space else "auto"
        per_layer = setting.clip_grouping == "layer"
        names = [name for name, _ in model.named_parameters()]
        groups = {name: name.rpartition(".")[0] if per_layer else BODY for name in names}
        share = 1 / math.sqrt(len(set(groups.values())))
        plan = PrivacyPlan(
            num_examples=100 * setting.batch_size,
            expected_batch_size=setting.batch_size,
            num_steps=10**6,
            noise_multiplier=1.0,
            l2_clip_norm=1.0,
            target_delta=1e-5,
            clip_shares=dict.fromkeys(groups.values(), share),
        )
        super().__init__(
            model,
            optimizer,
            plan,
            PerSampleLoss(model),
            examples=range(plan.num_examples),
            capture=BATCHED,
            collate=dict,  # no example is drawn: the batch is given
            rank=0 if full_space else setting.rank,
            head=new_head(model),
            clip_groups=groups,
            seed=0,
        )

    def _losses_of(self, inputs: Mapping[str, Any]) -> Tensor:
        """Says when the forward pass has ended."""
        losses = super()._losses_of(inputs)
        self.after_forward()
        return losses

    def _recorder(
        self, capture: str, projections: Mapping[str, Projection]
    ) -> tuple[_Watched, bool]:
        """Sees the batch as shapes tell."""
        sites, problems = sites_or_problems(self.model)
        _refuse(self.model, problems)
        three = make_batch(self.model, self._setting, _NUM_OBSERVED)

        def forward(samples: list[int]) -> Tensor:
            return self._losses_of({key: value[samples] for key, value in three.items()})

        layouts = observe_layouts(self.model, sites, forward)
        _refuse(self.model, {key: lay.problem for key, lay in layouts.items() if lay.problem})
        self.watched = _Watched(self.model, sites, projections, layouts, form=self._form)
        return self.watched, False


class PrivateMethod:
    """The private step on projected per-sample gradients, or in full space.

    Args:
        model: the model.
        setting: the setting.
        full_space: no projection, and each sample's gradients are formed in full, in float32, as
            libraries do that take per-sample gradients by hooks.

    Raises:
        ValueError: some tensor of the model cannot be trained.
    """

    def __init__(self, model: nn.Module, setting: Setting, *, full_space: bool = False) -> None:
        self.model = model
        self._size = setting.batch_size
        self.optimizer = make_optimizer(model.parameters(), setting)
        self._training = _Measured(model, self.optimizer, setting, full_space)
        self._batch = make_batch(model, setting, setting.batch_size)
        self._is_stepping = False

    def _stand_ins(self) -> list[Tensor]:
        return [*self._training.subspace.stand_ins.values()]

    def _matrices(self) -> list[Tensor]:
        return [p.matrix for p in self._training.projections.values() if p.side is not None]

    def tensors(self) -> list[Tensor | None]:
        """Weights, projections, stand-ins with their last gradients, and the batch."""
        stand_ins = self._stand_ins()
        gradients = [stand_in.grad for stand_in in stand_ins]
        held = [*_weights(self.model), *self._matrices(), *stand_ins]
        return [*held, *gradients, *self._batch.values()]

    def zero_gradients(self) -> None:
        """Sets the stand-ins' gradients."""
        subspace = self._training.subspace
        subspace.set_gradients(subspace.zero_sums(frozenset(subspace)))

    def after_step(self) -> None:
        """Drops the gradients of weights that are their own stand-ins."""
        self.model.zero_grad()

    def forward_backward(self, after_forward: Callable[[], None]) -> None:
        """Everything up to the private gradient."""
        self._is_stepping = True
        self._training.after_forward = after_forward
        self._training.take_gradient([PhysicalBatch(self._size, self._batch)])
        self._training.watched.gradients = None
        self._is_stepping = False

    def parts(self) -> Parts:
        """Bytes by purpose; sums over samples are as large as the stand-ins."""
        weights, stand_ins = _weights(self.model), self._stand_ins()
        own = num_bytes([*weights, *stand_ins]) - num_bytes(weights)
        sums = num_bytes(stand_ins) if self._is_stepping else 0
        gradients = self._training.watched.gradients
        return {
            "weights": num_bytes(weights),
            "projections": num_bytes(self._matrices()),
            "optimizer state": num_bytes(state_tensors(self.optimizer)) + own,
            "gradients": num_bytes(stand_in.grad for stand_in in stand_ins) + sums,
            "per-sample gradients": num_bytes(gradients.tensors()) if gradients else 0,
        }


def _refuse(model: nn.Module, problems: Mapping[str, str]) -> None:
    """Raises if there are problems, with the first."""
    for name, problem in problems.items():
        raise ValueError(
            f"`{type(model).__name__}` cannot be trained privately as it is: `{name}`: {problem} "
            f"({len(problems)} in all; `hf-dpgrape check` lists those of tensors)."
        )


# ---- not private ---------------------------------------------------------------------------


class OrdinaryMethod:
    """An ordinary step: one gradient for the whole batch.

    Args:
        model: the model; what does not require grad is not trained.
        setting: the setting.
    """

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.model = model
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self._trained, setting)
        base = getattr(model, "get_base_model", lambda: model)()
        self._batch = make_batch(base, setting, setting.batch_size)

    def tensors(self) -> list[Tensor | None]:
        """Weights, gradients and the batch."""
        gradients = [parameter.grad for parameter in self._trained]
        return [*_weights(self.model), *gradients, *self._batch.values()]

    def zero_gradients(self) -> None:
        """Sets the parameters' gradients."""
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)

    def after_step(self) -> None:
        """Drops the gradients."""
        self.model.zero_grad()

    def forward_backward(self, after_forward: Callable[[], None]) -> None:
        """The model's own loss and its gradients."""
        loss = self.model(**self._batch).loss
        after_forward()
        loss.backward()

    def parts(self) -> Parts:
        """Bytes by purpose."""
        return {
            "weights": num_bytes(_weights(self.model)),
            "optimizer state": num_bytes(state_tensors(self.optimizer)),
            "gradients": num_bytes(parameter.grad for parameter in self._trained),
        }


def with_lora(model: nn.Module, setting: Setting) -> nn.Module:
    """The model with LoRA adapters (peft) on all its linear layers; nothing else is trained.

    Raises:
        ImportError: peft is not installed.
    """
    import peft

    config = peft.LoraConfig(r=setting.rank, target_modules="all-linear")
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.24 has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted.train()
