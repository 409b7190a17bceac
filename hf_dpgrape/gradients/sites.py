"""Where a model's tensors live and which rule takes their gradients, before any training."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from hf_dpgrape.gradients.generic import EmbeddingSubclassRule, GenericRule
from hf_dpgrape.gradients.rules import (
    Conv2dRule,
    EmbeddingRule,
    LayerNormRule,
    LinearRule,
    Rule,
)

#: Rules by exact type.
_RULES: dict[type[nn.Module], Callable[[], Rule]] = {
    nn.Linear: LinearRule,
    nn.Embedding: EmbeddingRule,
    nn.LayerNorm: LayerNormRule,
    nn.Conv2d: Conv2dRule,
}


@dataclass(frozen=True, kw_only=True)
class Families:
    """What is known of other libraries' modules, whose classes are named and not imported.

    Attributes:
        rules: by the exact type's qualified name.
        methods: tables that are looked up once for all samples, by methods whose output has the
            batch in front: classes (regular expressions) of the table's own parent and of the
            method's owner, the method.
        scale_dims: classes that multiply activations by a bare vector: how many dimensions an
            activation has between the batch and the vector's own.
        loaded_flag: attribute that is set on the tensors that a checkpoint did have.
        refused: why a class, and those derived from it, cannot be trained privately at all, by the
            class's qualified name.
    """

    rules: Mapping[str, Callable[[], Rule]] = field(default_factory=dict)
    methods: tuple[tuple[str, str, str], ...] = ()
    scale_dims: Mapping[str, int] = field(default_factory=dict)
    loaded_flag: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)


#: Those known in this process; none where `hf_dpgrape.hf` was not imported.
_FAMILIES: list[Families] = []


def is_loaded(parameter: nn.Parameter) -> bool:
    """Whether a tensor came from a checkpoint, as the libraries known here mark it."""
    flags = (families.loaded_flag for families in _FAMILIES)
    return any(getattr(parameter, flag, False) for flag in flags if flag)


def know(families: Families) -> None:
    """Adds families to those known; again, it changes nothing."""
    if families not in _FAMILIES:
        _FAMILIES.append(families)


def register_rule(kind: type[nn.Module], make: Callable[[], Rule]) -> None:
    """Has modules of exactly this type take a rule in place of the generic one.

    A subclass may compute something else, so it keeps its own rule or the generic one.

    Args:
        kind: the type.
        make: the rule's class, or what makes a rule.

    Raises:
        ValueError: the type has a rule already.
    """
    if (present := _registered(kind)) is not None:
        raise ValueError(
            f"Expected a type of module without a rule, got {kind.__name__}, which has "
            f"{type(present()).__name__}; register a subclass of it."
        )
    _RULES[kind] = make


def _registered(kind: type[nn.Module]) -> Callable[[], Rule] | None:
    """What makes the rule of an exact type, if one is known."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    named = (families.rules[name] for families in _FAMILIES if name in families.rules)
    return _RULES.get(kind) or next(named, None)


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
        method: the method whose output the rule explains.
        scale_dims: for bare tensors, dimensions to insert between the batch and the tensor's own;
            None if the tensor's first dimension of 1 stands for the batch.
    """

    name: str
    module: nn.Module
    tensors: Mapping[str, str] = field(default_factory=dict)
    rule: Rule | None = None
    method: str = "forward"
    scale_dims: int | None = None

    @property
    def rule_name(self) -> str:
        """What the tensors are taken by, for reports."""
        return "bare parameter" if self.rule is None else type(self.rule).__name__

    @property
    def key(self) -> str:
        """Identifies what is called, among all sites."""
        return self.name if self.method == "forward" else f"{self.name}.{self.method}()"


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
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
    reasons = (why for known in _FAMILIES for kind, why in known.refused.items() if kind in kinds)
    return next(reasons, "")


def _rule_for(module: nn.Module) -> Rule:
    """The rule of a leaf module, by exact type."""
    kind = type(module)
    if isinstance(module, nn.Conv2d) and (
        module.groups != 1 or isinstance(module.padding, str) or module.padding_mode != "zeros"
    ):
        return GenericRule()
    if make := _registered(kind):
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
    bare_owners: list[tuple[str, nn.Module, dict[str, str]]] = []
    for module_name, module in model.named_modules():
        own = {
            local: canonical[id(p)]
            for local, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in canonical
        }
        if not own:
            continue
        if _is_leaf(module) and not isinstance(module, nn.ParameterDict | nn.ParameterList):
            sites.append(_leaf_site(model, module_name, module, own))
        else:
            bare_owners.append((module_name, module, own))
    layered = {name for site in sites for name in site.tensors.values()}
    for module_name, module, own in bare_owners:
        for local, name in own.items():
            if name in layered:  # another name of a tensor that a layer uses, as LM heads' biases
                continue
            if (site := _bare_site(model, module_name, module, local, name)) is not None:
                sites.append(site)
            else:
                problems[name] = "no module around it has a forward of its own"
    return sites, problems


def _bare_site(
    model: nn.Module, module_name: str, module: nn.Module, local: str, name: str
) -> Site | None:
    """The site of a tensor that no layer owns: itself, or the module around it as a whole."""
    owner = type(module).__name__
    known = (families.scale_dims[owner] for families in _FAMILIES if owner in families.scale_dims)
    scale_dims = next(known, None)
    tensor = module.get_parameter(local)
    if scale_dims is not None or (
        tensor.ndim >= 2 and tensor.shape[0] == 1 and _has_forward(module)
    ):
        return Site(module_name, module, {local: name}, scale_dims=scale_dims)
    path = local
    while not _has_forward(module):
        if not module_name:
            return None
        module_name, _, step = module_name.rpartition(".")
        module, path = model.get_submodule(module_name), f"{step}.{path}"
    return Site(module_name, module, {path: name}, GenericRule())


def own_tensors(site: Site) -> list[tuple[nn.Module, str]]:
    """The modules that hold a site's tensors, each with the tensor's name there."""
    held = []
    for path in site.tensors:
        owner, _, local = path.rpartition(".")
        held.append((site.module.get_submodule(owner), local))
    return held


def widened(model: nn.Module, sites: Sequence[Site], names: Collection[str]) -> list[Site] | None:
    """Sites where each of these tensors belongs to the smallest module around all its present ones.

    Returns:
        All sites; None if for some tensor there is no such module but the model itself.
    """
    found = [
        replace(site, tensors=kept)
        for site in sites
        if (kept := {path: n for path, n in site.tensors.items() if n not in names})
    ]
    for name in names:
        paths = [
            f"{site.name}.{path}".lstrip(".")
            for site in sites
            for path, tensor in site.tensors.items()
            if tensor == name
        ]
        owners = [site.name.split(".") for site in sites if name in site.tensors.values()]
        levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*owners, strict=False))
        common = [level[0] for level in levels]
        if len(owners) == 1 or common in owners:
            common = common[:-1]
        while common and not _has_forward(model.get_submodule(".".join(common))):
            common = common[:-1]
        if not common:
            return None
        around = ".".join(common)
        inside = {path.removeprefix(f"{around}."): name for path in paths}
        there = next(
            (s for s in found if s.key == around and isinstance(s.rule, GenericRule)), None
        )
        if there is not None:
            found.remove(there)
            inside |= there.tensors
        found.append(Site(around, model.get_submodule(around), inside, GenericRule()))
    return found


def _has_forward(module: nn.Module) -> bool:
    """Whether a module computes something, as containers of modules or tensors do not."""
    return type(module).forward is not nn.Module.forward


def _is_leaf(module: nn.Module) -> bool:
    """Whether a module has a forward of its own and no parameters below it."""
    return _has_forward(module) and all(
        next(child.parameters(), None) is None for child in module.children()
    )


def _leaf_site(model: nn.Module, name: str, module: nn.Module, own: dict[str, str]) -> Site:
    """The site of a leaf: itself, or the method above it that puts the batch in front."""
    parent = type(model.get_submodule(name.rpartition(".")[0])).__name__
    methods = (method for families in _FAMILIES for method in families.methods)
    for parent_class, owner_class, method in methods:
        if not isinstance(module, nn.Embedding) or not re.fullmatch(parent_class, parent):
            continue
        owner_name, path = name, ""
        while owner_name:
            owner_name, _, step = owner_name.rpartition(".")
            path = f"{step}.{path}"
            owner = model.get_submodule(owner_name)
            if re.fullmatch(owner_class, type(owner).__name__):
                tensors = {f"{path}{local}": tensor for local, tensor in own.items()}
                return Site(owner_name, owner, tensors, GenericRule(method), method)
    return Site(name, module, own, _rule_for(module))
