"""The training arguments: what they refuse, what they derive, and their help.

Covers: hf/argument_checks.py, hf/record_arguments.py, hf/refusals.py, hf/clip_shares.py.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_dpgrape import DPGrapeTrainingArguments
from hf_dpgrape.privacy.plan import BODY, HEAD, LOSS

NUM_EXAMPLES = 701


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Makes arguments from changes to a sound set."""

    def make(**changes: Any) -> DPGrapeTrainingArguments:
        budget = {"noise_multiplier": 1.1, "target_delta": 1e-4, "use_cpu": True}
        return DPGrapeTrainingArguments(str(tmp_path), **{**budget, **changes})

    return make


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("fp16", True, "loss scaling reacts to overflow in private gradients; use `bf16=True`"),
        ("max_grad_norm", 1.0, "set it to 0 and use `l2_clip_norm`"),
        ("train_sampling_strategy", "group_by_length", "the accounting needs Poisson sampling"),
        ("train_sampling_strategy", "sequential", "the accounting needs Poisson sampling"),
        ("dataloader_drop_last", True, "no incomplete batch to drop"),
        ("auto_find_batch_size", True, "a retry would spend privacy twice"),
        ("neftune_noise_alpha", 5.0, "depends on other examples"),
        ("torch_compile", True, "need eager mode"),
        ("use_liger_kernel", True, "fused kernels hide the layers"),
        ("include_num_input_tokens_seen", "all", "tokens drawn reveals the sample"),
        ("debug", "underflow_overflow", "print values of private activations"),
        ("optim", "galore_adamw", "keeps weights or projections of its own"),
        ("optim", "apollo_adamw", "keeps weights or projections of its own"),
        ("optim", "adalomo", "keeps weights or projections of its own"),
        ("optim", "schedule_free_adamw", "keeps weights or projections of its own"),
    ],
)
def test_refuses_what_breaks_privacy(make: Any, name: str, value: Any, reason: str) -> None:
    with pytest.raises(
        ValueError, match=f"`{name}=.*` is not possible in private training: .*{reason}"
    ):
        make(**{name: value})


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_refuses_sharded_gradients(make: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # transformers itself needs plugins before it takes these; only our refusal is of interest.
    def set_it(self: TrainingArguments) -> None:
        setattr(self, name, "full_shard")

    monkeypatch.setattr(TrainingArguments, "__post_init__", set_it)
    with pytest.raises(ValueError, match=f"`{name}=full_shard` .* sharded gradients are not supp"):
        make()


def test_refuses_several_gpus_without_launcher(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"`n_gpu=2` .*`accelerate launch` or set CUDA_VISIBLE"):
        make()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("ACCELERATE_MIXED_PRECISION", "fp8"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_FSDP", "true"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
    ],
)
def test_refuses_the_same_from_a_launcher(
    make: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    if variable == "ACCELERATE_USE_DEEPSPEED":  # not installed here
        monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"The launcher set `{variable}={value}`, which is not po"):
        make()


def test_accepts_what_a_plain_launch_sets(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_DEEPSPEED": "false",
        "ACCELERATE_USE_FSDP": "false",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
    }.items():
        monkeypatch.setenv(variable, value)
    make()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"noise_multiplier": None}, "exactly one of `target_epsilon` .*, got neither"),
        ({"target_epsilon": 3.0}, "exactly one of `target_epsilon` .*, got both"),
        ({"noise_multiplier": 0.0}, "gives no privacy at all; pass `allow_zero_noise=True`"),
        ({"target_delta": None}, "Expected `target_delta`.*below 1 / num_examples"),
        ({"rank": -1}, r"`rank` must be 0 \(no projection\) or positive, got -1"),
        ({"update_proj_gap": -1}, r"`update_proj_gap` must be 0 \(never\) or positive, got -1"),
        ({"length_grid": -8}, r"`length_grid` must be a power of two, or 0 .*, got -8"),
        ({"length_grid": 12}, r"`length_grid` must be a power of two, or 0 .*, got 12"),
        ({"head_clip_share": 0.0}, "`head_clip_share` must be between 0 and 1, got 0.0"),
        ({"head_clip_share": 1.0}, "`head_clip_share` must be between 0 and 1, got 1.0"),
        (
            {"private_loss_share": 1.0},
            r"`private_loss_share` must be 0 .* or between 0 and 1, got 1.0",
        ),
        ({"private_loss_share": -0.1}, "`private_loss_share` must be 0 .*, got -0.1"),
        ({"private_loss_share": float("nan")}, "`private_loss_share` must be 0 .*, got nan"),
        ({"private_loss_bound": 0.0}, "`private_loss_bound` must be positive and finite, got 0.0"),
        ({"private_loss_bound": float("inf")}, "`private_loss_bound` must be positive and finite"),
        ({"private_loss_bound": float("nan")}, "`private_loss_bound` must be positive and finite"),
        ({"clipping": "ghost"}, "`clipping` must be one of .*, got 'ghost'"),
        ({"projection_scale": "1"}, "`projection_scale` must be one of .*, got '1'"),
        ({"refresh_moments": "carry"}, "`refresh_moments` must be one of .*, got 'carry'"),
        ({"accountant": "gdp"}, "`accountant` must be one of .*, got 'gdp'"),
    ],
)
def test_refuses_wrong_values(make: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"expected_batch_size": 702}, "between 1 and the 701 training examples, got 702"),
        ({"expected_batch_size": 0}, "between 1 and the 701 training examples, got 0"),
        ({"noise_multiplier": -0.5}, "`noise_multiplier` must be zero or more"),
        ({"noise_multiplier": None, "target_epsilon": -1.0}, "`target_epsilon` must be positive"),
        (
            {"noise_multiplier": None, "target_epsilon": 1.0, "target_delta": 1.0},
            "`target_delta` must be between 0 and 1",
        ),
        ({"l2_clip_norm": 0.0}, "`l2_clip_norm` must be positive"),
        ({"head_only_steps": 99, "max_steps": 9}, "`head_only_steps` must be between 0 and the 9"),
        ({"num_train_epochs": 0}, "`num_train_epochs` must be positive"),
    ],
)
def test_plan_refuses_wrong_numbers(make: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(**changes).make_plan(NUM_EXAMPLES, has_head=True)


@pytest.mark.parametrize("option", [{"head_clip_share": 0.5}, {"head_only_steps": 1}])
def test_head_options_need_a_head(make: Any, option: dict[str, Any]) -> None:
    arguments = make(**option)
    with pytest.raises(ValueError, match=r"need a head.*`head_modules`"):
        arguments.make_plan(NUM_EXAMPLES)
    arguments.make_plan(NUM_EXAMPLES, has_head=True)


def test_private_defaults(make: Any) -> None:
    arguments = make()
    assert arguments.max_grad_norm == 0
    assert arguments.gradient_accumulation_steps == 1
    assert not make(ignore_data_skip=True).ignore_data_skip
    assert not arguments.log_non_private_metrics
    assert arguments.unsafe_test_seed is None
    assert (arguments.rank, arguments.l2_clip_norm) == (16, 1.0)
    assert (arguments.clipping, arguments.accountant) == ("flat", "pld")
    assert arguments.projection_scale == "1/sqrt(r)"
    assert arguments.private_loss_share == 0


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"per_device_train_batch_size": 6}, 6),
        ({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 5}, 30),
        ({"per_device_train_batch_size": 6, "expected_batch_size": 44}, 44),
        (
            {
                "per_device_train_batch_size": 6,
                "gradient_accumulation_steps": 5,
                "expected_batch_size": 44,
            },
            44,
        ),
    ],
)
def test_expected_batch_size(make: Any, changes: dict[str, int], size: int) -> None:
    arguments = make(num_train_epochs=2, **changes)
    plan = arguments.make_plan(NUM_EXAMPLES)
    assert plan.expected_batch_size == arguments.expected_batch_size == size
    assert plan.sampling_prob == size / NUM_EXAMPLES
    assert plan.num_steps == 2 * -(-NUM_EXAMPLES // size)
    assert arguments.gradient_accumulation_steps == 1


def test_expected_batch_size_counts_processes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "world_size", 3)
    arguments = make(per_device_train_batch_size=6, gradient_accumulation_steps=5)
    assert arguments.expected_batch_size == 90


def test_physical_batches_do_not_change_the_plan(make: Any) -> None:
    plans = [
        make(per_device_train_batch_size=b, gradient_accumulation_steps=a).make_plan(NUM_EXAMPLES)
        for b, a in ((12, 1), (4, 3), (1, 12))
    ]
    assert plans[0] == plans[1] == plans[2]


def test_max_steps_wins_over_epochs(make: Any) -> None:
    assert make(max_steps=13, num_train_epochs=5).make_plan(NUM_EXAMPLES).num_steps == 13


def test_plan_is_calibrated_by_the_accountant_that_reports(make: Any) -> None:
    arguments = make(
        noise_multiplier=None,
        target_epsilon=2.1,
        accountant="rdp",
        expected_batch_size=70,
        max_steps=30,
    )
    plan = arguments.make_plan(NUM_EXAMPLES)
    assert 0.99 * 2.1 < plan.epsilon() <= 2.1
    assert plan.accountant == "rdp"


def test_clip_shares(make: Any) -> None:
    arguments = make(head_clip_share=0.6, expected_batch_size=70)
    shares = arguments.make_plan(NUM_EXAMPLES, has_head=True).clip_shares
    assert shares == pytest.approx({BODY: 0.8, HEAD: 0.6})
    assert make(expected_batch_size=70).make_plan(NUM_EXAMPLES).clip_shares == {BODY: 1.0}


@pytest.mark.parametrize("given_shares", [None, {"layer.0": 0.6, "layer.1": 0.8}])
def test_loss_takes_its_share_from_all_others(make: Any, given_shares: Any) -> None:
    options = {"expected_batch_size": 70, "head_clip_share": 0.6}
    shares = given_shares or {BODY: 0.8, HEAD: 0.6}
    plan = make(private_loss_share=0.28, private_loss_bound=2.5, **options).make_plan(
        NUM_EXAMPLES, has_head=True, clip_shares=given_shares
    )
    scaled = {name: 0.96 * share for name, share in shares.items()}
    assert plan.clip_shares == pytest.approx({**scaled, LOSS: 0.28})
    assert plan.private_loss_bound == 2.5
    without = make(private_loss_bound=2.5, **options).make_plan(
        NUM_EXAMPLES, has_head=True, clip_shares=given_shares
    )
    assert without.clip_shares == pytest.approx(shares)
    assert without.private_loss_bound is None


@pytest.mark.parametrize(("gap", "steps", "found"), [(None, 900, 90), (None, 5000, 100), (7, 9, 7)])
def test_refresh_gap(make: Any, gap: int | None, steps: int, found: int) -> None:
    assert make(update_proj_gap=gap).refresh_gap(steps) == found
    assert make(update_proj_gap=0).refresh_gap(steps) == 0
    assert make().refresh_gap(3) == 1


OWN = [
    f
    for f in fields(DPGrapeTrainingArguments)
    if f.name not in {other.name for other in fields(TrainingArguments)}
]


def test_every_own_field_has_a_help() -> None:
    assert len(OWN) > 15
    for f in OWN:
        assert len(f.metadata.get("help", "")) > 20, f.name


def test_command_line(tmp_path: Path) -> None:
    (arguments,) = HfArgumentParser(DPGrapeTrainingArguments).parse_args_into_dataclasses(  # type: ignore[arg-type]
        f"--output_dir {tmp_path} --target_epsilon 3 --target_delta 1e-5 --clipping automatic "
        "--head_modules classifier score --optim_target_modules query --use_cpu "
        "--private_loss_share 0.1 --private_loss_bound 2".split()
    )
    assert (arguments.target_epsilon, arguments.noise_multiplier) == (3.0, None)
    assert arguments.clipping == "automatic"
    assert (arguments.private_loss_share, arguments.private_loss_bound) == (0.1, 2.0)
    assert arguments.head_modules == ["classifier", "score"]
    assert arguments.optim_target_modules == "query"
