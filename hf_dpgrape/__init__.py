"""Differentially private full-parameter fine-tuning for Hugging Face's Trainer."""

from hf_dpgrape.arguments import DPGrapeTrainingArguments
from hf_dpgrape.privacy.plan import PrivacyPlan
from hf_dpgrape.trainer import DPGrapeMixin, DPGrapeTrainer

__all__ = ["DPGrapeMixin", "DPGrapeTrainer", "DPGrapeTrainingArguments", "PrivacyPlan"]
