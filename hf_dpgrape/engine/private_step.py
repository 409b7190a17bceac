"""The private step of DP-GRAPE (arXiv 2506.15588, algorithm 1), on one page.

This is the whole mechanism. What leaves it is the noised gradient; what an optimizer does with it
afterwards, the lift onto the weights included, is post-processing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from hf_dpgrape.capture.capture import Recorder
from hf_dpgrape.capture.gradients import PerSampleGradients
from hf_dpgrape.privacy.clipping import clip_factors
from hf_dpgrape.privacy.noise import add_gaussian_noise_
from hf_dpgrape.privacy.plan import BODY, HEAD, PrivacyPlan
from hf_dpgrape.privacy.randomness import SecretSource
from hf_dpgrape.subspace.parameters import Subspace


class PhysicalBatch(NamedTuple):
    """Part of a logical batch that passes through the model at once."""

    num_samples: int
    inputs: Any


class PrivateStep:
    """Turns a logical batch into the private gradient of the trainable tensors.

    Guarantees:
        A call is one Gaussian mechanism of noise multiplier `plan.noise_multiplier`: one example
        more or less moves the sum before noise by at most `plan.l2_clip_norm`, whatever its
        contents (an example with a non-finite gradient or loss contributes nothing), and noise of
        standard deviation `plan.noise_stddev` is added once, also for an empty batch. The divisor
        is public. How the batch is split into physical ones changes nothing but rounding.

    Args:
        plan: the privacy plan.
        recorder: takes the per-sample projected gradients.
        subspace: the trainable tensors and their stand-ins.
        head: canonical names of the tensors that form the clip group HEAD where the plan has one;
            all others, and these where it has none, form the clip group BODY.
        source: secret randomness for the noise.
    """

    def __init__(
        self,
        *,
        plan: PrivacyPlan,
        recorder: Recorder,
        subspace: Subspace,
        head: frozenset[str],
        source: SecretSource,
    ) -> None:
        self.plan = plan
        self._recorder = recorder
        self._subspace = subspace
        self._head = head
        self._source = source

    def __call__(
        self,
        logical_batch: Iterable[PhysicalBatch],
        per_sample_losses: Callable[[Any], Tensor],
        *,
        step: int,
    ) -> Tensor:
        """Sets the stand-ins' `.grad` to the private gradient of step `step` (from 0).

        Args:
            logical_batch: this process's share of the examples drawn.
            per_sample_losses: maps a physical batch's inputs to one loss per sample, (B,); loss i
                must depend on sample i alone.
            step: number of steps done before.

        Returns:
            The sum of the losses, NOT private: it must not be shown unless the user asks for it.

        Raises:
            RuntimeError: the planned steps are used up.
            ValueError: the losses are not one per sample.
        """
        plan = self.plan
        if step >= plan.num_steps:
            raise RuntimeError(
                f"The plan's {plan.num_steps} steps are done; another step would spend more than "
                f"epsilon={plan.epsilon():.4g}. Plan a longer run from the start."
            )
        groups = self._groups_at(step)
        names = frozenset(name for group in groups.values() for name in group)
        sums = self._subspace.zero_sums(names)
        loss_sum = torch.zeros(())

        for physical_batch in logical_batch:
            with self._recorder.record(physical_batch.num_samples, names) as gradients:
                losses = per_sample_losses(physical_batch.inputs)
                _check_losses(losses, physical_batch.num_samples)
                if losses.requires_grad:
                    losses.sum().backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                self._add_clipped_(sums, gradients, groups, plan.shares_at(step))
            loss_sum = loss_sum + losses.detach().float().sum().cpu()

        self._add_noise_once_(sums)
        for total in sums.values():
            total.div_(plan.expected_batch_size)
        self._subspace.set_gradients(sums)
        return loss_sum

    def _groups_at(self, step: int) -> dict[str, list[str]]:
        """The tensors of each clip group that is trained at a step."""
        groups: dict[str, list[str]] = {group: [] for group in self.plan.shares_at(step)}
        for name in self._subspace:
            group = HEAD if HEAD in groups and name in self._head else BODY
            if group in groups:
                groups[group].append(name)
        return groups

    def _add_clipped_(
        self,
        sums: dict[str, Tensor],
        gradients: PerSampleGradients,
        groups: Mapping[str, list[str]],
        clip_shares: Mapping[str, float],
    ) -> None:
        """Adds each sample's clipped gradient to the sums."""
        like = next(iter(sums.values()))
        factors = clip_factors(
            {group: gradients.squared_norms(names, like) for group, names in groups.items()},
            l2_clip_norm=self.plan.l2_clip_norm,
            clip_shares=clip_shares,
            clipping=self.plan.clipping,
        )
        for group, names in groups.items():
            for name in names:
                gradients.add_weighted_sum_(name, sums[name], factors[group])

    def _add_noise_once_(self, sums: Mapping[str, Tensor]) -> None:
        """Adds the noise of this step and the sums of the other processes.

        The first process adds the noise to its own share; the sum over processes then carries it
        exactly once, and all processes see the same private gradient.
        """
        parallel = distributed.is_available() and distributed.is_initialized()
        if not parallel or distributed.get_rank() == 0:
            generators: dict[torch.device, torch.Generator] = {}
            for total in sums.values():
                if total.device not in generators:
                    generators[total.device] = self._source.generator(total.device)
                add_gaussian_noise_(
                    [total],
                    noise_stddev=self.plan.noise_stddev,
                    generator=generators[total.device],
                )
        if parallel:
            for total in sums.values():
                distributed.all_reduce(total)


def _check_losses(losses: Tensor, num_samples: int) -> None:
    """Refuses anything that is not one loss per sample."""
    if losses.shape != (num_samples,):
        raise ValueError(
            f"The loss must be one value per sample, of shape ({num_samples},), got "
            f"{tuple(losses.shape)}: compute it with `reduction='none'` and average within samples."
        )
