"""How much the order in which a gated delta net multiplies changes shares: chunks of 64 tokens, as transformers
computes, against one token at a time, on small random Qwen3.5 models (4 layers, one of them attention).

python benchmarks/scan_order.py
"""

from __future__ import annotations

from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from icebear import Model, attribute

LENGTHS, SEEDS = (8, 64, 100, 200), range(10)
SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}


def recurrent(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Compute the gated delta rule token by token."""
    groups = value.shape[2] // key.shape[2]
    query, key = (modeling_qwen3_5.l2norm(x).repeat_interleave(groups, 2) for x in (query, key))
    state, outputs = torch.zeros(()), []
    for t in range(query.shape[1]):
        state = state * g[:, t, :, None, None].exp() if t else state
        row, new = key[:, t, :, None], value[:, t, :, None]  # (B, H, 1, K), (B, H, 1, V)
        new = new - row @ state if t else new
        state = state + row.transpose(2, 3) @ (new * beta[:, t, :, None, None])
        outputs.append(query[:, t, :, None] * query.shape[-1] ** -0.5 @ state)
    return torch.cat(outputs, 2).transpose(1, 2), None


def relevance(model: Model, ids: list[int], other: list[int], method: str | None = None) -> tuple[Tensor, Tensor]:
    """Return the relevance of tokens (T,), and of all neurons of the first layer (N,)."""
    result = attribute(model, ids, 11, 12, counterfactual=other, method=method)
    return result.tokens, torch.cat([result.of(site)[0].flatten() for site in ("ffn", "mixer")])


def deviation(one: Tensor, two: Tensor) -> float:
    return ((one - two).abs().sum() / two.abs().sum()).item()


def measured(length: int, seed: int, changed: int) -> list[float]:
    """Return the errors of the sum, and the deviations of tokens and neurons: of chunks, and of gxi as a control.

    changed: in how many tokens, drawn anew, the counterfactual differs.
    """
    torch.manual_seed(seed)
    net = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SIZES), dtype=torch.float32)
    for weight in net.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, 0.2)
    model = Model(net, name="random")
    ids = torch.randint(64, (length,))
    other, places = ids.clone(), torch.randperm(length)[:changed]
    other[places] = (ids[places] + torch.randint(1, 64, (changed,))) % 64
    pair = ids.tolist(), other.tolist()
    chunks, control = relevance(model, *pair), relevance(model, *pair, "gxi")
    with patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", recurrent):
        steps = relevance(model, *pair)
    sums = abs((chunks[0].sum() - steps[0].sum()).item()) / steps[0].abs().sum().item()
    return [sums, *(deviation(one, two) for part in (chunks, control) for one, two in zip(part, steps, strict=True))]


def main() -> None:
    print("tokens, changed; sum, tokens and neurons of chunks, of gxi (medians of 10 models), largest of chunks")
    for length in LENGTHS:
        for changed in (1, length // 4, length):
            rows = [measured(length, seed, changed) for seed in SEEDS]
            columns = list(zip(*rows, strict=True))
            largest = (f"{max(column):.2g}" for column in columns[1:3])
            print(length, changed, *(f"{median(column):.2g}" for column in columns), *largest)


if __name__ == "__main__":
    main()
