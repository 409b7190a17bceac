"""What a Trainer does beside training that a private one leaves out, as it would tell too much."""

from __future__ import annotations

import functools
import os
from typing import Any

from transformers import TrainingArguments

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.trainer_part import TrainerPart


class LeavesOut(TrainerPart):
    """Wraps no model, counts nothing over a batch that was drawn, and saves no generator."""

    def create_accelerator_and_postprocess(self) -> None:
        """Keeps accelerate from wrapping the model in DistributedDataParallel.

        Its buckets would be as large as the full gradients, and wait for some that never come; the
        private step reduces the small projected sums instead.
        """
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = functools.partial(prepare, evaluation_mode=True)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The expected batch size, for the Trainer's messages."""
        assert isinstance(args, DPGrapeTrainingArguments) and args.expected_batch_size is not None
        return args.expected_batch_size

    def floating_point_ops(self, inputs: Any) -> int:
        """0: the number of tokens drawn, which a count would reveal, is secret."""
        return 0

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> None:
        """None: a count over the batch must not reach any sample's loss."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves nothing: the generators are secret, and tell how many examples were drawn."""
        os.makedirs(output_dir, exist_ok=True)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads nothing: a resumed run draws fresh secret randomness."""
