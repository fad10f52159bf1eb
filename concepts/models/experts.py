"""The FFN neurons of a mixture of experts: all experts' neurons in one row, silent where an expert is not chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from concepts.models.dispatch import present
from concepts.models.linear import WHOLE, Linear


def count(experts: Any) -> int:
    return experts.down_proj.shape[0]


def neuron_count(experts: Any) -> int:
    """How many neurons all experts have together; expert e has those from e * width on."""
    return experts.down_proj.shape[0] * experts.down_proj.shape[2]


def w1(experts: Any) -> Tensor:
    """(E * I, D) the rows of the experts' gates, in float32."""
    gates = slice(experts.down_proj.shape[2])  # the ups are behind them
    with present(experts):
        return torch.cat([Linear(weight).rows(gates) for weight in experts.gate_up_proj])


def w2(experts: Any, chosen: slice = WHOLE) -> Tensor:
    """(N, D) what the chosen of all experts' neurons write, before the router's weight, in float32."""
    neurons = torch.arange(neuron_count(experts))[chosen]
    width = experts.down_proj.shape[2]
    owners, places = neurons // width, neurons % width
    with present(experts):
        own = [(Linear(experts.down_proj[expert]), places[owners == expert]) for expert in owners.unique().tolist()]
        return torch.cat([linear.columns(here).T for linear, here in own])


Visit = Callable[[Tensor], Tensor]


def forward_past(experts: Any, visits: dict[str, Visit], before: Any = None) -> Callable[..., Tensor]:
    """The experts' forward method, on whose neurons (B * T, E * I) and router's weights (B * T, E) the functions
    `visits["ffn"]` and `visits["router"]` look, and may change them; after those of `before`, if that is one as well.

    The same sums as transformers' (`MixtralExperts` and its like), expert by expert; experts that are not chosen are
    silent, have no weight, and cost nothing.
    """
    width = experts.down_proj.shape[2]
    earlier: list[dict[str, Visit]] = getattr(before, "visits", [])

    def visited(site: str, x: Tensor) -> Tensor:
        for one in (*earlier, visits):
            x = one[site](x) if site in one else x
        return x

    def forward(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x (B * T, D), the chosen experts (B * T, K) and the router's weights for them (B * T, K)."""
        chosen = [(top_k_index == expert).any(-1).nonzero().flatten() for expert in range(count(experts))]
        weights = torch.zeros(len(x), len(chosen), dtype=top_k_weights.dtype, device=x.device)
        weights = weights.scatter_add(1, top_k_index, top_k_weights)
        weights = visited("router", weights)  # (B * T, E)
        parts = []
        for expert, rows in enumerate(chosen):
            gate, up = F.linear(x[rows], experts.gate_up_proj[expert]).chunk(2, -1)
            silent = torch.zeros(len(x), width, dtype=x.dtype, device=x.device)
            parts.append(silent.index_copy(0, rows, experts.act_fn(gate) * up))
        neurons = visited("ffn", torch.cat(parts, -1))  # (B * T, E * I)
        out = torch.zeros_like(x)
        for expert, rows in enumerate(chosen):
            written = F.linear(neurons[rows, expert * width : (expert + 1) * width], experts.down_proj[expert])
            out = out.index_add(0, rows, written * weights[rows, expert, None].to(written.dtype))
        return out

    def loaded(*args: Tensor) -> Tensor:
        with present(experts):
            return forward(*args)

    loaded.visits = [*earlier, visits]  # type: ignore[attr-defined]
    return loaded
