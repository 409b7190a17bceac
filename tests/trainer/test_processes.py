"""One process under `accelerate launch`, two under torchrun: one noise, the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = """
import json, sys
import torch
from conftest_trainer import NUM_EXAMPLES, collate, examples
from families import CLASSIFY, make_model
from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments

folder, sigma, bf16 = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "bf16"
model = make_model("roberta", CLASSIFY).float()
for module in model.modules():
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0
arguments = DPGrapeTrainingArguments(
    output_dir=folder, noise_multiplier=sigma, allow_zero_noise=True, target_delta=1e-3,
    per_device_train_batch_size=4, expected_batch_size=NUM_EXAMPLES, max_steps=3, rank=5,
    optim="sgd", learning_rate=0.05, lr_scheduler_type="constant", report_to=[],
    save_strategy="no", disable_tqdm=True,
    use_cpu=True, bf16_weights=bf16, dataloader_pin_memory=False,
)
trainer = DPGrapeTrainer(
    model=model, args=arguments, train_dataset=examples(), data_collator=collate
)
trainer.train()
rank = trainer.args.process_index
torch.save({n: p.detach() for n, p in trainer.model.named_parameters()}, f"{folder}/{rank}.pt")
facts = {"world": trainer.args.world_size, "wrapped": type(trainer.model_wrapped).__name__}
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(facts, file)
"""


def run(folder: Path, processes: int, sigma: float, dtype: str = "fp32") -> list[dict[str, Any]]:
    """Weights of every process after a run."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    tests = Path(__file__).parents[1]
    if processes == 1:
        launcher = ["accelerate.commands.launch", "--cpu", "--num_processes", "1"]
        launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    else:  # accelerate's own launcher wants MPI for several processes on CPUs
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, "-m", *launcher, str(script), str(folder), str(sigma), dtype]
    environment = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    assert len(said) == processes and all(s["world"] == processes for s in said)
    assert all("DistributedDataParallel" not in s["wrapped"] for s in said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    (one,) = run(tmp_path / "one", 1, 0.0)
    two = run(tmp_path / "two", 2, 0.0)
    for name, value in one.items():
        assert torch.equal(two[0][name], two[1][name]), name
        assert torch.allclose(two[0][name], value, atol=1e-5), name


@pytest.mark.slow
def test_noise_is_the_same_on_both_and_added_once(tmp_path: Path) -> None:
    (start,) = run(tmp_path / "none", 1, 0.0)
    first, second = run(tmp_path / "noisy", 2, 100.0)
    assert all(torch.equal(first[n], second[n]) for n in first)
    moved = torch.cat([(first[n] - start[n]).flatten() for n in first if n.endswith("bias")])
    # Three steps of SGD: 0.05 * sigma * C / B each, with independent noise.
    assert moved.std() == pytest.approx(3**0.5 * 0.05 * 100 / 40, rel=0.15)


@pytest.mark.slow
def test_16_bit_weights_do_not_drift_apart(tmp_path: Path) -> None:
    first, second = run(tmp_path / "bf16", 2, 10.0, "bf16")
    assert next(iter(first.values())).dtype == torch.bfloat16
    assert all(torch.equal(first[n], second[n]) for n in first)
