"""`DPGrapeTrainingArguments`: transformers' training arguments plus those of private training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from hf_dpgrape.gradients.recording import CAPTURES
from hf_dpgrape.hf.argument_checks import (
    refuse_against_dpmup,
    refuse_cut_over_processes,
    refuse_impossible_shares,
    refuse_negative,
    refuse_no_privacy,
    refuse_uneven_grid,
    refuse_unknown_words,
    refuse_unused_muon_rate,
)
from hf_dpgrape.hf.clip_shares import equal_shares, with_loss
from hf_dpgrape.hf.loss_arguments import LossArguments
from hf_dpgrape.hf.method_arguments import MethodArguments
from hf_dpgrape.hf.methods import fill_in_, refuse_conflicts
from hf_dpgrape.hf.noise_arguments import NoiseArguments
from hf_dpgrape.hf.record_arguments import RecordArguments
from hf_dpgrape.hf.refusals import refuse_what_a_launcher_set, refuse_what_breaks_privacy
from hf_dpgrape.hf.suggested_arguments import SuggestedArguments
from hf_dpgrape.hf.unit_arguments import UnitArguments
from hf_dpgrape.optim.table import OPTIMIZERS
from hf_dpgrape.privacy.accounting import require_unit_size
from hf_dpgrape.privacy.plan import (
    BODY,
    PrivacyPlan,
    planned_steps,
    require_one_budget,
    steps_per_epoch,
)

logger = logging.getLogger(__name__)


@dataclass
class DPGrapeTrainingArguments(
    MethodArguments,
    LossArguments,
    UnitArguments,
    NoiseArguments,
    RecordArguments,
    SuggestedArguments,
    TrainingArguments,
):
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
            "help": "Optimizer state at a new projection: keep (the paper) or reset.",
            "choices": ["keep", "reset"],
        },
    )
    # transformers' own type would have HfArgumentParser refuse our names; the method fills it in.
    optim: str = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "As in transformers, or muon (with AdamW for the rest), or adamw_bc. Default: "
            "the method's, or adamw_torch_fused."
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
    capture: str = field(
        default="auto",
        metadata={
            "help": "How per-sample gradients are taken: batched, from whole physical batches, "
            "where that is exact; single, one example at a time, which suits every model and "
            "takes about 1.5 to 2.5 times as long; auto, batched where a rehearsal on synthetic "
            "examples proves it exact, else single.",
            "choices": [*CAPTURES],
        },
    )
    bf16_weights: bool = field(
        default=False,
        metadata={
            "help": "Convert the weights to bfloat16, which halves their memory. Norms, sums, "
            "noise and optimizer state stay in float32; updates are rounded stochastically."
        },
    )
    muon_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "With `optim=muon`, learning rate of the matrices that Muon takes; the others "
            "have `learning_rate`, which is also the default here."
        },
    )
    dpmup_base_model: str | None = field(
        default=None,
        metadata={
            "help": "Folder, config.json or Hub name of the narrow model on which the learning "
            "rate was tuned: noise, clip shares and rates follow by DP-muP. No weights are read."
        },
    )
    dpmup_base_rank: int | None = field(
        default=None,
        metadata={"help": "Rank of the projection in that tuning. Default: `rank`."},
    )
    accountant: str = field(
        default="pld",
        metadata={"help": "pld (tight) or rdp (looser).", "choices": ["pld", "rdp"]},
    )
    expected_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Mean number of examples (units) per optimizer step. Default: per-device batch "
            "size x gradient accumulation steps x processes."
        },
    )
    max_logical_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Most examples per optimizer step: a larger Poisson sample is cut to a random "
            "subset, which bounds time and memory. It costs epsilon, little from "
            "expected_batch_size + 4 sqrt(expected_batch_size) on. In one process, and by "
            "`accountant=pld`. Default: no bound."
        },
    )
    length_grid: int = field(
        default=8,
        metadata={
            "help": "Lengths are rounded up, example by example, to multiples of this, and of a "
            "quarter of the next power of two above 4 times this, so that examples share physical "
            "batches: 8, 16, 24, 32, 48, 64, 96, 128, ... A power of two; 0 for exact lengths."
        },
    )
    log_non_private_metrics: bool = field(
        default=False,
        metadata={
            "help": "Log raw training losses, and metrics on the training set, by names that start "
            "with `non_private_`. They are NOT covered by epsilon."
        },
    )
    private_loss_share: float = field(
        default=0.0,
        metadata={
            "help": "Share s of the clip norm for the training loss, which is then released with "
            "the gradients, as `private_loss`, at no further epsilon; gradients keep sqrt(1 - s^2) "
            "of the clip norm. 0.1 costs them half a percent. 0 releases no loss."
        },
    )
    private_loss_bound: float = field(
        default=5.0,
        metadata={
            "help": "With `private_loss_share`: an example's loss is clamped to this. The noise "
            "grows with it; twice the loss of guessing, 2 ln(number of classes), mostly does."
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
        fill_in_(self)
        own_optimizer = self.optim if self.optim in OPTIMIZERS else None
        if own_optimizer:  # transformers does not know it by name
            self.optim = OptimizerNames.ADAMW_TORCH
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.optim = own_optimizer or self.optim
        self.check()
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
        # A resumed epoch goes on where it was. What it skips are draws of which nothing was used.
        self.ignore_data_skip = False

    def check(self) -> None:
        """Refuses what would break the guarantee; again before each run, as arguments can change.

        Raises:
            ValueError: in one sentence.
        """
        refuse_what_breaks_privacy(self)
        refuse_what_a_launcher_set(self)
        self._check_budget()
        self._check_choices()
        refuse_conflicts(self)

    def check_again(self) -> None:
        """As `check`, before a run of arguments that were made before.

        Raises:
            ValueError: in one sentence.
        """
        self.check()
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                "`gradient_accumulation_steps` must not be changed after the arguments were made, "
                f"got {self.gradient_accumulation_steps}; change `expected_batch_size`."
            )

    def _check_choices(self) -> None:
        """Words from their lists, and numbers that have a sign."""
        refuse_unknown_words(self)
        refuse_negative(
            rank=(self.rank, "no projection"),
            update_proj_gap=(self.update_proj_gap, "never"),
            num_tuning_trials=(self.num_tuning_trials, "none"),
        )
        require_unit_size(self.examples_per_unit)
        self.check_unit(self.examples_per_unit)
        refuse_uneven_grid(self.length_grid)
        self.cross_entropy()  # refuses impossible weights
        refuse_impossible_shares(
            self.head_clip_share, self.private_loss_share, self.private_loss_bound
        )
        refuse_unused_muon_rate(self.muon_learning_rate, self.optim_name)
        refuse_cut_over_processes(self.max_logical_batch_size, self.world_size)
        if self.dpmup_base_model is not None:
            refuse_against_dpmup(self.clipping, self.head_clip_share)

    def _check_budget(self) -> None:
        """Exactly one of epsilon and sigma, and a delta."""
        require_one_budget(self.target_epsilon, self.noise_multiplier)
        refuse_no_privacy(
            self.noise_multiplier, self.target_delta, allow_zero_noise=self.allow_zero_noise
        )
        self.refuse_without_cipher()

    @property
    def optim_name(self) -> str:
        """The optimizer as the user writes it."""
        return str(getattr(self.optim, "value", self.optim))

    def steps_per_epoch(self, num_examples: int) -> int:
        """Optimizer steps after which every example, or unit, was drawn about once."""
        assert self.expected_batch_size is not None
        return steps_per_epoch(num_examples, self.expected_batch_size, f"training {self.drawn}")

    def make_plan(
        self,
        num_examples: int,
        *,
        has_head: bool = False,
        layers: Sequence[str] = (BODY,),
        clip_shares: Mapping[str, float] | None = None,
    ) -> PrivacyPlan:
        """The privacy plan of a run on `num_examples` examples; calibrates the noise.

        Args:
            num_examples: size of the training set; with a `privacy_unit_column`, number of units.
            has_head: whether some tensors form a head; `head_clip_share` and `head_only_steps`
                need one.
            layers: names of the body's clip groups, all with the same share.
            clip_shares: share of each clip group where something else decides, as DP-muP.
        """
        assert self.expected_batch_size is not None and self.target_delta is not None
        given = self.head_clip_share or self.head_only_steps or self.head_learning_rate
        if given and not has_head:
            raise ValueError(
                "`head_learning_rate`, `head_clip_share` and `head_only_steps` need a head, but "
                "the checkpoint had all of the model's tensors; name the head by `head_modules`."
            )
        shares = clip_shares or equal_shares(layers, self.head_clip_share or 0.0)
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
                drawn=f"training {self.drawn}",
            ),
            l2_clip_norm=self.l2_clip_norm,
            target_delta=self.target_delta,
            clipping=self.clipping,
            clip_shares=with_loss(shares, self.private_loss_share),
            head_only_steps=self.head_only_steps,
            private_loss_bound=self.private_loss_bound if self.private_loss_share else None,
            max_logical_batch_size=self.max_logical_batch_size,
            accountant=self.accountant,
            privacy_unit_column=self.privacy_unit_column,
            max_rows_per_unit=self.rows_per_unit,
            secure_noise=self.secure_noise,
        )

    def refresh_gap(self, num_steps: int) -> int:
        """Steps between refreshes of the projections in a run of `num_steps` steps."""
        if self.update_proj_gap is not None:
            return self.update_proj_gap
        return max(1, min(100, num_steps // 10))
