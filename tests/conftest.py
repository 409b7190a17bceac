"""Settings of all tests: no network, one thread, reproducible property tests."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of transformers

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")
