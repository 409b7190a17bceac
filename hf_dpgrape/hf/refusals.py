"""What private training refuses of transformers' arguments, one sentence each."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import CodeType

from transformers import Trainer, TrainingArguments

#: Optimizers that keep weights of their own or need gradients of full size.
UNSUPPORTED_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo", "schedule_free")

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

#: Methods by which a step is private; who overrides them has to call what is overridden.
_PRIVATE_METHODS = (
    "train",
    "_inner_training_loop",
    "training_step",
    "get_train_dataloader",
    "create_optimizer",
)

#: Methods of a Trainer that private training replaces, and what is done there.
_REPLACED_METHODS = {
    "training_step": "the private step stands in its place; use callbacks for what is not training",
    "get_train_dataloader": "examples are drawn by Poisson sampling; change the data set instead",
}

#: Whose loss is the model's own, or is known per sample.
_KNOWN_LOSSES = (
    "transformers.",
    "hf_dpgrape.",
    "trl.trainer.sft_trainer.",
    "trl.trainer.dpo_trainer.",
    "trl.trainer.reward_trainer.",
)

#: Losses of DPO that are known per pair.
_DPO_LOSSES = ("sigmoid", "hinge", "ipo")


def refuse_what_breaks_privacy(args: TrainingArguments) -> None:
    """One sentence for each argument under which the guarantee would not hold."""
    refusals = {**_mechanism_refusals(args), **_system_refusals(args)}
    refusals |= {**_trl_refusals(args), **_dpo_refusals(args)}
    for name, (is_set, reason) in refusals.items():
        if is_set:
            came = _word(getattr(args, name))
            raise ValueError(f"`{name}={came}` is not possible in private training: {reason}.")


def _mechanism_refusals(args: TrainingArguments) -> dict[str, tuple[bool, str]]:
    """Arguments that change sampling, clipping or a sample's loss: whether set, why not."""
    return {
        "fp16": (
            args.fp16,
            "loss scaling reacts to overflow in private gradients; use `bf16=True`",
        ),
        "max_grad_norm": (
            args.max_grad_norm != 0,
            "it clips the aggregate gradient; set it to 0 and use `l2_clip_norm` per example",
        ),
        "train_sampling_strategy": (
            args.train_sampling_strategy != "random",
            "the accounting needs Poisson sampling; leave it at 'random' (examples of "
            "similar length are put together after sampling anyway)",
        ),
        "dataloader_drop_last": (
            args.dataloader_drop_last,
            "a Poisson sample has no incomplete batch to drop; leave it off",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a retry would spend privacy twice; lower `per_device_train_batch_size`, which "
            "leaves the result unchanged",
        ),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha is not None,
            "its noise is scaled by the padded length, which depends on other examples",
        ),
    }


def _system_refusals(args: TrainingArguments) -> dict[str, tuple[bool, str]]:
    """Arguments about devices, kernels, optimizers and reports: whether set, why not."""
    return {
        "deepspeed": (args.deepspeed is not None, "sharded gradients are not supported"),
        "fsdp": (bool(args.fsdp), "sharded gradients are not supported"),
        "torch_compile": (
            args.torch_compile,
            "the hooks that take per-sample gradients need eager mode",
        ),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "fused kernels hide the layers whose gradients are taken",
        ),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen not in ("no", False),
            "the number of tokens drawn reveals the sample",
        ),
        "debug": (
            any("underflow" in _word(option) for option in args.debug),
            "its reports print values of private activations",
        ),
        "optim": (
            any(name in _word(args.optim) for name in UNSUPPORTED_OPTIMIZERS),
            "this optimizer keeps weights or projections of its own; use an ordinary one such "
            "as adamw_torch or sgd, the projection is ours",
        ),
        "hub_strategy": (
            args.push_to_hub and "checkpoint" in _word(args.hub_strategy),
            "optimizer state is not published; choose 'every_save' or 'end'",
        ),
        "n_gpu": (
            args.n_gpu > 1,
            "several visible GPUs without a launcher make Trainer use nn.DataParallel; start "
            "with `accelerate launch` or set CUDA_VISIBLE_DEVICES to one device",
        ),
    }


def _trl_refusals(args: TrainingArguments) -> dict[str, tuple[bool, str]]:
    """Arguments that only configurations of TRL have: whether set, why not."""
    return {
        "packing": (
            getattr(args, "packing", False),
            "a packed row holds several examples, but each must be clipped by itself; set it to "
            "False",
        ),
        "padding_free": (
            getattr(args, "padding_free", False),
            "all examples of a batch would be one row, but each must be clipped by itself; set it "
            "to False",
        ),
        "loss_type": (
            _is_of(args, "SFTConfig") and getattr(args, "loss_type", "nll") != "nll",
            "only the model's own loss is known per sample; choose 'nll', or pass "
            "`compute_loss_func`",
        ),
        "router_aux_loss_coef": (
            bool(getattr(args, "router_aux_loss_coef", None)),
            "a loss that balances experts mixes the examples of a batch; leave it out",
        ),
        "activation_offloading": (
            getattr(args, "activation_offloading", False),
            "a private step does not apply it; use gradient checkpointing",
        ),
    }


def _dpo_refusals(args: TrainingArguments) -> dict[str, tuple[bool, str]]:
    """Arguments of DPO under which a pair's loss is another than is known here, or not its own."""
    if not _is_of(args, "DPOConfig"):
        return {}
    known, given = ", ".join(_DPO_LOSSES), getattr(args, "loss_type", [])
    size = getattr(args, "precompute_ref_batch_size", None) or args.per_device_train_batch_size
    other = f"of DPO only the losses {known} are known per pair, as they are; leave it out"
    return {
        "loss_type": (
            len(given) != 1 or given[0] not in _DPO_LOSSES,
            f"some losses of DPO compare pairs, or remember them; choose one of {known}",
        ),
        "loss_weights": (getattr(args, "loss_weights", None) is not None, other),
        "ld_alpha": (getattr(args, "ld_alpha", None) is not None, other),
        "use_weighting": (getattr(args, "use_weighting", False), other),
        "f_divergence_type": (
            getattr(args, "f_divergence_type", "reverse_kl") != "reverse_kl",
            other,
        ),
        "precompute_ref_log_probs": (
            not getattr(args, "precompute_ref_log_probs", False),
            "the reference must not run beside the model whose gradients are taken; set it to "
            "True, with `precompute_ref_batch_size=1`",
        ),
        "precompute_ref_batch_size": (
            size != 1,
            "pairs that share a batch would reach each other by its padding; set it to 1",
        ),
    }


def _is_of(args: TrainingArguments, kind: str) -> bool:
    """Whether arguments are of a class of TRL, which is named and not imported."""
    return any(owner.__name__ == kind for owner in type(args).__mro__)


def refuse_other_order(trainer: type, private: type) -> None:
    """Refuses a class whose Trainer comes before the private part, which it would hide."""
    order = trainer.__mro__
    if Trainer in order and order.index(Trainer) < order.index(private):
        raise TypeError(
            f"Expected the private part first, got it after the Trainer: write `class "
            f"{trainer.__name__}({private.__name__}, ...)`."
        )


def refuse_bypasses(trainer: type, private: type) -> None:
    """One sentence for a method of the user's by which the private part is not reached.

    Args:
        trainer: the class of the trainer.
        private: the class among its bases that trains privately.
    """
    order = trainer.__mro__
    for place, owner in enumerate(order):
        if not _where(owner).startswith(_KNOWN_LOSSES):
            _refuse_own_loss(owner)
        if place < order.index(private):
            _refuse_bypass(owner)
        elif not _where(owner).startswith(("transformers.", "hf_dpgrape.", "trl.")):
            _refuse_replaced(owner)


def _refuse_own_loss(owner: type) -> None:
    """Refuses a class with a loss of its own, which may look across a batch."""
    if _where(owner).startswith("trl.") and "compute_loss" in vars(owner):
        raise ValueError(
            f"`{owner.__name__}.compute_loss` is not possible in private training, where each "
            "example has a loss of its own; of TRL, train with SFTTrainer, DPOTrainer or "
            "RewardTrainer."
        )
    for name in ("compute_loss", "_compute_loss"):  # the second is that of TRL's DPOTrainer
        if name in vars(owner):
            raise ValueError(
                f"`{owner.__name__}.{name}` is not possible in private training, where each "
                "example has a loss of its own; remove it, and pass the loss of one example as "
                "`compute_loss_func=f` with f(outputs, labels)."
            )


def _refuse_bypass(owner: type) -> None:
    """Refuses a method before the private one that does not come to it."""
    for name in _PRIVATE_METHODS:
        if name in vars(owner) and not _calls(vars(owner)[name], name):
            raise ValueError(
                f"`{owner.__name__}.{name}` does not call `super().{name}`, so nothing would be "
                "private; call it, or remove the method."
            )


def _refuse_replaced(owner: type) -> None:
    """Refuses a method of the user's to which the private one does not come."""
    for name, reason in _REPLACED_METHODS.items():
        if name in vars(owner):
            raise ValueError(
                f"`{owner.__name__}.{name}` would not be called in private training: {reason}."
            )


def _where(owner: type) -> str:
    """Module and name of a class."""
    return f"{owner.__module__}.{owner.__qualname__}"


def _calls(method: Callable[..., object], name: str) -> bool:
    """Whether a method names another in its code."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is not None and name in _names_in(code)


def _names_in(code: CodeType) -> set[str]:
    """Names of attributes and globals in code, functions inside it included."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*inner)


def refuse_what_a_launcher_set(args: TrainingArguments) -> None:
    """The same refusals where `accelerate launch` decides by environment variables."""
    for name, (harmless, reason) in _LAUNCHER_REFUSALS.items():
        came = os.environ.get(name, "no")
        if name == "ACCELERATE_MIXED_PRECISION" and args.bf16:
            came = "bf16"  # the argument wins over the launcher
        if came.lower() not in harmless:
            raise ValueError(
                f"The launcher set `{name}={came}`, which is not possible in private "
                f"training: {reason}."
            )


def _word(option: object) -> str:
    """A choice as the user writes it; transformers keeps some as members of an enumeration."""
    return str(getattr(option, "value", option))
