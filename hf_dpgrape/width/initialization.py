"""Initial weights from which rates transfer over widths: muP's, for models trained from scratch."""

from __future__ import annotations

import math
import re

import torch
from torch import nn

from hf_dpgrape.width.shapes import layers_of, output_layers

#: Last names of layers that write into the residual stream, once per residual connection.
_RESIDUAL_OUTPUTS = re.compile(r"(^|\.)(c_proj|o_proj|out_proj|down_proj|fc2|output\.dense|wo)$")

#: Layers that make queries, alone or (GPT-2) as the first third of a fused layer.
_QUERIES = re.compile(r"(^|\.)(query|q_proj|q_lin)$")
_FUSED_QUERIES = re.compile(r"(^|\.)c_attn$")


@torch.no_grad()
def initialize_mup_(model: nn.Module) -> dict[str, str]:
    """Puts a model that is to be trained from scratch into muP, in place.

    Matrices are Gaussian with variance 1 / n_in, those that end a residual branch are divided by
    the square root of the number of branches (2 * depth in a transformer), the output layer and
    the queries are zero, biases beside matrices too. Embeddings, positions and norms stay as they
    are: their scale does not depend on the width (Yang et al. 2022, arXiv 2203.03466; the zero
    query, its appendix D.2).

    muP scales attention with 1 / d_head in place of 1 / sqrt(d_head). Make models wider by more
    heads of the same size: then the two differ by a constant, and the model's own scale is right.

    Args:
        model: the model, all of whose matrices are set anew.

    Returns:
        What was done to each matrix, by name: read it for a model other than an MLP, GPT-2 or ViT.

    Raises:
        ValueError: the output layer shares its weight with an embedding.
    """
    outputs = output_layers(model)
    layers = layers_of(model)
    tied = [name for name in outputs if name in layers and layers[name].shape.kind == "lookup"]
    if tied:
        raise ValueError(
            f"Expected an output layer of its own, got one that shares the weight of `{tied[0]}`: "
            "it cannot be zero. Set `tie_word_embeddings=False` in the configuration."
        )
    matrices = [name for name, layer in layers.items() if layer.shape.kind == "matrix"]
    branches = {name for name in matrices if _RESIDUAL_OUTPUTS.search(name)} - outputs
    done = {}
    for name in matrices:
        module, shape = model.get_submodule(name), layers[name].shape
        weight = max(module.parameters(recurse=False), key=lambda p: p.numel())
        for vector in module.parameters(recurse=False):
            if vector.ndim == 1:
                vector.zero_()
        stddev = 0.0 if name in outputs or _QUERIES.search(name) else shape.n_in**-0.5
        done[name] = f"N(0, 1/{shape.n_in})" if stddev else "zero"
        if name in branches:
            stddev /= math.sqrt(len(branches))
            done[name] += f" / sqrt({len(branches)})"
        weight.normal_(std=stddev) if stddev else weight.zero_()
        if _FUSED_QUERIES.search(name):  # (n_in, 3 * d), queries first
            weight[:, : weight.shape[1] // 3] = 0
            done[name] += ", queries zero"
    return done
