"""Predictions without storage against real steps: live tensors, the process, PyTorch's tracker.

Covers: commands/memory/account.py, commands/memory/command.py, commands/memory/methods.py,
commands/memory/setting.py, commands/memory/tracking.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import memory_cells
import pytest
import torch
import transformers
from memory_cells import CELLS
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from hf_dpgrape.commands.cli import main
from hf_dpgrape.commands.memory.account import ACTIVATIONS, METHODS, predict
from hf_dpgrape.commands.memory.setting import Setting
from hf_dpgrape.commands.memory.tracking import LiveBytes


def both(cell: str, method: str, device: str) -> tuple[Any, Any]:
    """What is predicted, and what a real step of the same kind takes."""
    accounts = [
        memory_cells.accounts(cell, [method], device=device, without_storage=fake)[0]
        for fake in (True, False)
    ]
    return accounts[0], accounts[1]


def assert_same(predicted: Any, real: Any) -> None:
    assert predicted.peak == pytest.approx(real.peak, rel=0.01)
    assert predicted.phases == pytest.approx(real.phases, rel=0.02)
    assert predicted.activations == pytest.approx(real.activations, rel=0.02)
    assert sum(predicted.parts.values()) == predicted.peak == max(predicted.phases.values())


@pytest.mark.parametrize(
    ("cell", "device"),
    [
        ("roberta-checkpointing", "gpu"),
        ("gpt2-bfloat16", "cpu"),
        *(
            pytest.param(cell, "cpu", marks=pytest.mark.slow)
            for cell in CELLS
            if cell != "gpt2-bfloat16"
        ),
    ],
)
def test_a_real_private_step_takes_what_is_predicted(cell: str, device: str) -> None:
    assert_same(*both(cell, "dp-grape", device))


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method != "dp-grape"])
def test_so_does_a_real_step_of_the_other_methods(method: str) -> None:
    if method == "lora":
        pytest.importorskip("peft")
    assert_same(*both("roberta", method, "gpu"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")
@pytest.mark.parametrize(
    ("cell", "method"), [*((cell, "dp-grape") for cell in CELLS), ("roberta", "dp-adam")]
)
def test_a_real_process_grows_by_what_is_predicted(cell: str, method: str) -> None:
    (account,) = memory_cells.accounts(cell, [method], device="cpu", without_storage=True)
    words = [sys.executable, "-W", "ignore", memory_cells.__file__, cell, method]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert account.peak == pytest.approx(json.loads(done.stdout)["growth"], rel=0.15)


def test_live_bytes_are_those_of_pytorchs_own_tracker() -> None:
    model = nn.Sequential(nn.Linear(37, 91), nn.GELU(), nn.Linear(91, 53))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(29, 37)

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    live = LiveBytes([*model.parameters(), *state, x])
    with live:
        live.start("step")
        step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, x)
    with tracker:
        step()
    assert live.peaks["step"].total == tracker.get_tracker_snapshot("peak")[x.device]["Total"]
    assert live.now == tracker.get_tracker_snapshot()[x.device]["Total"]


def test_parts_that_can_be_counted_by_hand() -> None:
    (account,) = memory_cells.accounts("roberta", ["dp-adam"], device="gpu", without_storage=True)
    config = transformers.AutoConfig.for_model("roberta", **CELLS["roberta"][1])
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    floats = sum(p.numel() for p in model.parameters())
    tokens = model.roberta.embeddings.position_ids.numel() + 130  # int64 buffers
    assert account.parts["weights"] == 4 * floats + 8 * tokens
    assert account.parts["gradients"] == 4 * floats
    assert account.parts["per-sample gradients"] == pytest.approx(7 * 4 * floats, rel=0.01)
    num_counters = len(list(model.parameters()))  # AdamW counts steps per tensor, in float32
    assert account.parts["optimizer state"] == 2 * 4 * floats + 4 * num_counters


@pytest.mark.slow
def test_memory_falls_where_it_should() -> None:
    def peak(method: str = "dp-grape", **changes: Any) -> int:
        found = memory_cells.accounts(
            "roberta", [method], device="gpu", without_storage=True, **changes
        )
        return int(found[0].peak)

    plain = peak()
    assert peak("dp-adam") > 2 * plain
    assert peak(gradient_checkpointing=True) < plain
    assert peak(dtype="bfloat16") < plain
    assert peak(batch_size=3) < plain
    joint = peak(batch_size=40, gradient_checkpointing=True)
    by_layer = peak(batch_size=40, gradient_checkpointing=True, clip_grouping="layer")
    assert by_layer < joint


def test_a_gpu_keeps_less_for_dropout_and_attention() -> None:
    of = {
        device: memory_cells.accounts("roberta", ["adamw"], device=device, without_storage=True)[0]
        for device in ("gpu", "cpu")
    }
    assert of["gpu"].activations < 0.8 * of["cpu"].activations


# ---- the command ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with a small model's configuration."""
    config = transformers.AutoConfig.for_model("roberta", **CELLS["roberta"][1])
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def words(folder: str, *more: str) -> list[str]:
    setting = ["--task", "sequence-classification", "--batch", "3", "--seq_len", "11"]
    return ["memory", folder, *setting, *more]


def test_json_is_the_prediction(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(folder, "--json", "--methods", "dp-grape", "--rank", "5")) == 0
    (account,) = predict(
        transformers.AutoConfig.from_pretrained(folder),
        Setting(batch_size=3, seq_len=11, rank=5),
        task="sequence-classification",
        methods=["dp-grape"],
    )
    assert json.loads(capsys.readouterr().out) == {"dp-grape": account.to_dict()}


def test_tables_and_plot(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "memory.png"
    more = ["--methods", "dp-grape", "adamw", "--plot", str(path)]
    assert main(words(folder, *more)) == 0
    out = capsys.readouterr().out
    for text in ("DP-GRAPE", "not private", "projections", ACTIVATIONS, "most in backward"):
        assert text in out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--batch", "0"], "`batch_size` must be at least 1, got 0"),
        (["--rank", "0"], "`rank` must be at least 1, got 0"),
        (["--seq_len", "131"], "`seq_len` must be at most 130"),
        (["--dtype", "float16"], "`dtype` must be one of float32, bfloat16, got 'float16'"),
        (["--optim", "muon"], "`optim` must be one of adamw_torch_fused, adamw_torch, sgd"),
        (["--methods", "magic"], "`methods` must be some of dp-grape, .*, got magic"),
        (["--task", "image-classification"], "Expected a model type with a head for the task"),
    ],
)
def test_wrong_settings_get_one_sentence(
    folder: str, capsys: pytest.CaptureFixture[str], more: list[str], sentence: str
) -> None:
    assert main(words(folder, *more)) == 2
    err = capsys.readouterr().err
    assert pytest.RaisesExc(ValueError, match=sentence).matches(ValueError(err))
    assert err.startswith("hf-dpgrape memory: ") and err.count("\n") == 1


def test_a_name_that_needs_the_hub_gets_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["memory", "facebook/opt-6.7b"]) == 2
    assert "if there is no network" in capsys.readouterr().err
