"""Two processes: the noise is in the sum of both once, and each draws its own examples."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NUM_COORDINATES, SIGMA, CLIP, DIVISOR = 20_000, 1.7, 0.3, 8
NUM_EXAMPLES = 23

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import distributed, nn
import hf_dpgrape
from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.mechanism.logical_batches import LogicalBatches
from hf_dpgrape.mechanism.estimators.backward import Backward
from hf_dpgrape.mechanism.private_step import PrivateStep
from hf_dpgrape.privacy.ledger import RunLedger
from hf_dpgrape.privacy.plan import BODY, PrivacyPlan
from hf_dpgrape.privacy.randomness import SecretSource
from hf_dpgrape.subspace.parameters import Subspace
from hf_dpgrape.subspace.projection import Projection

rank, folder, root, size, sigma, clip, divisor, num_examples, secure = sys.argv[1:]
assert Path(hf_dpgrape.__file__).is_relative_to(root), hf_dpgrape.__file__
meeting = f"file://{folder}/meeting"
distributed.init_process_group("gloo", init_method=meeting, rank=int(rank), world_size=2)
plan = PrivacyPlan(
    num_examples=100, expected_batch_size=int(divisor), num_steps=1, target_delta=1e-5,
    noise_multiplier=float(sigma), l2_clip_norm=float(clip), secure_noise=secure == "True",
)
model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(int(size)))})
projections = {"w": Projection("w", model["w"].shape, rank=0)}
step = PrivateStep(
    ledger=RunLedger(plan), estimator=Backward(Recorder(model, [], projections, {})),
    space=Subspace(dict(model.named_parameters()), projections), clip_groups={"w": BODY},
    source=SecretSource(unsafe_seed=40 + int(rank)),
)
step([], lambda inputs: inputs)
numbers = list(range(int(num_examples)))
batches = LogicalBatches(
    numbers, lambda batch: {"x": torch.tensor(batch)}, 4, source=SecretSource()
)
everybody = PrivacyPlan(
    num_examples=len(numbers), expected_batch_size=len(numbers), num_steps=1, target_delta=1e-5,
    noise_multiplier=float(sigma), l2_clip_norm=float(clip),
)
(batch,) = batches.loader(everybody, 1)
drawn = [x for part in batch for x in part.inputs["x"].tolist()]
torch.save((model["w"].grad, drawn), f"{folder}/{rank}.pt")
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module", params=[False, True], ids=["floating", "secure"])
def said(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[torch.Tensor, list[int]]]:
    """What two processes release about nobody, noise alone; and whom they draw of everybody."""
    folder, root = tmp_path_factory.mktemp("noise"), Path(__file__).parents[2]
    (folder / "step.py").write_text(SCRIPT)
    numbers = [str(n) for n in (NUM_COORDINATES, SIGMA, CLIP, DIVISOR, NUM_EXAMPLES)]
    numbers.append(str(request.param))
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "step.py"), str(rank), str(folder), str(root), *numbers],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def has_noise_once(gradient: torch.Tensor) -> bool:
    """Whether these are so many draws of the planned noise; 2.5 % are five standard errors."""
    want = SIGMA * CLIP / DIVISOR
    return abs(float(gradient.std()) / want - 1) < 5 / math.sqrt(2 * NUM_COORDINATES)


def test_noise_is_added_once(said: list[tuple[torch.Tensor, list[int]]]) -> None:
    (first, _), (second, _) = said
    assert torch.equal(first, second)
    assert has_noise_once(first)
    want = SIGMA * CLIP / DIVISOR
    assert abs(float(first.mean())) < 5 * want / math.sqrt(NUM_COORDINATES)


@pytest.mark.parametrize("factor", [0.0, math.sqrt(2), 0.5, 1.1, 0.9])
def test_noise_of_none_or_of_both_is_rejected(factor: float) -> None:
    draws = torch.randn(NUM_COORDINATES, generator=torch.Generator().manual_seed(6))
    assert has_noise_once(draws * SIGMA * CLIP / DIVISOR)
    assert not has_noise_once(draws * factor * SIGMA * CLIP / DIVISOR)


def test_every_example_is_drawn_by_one_process(
    said: list[tuple[torch.Tensor, list[int]]],
) -> None:
    (_, first), (_, second) = said
    assert first and second
    assert sorted(first + second) == list(range(NUM_EXAMPLES))
