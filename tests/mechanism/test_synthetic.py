"""Synthetic examples: inputs as models need them, of which none is read from a private row.

Covers: mechanism/placeholders.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hf_dpgrape.gradients.rehearsal import CONSTANT, PADDED
from hf_dpgrape.hf.losses import PerSampleLoss
from hf_dpgrape.mechanism.placeholders import num_image_tokens
from hf_dpgrape.mechanism.synthetic import SyntheticExamples

LENGTH, IMAGE = 23, 7
SAMPLES = (0, 1, PADDED, PADDED + 1, CONSTANT)


class Model(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(50, 6)
        self.config = SimpleNamespace(**config)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings


def structure(value: int, **more: Tensor) -> dict[str, Tensor]:
    ids = torch.full((1, LENGTH), value)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def own_batch(examples: SyntheticExamples) -> dict[str, Any]:
    made: dict[str, Any] = examples.choices()[-1][0](SAMPLES)
    return made


@pytest.mark.parametrize(("dtype", "page"), [(torch.long, 1000), (torch.float32, 1.0)])
@pytest.mark.parametrize("corners", [4, 8])
def test_boxes_lie_on_the_page(dtype: torch.dtype, page: float, corners: int) -> None:
    bbox = torch.zeros(1, LENGTH, corners).to(dtype)
    made = own_batch(SyntheticExamples(Model(), structure(0, bbox=bbox)))["bbox"]
    assert made.shape == (len(SAMPLES), LENGTH, corners) and made.dtype == dtype
    assert made.min() >= 0 and made.max() <= page
    left, top, right, bottom = made[..., [0, 1, 2, 3] if corners == 4 else [0, 1, 2, 5]].unbind(-1)
    assert (left < right).all() and (top < bottom).all()


def test_boxes_fit_a_small_table() -> None:
    model = Model(max_2d_position_embeddings=64)
    bbox = torch.zeros(1, LENGTH, 4).long()
    assert own_batch(SyntheticExamples(model, structure(0, bbox=bbox)))["bbox"].max() < 64


def test_three_separators_where_a_model_has_them() -> None:
    made = own_batch(SyntheticExamples(Model(sep_token_id=5, pad_token_id=1), structure(0)))
    assert (made["input_ids"] == 5).sum(1).tolist() == [3] * len(SAMPLES)


def test_nothing_that_the_example_holds_comes_through() -> None:
    """Two examples of the same names, dtypes and shapes that differ in all values give the same."""
    kinds: dict[str, Tensor] = {
        "bbox": torch.ones(1, LENGTH, 4).long(),
        "labels": torch.ones(1, LENGTH).long(),
        "pixel_values": torch.ones(1, 3, 5, 4),
        "token_type_ids": torch.ones(1, LENGTH).long(),
    }
    made = [
        own_batch(
            SyntheticExamples(Model(), structure(times, **{k: times * v for k, v in kinds.items()}))
        )
        for times in (0, 1)
    ]
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])


def llava() -> Any:
    text = hf.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=20,
        use_cache=True,
    )
    vision = hf.CLIPVisionConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        image_size=9,
        patch_size=3,
    )
    config = hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    torch.manual_seed(0)
    return hf.LlavaForConditionalGeneration(config)


def test_as_many_image_tokens_as_the_model_makes_features() -> None:
    model = llava()
    example = structure(3, pixel_values=torch.ones(1, 3, 9, 9), labels=torch.ones(1, LENGTH).long())
    assert num_image_tokens(model, example) == 9
    made = own_batch(SyntheticExamples(model, example, labels_are_tokens=True))
    assert (made["input_ids"] == IMAGE).sum(1).tolist() == [9] * len(SAMPLES)
    assert made["attention_mask"][made["input_ids"] == IMAGE].all()  # none is padding
    assert PerSampleLoss(model)(model, made).isfinite().all()
    assert num_image_tokens(model, structure(3)) == 0


def test_looking_for_image_tokens_leaves_the_model_as_it_was() -> None:
    model = llava().eval()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    num_image_tokens(model, structure(3, pixel_values=torch.ones(1, 3, 9, 9)))
    assert torch.equal(state, torch.get_rng_state()) and not model.training
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_no_part_of_a_model_fills_a_cache_in_training() -> None:
    model = llava()
    inner = model.model.language_model
    seen: list[bool] = []
    inner.register_forward_pre_hook(lambda module, _: seen.append(module.config.use_cache))
    example = structure(3, pixel_values=torch.ones(1, 3, 9, 9), labels=torch.ones(1, LENGTH).long())
    made = own_batch(SyntheticExamples(model, example, labels_are_tokens=True))
    loss = PerSampleLoss(model)
    _, outputs = loss.with_outputs(model, made)
    assert outputs.past_key_values is None
    assert loss.settle(model, {key: value[:1] for key, value in made.items()}) == ""
    assert seen and not any(seen)
    assert inner.config.use_cache  # as before


def test_no_number_inside_lists_comes_through() -> None:
    made = []
    for times in (1, 2):
        labels = [{"boxes": times * torch.ones(2, 4), "size": times, "area": times / 2}]
        batch = own_batch(
            SyntheticExamples(Model(num_labels=9), {**structure(0), "labels": labels})
        )
        made.append(batch["labels"])
    (one,), (other,) = made
    assert torch.equal(one.pop("boxes"), other.pop("boxes"))
    assert one == other


def test_flags_and_words_choose_how_a_model_runs_in_the_rehearsal_too() -> None:
    flags: dict[str, Any] = {"return_loss": True, "task": "a", "nothing": None}
    made = own_batch(SyntheticExamples(Model(), {**structure(0), **flags}))
    assert {key: made[key] for key in flags} == flags
