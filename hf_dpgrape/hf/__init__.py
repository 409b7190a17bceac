"""The private Trainer, and everything that knows of Hugging Face."""

from hf_dpgrape.gradients.sites import know
from hf_dpgrape.hf.families import FAMILIES

know(FAMILIES)  # on import, so that no part of this room can run without it
