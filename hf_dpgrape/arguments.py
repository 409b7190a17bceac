"""`DPGrapeTrainingArguments`: transformers' training arguments plus those of private training."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from transformers import TrainingArguments

from hf_dpgrape.privacy.plan import (
    BODY,
    HEAD,
    PrivacyPlan,
    planned_steps,
    require_one_budget,
    steps_per_epoch,
)

logger = logging.getLogger(__name__)

#: Optimizers that keep weights of their own or need gradients of full size.
_UNSUPPORTED_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo", "schedule_free")

#: What `accelerate launch` may decide by environment variables: harmless values, reason.
_LAUNCHER_REFUSALS = {
    "ACCELERATE_MIXED_PRECISION": (
        ("no", "bf16"),
        "loss scaling reacts to overflow in private gradients; choose `bf16` or `no`",
    ),
    "ACCELERATE_USE_DEEPSPEED": (("no", "false", "0"), "sharded gradients are not supported"),
    "ACCELERATE_USE_FSDP": (("no", "false", "0"), "sharded gradients are not supported"),
    "ACCELERATE_DYNAMO_BACKEND": (
        ("no",),
        "the hooks that take per-sample gradients need eager mode",
    ),
}


@dataclass
class DPGrapeTrainingArguments(TrainingArguments):
    """Arguments of a private training run.

    All of `transformers.TrainingArguments` mean what they mean there, except that
    `per_device_train_batch_size` is the size of physical batches (memory) and
    `gradient_accumulation_steps` only serves to compute `expected_batch_size` (privacy, utility),
    after which it is set to 1: one optimizer step is one logical batch.
    """

    max_grad_norm: float = field(
        default=0.0,
        metadata={
            "help": "Must stay 0: it would clip the aggregate. Per example, use `l2_clip_norm`."
        },
    )
    target_epsilon: float | None = field(
        default=None,
        metadata={"help": "Epsilon of the whole run; the noise is calibrated to it."},
    )
    target_delta: float | None = field(
        default=None,
        metadata={"help": "Delta at which epsilon is stated; choose it below 1 / num_examples."},
    )
    noise_multiplier: float | None = field(
        default=None,
        metadata={"help": "Noise standard deviation over l2_clip_norm, instead of an epsilon."},
    )
    allow_zero_noise: bool = field(
        default=False,
        metadata={"help": "Accept `noise_multiplier=0`, which gives NO privacy, for debugging."},
    )
    l2_clip_norm: float = field(
        default=1.0,
        metadata={"help": "Bound on one example's gradient norm over all trained tensors."},
    )
    clipping: str = field(
        default="flat",
        metadata={
            "help": "flat: scale down gradients above the bound; automatic: scale all to it.",
            "choices": ["flat", "automatic"],
        },
    )
    rank: int = field(
        default=16,
        metadata={"help": "Rank of the gradient projection; 0 trains in the full space."},
    )
    update_proj_gap: int | None = field(
        default=None,
        metadata={
            "help": "Steps between new projections; 0 for never. Default: a tenth of the steps, "
            "at most 100."
        },
    )
    projection_scale: str = field(
        default="1/sqrt(r)",
        metadata={
            "help": "Standard deviation of projection entries. 1/sqrt(r) keeps gradient norms; "
            "1/r is that of the DP-GRAPE authors' code.",
            "choices": ["1/sqrt(r)", "1/r"],
        },
    )
    refresh_moments: str = field(
        default="keep",
        metadata={
            "help": "Optimizer state at a new projection: keep (the paper), reset, or carry the "
            "first moment over.",
            "choices": ["keep", "reset", "carry"],
        },
    )
    # None first, as transformers has it: HfArgumentParser fails on any other order.
    optim_target_modules: None | str | list[str] = field(  # noqa: RUF036
        default=None,
        metadata={
            "help": "Which tensors are projected: a regular expression, or a list of parts of "
            "names; `all-linear` is the default: all pretrained tensors with both sides > rank."
        },
    )
    head_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Parts of names of the tensors that form the head. Default: those that the "
            "checkpoint did not have. The head is never projected by default."
        },
    )
    head_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the head; default: `learning_rate`."},
    )
    head_clip_share: float | None = field(
        default=None,
        metadata={
            "help": "Share s of the clip norm for a clip group of the head's own; the body has "
            "sqrt(1 - s^2). Default: head and body are clipped together."
        },
    )
    clip_grouping: str = field(
        default="joint",
        metadata={
            "help": "joint: one norm over all tensors; layer: every layer has an equal share of "
            "the clip norm, so that per-sample gradients are freed during backward.",
            "choices": ["joint", "layer"],
        },
    )
    head_only_steps: int = field(
        default=0,
        metadata={"help": "Train the head alone for that many first steps; they count fully."},
    )
    bf16_weights: bool = field(
        default=False,
        metadata={
            "help": "Convert the weights to bfloat16, which halves their memory. Norms, sums, "
            "noise and optimizer state stay in float32; updates are rounded stochastically."
        },
    )
    accountant: str = field(
        default="pld",
        metadata={"help": "pld (tight) or rdp (looser).", "choices": ["pld", "rdp"]},
    )
    expected_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Mean number of examples per optimizer step. Default: per-device batch size x "
            "gradient accumulation steps x processes."
        },
    )
    log_non_private_metrics: bool = field(
        default=False,
        metadata={
            "help": "Log the raw training loss as `non_private_loss`. It is NOT covered by epsilon."
        },
    )
    unsafe_test_seed: int | None = field(
        default=None,
        metadata={
            "help": "For tests only: fixes the noise and the sampling, which voids all privacy."
        },
    )

    def __post_init__(self) -> None:
        """Checks everything that can be checked without model and data."""
        super().__post_init__()  # type: ignore[no-untyped-call]
        self._refuse_what_breaks_privacy()
        self._refuse_what_a_launcher_set()
        self._check_budget()
        self._check_choices()
        if self.expected_batch_size is None:
            self.expected_batch_size = (
                self.per_device_train_batch_size
                * self.gradient_accumulation_steps
                * self.world_size
            )
        if self.gradient_accumulation_steps != 1:
            logger.info(
                "gradient_accumulation_steps=%d is absorbed into expected_batch_size=%d: one "
                "optimizer step is one logical batch.",
                self.gradient_accumulation_steps,
                self.expected_batch_size,
            )
            self.gradient_accumulation_steps = 1
        # Sampling is random anew at every step: there is nothing to skip in a resumed run.
        self.ignore_data_skip = True

    def _refuse_what_breaks_privacy(self) -> None:
        """One sentence for each argument under which the guarantee would not hold."""
        refusals = {**self._mechanism_refusals(), **self._system_refusals()}
        for name, (is_set, reason) in refusals.items():
            if is_set:
                came = _word(getattr(self, name))
                raise ValueError(f"`{name}={came}` is not possible in private training: {reason}.")

    def _mechanism_refusals(self) -> dict[str, tuple[bool, str]]:
        """Arguments that change sampling, clipping or a sample's loss: whether set, why not."""
        return {
            "fp16": (
                self.fp16,
                "loss scaling reacts to overflow in private gradients; use `bf16=True`",
            ),
            "max_grad_norm": (
                self.max_grad_norm != 0,
                "it clips the aggregate gradient; set it to 0 and use `l2_clip_norm` per example",
            ),
            "train_sampling_strategy": (
                self.train_sampling_strategy != "random",
                "the accounting needs Poisson sampling; leave it at 'random' (examples of "
                "similar length are put together after sampling anyway)",
            ),
            "dataloader_drop_last": (
                self.dataloader_drop_last,
                "a Poisson sample has no incomplete batch to drop; leave it off",
            ),
            "auto_find_batch_size": (
                self.auto_find_batch_size,
                "a retry would spend privacy twice; lower `per_device_train_batch_size`, which "
                "leaves the result unchanged",
            ),
            "label_smoothing_factor": (
                self.label_smoothing_factor != 0,
                "the Trainer's label smoothing averages over the batch; pass "
                "`compute_loss_func` with a smoothed per-sample loss",
            ),
            "neftune_noise_alpha": (
                self.neftune_noise_alpha is not None,
                "its noise is scaled by the padded length, which depends on other examples",
            ),
        }

    def _system_refusals(self) -> dict[str, tuple[bool, str]]:
        """Arguments about devices, kernels, optimizers and reports: whether set, why not."""
        return {
            "deepspeed": (self.deepspeed is not None, "sharded gradients are not supported"),
            "fsdp": (bool(self.fsdp), "sharded gradients are not supported"),
            "torch_compile": (
                self.torch_compile,
                "the hooks that take per-sample gradients need eager mode",
            ),
            "use_liger_kernel": (
                self.use_liger_kernel,
                "fused kernels hide the layers whose gradients are taken",
            ),
            "include_num_input_tokens_seen": (
                self.include_num_input_tokens_seen not in ("no", False),
                "the number of tokens drawn reveals the sample",
            ),
            "debug": (
                any("underflow" in _word(option) for option in self.debug),
                "its reports print values of private activations",
            ),
            "optim": (
                any(name in _word(self.optim) for name in _UNSUPPORTED_OPTIMIZERS),
                "this optimizer keeps weights or projections of its own; use an ordinary one such "
                "as adamw_torch or sgd, the projection is ours",
            ),
            "n_gpu": (
                self.n_gpu > 1,
                "several visible GPUs without a launcher make Trainer use nn.DataParallel; start "
                "with `accelerate launch` or set CUDA_VISIBLE_DEVICES to one device",
            ),
        }

    def _refuse_what_a_launcher_set(self) -> None:
        """The same refusals where `accelerate launch` decides by environment variables."""
        for name, (harmless, reason) in _LAUNCHER_REFUSALS.items():
            came = os.environ.get(name, "no")
            if name == "ACCELERATE_MIXED_PRECISION" and self.bf16:
                came = "bf16"  # the argument wins over the launcher
            if came.lower() not in harmless:
                raise ValueError(
                    f"The launcher set `{name}={came}`, which is not possible in private "
                    f"training: {reason}."
                )

    def _check_choices(self) -> None:
        """Words from their lists, and numbers that have a sign."""
        theirs = {f.name for f in fields(TrainingArguments)}
        for f in fields(self):
            choices = None if f.name in theirs else f.metadata.get("choices")
            if choices and getattr(self, f.name) not in choices:
                raise ValueError(
                    f"`{f.name}` must be one of {choices}, got {getattr(self, f.name)!r}."
                )
        if self.rank < 0:
            raise ValueError(f"`rank` must be 0 (no projection) or positive, got {self.rank}.")
        if self.update_proj_gap is not None and self.update_proj_gap < 0:
            raise ValueError(
                f"`update_proj_gap` must be 0 (never) or positive, got {self.update_proj_gap}."
            )
        if self.head_clip_share is not None and not 0 < self.head_clip_share < 1:
            raise ValueError(
                f"`head_clip_share` must be between 0 and 1, got {self.head_clip_share}."
            )

    def _check_budget(self) -> None:
        """Exactly one of epsilon and sigma, and a delta."""
        require_one_budget(self.target_epsilon, self.noise_multiplier)
        if self.noise_multiplier == 0 and not self.allow_zero_noise:
            raise ValueError(
                "`noise_multiplier=0` gives no privacy at all; pass `allow_zero_noise=True` if "
                "this is a debugging run."
            )
        if self.target_delta is None:
            raise ValueError(
                "Expected `target_delta`, the delta of the (epsilon, delta) guarantee; choose it "
                "below 1 / num_examples, for instance 1e-5 for 60,000 examples."
            )

    def steps_per_epoch(self, num_examples: int) -> int:
        """Optimizer steps after which every example was drawn about once."""
        assert self.expected_batch_size is not None
        return steps_per_epoch(num_examples, self.expected_batch_size)

    def make_plan(
        self, num_examples: int, *, has_head: bool = False, layers: Sequence[str] = (BODY,)
    ) -> PrivacyPlan:
        """The privacy plan of a run on `num_examples` examples; calibrates the noise.

        Args:
            num_examples: size of the training set.
            has_head: whether some tensors form a head; `head_clip_share` and `head_only_steps`
                need one.
            layers: names of the body's clip groups, all with the same share.
        """
        assert self.expected_batch_size is not None and self.target_delta is not None
        given = self.head_clip_share or self.head_only_steps or self.head_learning_rate
        if given and not has_head:
            raise ValueError(
                "`head_learning_rate`, `head_clip_share` and `head_only_steps` need a head, but "
                "the checkpoint had all of the model's tensors; name the head by `head_modules`."
            )
        head_share = self.head_clip_share or 0.0
        body_share = math.sqrt((1 - head_share**2) / len(layers))
        shares = dict.fromkeys(layers, body_share)
        if head_share:
            shares[HEAD] = head_share
        return PrivacyPlan.calibrated(
            target_epsilon=self.target_epsilon,
            noise_multiplier=self.noise_multiplier,
            num_examples=num_examples,
            expected_batch_size=self.expected_batch_size,
            num_steps=planned_steps(
                num_examples,
                self.expected_batch_size,
                num_train_epochs=self.num_train_epochs,
                max_steps=self.max_steps,
            ),
            l2_clip_norm=self.l2_clip_norm,
            target_delta=self.target_delta,
            clipping=self.clipping,
            clip_shares=shares,
            head_only_steps=self.head_only_steps,
            accountant=self.accountant,
        )

    def refresh_gap(self, num_steps: int) -> int:
        """Steps between refreshes of the projections in a run of `num_steps` steps."""
        if self.update_proj_gap is not None:
            return self.update_proj_gap
        return max(1, min(100, num_steps // 10))


def _word(option: object) -> str:
    """A choice as the user writes it; transformers keeps some as members of an enumeration."""
    return str(getattr(option, "value", option))
