"""Methods of private training, one row each: what is trained, what is released, what steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_dpgrape.mechanism.estimators.table import BACKWARD, GALORE, ZEROTH_ORDER
from hf_dpgrape.mechanism.tensors import matching, newly_initialized

#: What ordinary training is called, which no private trainer does.
NON_PRIVATE = "non-private"

#: What a method uses where neither it nor the user says anything.
DEFAULT_RANK, DEFAULT_OPTIM, DEFAULT_LORA_RANK = 16, "adamw_torch_fused", 8
DEFAULT_NUM_DIRECTIONS, DEFAULT_PERTURBATION = 1, 1e-3


class MethodSettings(Protocol):
    """The training arguments that a method has a say in."""

    method: str
    rank: Any  # None only until it is resolved
    optim: Any
    lora_rank: int | None
    num_directions: int
    perturbation_scale: float
    head_modules: list[str] | None
    head_clip_share: float | None
    head_only_steps: int
    clip_grouping: str
    dpmup_base_model: str | None


Prepare = Callable[[nn.Module, MethodSettings], nn.Module]


def _as_it_is(model: nn.Module, args: MethodSettings) -> nn.Module:
    return model


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method.

    Attributes:
        says: what it does, for the card.
        prepare: freezes what it does not train, or puts adapters into the model.
        estimator: what a step releases, a name in `ESTIMATORS`.
        rank: of the projections; None for the argument's.
        optims: the values of `optim` that it may have, its default first; none for any.
    """

    says: str
    prepare: Prepare = _as_it_is
    estimator: str = BACKWARD
    rank: int | None = 0
    optims: tuple[str, ...] = ()


def _with_adapters(model: nn.Module, args: MethodSettings) -> nn.Module:
    """The model with LoRA adapters at its linear layers; a model that has adapters stays."""
    try:
        import peft  # not a dependency of the package
    except ImportError as error:
        raise ValueError(
            "`method=dp-lora` needs peft, which is not installed: `pip install 'hf-dpgrape[peft]'`."
        ) from error
    if isinstance(model, peft.PeftModel):
        return model
    head = _head_modules(model, args.head_modules)
    if head:  # told apart from the adapters, which the checkpoint did not have either
        args.head_modules = head
    output = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not output
        and not any(f".{part}." in f".{name}." for part in head)
    ]
    rank = args.lora_rank or DEFAULT_LORA_RANK
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=linear,
            modules_to_save=head or None,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        ),
    )


def _head_modules(model: nn.Module, given: list[str] | None) -> list[str]:
    """The largest modules whose tensors are all the head's."""
    names = [name for name, _ in model.named_parameters()]
    head = newly_initialized(model) if given is None else matching(names, given)
    found: list[str] = []
    for name, module in model.named_modules():
        own = {f"{name}.{local}" for local, _ in module.named_parameters()}
        if own and own <= head and not any(name.startswith(f"{above}.") for above in found):
            found.append(name)
    return found


def _frozen_but(model: nn.Module, args: MethodSettings, *, with_biases: bool) -> nn.Module:
    """The model with everything frozen but its head, and its biases."""
    names = [name for name, _ in model.named_parameters()]
    given = args.head_modules
    head = newly_initialized(model) if given is None else matching(names, given)
    biases = {name for name in names if with_biases and name.endswith("bias")}
    if not head | biases:
        raise ValueError(
            f"`method={args.method}` trains the head, but the checkpoint had all of the model's "
            f"tensors, or `head_modules` names none; name it by `head_modules`, as `{names[-1]}`."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in head | biases)
    return model


def _biases_and_head(model: nn.Module, args: MethodSettings) -> nn.Module:
    return _frozen_but(model, args, with_biases=True)


def _head(model: nn.Module, args: MethodSettings) -> nn.Module:
    return _frozen_but(model, args, with_biases=False)


#: By value of the argument `method`.
METHODS: dict[str, Method] = {
    "dp-grape": Method(
        says="random projections of all gradients (arXiv 2506.15588)",
        rank=None,
    ),
    "dp-adam": Method(
        says="Adam on full gradients of all tensors",
        optims=(DEFAULT_OPTIM, "adamw_torch"),
    ),
    "dp-sgd": Method(
        says="SGD on full gradients of all tensors (arXiv 1607.00133)", optims=("sgd",)
    ),
    "dp-muon": Method(
        says="Muon on full gradients of hidden matrices, Adam on the rest", optims=("muon",)
    ),
    "naive-dp-galore": Method(
        says="full gradients of all tensors, projected after the noise (arXiv 2506.15588)",
        estimator=GALORE,
        rank=None,
    ),
    "dpzero": Method(
        says="loss differences along random directions, without backward (arXiv 2310.09639)",
        estimator=ZEROTH_ORDER,
        optims=("sgd",),
    ),
    "dp-lora": Method(
        says="full gradients of LoRA adapters and of the head", prepare=_with_adapters
    ),
    "dp-bitfit": Method(
        says="full gradients of biases and of the head (arXiv 2210.00036)",
        prepare=_biases_and_head,
    ),
    "dp-head": Method(says="full gradients of the head alone", prepare=_head),
}


def method_of(args: MethodSettings) -> Method:
    """The row of a run's method.

    Raises:
        ValueError: there is none of that name, or it is not private.
    """
    if args.method == NON_PRIVATE:
        raise ValueError(
            "`method=non-private` is not possible in a private trainer, whose results are read as "
            "private: use transformers' Trainer, or `scripts/compare_methods.py` to compare."
        )
    if args.method not in METHODS:
        raise ValueError(f"`method` must be one of {[*METHODS]}, got {args.method!r}.")
    return METHODS[args.method]


def fill_in_(args: MethodSettings) -> None:
    """Gives `rank` and `optim` the method's values where the user set none."""
    method = method_of(args)
    if args.rank is None:
        args.rank = DEFAULT_RANK if method.rank is None else method.rank
    if args.optim is None:
        args.optim = next(iter(method.optims), DEFAULT_OPTIM)


def refuse_conflicts(args: MethodSettings) -> None:
    """One sentence for an argument that the method contradicts or has no use for.

    Raises:
        ValueError: there is one.
    """
    method = method_of(args)
    optim = str(getattr(args.optim, "value", args.optim))
    is_zeroth = method.estimator == ZEROTH_ORDER
    wrong = {
        "rank": method.rank is not None and args.rank != method.rank,
        "optim": bool(method.optims) and optim not in method.optims,
        "lora_rank": args.lora_rank is not None and method.prepare is not _with_adapters,
        "num_directions": args.num_directions != DEFAULT_NUM_DIRECTIONS and not is_zeroth,
        "perturbation_scale": args.perturbation_scale != DEFAULT_PERTURBATION and not is_zeroth,
        "head_clip_share": args.head_clip_share is not None and is_zeroth,
        "head_only_steps": args.head_only_steps != 0 and is_zeroth,
        "clip_grouping": args.clip_grouping != "joint" and is_zeroth,
        "dpmup_base_model": args.dpmup_base_model is not None and method.estimator != BACKWARD,
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            came = optim if name == "optim" else getattr(args, name)
            raise ValueError(
                f"`{name}={came}` does not go with `method={args.method}` ({method.says}); leave "
                "one of them out."
            )
    for name in ("lora_rank", "num_directions", "perturbation_scale"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"`{name}` must be positive, got {value}.")


def refuse_given_optimizer(args: MethodSettings, given: str | None) -> None:
    """Refuses an optimizer that was passed to a method that has one of its own."""
    method = method_of(args)
    if given is not None and method.optims:
        raise ValueError(
            f"`method={args.method}` has an optimizer of its own, {method.optims[0]}, but a "
            f"{given} was passed; leave it out, or choose a method with any optimizer."
        )


def prepared(model: Any, args: MethodSettings) -> Any:
    """The model as the method trains it.

    Raises:
        ValueError: it has nothing that the method trains, or is a name.
    """
    prepare = method_of(args).prepare
    if isinstance(model, nn.Module):
        return prepare(model, args)
    if prepare is _as_it_is:
        return model
    raise ValueError(
        f"`method={args.method}` needs the model itself, of which it freezes parts, got "
        f"{type(model).__name__}; load the model first."
    )


def with_prepared_model(
    positional: tuple[Any, ...], named: Mapping[str, Any], kind: type
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A Trainer's arguments, with the model as the method trains it.

    Args:
        positional: model and training arguments come first, where they are here.
        named: the others.
        kind: class of the training arguments; with others, nothing is done.
    """
    given = dict(zip(("model", "args"), positional, strict=False)) | dict(named)
    model, args = given.get("model"), given.get("args")
    if model is None or not isinstance(args, kind):
        return positional, dict(named)
    ready: Any = prepared(model, args)  # type: ignore[arg-type]
    if positional:
        return (ready, *positional[1:]), dict(named)
    return positional, {**named, "model": ready}


def method_record(args: MethodSettings) -> dict[str, Any]:
    """What `privacy.json` says about the method."""
    method = method_of(args)
    numbers: dict[str, Any] = {}
    if method.estimator == ZEROTH_ORDER:
        numbers |= {
            "num_directions": args.num_directions,
            "perturbation_scale": args.perturbation_scale,
        }
    if method.prepare is _with_adapters:
        numbers["lora_rank"] = args.lora_rank or DEFAULT_LORA_RANK
    return {
        "name": args.method,
        "says": method.says,
        "estimator": method.estimator,
        **numbers,
    }
