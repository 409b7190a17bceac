"""What private training would do to a model, from its configuration alone: no weights, no data."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import nn

from hf_dpgrape.mechanism.tensors import (
    TargetModules,
    TensorReport,
    matching,
    refused_modules,
    report_tensors,
    require_matches,
)

#: Auto classes by the names of tasks; "auto" takes the configuration's own architecture.
TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification",
}


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """What happens to each trainable tensor of a model, and what cannot be trained.

    Attributes:
        architecture: class of the model.
        tensors: one row per trainable tensor that can be trained.
        refused: name of a tensor or module -> why it cannot be trained.
        head: tensors that are taken for a new head, which is not projected.
    """

    architecture: str
    tensors: list[TensorReport]
    refused: dict[str, str] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)

    @property
    def num_parameters(self) -> int:
        """Entries of all tensors that can be trained."""
        return sum(math.prod(t.shape) for t in self.tensors)

    @property
    def num_projected_parameters(self) -> int:
        """Entries of those that are projected."""
        return sum(math.prod(t.shape) for t in self.tensors if t.shape != t.projected_shape)

    @property
    def num_floats_per_sample(self) -> int:
        """Entries of one sample's whole projected gradient."""
        return sum(math.prod(t.projected_shape) for t in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        totals = ("num_parameters", "num_projected_parameters", "num_floats_per_sample")
        return {**asdict(self), **{name: getattr(self, name) for name in totals}}


def load_config(source: str) -> Any:
    """The configuration of a model folder, a `config.json` or a model on the Hub.

    Raises:
        ValueError: there is none, in one sentence.
    """
    try:
        return transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        # Only the first sentence: transformers explains at length.
        reason = str(error).strip().splitlines()[0].split(". ")[0].rstrip(".:")
        raise ValueError(
            "Expected a model folder, a config.json or the name of a model on the Hugging Face "
            f"Hub, got {source!r} ({reason}); correct the path or name, or download the "
            "configuration first if there is no network."
        ) from error


def build_on_meta(config: Any, task: str = "auto") -> nn.Module:
    """As `build_model`, without storage for its weights."""
    return build_model(config, task, device="meta")


def build_model(config: Any, task: str = "auto", *, device: str) -> nn.Module:
    """The model of a configuration, with random weights.

    Args:
        config: a configuration of transformers.
        task: one of `TASKS`, or "auto".
        device: where it is made.

    Raises:
        ValueError: the configuration names no architecture that transformers has, there is no such
            task, or the model type has no head for it.
    """
    if task not in ("auto", *TASKS):
        raise ValueError(f"`task` must be auto or one of {', '.join(TASKS)}, got {task!r}.")
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if task == "auto" and kind is None:
        raise ValueError(
            "Expected a configuration that names an architecture of transformers, got "
            f"`architectures`={names}; choose a `--task` out of {', '.join(TASKS)}."
        )
    try:
        with torch.device(device):
            if task == "auto":
                model = kind(config)  # type: ignore[misc]
            else:
                model = getattr(transformers, TASKS[task]).from_config(config)
    except ValueError as error:
        raise ValueError(
            f"Expected a model type with a head for the task {task!r}, got "
            f"{getattr(config, 'model_type', '?')!r}; choose another `--task`."
        ) from error
    assert isinstance(model, nn.Module)
    return model


def new_head(model: nn.Module, head_modules: Sequence[str] | None = None) -> frozenset[str]:
    """Tensors that form the head: the named ones, or what the checkpoint's class does not have.

    Without weights that is a guess: everything outside the base model, if the model is of another
    class than the checkpoint and its head is not a language model's.

    Raises:
        ValueError: the given names match nothing.
    """
    names = [name for name, _ in model.named_parameters()]
    if head_modules:
        require_matches(names, "head_modules", list(head_modules))
        return matching(names, list(head_modules))
    kind = type(model).__name__
    prefix = getattr(model, "base_model_prefix", "")
    loaded = getattr(model.config, "architectures", None) or [kind]
    if kind in loaded or not prefix or not kind.endswith(("Classification", "Answering")):
        return frozenset()
    return frozenset(name for name in names if not name.startswith(f"{prefix}."))


def inspect_model(
    model: nn.Module,
    *,
    rank: int,
    head_modules: Sequence[str] | None = None,
    target_modules: TargetModules = None,
    one_by_one: bool = False,
) -> ModelReport:
    """The report on a model, which may have no storage.

    It is about tensors and layers. How layers see the batch is observed when training starts, and
    may lead to a refusal then.

    Args:
        model: the model.
        rank: rank of the projection; 0 for none.
        head_modules: parts of names of the tensors that form the head.
        target_modules: which tensors are projected, as `optim_target_modules`.
        one_by_one: whether gradients are taken of one example at a time.
    """
    if rank < 0:
        raise ValueError(f"`rank` must be 0 (no projection) or positive, got {rank}.")
    head = new_head(model, head_modules)
    rows = report_tensors(model, rank=rank, head=head, target_modules=target_modules)
    refused = {row.name: row.problem for row in rows if row.problem}
    if one_by_one:
        refused = refused_modules(model)
        names = {name for name, _ in model.named_parameters()}
        rows = [replace(row, rule="autograd", problem="") for row in rows if row.name in names]
    return ModelReport(
        architecture=type(model).__name__,
        tensors=[row for row in rows if not _is_in(row.name, refused)],
        refused=refused,
        head=sorted(head),
    )


def _is_in(name: str, refused: Collection[str]) -> bool:
    """Whether a tensor is refused itself or belongs to a refused module."""
    return any(f"{name}.".startswith(f"{other}.") for other in refused)
