"""Which rule a module takes: by exact type, registered from outside, and without Hugging Face.

Covers: gradients/observation.py, gradients/layout.py, hf/families.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hf_dpgrape.hf  # noqa: F401  # tells the rules of transformers' own layers
from hf_dpgrape import register_rule
from hf_dpgrape.gradients.observation import observe_layouts
from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.gradients.rules import Call, Found, LinearRule
from hf_dpgrape.mechanism.tensors import make_projections, sites_or_problems


class Doubled(nn.Linear):
    """Twice a linear layer, which the rule of a linear layer does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledRule(LinearRule):
    """The output gradient counts twice."""

    def gradients(self, call: Call, saved: Sequence[Tensor], grad: Tensor) -> Found:
        return super().gradients(call, saved, 2 * grad)


class Below(Doubled):
    """A subclass of a registered type."""


def rule_names(*layers: nn.Module) -> list[str]:
    sites, problems = sites_or_problems(nn.Sequential(*layers))
    assert not problems
    return [site.rule_name for site in sites]


def test_rules_are_chosen_by_exact_type() -> None:
    found = rule_names(nn.Linear(3, 5), Conv1D(7, 5), nn.LayerNorm(7), Below(7, 2))
    assert found == ["LinearRule", "Conv1DRule", "LayerNormRule", "GenericRule"]


def test_a_registered_rule_is_used_and_exact() -> None:
    register_rule(Doubled, DoubledRule)
    assert rule_names(Doubled(5, 3), Below(3, 2)) == ["DoubledRule", "GenericRule"]
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(Doubled(5, 3).double())
    x = torch.randn(4, 5, generator=g, dtype=torch.float64)
    sites, _ = sites_or_problems(model)
    projections = make_projections(model, rank=0, scale="1/sqrt(r)", seed=7, head=frozenset())
    layouts = observe_layouts(model, sites, lambda rows: model(x[rows]).square().sum(-1))
    recorder = Recorder(model, sites, projections, layouts)
    with recorder.record(4) as gradients:
        model(x).square().sum().backward()
    for i in range(4):
        weight = model[0].weight
        (want,) = torch.autograd.grad(model(x[i : i + 1]).square().sum(), weight)
        held = gradients.dense("0.weight")
        assert held is not None
        torch.testing.assert_close(held[i].view_as(want), want)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_type_with_a_rule_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=f"type of module without a rule, got {kind.__name__}"):
        register_rule(kind, DoubledRule)


def test_rooms_below_work_without_hugging_face() -> None:
    program = """
import sys
from torch import nn
from hf_dpgrape.mechanism.private_step import PrivateStep
from hf_dpgrape.mechanism.tensors import sites_or_problems
sites, problems = sites_or_problems(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)))
assert not problems and not {"transformers", "peft", "hf_dpgrape.hf"} & set(sys.modules)
print([site.rule_name for site in sites])
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "['EmbeddingRule', 'LinearRule']"
