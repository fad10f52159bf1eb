"""Relevance as plain arrays, by our names or by TransformerLens'."""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import Tensor

from icebear.concepts.results.ranking import NeuronScores
from icebear.records import HOOKS
from icebear.values import one_of

Names = Literal["icebear", "transformer_lens"]
BY_HEAD = {"attn": HOOKS["head"], "q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v"}


def arrays(tokens: Tensor, neurons: NeuronScores, names: Names) -> dict[str, np.ndarray]:
    """Return `Relevance.to_arrays`."""
    one_of(names, "naming of arrays", ("icebear", "transformer_lens"))
    sites = {site: values.float().numpy() for site, values in neurons.relevance.items()}
    if names == "icebear":
        return {"tokens": tokens.numpy(), **sites}
    named: dict[str, np.ndarray] = {"hook_embed": tokens.numpy()}
    for site, values in sites.items():
        for layer, rows in enumerate(values):
            if site == "ffn":
                named[f"blocks.{layer}.{HOOKS[site]}"] = rows
            elif site in BY_HEAD and "attn" in sites:
                width = sites["attn"].shape[-1] // neurons.head_count
                named[f"blocks.{layer}.{BY_HEAD[site]}"] = rows.reshape(len(rows), -1, width)
            else:
                named[f"L{layer}.{site}"] = rows
    return named
