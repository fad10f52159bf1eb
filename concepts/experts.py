"""The FFN neurons of a mixture of experts: all experts' neurons in one row, silent where an expert is not chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def counted(experts: Any) -> int:
    """How many neurons all experts have together; expert e has those from e * width on."""
    return experts.down_proj.shape[0] * experts.down_proj.shape[2]


def w1(experts: Any) -> Tensor:
    """(E * I, D) the rows of the experts' gates, in float32."""
    width = experts.down_proj.shape[2]
    return experts.gate_up_proj[:, :width].detach().float().flatten(0, 1)


def w2(experts: Any) -> Tensor:
    """(E * I, D) what the experts' neurons write, before the router's weight, in float32."""
    return experts.down_proj.detach().float().transpose(1, 2).flatten(0, 1)


def forward_past(experts: Any, visit: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The experts' forward method, on whose neurons (B * T, E * I) `visit` looks, and may change them.

    The same sums as transformers' (`MixtralExperts` and its like), expert by expert; experts that are not chosen are
    silent and cost nothing.
    """
    count, width = experts.down_proj.shape[0], experts.down_proj.shape[2]

    def forward(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x (B * T, D), the chosen experts (B * T, K) and the router's weights for them (B * T, K)."""
        chosen = [(top_k_index == expert).any(-1).nonzero().flatten() for expert in range(count)]
        parts = []
        for expert, rows in enumerate(chosen):
            gate, up = F.linear(x[rows], experts.gate_up_proj[expert]).chunk(2, -1)
            silent = torch.zeros(len(x), width, dtype=x.dtype, device=x.device)
            parts.append(silent.index_copy(0, rows, experts.act_fn(gate) * up))
        neurons = visit(torch.cat(parts, -1))  # (B * T, E * I)
        out = torch.zeros_like(x)
        for expert, rows in enumerate(chosen):
            written = F.linear(neurons[rows, expert * width : (expert + 1) * width], experts.down_proj[expert])
            weight = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)[rows]  # (n, 1)
            out = out.index_add(0, rows, written * weight.to(written.dtype))
        return out

    return forward
