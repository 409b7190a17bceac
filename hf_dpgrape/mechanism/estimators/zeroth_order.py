"""Each sample's loss differences along public random directions, without any backward pass.

DPZero (Zhang et al. 2024, arXiv 2310.09639; its estimate is that of MeZO, Malladi et al. 2023,
arXiv 2305.17333). With k directions z_j of independent entries N(0, 1/k), sample i's vector is
`(loss_i(w + h z_j) - loss_i(w - h z_j)) / (2 h)` for j = 1 ... k, about `z_j @ gradient_i`. Its k
numbers are clipped together. One is the published method: one number with one coordinate of noise.
With the private mean v of the vectors, the estimate of the gradient is the sum of `v_j z_j`. As
with a random projection of rank k, vectors have the gradients' squared norms on average and the
estimate has the gradient as its mean (up to h), so that clip norm and rate mean the same for any k.

Why that is private. Directions are a function of the public seed and the step, so independent of
data. A sample's vector is a function of its own losses and of the draws of its passes, which are
the same in all of them: its bound is the clip's. The optimizer and the sum of directions come after
the noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpgrape.gradients.forms import Dense, PerSampleGradients, WhenComplete
from hf_dpgrape.gradients.recorder import unmoved_buffers
from hf_dpgrape.mechanism.estimators.base import Estimate, Made, Setup
from hf_dpgrape.privacy.plan import BODY, LOSS, PrivacyPlan
from hf_dpgrape.privacy.randomness import global_randomness_restored
from hf_dpgrape.subspace.parameters import (
    refuse_reader_of_weights,
    refuse_state,
    rounding_generator,
    update_,
)
from hf_dpgrape.subspace.projection import Projection

#: Name of the only part of the vector.
DIRECTIONS = "directions"

#: Rank in which the rehearsal takes the gradients that it compares, so that they take no room.
_REHEARSAL_RANK = 1


class DirectionSpace:
    """The k coefficients of a step's directions, and the weights that they move.

    The optimizer steps on k numbers for each of its groups, all of which have the same gradient, so
    that groups keep their rates and decays. After its step each weight moves by the sum of its
    group's numbers times the directions. State of the optimizer belongs to directions that are
    gone at the next step: plain SGD has none, and is the published method.

    Guarantees:
        Directions are a function of the seed, the tensor's name, the step and j alone. Between
        steps the weights are, bit for bit, what the optimizer's last step left.

    Args:
        weights: canonical name -> weight.
        num_directions: k.
        seed: public seed of the directions, and of the stochastic rounding of 16-bit weights.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], *, num_directions: int, seed: int
    ) -> None:
        self.weights = dict(weights)
        self.num_directions = num_directions
        self.stand_ins: dict[str, nn.Parameter] = {}
        self._seed = seed
        self._step = 0
        self._rounding: dict[torch.device, torch.Generator] = {}

    def __iter__(self) -> Iterator[str]:
        """The only part."""
        return iter((DIRECTIONS,))

    def zero_sums(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Zero coefficients, in float64 if all weights are, else in float32."""
        return {DIRECTIONS: self._zeros()} if DIRECTIONS in names else {}

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Gives every stand-in the same private coefficients."""
        found = gradients.get(DIRECTIONS)
        for stand_in in self.stand_ins.values():
            stand_in.grad = None if found is None else found.clone()

    def start_at_(self, step: int) -> None:
        """Nothing: every step has directions of its own."""

    def refresh_(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Moves on to the directions of a step, counted from 0."""
        self._step = step

    def direction(self, name: str, index: int) -> Tensor:
        """The part of a direction of the present step that belongs to one weight."""
        weight = self.weights[name]
        key = f"{self._seed}/{name}/{self._step}/{index}/direction".encode()
        public_seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1
        generator = torch.Generator(weight.device).manual_seed(public_seed)
        drawn = torch.empty(weight.shape, dtype=_wide(weight), device=weight.device)
        return drawn.normal_(generator=generator).mul_(self.num_directions**-0.5)

    @contextmanager
    def perturbed(self) -> Iterator[Callable[[int, float], None]]:
        """Yields what moves the weights along a direction; the weights come back after the block.

        They come back from a copy: to add and subtract the same number is not exact. So the block
        holds the trained weights twice, and no gradient.
        """
        originals = {name: weight.detach().clone() for name, weight in self.weights.items()}

        def move(index: int, length: float) -> None:
            for name, weight in self.weights.items():
                moved = self.direction(name, index).mul_(length).add_(originals[name])
                weight.copy_(moved)

        with torch.no_grad():
            try:
                yield move
            finally:
                for name, weight in self.weights.items():
                    weight.copy_(originals[name])

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer that was built on the weights step on coefficients, one set a group.

        Raises:
            ValueError: the optimizer has state already, or reads the weights.
        """
        refuse_reader_of_weights(optimizer)
        refuse_state(optimizer)
        names = {id(weight): name for name, weight in self.weights.items()}
        moved = []
        for number, group in enumerate(optimizer.param_groups):
            held = [names[id(p)] for p in group["params"] if id(p) in names]
            stand_in = nn.Parameter(self._zeros())
            self.stand_ins[f"{DIRECTIONS}.{number}"] = stand_in
            group["params"] = [stand_in]
            moved.append(held)

        @torch.no_grad()
        def lift(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for group, held in zip(optimizer.param_groups, moved, strict=True):
                self._lift_(group, held)

        optimizer.register_step_post_hook(lift)

    def _lift_(self, group: Mapping[str, Any], names: list[str]) -> None:
        """Moves one group's weights by what the optimizer did to its coefficients."""
        (stand_in,) = group["params"]
        if stand_in.grad is None:
            return
        keep = 1 - group["lr"] * group.get("weight_decay", 0.0)
        for name in names:
            weight = self.weights[name]
            update = torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device)
            for index, coefficient in enumerate(stand_in.tolist()):
                update.add_(self.direction(name, index), alpha=coefficient)
            whole = Projection(name, weight.shape, rank=0)
            generator = rounding_generator(self._rounding, weight.device, self._seed)
            update_(weight, update, whole, keep, generator)
        stand_in.zero_()

    def _zeros(self) -> Tensor:
        """Zero coefficients where the first weight is."""
        first = next(iter(self.weights.values()))
        is_double = all(weight.dtype == torch.float64 for weight in self.weights.values())
        dtype = torch.float64 if is_double else torch.float32
        return torch.zeros(self.num_directions, dtype=dtype, device=first.device)


class ZerothOrder:
    """Takes loss differences along the directions of a space, in 2 k forward passes.

    Guarantees:
        All passes of a physical batch draw the same random numbers (dropout), and what is drawn
        after them does not repeat these. A sample whose difference is not finite contributes
        nothing.

    Args:
        model: the model.
        space: whose directions they are.
        scale: how far along a direction the loss is looked at, h.
    """

    def __init__(self, model: nn.Module, space: DirectionSpace, scale: float) -> None:
        self._model = model
        self._space = space
        self._scale = scale

    def __call__(
        self,
        num_samples: int,
        inputs: Any,
        losses_of: Callable[[], Tensor],
        *,
        names: frozenset[str],
        when_complete: WhenComplete,
    ) -> Estimate:
        """Each sample's differences, and its mean loss over the passes; see `Estimator`."""
        ahead: list[Tensor] = []
        behind: list[Tensor] = []
        num = self._space.num_directions
        with unmoved_buffers(self._model), self._space.perturbed() as move:
            for index in range(num):
                for sign, found in ((1, ahead), (-1, behind)):
                    is_last = index == num - 1 and sign < 0
                    move(index, sign * self._scale)
                    with nullcontext() if is_last else global_randomness_restored():
                        found.append(losses_of().detach().double())
        plus, minus = torch.stack(ahead, 1), torch.stack(behind, 1)
        (like,) = self._space.zero_sums(frozenset({DIRECTIONS})).values()
        vectors = PerSampleGradients(num_samples)
        vectors.add(DIRECTIONS, Dense(((plus - minus) / (2 * self._scale)).to(like)))
        return Estimate(((plus + minus) / 2).mean(1), vectors)


def zeroth_order(setup: Setup) -> Made:
    """Loss differences along directions.

    Raises:
        ValueError: a number is not positive, or the plan wants groups of tensors, which a vector
            over directions does not have.
    """
    arguments = setup.arguments
    if arguments.num_directions < 1 or not arguments.perturbation_scale > 0:
        raise ValueError(
            "`num_directions` and `perturbation_scale` must be positive, got "
            f"{arguments.num_directions} and {arguments.perturbation_scale}."
        )
    _refuse_groups(setup.plan)
    space = DirectionSpace(
        setup.weights, num_directions=arguments.num_directions, seed=arguments.seed
    )
    return Made(
        space=space,
        clip_groups={DIRECTIONS: BODY},
        rehearsed=setup.projections(_REHEARSAL_RANK),
        projections={},
        estimator=lambda _: ZerothOrder(setup.model, space, arguments.perturbation_scale),
    )


def _refuse_groups(plan: PrivacyPlan) -> None:
    """Refuses a plan that treats tensors differently."""
    groups = sorted(set(plan.clip_shares) - {BODY, LOSS})
    if groups or plan.head_only_steps:
        raise ValueError(
            "Expected a plan that clips all tensors together and trains them from the first step, "
            "as directions run through all of them, got "
            + (f"the clip group `{groups[0]}`" if groups else f"{plan.head_only_steps} steps")
            + " of the head's own; leave clip shares and `head_only_steps` out."
        )


def _wide(weight: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
