"""Where a model's tensors live and which rule takes their gradients, before any training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from hf_dpgrape.capture.generic import EmbeddingSubclassRule, GenericRule
from hf_dpgrape.capture.rules import (
    Conv1DRule,
    Conv2dRule,
    EmbeddingRule,
    LayerNormRule,
    LinearRule,
    Rule,
)

#: Rules by the exact type's qualified name, so that no other library has to be imported.
_RULES: dict[str, Callable[[], Rule]] = {
    "torch.nn.modules.linear.Linear": LinearRule,
    "transformers.pytorch_utils.Conv1D": Conv1DRule,
    "torch.nn.modules.sparse.Embedding": EmbeddingRule,
    "torch.nn.modules.normalization.LayerNorm": LayerNormRule,
    "torch.nn.modules.conv.Conv2d": Conv2dRule,
}

#: Layers whose output for one sample depends on the other samples of the batch.
_MIXING_LAYERS = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True)
class Site:
    """A module that owns captured tensors directly.

    Attributes:
        name: qualified name of the module.
        module: the module.
        tensors: local parameter name -> canonical name in the model (tied tensors share one).
        rule: the layer rule; None for tensors that the module itself adds or expands ("bare").
    """

    name: str
    module: nn.Module
    tensors: Mapping[str, str] = field(default_factory=dict)
    rule: Rule | None = None

    @property
    def rule_name(self) -> str:
        """What the tensors are taken by, for reports."""
        return "bare parameter" if self.rule is None else type(self.rule).__name__


def refusal(module: nn.Module) -> str:
    """Why a module cannot be part of a privately trained model; empty if it can."""
    if isinstance(module, _MIXING_LAYERS):
        return (
            f"{type(module).__name__} mixes the samples of a batch, so no per-sample gradient "
            "exists; replace it by GroupNorm or LayerNorm"
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None):
        return "nn.Embedding with `max_norm` rewrites its weight in forward; unset `max_norm`"
    if isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.sparse):
        return (
            "nn.Embedding with `scale_grad_by_freq` or `sparse` has no dense per-sample gradient; "
            "unset the option"
        )
    return ""


def _rule_for(module: nn.Module) -> Rule:
    """The rule of a leaf module, by exact type."""
    kind = type(module)
    if isinstance(module, nn.Conv2d) and (
        module.groups != 1 or isinstance(module.padding, str) or module.padding_mode != "zeros"
    ):
        return GenericRule()
    if make := _RULES.get(f"{kind.__module__}.{kind.__qualname__}"):
        return make()
    return EmbeddingSubclassRule() if isinstance(module, nn.Embedding) else GenericRule()


def find_sites(model: nn.Module, names: Collection[str]) -> tuple[list[Site], dict[str, str]]:
    """Sites of the tensors `names`, and the reasons for those that have none.

    Args:
        model: the model.
        names: canonical parameter names, as `named_parameters()` lists them.

    Returns:
        Sites in the order of `named_modules()`, and tensor name -> reason.
    """
    canonical = {id(p): name for name, p in model.named_parameters() if name in names}
    sites: list[Site] = []
    problems: dict[str, str] = {}
    for module_name, module in model.named_modules():
        own = {
            local: canonical[id(p)]
            for local, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in canonical
        }
        if not own:
            continue
        is_leaf = all(next(child.parameters(), None) is None for child in module.children())
        if is_leaf and type(module).forward is not nn.Module.forward:
            sites.append(Site(module_name, module, own, _rule_for(module)))
            continue
        bare = {}
        for local, name in own.items():
            if _is_broadcast(module.get_parameter(local)):
                bare[local] = name
            else:
                problems[name] = (
                    f"{type(module).__name__} uses `{local}` directly and not through a layer, "
                    "and it has no leading dimension of 1 to stand for the batch"
                )
        if bare:
            sites.append(Site(module_name, module, bare))
    return sites, problems


def _is_broadcast(tensor: Tensor) -> bool:
    """Whether a bare tensor has a first dimension of 1 that stands for the batch."""
    return tensor.ndim >= 2 and tensor.shape[0] == 1
