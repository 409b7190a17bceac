"""`secure_noise` in a Trainer: what record and card say, resuming, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_trainer import MakeTrainer

from hf_dpgrape.artifacts.model_card import privacy_facts

#: As many steps as are saved, and some more.
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "secure_noise": True}


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_a_run_says_how_its_noise_was_drawn(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plain, secure = make_trainer(), make_trainer(**SAVED)
    plain.train(), secure.train()
    assert not torch.equal(weights(plain), weights(secure))
    record = secure.privacy_record()
    assert record["plan"]["secure_noise"] is True
    assert ("noise", record["noise"]) in privacy_facts(record) and "AES-256" in record["noise"]
    assert "not cryptographic" in plain.privacy_record()["noise"]
    assert record["epsilon"] == plain.privacy_record()["epsilon"]
    # A checkpoint holds no state of a generator.
    names = {path.name for path in (tmp_path / "out" / "checkpoint-2").iterdir()}
    assert not [name for name in names if "rng" in name]


def test_noise_is_new_in_every_run_unless_a_test_fixes_the_seed(make_trainer: MakeTrainer) -> None:
    def trained(**changes: Any) -> torch.Tensor:
        trainer = make_trainer(secure_noise=True, max_steps=2, **changes)
        trainer.train()
        return weights(trainer)

    assert torch.equal(trained(), trained())
    assert not torch.equal(trained(unsafe_test_seed=None), trained(unsafe_test_seed=None))


def test_a_resumed_run_keeps_the_mode(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(**SAVED).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    with pytest.raises(ValueError, match="`secure_noise` was True, is now False"):
        make_trainer().train(resume_from_checkpoint=checkpoint)
    resumed = make_trainer(**SAVED)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.privacy_record()["steps_done"] == 4


def test_the_library_is_asked_for_before_anything_is_read(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    make_trainer()
    with pytest.raises(ValueError, match=r"install `hf-dpgrape\[secure\]`"):
        make_trainer(secure_noise=True)
