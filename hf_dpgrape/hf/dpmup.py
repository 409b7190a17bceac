"""Width transfer for a run: from arguments and two models to clip groups, shares and rates.

The half of DP-muP that knows arguments and models of Hugging Face; the rules are in `width`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
from hf_dpgrape.hf.models import load_config
from hf_dpgrape.hf.refusals import UNSUPPORTED_OPTIMIZERS
from hf_dpgrape.mechanism.tensors import (
    TargetModules,
    loaded_tensors,
    make_projections,
    newly_initialized,
)
from hf_dpgrape.optim.table import OPTIMIZERS, WidthRule
from hf_dpgrape.subspace.projection import Scale
from hf_dpgrape.width.rules import OptimizerKind, Transfer, transfer
from hf_dpgrape.width.shapes import Layer, hidden_matrices, layers_of, output_layers

logger = logging.get_logger(__name__)

#: How configurations call the size of a head, or the number of heads that gives it.
_NUM_HEADS = ("num_attention_heads", "num_heads", "encoder_attention_heads")
_HIDDEN_SIZES = ("hidden_size", "d_model")

#: Parts of the names of other libraries' optimizers, and their rule.
_WIDTH_RULES: dict[str, WidthRule] = {
    "muon": "muon",
    **dict.fromkeys(("adam", "rmsprop", "lion", "adafactor", "ademamix"), "adam"),
}

EXTRAPOLATION = (
    "DP-muP's rates are derived for weights initialized in muP. This model was loaded from a "
    "checkpoint, for which they are an extrapolation: look at `hf-dpgrape coord-check NARROW WIDE`."
)


@dataclass(frozen=True, kw_only=True)
class WidthTransfer:
    """What a run at the target's width uses, and why.

    Attributes:
        base_model: what the proxy was made from, as the user named it.
        layers: the target's layers, by name; the tensors of each are a clip group.
        rules: noise, clip shares and rates, by the same names.
        optimizer: which rule the rates follow.
        conventions: decisions about tensors that the rules do not name, one sentence each.
    """

    base_model: str
    layers: Mapping[str, Layer]
    rules: Transfer
    optimizer: OptimizerKind
    conventions: tuple[str, ...]

    @cached_property
    def clip_groups(self) -> dict[str, str]:
        """Tensor -> name of its layer."""
        return {name: key for key, layer in self.layers.items() for name in layer.tensors}

    def rate_ratio(self, tensor: str) -> float:
        """Learning rate of a tensor over that which was tuned on the proxy."""
        return self.rules.rate_ratios[self.clip_groups[tensor]]

    def record(self, noise_multiplier: float) -> dict[str, Any]:
        """What `privacy.json` says about it: public numbers, and of a path the last part only."""
        path = Path(self.base_model)
        return {
            "base_model": path.name if path.exists() else self.base_model,
            "optimizer": self.optimizer,
            "noise_ratio": self.rules.noise_ratio,
            "proxy_noise_multiplier": self.rules.noise_ratio * noise_multiplier,
            "rate_ratios": dict(self.rules.rate_ratios),
            "conventions": list(self.conventions),
        }


def optimizer_kind(optim: str) -> OptimizerKind:
    """Which rule an optimizer follows, by its name in transformers or its class's.

    Raises:
        ValueError: its step neither keeps nor loses the gradient's scale in a way we know.
    """
    for name, row in OPTIMIZERS.items():
        if optim in (name, row.make.__name__):
            return row.width_rule
    name = optim.lower()
    if not any(word in name for word in UNSUPPORTED_OPTIMIZERS):
        if name == "sgd":
            return "sgd"
        for word, rule in _WIDTH_RULES.items():
            if word in name:
                return rule
    raise ValueError(
        f"DP-muP knows rules for sgd, Adam-like optimizers and muon, got `optim={optim}`; choose "
        "one of these, or leave `dpmup_base_model` out."
    )


def width_transfer(
    model: nn.Module,
    proxy: nn.Module,
    *,
    base_model: str = "the proxy",
    optim: str,
    rank: int = 16,
    proxy_rank: int | None = None,
    projection_scale: Scale = "1/sqrt(r)",
    head: frozenset[str] | None = None,
    target_modules: TargetModules = None,
) -> WidthTransfer:
    """What changes from a narrow model, the proxy, to a wide one: noise, clip shares and rates.

    `dpmup_base_model` does this in the trainer. In a loop of one's own:

        transfer = width_transfer(model, proxy, optim="sgd")
        plan = PrivacyPlan.calibrated(
            clip_shares=transfer.rules.clip_shares, clipping="automatic", ...
        )
        groups = [
            {"params": [p], "lr": rate * transfer.rate_ratio(name)}
            for name, p in model.named_parameters()
        ]
        optimizer = torch.optim.SGD(groups)
        training = PrivateTraining(
            model, optimizer, plan, ..., clip_groups=transfer.clip_groups
        )

    Muon further scales the rates of the hidden matrices, see `hf_dpgrape.optim.muon.muon_scale`.
    The rules and their derivation are in `hf_dpgrape.width.rules`, after DP-muP and Yang et al.
    2022 (arXiv 2203.03466).

    Guarantees:
        Only shapes, names and settings are looked at, so the result is public. Neither model needs
        storage for its weights: both may be on the meta device.

    Args:
        model: the wide model.
        proxy: the narrow one, of the same architecture, with the same tensors frozen.
        base_model: what the proxy was made from, for the record.
        optim: name of the optimizer in transformers or in `OPTIMIZERS`, or its class's.
        rank: rank of the projection of the wide model's run; 0 for none.
        proxy_rank: rank in the proxy's run; None for the same.
        projection_scale: of both.
        head: tensors that are not projected, and that Muon does not take; None for those that a
            checkpoint did not have.
        target_modules: which tensors are projected; None for all but the head.

    Raises:
        ValueError: the models have no layer in common, the proxy is the wider one, or there is no
            rule for the optimizer.
    """
    kind = optimizer_kind(optim)
    head = newly_initialized(model) if head is None else head

    def layers(of: nn.Module, its_rank: int) -> dict[str, Layer]:
        projections = make_projections(
            of,
            rank=its_rank,
            scale=projection_scale,
            seed=0,
            head=head,
            target_modules=target_modules,
        )
        return layers_of(
            of,
            {n: (p.rank, p.entry_stddev) for n, p in projections.items() if p.rank},
            hidden=hidden_matrices(of) - head,
        )

    target = layers(model, rank)
    narrow = layers(proxy, rank if proxy_rank is None else proxy_rank)
    rules = transfer(
        {name: layer.shape for name, layer in narrow.items()},
        {name: layer.shape for name, layer in target.items()},
        optimizer=kind,
    )
    _refuse_wider_proxy(narrow, target, rules)
    return WidthTransfer(
        base_model=base_model,
        layers=target,
        rules=rules,
        optimizer=kind,
        conventions=tuple(_conventions(model, proxy, target, narrow, kind)),
    )


def _refuse_wider_proxy(
    narrow: Mapping[str, Layer], target: Mapping[str, Layer], rules: Transfer
) -> None:
    """Refuses a proxy that would be tuned under less noise than the model that it stands for."""
    wider = [
        name
        for name, layer in target.items()
        if name in narrow and narrow[name].shape.noise_metric > layer.shape.noise_metric
    ]
    if wider and rules.noise_ratio < 1:
        raise ValueError(
            "Expected the narrow model as the base and the wide one as the target, got a base that "
            f"is wider, as in `{wider[0]}`: each run on it would spend more than the run that it "
            "is to spare; exchange the two."
        )


def _conventions(
    model: nn.Module,
    proxy: nn.Module,
    target: Mapping[str, Layer],
    narrow: Mapping[str, Layer],
    kind: OptimizerKind,
) -> list[str]:
    """What was decided about tensors and settings that the rules do not name."""
    kinds: dict[str, list[str]] = {}
    for name, layer in target.items():
        kinds.setdefault(layer.shape.kind, []).append(name)
    said = ["A layer is a module; its tensors share a clip group and a rate (biases, too)."]
    if lookups := kinds.get("lookup"):
        said.append(f"Lookups take one row at a time, n_in = 1: {_some(lookups)}.")
    if vectors := kinds.get("vector"):
        rate = "the base rate over the noise" if kind == "sgd" else "the base rate"
        said.append(f"Vectors of their own have {rate}: {_some(vectors)}.")
    tied = [n for n in output_layers(model) if n in target and target[n].shape.kind == "lookup"]
    if tied:
        said.append(f"The output layer is tied to `{tied[0]}` and has the rate of that lookup.")
    if alone := sorted(target.keys() - narrow.keys()):
        said.append(
            "Without a partner in the proxy, hence with the base rate and an equal share of the "
            f"clip norm: {_some(alone)}."
        )
    if alone := sorted(narrow.keys() - target.keys()):
        said.append(f"Only in the proxy, hence ignored: {_some(alone)}.")
    sizes = [_head_size(getattr(m, "config", None)) for m in (proxy, model)]
    if sizes[0] != sizes[1]:
        said.append(
            f"Attention heads have size {sizes[0]} in the proxy and {sizes[1]} here: muP's scale "
            "1 / d_head is not applied; widen a model by more heads of one size."
        )
    said.append("Decoupled weight decay follows each tensor's rate.")
    said.append("For weights that are not initialized in muP, as a checkpoint's, it extrapolates.")
    return said


def _some(names: list[str]) -> str:
    """A list that stays readable for models of many layers."""
    shown = ", ".join(f"`{name}`" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _head_size(config: Any) -> int | None:
    """Size of an attention head, where a configuration tells it."""
    if size := getattr(config, "head_dim", None) or getattr(config, "d_kv", None):
        return int(size)
    heads = next((getattr(config, name) for name in _NUM_HEADS if hasattr(config, name)), None)
    hidden = next((getattr(config, name) for name in _HIDDEN_SIZES if hasattr(config, name)), None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None  # as in Swin, whose stages differ
    return hidden // heads


def proxy_of(model: Any, base_model: str) -> nn.Module:
    """The narrow model of a configuration, of the class and with the labels of a model, on meta.

    Args:
        model: a model of transformers.
        base_model: folder, config.json or name on the Hub.

    Raises:
        ValueError: the model is not transformers' own, or the configuration is another type's.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            "`dpmup_base_model` needs a model of transformers, whose class is built again from the "
            f"narrow configuration, got {type(model).__name__}; override `dpmup_proxy` in a "
            "subclass of the trainer to return the narrow model."
        )
    config = load_config(base_model)
    if config.model_type != model.config.model_type:
        raise ValueError(
            f"Expected `dpmup_base_model` to be a {model.config.model_type!r} as the model is, got "
            f"{config.model_type!r}; name a narrow model of the same architecture."
        )
    config.num_labels = model.config.num_labels
    if hasattr(model.config, "tie_word_embeddings"):
        config.tie_word_embeddings = model.config.tie_word_embeddings
    with torch.device("meta"):
        return type(model)(config)


def resolve(
    args: DPGrapeTrainingArguments, model: nn.Module, proxy: nn.Module, head: frozenset[str]
) -> WidthTransfer:
    """The transfer that a trainer's arguments ask for.

    Args:
        args: the arguments, with the proxy's tuned values.
        model: the wide model.
        proxy: the narrow one; what is frozen in the model is frozen there.
        head: tensors of the model that are not projected.
    """
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    for name, parameter in proxy.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if loaded_tensors(model):
        logger.warning_once(EXTRAPOLATION)
    return width_transfer(
        model,
        proxy,
        base_model=str(args.dpmup_base_model),
        optim=args.optim_name,
        rank=args.rank,
        proxy_rank=args.rank if args.dpmup_base_rank is None else args.dpmup_base_rank,
        projection_scale=args.projection_scale,  # type: ignore[arg-type]
        head=head,
        target_modules=args.optim_target_modules,
    )
