"""The FFN neurons of a mixture of experts, in one row. Neurons of experts that are not chosen are zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from icebear.errors import MissingRule, ModelError
from icebear.models.parts.linear import ALL_INDICES, Linear, present

expert_tokens: ContextVar[tuple[Tensor, int] | None] = ContextVar("expert_tokens", default=None)
"""While an expert runs: the indices of its tokens, and the number of tokens in the batch.

Rules read it when they account for biases, whose rows are then no longer those of the batch; torch gives the rule of an
operation nothing but the operation's arguments.
"""


@contextmanager
def on_expert_tokens(tokens: Tensor, count: int) -> Iterator[None]:
    token = expert_tokens.set((tokens, count))
    try:
        yield
    finally:
        expert_tokens.reset(token)


def count(experts: Any) -> int:
    return experts.down_proj.shape[0]


def routes_inputs(experts: Any) -> bool:
    """Return whether the router weighs what experts read (Llama 4), so that all of them run on all tokens."""
    return hasattr(experts, "gate_up_proj") and not hasattr(experts, "is_transposed")


def is_transposed(experts: Any) -> bool:
    """Return whether the weights have rows of inputs."""
    return routes_inputs(experts) or bool(experts.is_transposed)


def width(experts: Any) -> int:
    """Return the number of neurons of each expert."""
    return int(experts.down_proj.shape[1 if is_transposed(experts) else 2])


def neuron_count(experts: Any) -> int:
    """Return the number of neurons of all experts; those of expert e begin at e * width."""
    return count(experts) * width(experts)


def _map(experts: Any, name: str, expert: int) -> tuple[Tensor, Tensor | None]:
    """Return the weight (out, in) and the bias of ``gate_up`` or ``down`` of one expert (transformers' interface)."""
    weight = getattr(experts, f"{name}_proj")[expert]
    bias = getattr(experts, f"{name}_proj_bias")[expert] if getattr(experts, "has_bias", False) else None
    return weight.T if is_transposed(experts) else weight, bias


def w_in_rows(experts: Any) -> Tensor:
    """Return the rows (E * I, D) of the gates of all experts, in float32."""
    concatenated = getattr(experts, "is_concatenated", True)
    gates = slice(width(experts)) if concatenated else slice(0, None, 2)  # the up rows follow, or alternate
    with present(experts):
        return torch.cat([Linear(_map(experts, "gate_up", e)[0]).rows(gates) for e in range(count(experts))])


def w_out_rows(experts: Any, chosen: slice = ALL_INDICES) -> Tensor:
    """Return the W_out rows (N, D) of the chosen neurons of all experts, before the router's weight, in float32."""
    neurons = torch.arange(neuron_count(experts))[chosen]
    owners, columns = neurons // width(experts), neurons % width(experts)
    with present(experts):
        expert_maps = [(Linear(_map(experts, "down", e)[0]), columns[owners == e]) for e in owners.unique().tolist()]
        return torch.cat([linear.columns(chosen_columns).T for linear, chosen_columns in expert_maps])


Visit = Callable[[Tensor], Tensor]
row_choices: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""In a pass of pairs: a router's indices (N, K), the same in both rows of a pair -> which of them a row chose itself
(N, K)."""


def forward_in_pass(module: Any, paired: bool) -> Callable[..., Any] | None:
    """Return a forward method for a pass with relevance rules, if the module has experts, whose kernels sort tokens.

    paired: as in `forward_with_hooks`.
    """
    if hasattr(module, "is_transposed") and hasattr(module, "down_proj"):  # transformers' interface
        return forward_with_hooks(module, {}, paired=paired)
    if paired and hasattr(module, "shared_expert") and routes_inputs(getattr(module, "experts", None)):
        return partial(_weighed_inputs, module)
    return None


def _weighed_inputs(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Run a mixture whose router weighs inputs (Llama 4), with the tokens of a batch first in each product."""
    x = x.flatten(0, -2)  # (B * T, D)
    scores, logits = block.router(x)  # (B * T, E)
    routed = block.experts((x[:, None] * scores[..., None]).transpose(0, 1).flatten(0, 1))  # (E * B * T, D)
    return block.shared_expert(x) + routed.unflatten(0, (scores.shape[1], -1)).sum(0), logits


def forward_with_hooks(
    experts: Any, visits: dict[str, Visit], before: Any = None, paired: bool = False
) -> Callable[..., Tensor]:
    """Return a forward method of the experts with hooks on their neurons and on the router's weights.

    `visits["ffn"]` receives and returns the neurons (B * T, E * I), `visits["router"]` the weights (B * T, E). They run
    after the hooks of `before`, if it is such a method. The computation is that of transformers, expert by expert; the
    neurons and weights of experts that are not chosen are zero and cost nothing.

    paired: whether the second half of rows are partners of the first half, for difference rules. What an expert writes
        that only one of two rows chose is then a constant, so that its relevance is that of the router's weight.
    """
    replacement = vars(experts).get("forward")
    if replacement is not None and not hasattr(replacement, "visits") and not hasattr(experts, "_hf_hook"):
        raise ModelError(
            "The forward method of a mixture of experts was replaced, so that icebear cannot run its neurons as it "
            "does; put the method of its class back."
        )
    each = width(experts)
    earlier: list[dict[str, Visit]] = getattr(before, "visits", [])
    paired = paired or getattr(before, "paired", False)

    def visited(site: str, x: Tensor) -> Tensor:
        for site_hooks in (*earlier, visits):
            x = site_hooks[site](x) if site in site_hooks else x
        return x

    def forward(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x (B * T, D), the chosen experts (B * T, K) and the router's weights for them (B * T, K)."""
        mine = _row_choices(top_k_index, top_k_weights) if paired else torch.ones_like(top_k_index, dtype=torch.bool)
        runs = torch.zeros(len(x), count(experts), dtype=torch.bool, device=x.device)
        runs = runs.scatter(1, top_k_index, mine)  # (B * T, E)
        weights = torch.zeros(*runs.shape, dtype=top_k_weights.dtype, device=x.device)
        weights = weights.scatter_add(1, top_k_index, top_k_weights)
        weights = visited("router", weights)  # (B * T, E)
        runs = runs if paired else runs | (weights != 0)  # a hook may give another expert a weight
        chosen = [rows.nonzero().flatten() for rows in (runs | partner(runs) if paired else runs).unbind(1)]
        parts = []
        for expert, rows in enumerate(chosen):
            with on_expert_tokens(rows, len(x)):
                inside = _neurons(experts, x[rows], expert)
            inside = torch.where(runs[rows, expert, None], inside, 0) if paired else inside
            silent = torch.zeros(len(x), each, dtype=x.dtype, device=x.device)
            parts.append(silent.index_copy(0, rows, inside))
        neurons = visited("ffn", torch.cat(parts, -1))  # (B * T, E * I)
        out = torch.zeros_like(x)
        for expert, rows in enumerate(chosen):
            inside = neurons[rows, expert * each : (expert + 1) * each]
            with on_expert_tokens(rows, len(x)):
                written = F.linear(inside, *_map(experts, "down", expert))
            written = _shared(written, runs[rows, expert, None]) if paired else written
            out = out.index_add(0, rows, written * weights[rows, expert, None].to(written.dtype))
        return out

    def forward_all(x: Tensor) -> Tensor:
        """x (E * B * T, D): what each expert reads; zeros if it is not chosen, and its neurons are zero."""
        read = torch.bmm(x.view(count(experts), -1, x.shape[-1]), experts.gate_up_proj)
        gate, up = read.transpose(0, 1).chunk(2, -1)  # (B * T, E, I)
        neurons = (up * experts.act_fn(gate)).flatten(1)
        inside = visited("ffn", neurons).unflatten(1, (count(experts), each)).transpose(0, 1)
        return torch.bmm(inside, experts.down_proj).flatten(0, 1)

    def loaded(*args: Tensor) -> Tensor:
        with present(experts):
            return forward_all(*args) if routes_inputs(experts) else forward(*args)

    # The next call for this module gets this function as `before`: it replaces it, and runs its hooks first.
    loaded.visits, loaded.paired = [*earlier, visits], paired  # type: ignore[attr-defined]
    return loaded


def _neurons(experts: Any, x: Tensor, expert: int) -> Tensor:
    if experts.has_gate:
        return experts._apply_gate(F.linear(x, *_map(experts, "gate_up", expert)))  # type: ignore[no-any-return]
    return experts.act_fn(F.linear(x, *_map(experts, "up", expert)))  # type: ignore[no-any-return]


def partner(x: Tensor) -> Tensor:
    """Return the values of the other row of each pair."""
    return x.roll(len(x) // 2, 0)


def _row_choices(index: Tensor, weights: Tensor) -> Tensor:
    """Return which of the experts of both rows a row chose itself. Raises `MissingRule` if its weights give others a
    share."""
    mine: Tensor | None = row_choices.get(index)
    if mine is None and torch.equal(index, partner(index)):
        return torch.ones_like(index, dtype=torch.bool)
    if mine is None or bool((weights.detach().abs() > SILENT)[~mine].any()):
        raise MissingRule("the router has no difference rule: the choices of both prompts are not apart.")
    return mine


SILENT = 1e-30
"""The largest weight of an expert that was not chosen: logits that stand for "not chosen" leave less."""


def _shared(written: Tensor, runs: Tensor) -> Tensor:
    """Return what an expert writes (N, D) in pairs; where only one row runs it, both get the same, as a constant."""
    alone = runs != partner(runs)
    return torch.where(alone, torch.where(runs, written, partner(written)).detach(), written)
