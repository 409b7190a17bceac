"""How many tokens a model takes: all that is known here of models' position tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

#: Under which names configurations have the size of the position table.
_IN_CONFIG = ("max_position_embeddings", "n_positions", "max_target_positions")

#: Tokenizers that know no limit have about 1e30.
_NO_LIMIT = 10**9


def longest_input(model: nn.Module, processing_class: Any = None) -> int | None:
    """Most tokens, padding included, that model and tokenizer surely take; None if any number.

    The smallest number found, which may be too small (a table of image patches counts too): lengths
    beyond it are only not rounded up.

    Args:
        model: the model, of which configuration and position embeddings are looked at.
        processing_class: its tokenizer, or a processor that has one.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    found = [*_of_configs(getattr(model, "config", None)), *_of_tables(model)]
    limit = getattr(tokenizer, "model_max_length", None)
    if isinstance(limit, int) and limit < _NO_LIMIT:
        found.append(limit)
    positive = [n for n in found if n > 0]  # -1 stands for no limit
    return min(positive) if positive else None


def _of_configs(config: Any) -> Iterator[int]:
    """What a configuration and those inside it say."""
    if config is None:
        return
    for name in _IN_CONFIG:
        if isinstance(limit := getattr(config, name, None), int):
            yield limit
    for inner in getattr(config, "sub_configs", {}):
        yield from _of_configs(getattr(config, inner, None))


def _of_tables(model: nn.Module) -> Iterator[int]:
    """Sizes of position embeddings, less the rows that no token has.

    OPT and BART begin `offset` rows into the table. RoBERTa and its relatives begin behind the
    padding's row, which they name as the table's `padding_idx`.
    """
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("pos" in own or own == "wpe"):
            padding = -1 if module.padding_idx is None else module.padding_idx
            yield module.num_embeddings - (padding + 1) - int(getattr(module, "offset", 0))
