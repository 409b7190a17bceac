"""TRL's trainers on pairs of answers, chosen and rejected: one example is one pair.

TRL's own losses average over a batch, and collect metrics over all processes on the way. Here a
pair is a physical batch by itself, and its loss a function of it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer

from hf_dpgrape.gradients.rehearsal import CONSTANT, Batch
from hf_dpgrape.hf.own_loss import configs_of, named_outputs, without_caches
from hf_dpgrape.mechanism.synthetic import IGNORED, Shapes, SyntheticExamples

#: What the collators add for the loss, which no model takes.
_FOR_THE_LOSS = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps", "margin")

#: From (logits, inputs, arguments) to the loss of the one pair.
PairLoss = Callable[[Tensor, Mapping[str, Tensor], Any], Tensor]


def dpo_loss(logits: Tensor, inputs: Mapping[str, Tensor], args: Any) -> Tensor:
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290), as TRL has it.

    Args:
        logits: (2, T, V), of the chosen and the rejected answer behind the prompt.
        inputs: the tokens, which of them are the answer's, and the reference's log-probabilities.
        args: `loss_type`, one of sigmoid, hinge (arXiv 2305.10425) and ipo (arXiv 2310.12036),
            and `beta`.
    """
    ids, mask = inputs["input_ids"], inputs["completion_mask"]
    labels = ids.masked_fill(mask == 0, IGNORED)[:, 1:]
    logits = logits[:, -ids.shape[1] : -1]  # behind the virtual tokens of prompt tuning
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    reference = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
    scores = -losses.view_as(labels).sum(1) - reference
    (kind,), beta = args.loss_type, float(args.beta)
    if kind == "ipo":  # per token of the answer
        scores = scores / mask.sum(1).clamp(min=1)
        return (scores[0] - scores[1] - 1 / (2 * beta)) ** 2
    margin = beta * (scores[0] - scores[1])
    return F.relu(1 - margin) if kind == "hinge" else -F.logsigmoid(margin)


def reward_loss(logits: Tensor, inputs: Mapping[str, Tensor], args: Any) -> Tensor:
    """The negative log-likelihood of the preference (Bradley and Terry 1952), as TRL has it.

    Args:
        logits: (2, 1), the rewards of the chosen and the rejected answer.
        inputs: `margin`, by which the rewards should differ, if the data have one.
        args: `center_rewards_coefficient`, if rewards are to be near zero.
    """
    chosen, rejected = logits.flatten()
    margin = inputs["margin"][0] if "margin" in inputs else 0.0
    loss = -F.logsigmoid(chosen - rejected - margin)
    center = args.center_rewards_coefficient
    return loss if center is None else loss + center * (chosen + rejected) ** 2


#: By the trainer's class, which is named and not imported.
_LOSSES: dict[str, PairLoss] = {
    "trl.trainer.dpo_trainer.DPOTrainer": dpo_loss,
    "trl.trainer.reward_trainer.RewardTrainer": reward_loss,
}


def pair_loss_of(trainer: Trainer) -> PairLoss | None:
    """The loss of one pair, if a trainer's examples are pairs."""
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(trainer).__mro__)
    return next((_LOSSES[name] for name in names if name in _LOSSES), None)


class PairLosses:
    """Runs a model on the two answers of one pair and returns its loss, (1,).

    Guarantees:
        The loss is a function of the model, the pair and the arguments alone: nothing of it is
        gathered, averaged or kept.

    Args:
        loss: of one pair.
        args: which it takes numbers from.
        head: the model that has the task head.
        precision: what the trainer computes a loss in.
        prepare: what the trainer does to the inputs of a batch.
    """

    def __init__(
        self,
        loss: PairLoss,
        args: Any,
        *,
        head: nn.Module,
        precision: Callable[[], AbstractContextManager[Any]],
        prepare: Callable[[dict[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._loss = loss
        self._args = args
        self._config = head.config
        self._configs = configs_of(head)
        self._precision = precision
        self._prepare = prepare

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The loss of this pair, (1,).

        Raises:
            ValueError: the batch holds several pairs.
        """
        if len(inputs["input_ids"]) != 2:
            raise ValueError(
                "Expected the two answers of one pair, whose loss is its own, got "
                f'{len(inputs["input_ids"])} rows; set `capture="single"`.'
            )
        with self._precision(), without_caches(self._configs), named_outputs(self._config):
            prepared = self._prepare(dict(inputs))
            features = {k: v for k, v in prepared.items() if k not in _FOR_THE_LOSS}
            logits = model(**features).logits
            logits = logits.float() if logits.element_size() < 4 else logits
            return self._loss(logits, prepared, self._args).reshape(1)


class SyntheticPairs(SyntheticExamples):
    """Makes pairs for one model: where an example has two rows, the second is another answer.

    Args:
        model: the model with the task head.
        structure: one collated pair, of which names, dtypes and shapes are used.
    """

    def __init__(self, model: nn.Module, structure: Mapping[str, Any]) -> None:
        super().__init__(model, structure)
        self._num_rows = {k: len(v) for k, v in structure.items() if isinstance(v, Tensor)}

    def of_shape(self, shapes: Shapes) -> Batch:
        """Batches of ONE pair; its number decides what it holds."""
        of_rows = super().of_shape(shapes)

        def batch(samples: Sequence[int]) -> dict[str, Any]:
            (number,) = samples
            rows = of_rows([number, number + 2 * CONSTANT])
            return {k: v[: self._num_rows[k]] if k in shapes else v for k, v in rows.items()}

        return batch
