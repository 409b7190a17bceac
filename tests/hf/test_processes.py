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

#: Another copy may be installed; it is not the one under test.
THIS_COPY = f"""
from pathlib import Path
import hf_dpgrape
assert Path(hf_dpgrape.__file__).is_relative_to({str(Path(__file__).parents[2])!r})
"""

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
    private_loss_share=0.3, logging_steps=3, log_non_private_metrics=sigma == 0,
    use_cpu=True, bf16_weights=bf16, dataloader_pin_memory=False,
)
trainer = DPGrapeTrainer(
    model=model, args=arguments, train_dataset=examples(), data_collator=collate
)
trainer.train()
rank = trainer.args.process_index
torch.save({n: p.detach() for n, p in trainer.model.named_parameters()}, f"{folder}/{rank}.pt")
facts = {"world": trainer.args.world_size, "wrapped": type(trainer.model_wrapped).__name__}
facts["log"] = trainer.state.log_history[0]
assert trainer.privacy_record()["num_processes"] == trainer.args.world_size
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(facts, file)
"""


def launch(folder: Path, script_text: str, processes: int, *options: str) -> list[dict[str, Any]]:
    """What every process of a run says."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(THIS_COPY + script_text)
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests.parent), str(tests)])
    if processes == 1:
        launcher = ["accelerate.commands.launch", "--cpu", "--num_processes", "1"]
        launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    else:  # accelerate's own launcher wants MPI for several processes on CPUs
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, "-m", *launcher, str(script), str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def run(folder: Path, processes: int, sigma: float, dtype: str = "fp32") -> list[dict[str, Any]]:
    """Weights of every process after a run."""
    said = launch(folder, SCRIPT, processes, str(sigma), dtype)
    assert len(said) == processes and all(s["world"] == processes for s in said)
    assert all("DistributedDataParallel" not in s["wrapped"] for s in said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


def first_logs(folder: Path, processes: int) -> list[dict[str, float]]:
    """The first log of every process of a finished run."""
    return [json.loads((folder / f"{rank}.json").read_text())["log"] for rank in range(processes)]


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    (one,) = run(tmp_path / "one", 1, 0.0)
    two = run(tmp_path / "two", 2, 0.0)
    for name, value in one.items():
        assert torch.equal(two[0][name], two[1][name]), name
        assert torch.allclose(two[0][name], value, atol=1e-5), name
    (alone,), both = first_logs(tmp_path / "one", 1), first_logs(tmp_path / "two", 2)
    assert alone["private_loss"] == pytest.approx(alone["non_private_loss"], rel=1e-5)
    for log in both:
        assert log["private_loss"] == pytest.approx(alone["private_loss"], rel=1e-5)


@pytest.mark.slow
def test_noise_is_the_same_on_both_and_added_once(tmp_path: Path) -> None:
    (start,) = run(tmp_path / "none", 1, 0.0)
    first, second = run(tmp_path / "noisy", 2, 100.0)
    assert all(torch.equal(first[n], second[n]) for n in first)
    moved = torch.cat([(first[n] - start[n]).flatten() for n in first if n.endswith("bias")])
    # Three steps of SGD: 0.05 * sigma * C / B each, with independent noise.
    assert moved.std() == pytest.approx(3**0.5 * 0.05 * 100 / 40, rel=0.15)
    logs = first_logs(tmp_path / "noisy", 2)
    assert logs[0]["private_loss"] == logs[1]["private_loss"]
    stderr = 100 * 5 / (0.3 * 40) / 3**0.5
    assert logs[0]["private_loss_stderr"] == pytest.approx(stderr)
    assert 0 < abs(logs[0]["private_loss"]) < 6 * stderr


INCLUSION = """
import json, sys
import torch
from conftest_trainer import NUM_EXAMPLES, collate, examples
from families import CLASSIFY, make_model
from transformers import TrainerCallback
from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments


class Counted(torch.utils.data.Dataset):
    def __init__(self):
        self.rows, self.draws = examples(), []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.draws.append(index)
        return self.rows[index]


class Begin(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        data.draws.clear()  # what was looked at before the first step


folder = sys.argv[1]
model, data = make_model("roberta", CLASSIFY).float(), Counted()
for name, p in model.named_parameters():
    p.requires_grad_(name.startswith("classifier.out_proj"))
arguments = DPGrapeTrainingArguments(
    output_dir=folder, noise_multiplier=1.0, target_delta=1e-3, per_device_train_batch_size=8,
    expected_batch_size=12, max_steps=120, report_to=[], save_strategy="no", disable_tqdm=True,
    use_cpu=True, dataloader_pin_memory=False, unsafe_test_seed=3, logging_steps=1000,
)
trainer = DPGrapeTrainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
trainer.add_callback(Begin())
trainer.train()
counts = [data.draws.count(i) for i in range(NUM_EXAMPLES)]
with open(f"{folder}/{trainer.args.process_index}.json", "w") as file:
    json.dump({"counts": counts, "world": trainer.args.world_size}, file)
"""


@pytest.mark.slow
def test_two_processes_draw_every_example_at_the_planned_rate(tmp_path: Path) -> None:
    first, second = launch(tmp_path / "drawn", INCLUSION, 2)
    assert first["world"] == second["world"] == 2
    counts = torch.tensor(first["counts"]) + torch.tensor(second["counts"])
    num, prob = 120, 12 / 40
    # Sharded a second time, a loader would show half of them to each process, or all to both.
    assert counts.sum() == pytest.approx(40 * num * prob, abs=5 * (40 * num * prob * 0.7) ** 0.5)
    spread = (num * prob * (1 - prob)) ** 0.5
    assert ((counts - num * prob).abs() < 4.5 * spread).all()
    statistic = ((counts - num * prob) / spread).square().sum()
    assert 15 < statistic < 75  # chi-square with 40 degrees of freedom, at 1e-4 on either side
    assert abs(sum(first["counts"]) - sum(second["counts"])) < 5 * (40 * num * prob) ** 0.5


@pytest.mark.slow
def test_16_bit_weights_do_not_drift_apart(tmp_path: Path) -> None:
    first, second = run(tmp_path / "bf16", 2, 10.0, "bf16")
    assert next(iter(first.values())).dtype == torch.bfloat16
    assert all(torch.equal(first[n], second[n]) for n in first)
