"""The FFN neurons of a mixture of experts, in one row. Neurons of experts that are not chosen are zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icebear.concepts.models.dispatch import present
from icebear.concepts.models.linear import WHOLE, Linear

part: ContextVar[tuple[Tensor, int] | None] = ContextVar("part", default=None)
"""While an expert runs: the indices of its tokens, and the number of tokens in the batch."""


@contextmanager
def on_part(tokens: Tensor, count: int) -> Iterator[None]:
    token = part.set((tokens, count))
    try:
        yield
    finally:
        part.reset(token)


def count(experts: Any) -> int:
    return experts.down_proj.shape[0]


def routes_inputs(experts: Any) -> bool:
    """Return whether the router weighs what experts read (Llama 4), so that all of them run on all tokens."""
    return not hasattr(experts, "is_transposed")


def _transposed(experts: Any) -> bool:
    return routes_inputs(experts) or bool(experts.is_transposed)


def width(experts: Any) -> int:
    """Return the number of neurons of each expert."""
    return int(experts.down_proj.shape[1 if _transposed(experts) else 2])


def neuron_count(experts: Any) -> int:
    """Return the number of neurons of all experts; those of expert e begin at e * width."""
    return count(experts) * width(experts)


def _map(experts: Any, name: str, expert: int) -> tuple[Tensor, Tensor | None]:
    """Return the weight (out, in) and the bias of ``gate_up`` or ``down`` of one expert (transformers' interface)."""
    weight = getattr(experts, f"{name}_proj")[expert]
    bias = getattr(experts, f"{name}_proj_bias")[expert] if getattr(experts, "has_bias", False) else None
    return weight.T if _transposed(experts) else weight, bias


def w_in_rows(experts: Any) -> Tensor:
    """Return the rows (E * I, D) of the gates of all experts, in float32."""
    concatenated = getattr(experts, "is_concatenated", True)
    gates = slice(width(experts)) if concatenated else slice(0, None, 2)  # the up rows follow, or alternate
    with present(experts):
        return torch.cat([Linear(_map(experts, "gate_up", e)[0]).rows(gates) for e in range(count(experts))])


def w_out_rows(experts: Any, chosen: slice = WHOLE) -> Tensor:
    """Return the W_out rows (N, D) of the chosen neurons of all experts, before the router's weight, in float32."""
    neurons = torch.arange(neuron_count(experts))[chosen]
    owners, places = neurons // width(experts), neurons % width(experts)
    with present(experts):
        own = [(Linear(_map(experts, "down", e)[0]), places[owners == e]) for e in owners.unique().tolist()]
        return torch.cat([linear.columns(here).T for linear, here in own])


Visit = Callable[[Tensor], Tensor]


def forward_past(experts: Any, visits: dict[str, Visit], before: Any = None) -> Callable[..., Tensor]:
    """Return a forward method of the experts with hooks on their neurons and on the router's weights.

    `visits["ffn"]` receives and returns the neurons (B * T, E * I), `visits["router"]` the weights (B * T, E). They run
    after the hooks of `before`, if it is such a method. The computation is that of transformers, expert by expert; the
    neurons and weights of experts that are not chosen are zero and cost nothing.
    """
    each = width(experts)
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
            with on_part(rows, len(x)):
                own = experts._apply_gate(F.linear(x[rows], *_map(experts, "gate_up", expert)))
            silent = torch.zeros(len(x), each, dtype=x.dtype, device=x.device)
            parts.append(silent.index_copy(0, rows, own))
        neurons = visited("ffn", torch.cat(parts, -1))  # (B * T, E * I)
        out = torch.zeros_like(x)
        for expert, rows in enumerate(chosen):
            inside = neurons[rows, expert * each : (expert + 1) * each]
            with on_part(rows, len(x)):
                written = F.linear(inside, *_map(experts, "down", expert))
            out = out.index_add(0, rows, written * weights[rows, expert, None].to(written.dtype))
        return out

    def forward_all(x: Tensor) -> Tensor:
        """x (E * B * T, D): what each expert reads; zeros if it is not chosen, and its neurons are zero."""
        gate, up = torch.bmm(x.view(count(experts), -1, x.shape[-1]), experts.gate_up_proj).chunk(2, -1)
        neurons = (up * experts.act_fn(gate)).transpose(0, 1).flatten(1)
        inside = visited("ffn", neurons).unflatten(1, (count(experts), each)).transpose(0, 1)
        return torch.bmm(inside, experts.down_proj).flatten(0, 1)

    def loaded(*args: Tensor) -> Tensor:
        with present(experts):
            return forward_all(*args) if routes_inputs(experts) else forward(*args)

    loaded.visits = [*earlier, visits]  # type: ignore[attr-defined]
    return loaded
