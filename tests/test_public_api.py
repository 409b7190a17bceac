"""What users import, and that importing is cheap until they do."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hf_dpgrape

PUBLIC = [
    "DPGrapeMixin",
    "DPGrapeTrainer",
    "DPGrapeTrainingArguments",
    "OptimizerRow",
    "PerSampleLoss",
    "PrivacyPlan",
    "PrivateTraining",
    "RunLedger",
    "__version__",
    "initialize_mup_",
    "parse_arguments",
    "register_optimizer",
    "register_rule",
    "width_transfer",
]


def test_names_are_pinned() -> None:
    assert hf_dpgrape.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(hf_dpgrape))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_names_resolve(name: str) -> None:
    assert getattr(hf_dpgrape, name).__name__ == name


def test_other_names_do_not() -> None:
    with pytest.raises(AttributeError, match="'hf_dpgrape' has no attribute 'Trainer'"):
        _ = hf_dpgrape.Trainer


def test_accounting_starts_without_torch_and_transformers() -> None:
    program = (
        "import sys, hf_dpgrape.commands.cli; print({'torch', 'transformers'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "set()"
