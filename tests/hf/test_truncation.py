"""A bound on the size of logical batches: what is drawn, recorded, resumed and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest_trainer import NUM_EXAMPLES, MakeTrainer

from hf_dpgrape.privacy.ledger import run_from_dict, run_to_dict
from hf_dpgrape.privacy.sampling.truncated_poisson import TruncatedPoisson

BOUND = 11


def test_no_step_holds_more_and_the_record_says_so(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(
        max_logical_batch_size=BOUND, save_strategy="steps", save_steps=2, num_train_epochs=1
    )
    sizes = [
        sum(p.num_samples for p in b) for _ in range(12) for b in trainer.get_train_dataloader()
    ]
    assert max(sizes) == BOUND and sizes.count(BOUND) > 5
    trainer.train()
    record = trainer.privacy_record()
    assert record["sampling"] == "Poisson, cut at random to at most 11 examples"
    assert list(record["epsilon_by_accountant"]) == ["pld"]
    assert record["epsilon"] == trainer.plan.epsilon() > make_trainer().plan.epsilon()
    other = make_trainer(max_logical_batch_size=BOUND + 1)
    with pytest.raises(ValueError, match="`max_logical_batch_size` was 11, is now 12"):
        other.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_runs_are_read_as_they_were_written() -> None:
    sampling = TruncatedPoisson(
        sampling_prob=0.25, num_examples=NUM_EXAMPLES, max_logical_batch_size=BOUND
    )
    run = (1.5, sampling, 7)
    assert run_from_dict(run_to_dict(run)) == run


def test_what_cannot_be_accounted_for_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="`max_logical_batch_size` must be at least `expected_ba"):
        make_trainer(max_logical_batch_size=9)
    with pytest.raises(ValueError, match=r"`accountant` must be one of .* cut at random"):
        make_trainer(max_logical_batch_size=BOUND, accountant="rdp")


def test_several_processes_are_refused(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make_trainer(max_logical_batch_size=BOUND).args
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ValueError, match=r"`max_logical_batch_size` needs one process, .* got 2"):
        args.check()
