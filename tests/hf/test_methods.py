"""What every private method has to do; one row in `METHODS` is one more run of each test here.

Covers: hf/method_arguments.py, mechanism/estimators/table.py.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest_trainer import MakeTrainer, collate, examples
from families import CLASSIFY, VOCAB, make_model
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpgrape import DPGrapeTrainer
from hf_dpgrape.hf.methods import METHODS, NON_PRIVATE
from hf_dpgrape.mechanism.private_step import PhysicalBatch

# A remark of peft's about transformers 5.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is dep:FutureWarning")

each_method = pytest.mark.parametrize("method", METHODS)

#: By default one method of each kind of vector; the others share their lines of code with one.
each_kind = pytest.mark.parametrize(
    "method",
    [
        name
        if name in ("dp-grape", "naive-dp-galore", "dpzero", "dp-lora")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
    ],
)

CLIP, DIVISOR = 0.7, 10

#: Rates with which each method gets somewhere on the easy problem; all take the same steps.
RATES = {
    "dp-grape": 3e-3,
    "dp-adam": 3e-3,
    "dp-sgd": 0.5,
    "dp-muon": 3e-3,
    "naive-dp-galore": 3e-3,
    "dpzero": 0.15,
    "dp-lora": 1e-2,
    "dp-bitfit": 3e-2,
    "dp-head": 3e-2,
}


class Methods:
    """Makes trainers of one method that differ in nothing else."""

    def __init__(self, make_trainer: MakeTrainer) -> None:
        self._make_trainer = make_trainer

    def __call__(self, method: str, **changes: Any) -> DPGrapeTrainer:
        model = make_model("roberta", CLASSIFY).float()
        for module in model.modules():  # two runs would draw other masks
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        given = {"l2_clip_norm": CLIP, "head_modules": ["classifier"], "optim": None}
        given["rank"] = 5 if METHODS[method].rank is None else None
        return self._make_trainer(model=model, method=method, **{**given, **changes})


@pytest.fixture
def methods(make_trainer: MakeTrainer) -> Methods:
    return Methods(make_trainer)


def begun(trainer: DPGrapeTrainer) -> Any:
    """The private training of a trainer, before its first step."""
    trainer.get_train_dataloader()
    trainer.create_optimizer()
    assert trainer.private_training is not None
    return trainer.private_training


def batch_of(trainer: DPGrapeTrainer, indices: list[int]) -> list[PhysicalBatch]:
    """These examples, as the trainer collates them."""
    assert trainer._batches is not None
    return trainer._batches[indices]


def released(training: Any, batch: list[PhysicalBatch]) -> Tensor:
    """The vector that a step releases, which is what its space is given."""
    seen: list[Tensor] = []
    own: Callable[[Any], None] = training.subspace.set_gradients

    def look(gradients: dict[str, Tensor]) -> None:
        seen.extend(gradients[name].flatten().clone() for name in sorted(gradients))
        own(gradients)

    training.subspace.set_gradients = look
    try:
        training.take_gradient(batch)
    finally:
        training.subspace.set_gradients = own
    return torch.cat(seen)


# ---- Sensitivity and noise ---------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("factor", [1e7, math.inf])
def test_one_example_moves_the_released_sum_by_at_most_the_clip_norm(
    methods: Methods, method: str, factor: float
) -> None:
    """The last of the examples, the only one of class 2, has an enormous loss and gradient."""
    rows = examples()
    others = rows.filter(lambda row: row["label"] != 2).select(range(7)).to_list()
    odd = {"input_ids": list(range(3, 17)), "label": 2}  # of its own length, so alone in a batch

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        own = F.cross_entropy(outputs.logits, labels, reduction="none")
        return own * torch.where(labels == 2, factor, 1.0)

    more = {
        "train_dataset": datasets.Dataset.from_list([*others, odd]),
        "compute_loss_func": loss,
        "data_collator": collate,
    }
    sums = []
    given = {"noise_multiplier": 0.0, "allow_zero_noise": True, "expected_batch_size": 8}
    for indices in ([*range(7)], [*range(8)]):
        trainer = methods(method, more=more, **given)
        # To divide by 8 is exact.
        sums.append(released(begun(trainer), batch_of(trainer, indices)) * 8)
    moved = float((sums[1].double() - sums[0].double()).norm())
    assert bool(sums[1].isfinite().all())
    assert moved <= CLIP
    assert moved == 0 if math.isinf(factor) else moved > 0.99 * CLIP  # the bound is reached
    assert float(sums[0].norm()) > 0.01 * CLIP


@each_kind
def test_noise_has_its_standard_deviation(methods: Methods, method: str) -> None:
    training = begun(methods(method, noise_multiplier=1.3, max_steps=4000))
    drawn: list[Tensor] = []
    while sum(len(vector) for vector in drawn) < 3000:
        drawn.append(released(training, []))
    values = torch.cat(drawn)
    want = 1.3 * CLIP / DIVISOR
    # The estimate's own deviation is at most 1.3 %: 5 % accepts, and 10 % is rejected.
    assert float(values.std()) == pytest.approx(want, rel=0.05)
    assert float(values.std()) != pytest.approx(1.1 * want, rel=0.05)
    assert abs(float(values.mean())) < 4 * want / math.sqrt(len(values))


@each_kind
def test_accounting_is_the_same_for_all(methods: Methods, method: str) -> None:
    trainer, other = methods(method), methods("dp-grape")
    assert trainer.plan == other.plan
    trainer.train()
    other.train()
    record, reference = trainer.privacy_record(), other.privacy_record()
    for key in ("epsilon", "epsilon_by_accountant", "plan", "steps_done", "sampling_prob"):
        assert record[key] == reference[key], key


# ---- Progress ----------------------------------------------------------------------------------


def easy(num: int = 60) -> datasets.Dataset:
    """The first token is the class."""
    g = torch.Generator().manual_seed(4)
    rest = [torch.randint(6, VOCAB, (5,), generator=g).tolist() for _ in range(num)]
    rows = [{"input_ids": [3 + i % 3, *row], "label": i % 3} for i, row in enumerate(rest)]
    return datasets.Dataset.from_list(rows)


@each_kind
def test_gets_somewhere_on_an_easy_problem(methods: Methods, method: str) -> None:
    more = {"train_dataset": easy(), "eval_dataset": easy(), "data_collator": collate}
    given: dict[str, Any] = {"num_directions": 16} if method == "dpzero" else {}
    trainer = methods(
        method,
        more=more,
        learning_rate=RATES[method],
        noise_multiplier=0.3,
        expected_batch_size=30,
        per_device_train_batch_size=30,
        max_steps=25,
        log_non_private_metrics=True,
        **given,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before


# ---- Resuming ----------------------------------------------------------------------------------


def steps(trainer: DPGrapeTrainer, first: int, num: int) -> None:
    """Takes steps on given examples, which depend on the number of the step alone."""
    assert trainer.private_training is not None
    for step in range(first, first + num):
        batch = batch_of(trainer, [step, 10 + step, 20 + 2 * step])
        trainer.private_training.step(batch)


@each_kind
def test_a_resumed_run_is_an_unbroken_one(methods: Methods, method: str) -> None:
    """Bit for bit, from what is on disk, when the secret source goes on where it stood."""
    whole = methods(method, update_proj_gap=3)
    training = begun(whole)
    steps(whole, 0, 2)
    state, weights = training.state_dict(), copy.deepcopy(whole.model.state_dict())
    file = io.BytesIO()
    torch.save(whole.optimizer.state_dict(), file)
    secrets = copy.deepcopy(whole._source._unsafe.getstate())
    steps(whole, 2, 2)

    continued = methods(method, update_proj_gap=3)
    again = begun(continued)
    continued.model.load_state_dict(weights)
    again.load_state_dict(state)
    file.seek(0)
    continued.optimizer.load_state_dict(torch.load(file, weights_only=True))
    continued._source._unsafe.setstate(secrets)
    steps(continued, 2, 2)
    assert again.epsilon == training.epsilon
    moved = 0
    for (name, p), q in zip(
        whole.model.named_parameters(), continued.model.parameters(), strict=True
    ):
        assert torch.equal(p, q), name
        moved += not torch.equal(p, weights[name])
    assert moved > 0


@each_kind
def test_a_checkpoint_is_resumed_by_the_same_method_alone(
    methods: Methods, tmp_path: Path, method: str
) -> None:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    methods(method, **saves).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    trainer = methods(method, **saves)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.privacy_record()["steps_done"] == 4
    other = "dp-sgd" if method == "dp-adam" else "dp-adam"
    with pytest.raises(ValueError, match=f"`method` was {method}, is now {other}"):
        methods(other, **saves).train(resume_from_checkpoint=checkpoint)


# ---- What is trained, and what is said of it ---------------------------------------------------


def moved_tensors(trainer: DPGrapeTrainer) -> set[str]:
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    return {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}


@each_method
def test_trains_what_it_says(methods: Methods, method: str) -> None:
    trainer = methods(method, noise_multiplier=50.0)
    names = {name for name, _ in trainer.model.named_parameters()}
    head = {n for n in names if "classifier." in n and "original_module" not in n}
    adapters = {n for n in names if "lora_" in n}
    wanted = {
        "dp-lora": head | adapters,
        "dp-bitfit": head | {n for n in names if n.endswith("bias")},
        "dp-head": head,
    }.get(method, names)
    assert moved_tensors(trainer) == wanted
    assert len(wanted) >= 4


@each_kind
def test_record_and_card_state_the_method(methods: Methods, tmp_path: Path, method: str) -> None:
    trainer = methods(method)
    trainer.train()
    record = trainer.privacy_record()
    assert record["method"]["name"] == record["projection"]["method"] == method
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| method | {method}: {METHODS[method].says} |" in card
    words = {"dpzero": "1 random direction(s) a step", "dp-grape": "rank 5, entries of",
             "naive-dp-galore": "after the noise, on 5 singular vectors"}  # fmt: skip
    assert f"| projection | {words.get(method, 'none')}" in card


# ---- Conflicts ---------------------------------------------------------------------------------

CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"method": "dp-head", "rank": 16}, "`rank=16` does not go with `method=dp-head`"),
    "optim": ({"method": "dp-sgd", "optim": "adamw_torch"}, "`optim=adamw_torch` does not go"),
    "zero": ({"method": "dpzero", "optim": "muon"}, "`optim=muon` does not go with `method=dpz"),
    "adapters": ({"method": "dp-adam", "lora_rank": 4}, "`lora_rank=4` does not go"),
    "directions": ({"num_directions": 4}, "`num_directions=4` does not go with `method=dp-grape`"),
    "reach": ({"perturbation_scale": 0.1}, "`perturbation_scale=0.1` does not go"),
    "head": ({"method": "dpzero", "head_only_steps": 2}, "`head_only_steps=2` does not go"),
    "share": ({"method": "dpzero", "head_clip_share": 0.5}, "`head_clip_share=0.5` does not go"),
    "layers": ({"method": "dpzero", "clip_grouping": "layer"}, "`clip_grouping=layer` does not"),
    "none": ({"method": "dpzero", "num_directions": 0}, "`num_directions` must be positive, got 0"),
    "ordinary": ({"method": NON_PRIVATE}, "`method=non-private` is not possible in a private tr"),
    "unknown": ({"method": "dp"}, r"`method` must be one of \['dp-grape', .*, got 'dp'"),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_conflicts_are_one_sentence(make_trainer: MakeTrainer, case: str) -> None:
    changes, sentence = CONFLICTS[case]
    with pytest.raises(ValueError, match=sentence) as error:
        make_trainer(**{"rank": None, **changes})
    assert str(error.value).count(". ") == 0


def test_a_method_with_an_optimizer_takes_no_other(make_trainer: MakeTrainer) -> None:
    model = make_model("roberta", CLASSIFY).float()
    more = {"optimizers": (torch.optim.Adagrad(model.parameters()), None)}
    with pytest.raises(ValueError, match="an optimizer of its own, sgd, but a Adagrad was passed"):
        make_trainer(model=model, method="dp-sgd", rank=None, more=more)


def test_a_head_has_to_be_named_where_none_is_new(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        ValueError, match=r"`method=dp-head` trains the head, .* name it by `head_m"
    ):
        make_trainer(method="dp-head", rank=None)


def test_a_model_that_has_adapters_keeps_them(make_trainer: MakeTrainer) -> None:
    import peft

    config = peft.LoraConfig(r=3, target_modules=["query"], task_type="SEQ_CLS")
    model = peft.get_peft_model(make_model("roberta", CLASSIFY).float(), config)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    trainer = make_trainer(model=model, method="dp-lora", rank=None, max_steps=1)
    assert [n for n, p in trainer.model.named_parameters() if p.requires_grad] == names
    trainer.train()


def test_a_model_that_is_made_later_is_prepared(make_trainer: MakeTrainer) -> None:
    more = {"model_init": lambda: make_model("roberta", CLASSIFY).float()}
    given: dict[str, Any] = {"head_modules": ["classifier"], "rank": None, "more": more}
    trainer = make_trainer(method="dp-head", **given)
    assert all(n.startswith("classifier.") for n in moved_tensors_after_init(trainer))


def moved_tensors_after_init(trainer: DPGrapeTrainer) -> set[str]:
    trainer.train()
    return {n for n, p in trainer.model.named_parameters() if p.requires_grad}
