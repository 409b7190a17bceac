"""Differentially private full-parameter fine-tuning for Hugging Face's Trainer.

Names are imported when they are first used, so that the accounting and the command line start
without torch and transformers.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dpgrape.commands.presets import parse_arguments
    from hf_dpgrape.gradients.sites import register_rule
    from hf_dpgrape.hf.arguments import DPGrapeTrainingArguments
    from hf_dpgrape.hf.dpmup import width_transfer
    from hf_dpgrape.hf.losses import PerSampleLoss
    from hf_dpgrape.hf.trainer import DPGrapeMixin, DPGrapeTrainer
    from hf_dpgrape.mechanism.private_training import PrivateTraining
    from hf_dpgrape.optim.table import OptimizerRow, register_optimizer
    from hf_dpgrape.privacy.ledger import RunLedger
    from hf_dpgrape.privacy.plan import PrivacyPlan
    from hf_dpgrape.width.initialization import initialize_mup_

__all__ = [
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

__version__ = version("hf-dpgrape")

_MODULES = {
    "DPGrapeMixin": "hf_dpgrape.hf.trainer",
    "DPGrapeTrainer": "hf_dpgrape.hf.trainer",
    "DPGrapeTrainingArguments": "hf_dpgrape.hf.arguments",
    "OptimizerRow": "hf_dpgrape.optim.table",
    "PerSampleLoss": "hf_dpgrape.hf.losses",
    "PrivacyPlan": "hf_dpgrape.privacy.plan",
    "PrivateTraining": "hf_dpgrape.mechanism.private_training",
    "RunLedger": "hf_dpgrape.privacy.ledger",
    "initialize_mup_": "hf_dpgrape.width.initialization",
    "parse_arguments": "hf_dpgrape.commands.presets",
    "register_optimizer": "hf_dpgrape.optim.table",
    "register_rule": "hf_dpgrape.gradients.sites",
    "width_transfer": "hf_dpgrape.hf.dpmup",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that defines it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
