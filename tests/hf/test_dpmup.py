"""Width transfer and its optimizers inside the trainer.

Covers: hf/rates.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest_trainer import MakeTrainer, collate, examples
from families import CAUSAL, CLASSIFY, HEADS, make_config, make_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_dpgrape import PerSampleLoss, PrivacyPlan, PrivateTraining, width_transfer
from hf_dpgrape.subspace.parameters import SubspaceTensor
from hf_dpgrape.width.rules import transfer
from hf_dpgrape.width.shapes import layers_of


def narrow_config(folder: Path, family: str = "roberta") -> str:
    """A folder with the configuration of a narrower model, heads of the same size."""
    config = make_config(family)
    config.hidden_size, config.num_attention_heads, config.intermediate_size = 12, 1, 20
    config.save_pretrained(folder / "narrow")
    return str(folder / "narrow")


def wide(**changes: Any) -> Any:
    config = make_config("roberta")
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return HEADS[CLASSIFY].from_config(config)


def rates(trainer: Any) -> dict[str, float]:
    """Learning rate of every tensor."""
    tensors: dict[str, SubspaceTensor] = trainer.private_training.subspace.tensors
    names = {id(tensor.stand_in): name for name, tensor in tensors.items()}
    return {
        names[id(p)]: group["initial_lr"]
        for group in trainer.optimizer.param_groups
        for p in group["params"]
    }


DPMUP = {"clipping": "automatic", "max_steps": 2}


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "adamw_bc", "muon"])
@pytest.mark.parametrize("rank", [0, 5])
def test_plan_and_rates_are_the_rules(
    make_trainer: MakeTrainer, tmp_path: Path, optim: str, rank: int
) -> None:
    base = narrow_config(tmp_path)
    trainer = make_trainer(
        model=wide(), dpmup_base_model=base, optim=optim, rank=rank, learning_rate=0.01, **DPMUP
    )
    trainer.train()
    proxy = wide(hidden_size=12, num_attention_heads=1, intermediate_size=20)
    shapes = [{n: layer.shape for n, layer in layers_of(m).items()} for m in (proxy, trainer.model)]
    kind = {"sgd": "sgd", "muon": "muon"}.get(optim, "adam")
    rules = transfer(*shapes, optimizer=kind)
    assert dict(trainer.plan.clip_shares) == pytest.approx(dict(rules.clip_shares))
    found = rates(trainer)
    dense = "roberta.encoder.layer.0.intermediate.dense"
    expected = 0.01 * rules.rate_ratios[dense]
    if optim == "muon":
        assert rules.rate_ratios[dense] == 1
        shape = trainer.private_training.subspace.projections[f"{dense}.weight"].shape
        expected *= ((40 / 24) / max(1, shape[0] / shape[1])) ** 0.5
    assert found[f"{dense}.weight"] == pytest.approx(expected)
    assert found[f"{dense}.bias"] == pytest.approx(0.01 * rules.rate_ratios[dense])
    vector = 0.01 * (rules.noise_ratio if optim == "sgd" else 1)
    assert found["roberta.embeddings.LayerNorm.weight"] == pytest.approx(vector)
    out = "classifier.out_proj"
    assert found[f"{out}.weight"] == pytest.approx(0.01 * rules.rate_ratios[out])


def test_a_loop_of_ones_own_has_the_same_plan_groups_and_rates(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    base = narrow_config(tmp_path)
    trainer = make_trainer(model=wide(), dpmup_base_model=base, optim="sgd", **DPMUP)
    trainer.train()

    model = wide()
    with torch.device("meta"):
        proxy = wide(hidden_size=12, num_attention_heads=1, intermediate_size=20)
    width = width_transfer(model, proxy, optim="sgd", rank=5)
    plan = PrivacyPlan.calibrated(
        noise_multiplier=1.0,
        target_delta=1e-3,
        num_examples=40,
        expected_batch_size=10,
        num_steps=2,
        l2_clip_norm=trainer.plan.l2_clip_norm,
        clipping="automatic",
        clip_shares=width.rules.clip_shares,
    )
    assert plan == trainer.plan
    groups = [
        {"params": [p], "lr": 0.01 * width.rate_ratio(name)} for name, p in model.named_parameters()
    ]
    training = PrivateTraining(
        model,
        torch.optim.SGD(groups),
        plan,
        PerSampleLoss(model),
        examples=examples(),
        collate=collate,
        physical_batch_size=4,
        rank=5,
        clip_groups=width.clip_groups,
    )
    for batch in training.batches():
        training.step(batch)
    tensors = training.subspace.tensors
    found = {
        id(p): group["lr"] for group in training.optimizer.param_groups for p in group["params"]
    }
    own = {name: found[id(tensor.stand_in)] for name, tensor in tensors.items()}
    assert own == pytest.approx(rates(trainer), rel=1e-12)
    assert training.epsilon == trainer.private_training.epsilon


def test_record_and_card(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(model=wide(), dpmup_base_model=narrow_config(tmp_path), **DPMUP)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    out = Path(trainer.args.output_dir)
    record = json.loads((out / "privacy.json").read_text())["dpmup"]
    assert record["base_model"] == "narrow" and record["optimizer"] == "adam"
    sigma = trainer.plan.noise_multiplier
    assert record["proxy_noise_multiplier"] == pytest.approx(sigma * record["noise_ratio"])
    assert record["noise_ratio"] > 1
    assert any("Vectors of their own" in line for line in record["conventions"])
    assert "narrow" in (out / "README.md").read_text()


def test_a_proxy_of_the_same_width_changes_nothing(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    weights = []
    make_config("roberta").save_pretrained(tmp_path / "same")
    for more in ({"clip_grouping": "layer"}, {"dpmup_base_model": str(tmp_path / "same")}):
        trainer = make_trainer(model=wide(), output_dir=str(tmp_path / "run"), **more, **DPMUP)
        trainer.train()
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_resumed_run_has_the_same_rates(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    base = narrow_config(tmp_path)
    given = {"dpmup_base_model": base, "clipping": "automatic", "max_steps": 4}
    first = make_trainer(model=wide(), save_strategy="steps", save_steps=2, **given)
    first.train()
    second = make_trainer(model=wide(), **given)
    second.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
    assert rates(second) == rates(first)
    assert second.plan == first.plan


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("optim", ["muon", "adamw_bc"])
def test_own_optimizers_learn_without_dpmup(
    make_trainer: MakeTrainer, optim: str, rank: int
) -> None:
    trainer = make_trainer(optim=optim, rank=rank, max_steps=2, weight_decay=0.1)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    assert all(not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    if optim == "muon":
        used = [g for g in trainer.optimizer.param_groups if g["use_muon"]]
        assert sum(len(g["params"]) for g in used) == 13  # 2 x (4 + 2) and the head's dense


def test_muon_leaves_the_head_to_the_rule_of_adam(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    given = {"dpmup_base_model": narrow_config(tmp_path), "head_modules": ["dense"], **DPMUP}
    muon, adam = (
        make_trainer(model=wide(), optim=optim, **given) for optim in ("muon", "adamw_torch")
    )
    head = "roberta.encoder.layer.0.output.dense"
    ratios = [t._planned.width_transfer.rules.rate_ratios for t in (muon, adam)]
    assert ratios[0][head] == ratios[1][head] != 1
    assert ratios[0]["roberta.encoder.layer.0.attention.self.query"] == 1


def test_an_optimizer_that_was_passed_must_fit_the_rule(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    model = wide()
    model.roberta.embeddings.word_embeddings.requires_grad_(False)
    more = {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.01), None)}
    given = {"model": model, "dpmup_base_model": narrow_config(tmp_path), "more": more, **DPMUP}
    with pytest.raises(ValueError, match="is SGD, but DP-muP's rates are for adam"):
        make_trainer(optim="adamw_torch", **given).train()
    trainer = make_trainer(optim="sgd", **given)
    trainer.train()
    name = "roberta.encoder.layer.0.intermediate.dense"
    ratio = trainer._planned.width_transfer.rules.rate_ratios[name]
    assert rates(trainer)[f"{name}.weight"] == pytest.approx(0.01 * ratio)


def test_muon_has_a_rate_of_its_own(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(optim="muon", rank=0, max_steps=1, muon_learning_rate=0.5)
    trainer.train()
    found = rates(trainer)
    assert found["roberta.encoder.layer.0.attention.self.query.weight"] == 0.5
    assert found["roberta.encoder.layer.0.attention.self.query.bias"] == 0.01


def test_pretrained_models_are_an_extrapolation(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("gpt2", CAUSAL).float().save_pretrained(tmp_path / "wide")
    config = make_config("gpt2")
    config.n_embd, config.n_head = 12, 1
    config.save_pretrained(tmp_path / "narrow")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    logging.warning_once.cache_clear()
    trainer = make_trainer(
        model=loaded, causal=True, dpmup_base_model=str(tmp_path / "narrow"), **DPMUP
    )
    trainer.train()
    said = [r.getMessage() for r in caplog.records if "extrapolation" in r.getMessage()]
    assert len(said) == 1 and "coord-check" in said[0]
    conventions = trainer.privacy_record()["dpmup"]["conventions"]
    assert any("tied to `transformer.wte`" in line for line in conventions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clipping": "flat"}, "needs `clipping=automatic`"),
        ({"head_clip_share": 0.5}, "leave out `head_clip_share`"),
        ({"optim": "adagrad"}, "got `optim=adagrad`"),
        ({"dpmup_base_model": "/nowhere"}, "Expected a model folder"),
        ({"dpmup_base_model": "gpt2"}, r"to be a 'roberta' as the model is, got 'gpt2'"),
        ({"muon_learning_rate": 1.0}, "`muon_learning_rate` needs `optim=muon`"),
        ({"optim": "adamw_bc", "optim_args": "flor=1"}, "Expected `optim_args`"),
    ],
)
def test_wrong_input(
    make_trainer: MakeTrainer, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given = {"dpmup_base_model": narrow_config(tmp_path), **DPMUP, **changes}
    if given["dpmup_base_model"] == "gpt2":
        make_config("gpt2").save_pretrained(tmp_path / "gpt2")
        given["dpmup_base_model"] = str(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=message):
        make_trainer(model=wide(), **given).train()


def test_a_model_of_ones_own_needs_a_proxy_of_ones_own(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

    with pytest.raises(ValueError, match="override `dpmup_proxy`"):
        make_trainer(
            model=Own(),
            more={"compute_loss_func": lambda outputs, labels: outputs},
            dpmup_base_model="narrow",
            **DPMUP,
        )
