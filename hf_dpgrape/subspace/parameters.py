"""Subspace parameters: what an ordinary optimizer steps on in place of the weights.

For a projected weight W there is a parameter S of the projected shape, zero between steps, whose
`.grad` is the private gradient. The optimizer steps on S, and a hook after its step adds the
lifted S to W and sets S to zero again. Every optimizer whose step depends on gradients alone, and
every schedule, thus works in the small space. A weight that is not projected and has at least 32
bits is its own S.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_dpgrape.subspace.projection import Projection, matrix_shape
from hf_dpgrape.subspace.rounding import round_to_bfloat16

Moments = Literal["keep", "reset"]

#: Elements of a 16-bit weight that are held in float32 at a time.
_CHUNK_ELEMENTS = 2**22

#: Names of optimizers that scale a step by the weight's norm (You et al. 2017, 2020).
_BY_WEIGHT_NORM = re.compile("lamb(?!da)|lars", re.IGNORECASE)


@dataclass(frozen=True)
class SubspaceTensor:
    """One trainable weight and its stand-in."""

    weight: nn.Parameter
    projection: Projection
    stand_in: nn.Parameter

    @property
    def is_own_stand_in(self) -> bool:
        """Whether the optimizer steps on the weight itself."""
        return self.stand_in is self.weight


class Subspace:
    """All trainable weights of a model with their stand-ins.

    Args:
        weights: canonical name -> weight.
        projections: canonical name -> projection, for the same names.
        update_proj_gap: steps between refreshes of the projections; 0 for never.
        moments: what happens to optimizer moments of a projected tensor at a refresh: "keep" them
            as they are (the paper), or "reset" the optimizer's state.
        seed: public seed of the stochastic rounding of 16-bit weights.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        projections: Mapping[str, Projection],
        *,
        update_proj_gap: int = 0,
        moments: Moments = "keep",
        seed: int = 0,
    ) -> None:
        self.tensors = {
            name: SubspaceTensor(weight, projections[name], _stand_in(weight, projections[name]))
            for name, weight in weights.items()
        }
        self.projections = projections
        self._update_proj_gap = update_proj_gap
        self._moments = moments
        self._seed = seed
        self._rounding: dict[torch.device, torch.Generator] = {}

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The trained tensors, by canonical name."""
        return {name: tensor.weight for name, tensor in self.tensors.items()}

    @property
    def stand_ins(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps on, by the same names."""
        return {name: tensor.stand_in for name, tensor in self.tensors.items()}

    def __iter__(self) -> Iterator[str]:
        """Canonical names."""
        return iter(self.tensors)

    def zero_sums(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Zero accumulators of the projected shapes, in at least float32."""
        return {
            name: torch.zeros_like(self.tensors[name].stand_in)
            for name in self.tensors
            if name in names
        }

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Gives the stand-ins these gradients; tensors that are not named get none."""
        # None, not zero, for the others: an optimizer skips them, and momentum does not move them.
        for name, tensor in self.tensors.items():
            tensor.stand_in.grad = gradients.get(name)

    def start_at_(self, step: int) -> None:
        """Sets the projections that the step before `step` used; for a resumed run."""
        self.refresh_(max(step - 1, 0))

    def refresh_(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Moves to the projections of a step, counted from 0; nothing happens between refreshes."""
        index = step // self._update_proj_gap if self._update_proj_gap else 0
        for tensor in self.tensors.values():
            projection = tensor.projection
            if projection.side is None or projection.refresh_index == index:
                continue
            projection.refresh_(index)
            if optimizer is None or tensor.stand_in not in optimizer.state:
                continue
            if self._moments == "reset":  # with the step count, or bias correction would misfire
                del optimizer.state[tensor.stand_in]

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer that was built on the weights step on their stand-ins.

        The groups stay, so that a schedule may have been made for them. Whatever an optimizer does
        with `weight_decay`, it does nothing to a stand-in, which is zero; the lift decays the
        weight itself instead, by `lr * weight_decay` of its group (decoupled decay).

        Raises:
            ValueError: the optimizer has state already, with the weights' shapes, or reads the
                weights, where their stand-ins are zero.
        """
        if not all(tensor.is_own_stand_in for tensor in self.tensors.values()):
            refuse_reader_of_weights(optimizer)
        refuse_state(optimizer)
        by_weight = {id(t.weight): t for t in self.tensors.values()}
        for group in optimizer.param_groups:
            group["params"] = [
                by_weight[id(p)].stand_in for p in group["params"] if id(p) in by_weight
            ]
        optimizer.register_step_post_hook(self._lift_hook())

    def _lift_hook(self) -> Callable[[Any, Any, Any], None]:
        by_stand_in = {id(t.stand_in): t for t in self.tensors.values()}

        @torch.no_grad()
        def lift(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for stand_in in group["params"]:
                    tensor = by_stand_in[id(stand_in)]
                    if tensor.is_own_stand_in or stand_in.grad is None:
                        continue
                    # Read at every step: a schedule may have changed the rate since the last one.
                    decay = group.get("weight_decay", 0.0)
                    keep = 1 - group["lr"] * decay if decay else 1.0
                    device = tensor.weight.device
                    generator = rounding_generator(self._rounding, device, self._seed)
                    update_(tensor.weight, stand_in, tensor.projection, keep, generator)
                    stand_in.zero_()  # the next step starts from where the weight is now

        return lift


def rounding_generator(
    known: dict[torch.device, torch.Generator], device: torch.device, seed: int
) -> torch.Generator:
    """The generator of stochastic rounding on a device: the same sequence in every process."""
    if device not in known:
        known[device] = torch.Generator(device).manual_seed(seed)
    return known[device]


def refuse_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose state has the weights' shapes."""
    if optimizer.state:
        raise ValueError(
            "The optimizer holds state of the full weights already, from earlier steps or as "
            "Adagrad does from the start; pass a new one, or one of another kind."
        )


def refuse_reader_of_weights(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose step follows the norm of what it steps on, which is zero here."""
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    # torch's own Adafactor has no such option and always scales.
    scales = any(group.get("scale_parameter", True) for group in optimizer.param_groups)
    if ("Adafactor" in names and scales) or any(_BY_WEIGHT_NORM.search(name) for name in names):
        raise ValueError(
            f"Expected an optimizer whose step depends on gradients alone, got {names[0]}, which "
            "scales its step by the weight's norm, but steps on stand-ins that are zero (of "
            "projected or 16-bit weights), so it would hardly move: use transformers' Adafactor "
            "with `scale_parameter=False`, or `optim=adamw_torch`, or `rank=0` without "
            "`bf16_weights`."
        )


def _stand_in(weight: nn.Parameter, projection: Projection) -> nn.Parameter:
    """The weight itself if possible, else zeros of the projected shape in at least float32."""
    wide = weight.dtype in (torch.float32, torch.float64)
    if projection.side is None and wide:
        return weight
    dtype = weight.dtype if wide else torch.float32
    return nn.Parameter(torch.zeros(projection.shape, dtype=dtype, device=weight.device))


def update_(
    weight: Tensor,
    update: Tensor,
    projection: Projection,
    keep: float,
    generator: torch.Generator,
) -> None:
    """Makes the weight `keep * weight + lift(update)`, in place.

    A 16-bit weight is updated in float32 and rounded stochastically, a few rows at a time.
    """
    matrix = weight.view(matrix_shape(weight.shape))
    if weight.dtype == update.dtype:
        if keep != 1:
            matrix.mul_(keep)
        projection.lift_onto_(matrix, update)
        return
    size = max(1, _CHUNK_ELEMENTS // matrix.shape[1])
    for start in range(0, matrix.shape[0], size):
        rows = slice(start, start + size)
        wide = matrix[rows].to(update.dtype).mul_(keep)
        projection.lift_onto_(wide, update, rows)
        matrix[rows] = round_to_bfloat16(wide, generator)
