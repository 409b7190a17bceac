"""Synthetic examples: made-up inputs of a model, on which it is rehearsed before training.

They have the structure of a collated example (names, dtypes, numbers of dimensions), which is
public, and contents from the model's configuration: token ids that it knows, random labels of the
right kind, masks. Of the training data no number is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dpgrape.gradients.rehearsal import CONSTANT, PADDED, Batch
from hf_dpgrape.mechanism.placeholders import image_token, num_image_tokens

#: Lengths of the two shapes that a model of sequences is rehearsed at, and of its labels where they
#: have a length of their own.
_LENGTHS, _LABEL_LENGTHS = (8, 16), (5, 9)

#: Label positions that count for nothing, by the convention of torch and transformers.
IGNORED = -100

#: Width and height of the page that boxes of whole numbers are on; others are its parts.
_PAGE = 1000

Shapes = Mapping[str, tuple[int, ...]]


class SyntheticExamples:
    """Makes examples for one model.

    Args:
        model: the model with the task head.
        structure: one collated example, of which names, dtypes and shapes are used.
        labels_are_tokens: whether labels are ids of tokens, not of a few classes.
    """

    def __init__(
        self, model: nn.Module, structure: Mapping[str, Any], *, labels_are_tokens: bool = False
    ) -> None:
        self._labels_are_tokens = labels_are_tokens
        self._dtypes = {k: v.dtype for k, v in structure.items() if isinstance(v, Tensor)}
        self._rest = {k: v for k, v in structure.items() if not isinstance(v, Tensor)}
        self._shape = {k: tuple(v.shape[1:]) for k, v in structure.items() if isinstance(v, Tensor)}
        self._num_tokens = _num_tokens(model)
        self._config = getattr(model, "config", None)
        self._num_image_tokens = num_image_tokens(model, structure)

    def choices(self) -> list[list[Batch]]:
        """Batches of two short shapes; and, should the model not take these, of the example's."""
        own = [self.of_shape(self._shape)]
        length = self._length()
        if length is None:
            return [own]
        small = [
            self.of_shape(
                {k: _resized(k, shape, length, *sizes) for k, shape in self._shape.items()}
            )
            for sizes in zip(_LENGTHS, _LABEL_LENGTHS, strict=True)
        ]
        return [small, own]

    def like(self, inputs: Mapping[str, Any]) -> Batch:
        """Batches of the shape of these inputs."""
        return self.of_shape({k: tuple(v.shape[1:]) for k, v in inputs.items() if k in self._shape})

    def of_shape(self, shapes: Shapes) -> Batch:
        """Batches of examples of one shape; an example's number decides what it holds."""

        def batch(samples: Sequence[int]) -> dict[str, Any]:
            examples = [self._example(number, shapes) for number in samples]
            return {
                **{k: self._nested(v, samples[0]) for k, v in self._rest.items()},
                **{key: torch.stack([example[key] for example in examples]) for key in shapes},
            }

        return batch

    def _nested(self, value: Any, number: int) -> Any:
        """A value that is no tensor, with other numbers in everything inside it.

        Flags and words choose how a model runs, and are structure.
        """
        generator = torch.Generator().manual_seed(1000 + number)
        highest = self._highest("labels", ())

        def drawn(shape: tuple[int, ...], is_whole: bool) -> Tensor:
            if is_whole:
                return torch.randint(highest, shape, generator=generator)
            return torch.rand(shape, generator=generator) / 2 + 0.25  # boxes, relative

        def other(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return drawn(leaf.shape, not leaf.is_floating_point()).to(leaf.dtype)
            if isinstance(leaf, int | float) and not isinstance(leaf, bool):
                return drawn((), isinstance(leaf, int)).item()
            return leaf

        return pytree.tree_map(other, value)

    def _length(self) -> int | None:
        """Length of the sequences in the structure; None for other inputs."""
        whole = {k: d for k, d in self._dtypes.items() if not d.is_floating_point}
        names = ["input_ids", "decoder_input_ids", "labels", *whole]
        shape = next((self._shape[n] for n in names if n in whole and self._shape[n]), None)
        if shape is None:
            return None
        return shape[-1] if "input_ids" in whole else shape[0]

    def _example(self, number: int, shapes: Shapes) -> dict[str, Tensor]:
        """One example."""
        generator = torch.Generator().manual_seed(1000 + number)
        ids = next((s for k, s in shapes.items() if k.endswith("input_ids") and s), None)
        length = ids[-1] if ids else None
        real = None if length is None else _real(number, length, self._num_image_tokens)
        return {
            key: self._value(key, shape, number, real, generator) for key, shape in shapes.items()
        }

    def _value(
        self,
        key: str,
        shape: tuple[int, ...],
        number: int,
        real: Tensor | None,
        generator: torch.Generator,
    ) -> Tensor:
        """What one key of one example holds."""
        dtype = self._dtypes[key]
        is_sequence = real is not None and len(shape) > 0 and shape[-1] == len(real)
        if "mask" in key:
            value = torch.ones(shape)
            if key.startswith("global"):
                value = torch.zeros(shape)
                value[..., 0] = 1
            elif is_sequence and real is not None:
                value = value * real
            return value.to(dtype)
        if dtype.is_floating_point and "bbox" not in key:
            drawn = torch.rand if "label" in key else torch.randn
            value = drawn(shape, generator=generator)
            return (torch.full(shape, 0.5) if number >= CONSTANT else value).to(dtype)
        if key.endswith("input_ids"):
            return self._tokens(shape, number, real if is_sequence else None, generator).to(dtype)
        if key.endswith("position_ids"):
            return torch.arange(shape[-1]).expand(shape).to(dtype)
        if "bbox" in key:
            boxes = self._boxes(shape, generator)
            return (boxes / _PAGE if dtype.is_floating_point else boxes).to(dtype)
        if key == "mm_token_type_ids":
            return self._is_image(shape).to(dtype)
        highest = self._highest(key, shape)
        value = torch.randint(highest, shape, generator=generator)
        if "label" in key and is_sequence:
            assert real is not None
            value = value.masked_fill(~real, IGNORED)
        return value.to(dtype)

    def _boxes(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Boxes (..., 4) on a page, or their corners (..., 8), none of them empty."""
        most = min(getattr(self._config, "max_2d_position_embeddings", _PAGE + 1) - 1, _PAGE)
        low, high = torch.randint(1, most // 2, (2, *shape[:-1], 2), generator=generator)
        left, top = low.unbind(-1)
        right, bottom = (low + high).unbind(-1)
        corners = (left, top, right, top, right, bottom, left, bottom)
        box = (left, top, right, bottom)
        return torch.stack(corners if shape[-1] == len(corners) else box, dim=-1)

    def _tokens(
        self, shape: tuple[int, ...], number: int, real: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Token ids: ordinary ones, the end of the text, padding."""
        special = _special_tokens(self._config)
        ordinary = [i for i in range(min(self._num_tokens, 4096)) if i not in special] or [0]
        pick = torch.randint(len(ordinary), shape, generator=generator)
        if number >= CONSTANT:
            pick = torch.full(shape, number % len(ordinary))
        tokens = torch.tensor(ordinary)[pick]
        end, pad = (getattr(self._config, f"{name}_token_id", None) for name in ("eos", "pad"))
        last = shape[-1] - 1 if real is None else int(real.nonzero()[-1])
        separator = getattr(self._config, "sep_token_id", None)
        if isinstance(separator, int) and last > 1:  # three, as between and behind two texts
            tokens[..., [last // 2 - 1, last // 2, last]] = separator
        if isinstance(end, int) and end != pad and len(shape) == 1:
            tokens[last] = end
        if real is not None:
            tokens = tokens.masked_fill(~real, pad if isinstance(pad, int) else 0)
        image = image_token(self._config)
        return tokens if image is None else tokens.masked_fill(self._is_image(shape), image)

    def _is_image(self, shape: tuple[int, ...]) -> Tensor:
        """Which tokens stand for an image: some behind the first."""
        place = torch.arange(shape[-1]).expand(shape)
        return (place > 0) & (place <= self._num_image_tokens)

    def _highest(self, key: str, shape: tuple[int, ...]) -> int:
        """One more than the largest value of an integer input."""
        if "label" in key:
            if self._labels_are_tokens:
                return self._num_tokens if shape else 2  # one for the whole: not a token
            return max(2, getattr(self._config, "num_labels", 2) or 2)
        if key.endswith("positions"):
            return self._shape_length_or(4)
        if key == "token_type_ids":
            return max(1, getattr(self._config, "type_vocab_size", 1) or 1)
        return 1000 if key == "bbox" else 2

    def _shape_length_or(self, default: int) -> int:
        return min(self._length() or default, default)


def _real(number: int, length: int, num_image_tokens: int = 0) -> Tensor:
    """Which positions of an example are not padding, (length,)."""
    place = torch.arange(length)
    if not PADDED <= number < CONSTANT:
        return place >= 0
    num_real = max(1, math.ceil(length / 2) + (number - PADDED) % 2 - (number - PADDED) // 2)
    return place < max(num_real, num_image_tokens + 2)


def _special_tokens(config: Any) -> set[Any]:
    """Ids with a meaning of their own, of a configuration and those inside it."""
    found: set[Any] = set()
    for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            found.add(value)
        elif hasattr(value, "to_dict"):
            found |= _special_tokens(value)
    return found


def _resized(
    key: str, shape: tuple[int, ...], length: int, short: int, short_labels: int
) -> tuple[int, ...]:
    """A shape with another length in place of that of the sequences."""
    if "label" in key and len(shape) == 1 and shape[0] != length:
        return (short_labels,)
    return tuple(short if size == length else size for size in shape)


def _num_tokens(model: nn.Module) -> int:
    """How many tokens a model knows; 2 if it has no table of them."""
    get: Callable[[], Any] | None = getattr(model, "get_input_embeddings", None)
    try:
        table = get() if get is not None else None
    except (NotImplementedError, AttributeError):  # transformers' answers where there is none
        table = None
    if isinstance(table, nn.Embedding):  # some have a row more than there are tokens
        known = getattr(getattr(model, "config", None), "vocab_size", None)
        return min(table.num_embeddings, known) if isinstance(known, int) else table.num_embeddings
    sizes = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and "pos" not in name and "type" not in name
    ]
    return min(sizes, default=2)
