"""A prompt and its counterfactual, and passes in which most parts hold their counterfactual values.

1. Both prompts are read once: the activations of heads and FFN neurons, and the residual stream after each layer.
2. A `State` says what is recomputed; hooks give everything else its counterfactual value.
3. `CompletePasses` read all tokens for each state. `CachedPasses`, of a causal model, read what both prompts begin with
   once, the tokens before the explained one once for all states that agree there, and then its token for each state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.passes.neuron_recorders import Values
from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.passes.sites import hooks
from icebear.models.batch import Batch
from icebear.models.lock import replaced
from icebear.models.model import Model
from icebear.models.objective import Objective

KINDS = {"attn": ("attn", "cross"), "ffn": ("ffn", "shared", "router")}
"""The two kinds of parts, and their sites. The FFN of a mixture of experts is held with the weights of its router."""
STATES_PER_PASS = 24
"""The largest number of states that one pass computes."""
EXTRA_TOKENS = 40
"""A pass costs about as much as this many tokens more in a larger one: it reads all weights."""


@dataclass(frozen=True, eq=False)
class State:
    """What a pass recomputes. Everything else, from the first difference on, holds its counterfactual value."""

    attn: frozenset[int]
    """Tokens whose attention is recomputed in all layers."""
    ffn: frozenset[int]
    """Tokens whose FFN is recomputed in all layers."""
    nodes: Mapping[str, Tensor] = field(default_factory=dict)
    """Site -> (L, W) heads or neurons that are recomputed at the explained token."""
    read: frozenset[int] | None = None
    """Tokens that are read from the prompt, the others from the counterfactual; None for all."""

    def free_tokens(self, kind: str) -> frozenset[int]:
        return self.attn if kind == "attn" else self.ffn


@dataclass(frozen=True, eq=False)
class Reading:
    """What one prompt computes, at its S tokens from the first difference on."""

    activation: dict[str, Tensor]
    """Site -> (L, S, W)."""
    streams: dict[int, Tensor]
    """Layer -> (S, D), the residual stream after it; of an encoder-decoder at the tokens of the layer's stack."""
    logits: Tensor
    """(V,)"""


class PatchedPair:
    """Two prompts of equal length whose explained tokens have the same position, or prompts of other lengths, of which
    only the explained tokens are exchanged."""

    def __init__(self, model: Model, pair: Objective) -> None:
        """pair: the prompt and the counterfactual, with one target token."""
        self.model, self.pair, self.batch = model, pair, pair.rows([0]).batch
        self.is_aligned = len(set(pair.batch.lengths)) == 1
        self.target, self.contrast = (pair.targets[0] or (0,))[0], pair.contrasts[0]
        self.explained, self.explained_c = (pair.target_positions(row)[0] for row in (0, 1))
        cut = [explained + 1 if model.task.is_causal else None for explained in (self.explained, self.explained_c)]
        self.ids, self.ids_c = (pair.batch.row_ids(row)[: cut[row]] for row in (0, 1))
        self.ends_alike = self.ids[self.explained] == self.ids_c[self.explained_c]
        unequal = [p for p, ids in enumerate(zip(self.ids, self.ids_c, strict=False)) if ids[0] != ids[1]]
        self.first_difference = min(unequal, default=self.explained) if self.is_aligned else self.explained
        others = set(range(len(self.ids))) - {self.explained} if self.is_aligned else set()
        self.differing = frozenset(others & set(unequal))
        known = self.first_difference if model.task.is_causal else -1
        self.between = frozenset(p for p in others - self.differing if p > known)
        self.sites = [site for sites in KINDS.values() for site in sites if site in model.sites]
        with model.lock:  # no other thread may see the hooks that read
            self.passes: Passes = CachedPasses(self) if CachedPasses.fit(self) else CompletePasses(self)
            self.prompt, self.counterfactual = self.passes.read(0), self.passes.read(1)
        held = {site: x.to(model.device) for site, x in self.counterfactual.activation.items()}
        self.counterfactual = replace(self.counterfactual, activation=held)

    def number(self, logits: Tensor) -> Tensor:
        """Return target minus contrast (...) of logits (..., V)."""
        number = logits[..., self.target]
        return number if self.contrast is None else number - logits[..., self.contrast]

    @cached_property
    def ends(self) -> tuple[float, float]:
        """m(x) and m(c)."""
        return self.number(self.prompt.logits).item(), self.number(self.counterfactual.logits).item()

    def shares(self, logits: Tensor) -> list[float]:
        """Return F (N) of logits (N, V)."""
        complete, compared = self.ends
        return [(number - compared) / (complete - compared) for number in self.number(logits.double()).tolist()]

    def logits(self, states: Sequence[State]) -> Tensor:
        """Return the logits (N, V) at the explained token in each state."""
        return self.passes.logits(states)

    def at_explained(self, site: str) -> tuple[Tensor, Tensor]:
        """Return the activations (L, W) of a site at the explained token, of the prompt and the counterfactual."""
        column = self.explained - self.passes.start
        readings = (self.prompt, self.counterfactual)
        prompt, counterfactual = (reading.activation[site][:, column].to(self.model.device) for reading in readings)
        return prompt, counterfactual

    @property
    def all_tokens(self) -> frozenset[int]:
        return frozenset(range(len(self.ids)))

    def trace(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        """Return the logits (len(tokens), len(layers), V) of the counterfactual when the residual stream of one token
        after one layer is that of the prompt. In an encoder-decoder, layers count within the token's stack."""
        return self.passes.trace(tokens, layers)


class Passes:
    """Passes over the tokens of a pair from `start` on."""

    start = 0

    def __init__(self, pair: PatchedPair) -> None:
        self.pair, self.model = pair, pair.model
        self.outputs = [0] * pair.model.layers
        """How many values each layer returns in a tuple; 0 if it returns its residual stream alone."""

    def read(self, row: int) -> Reading:
        """Return what the prompt (row 0) or the counterfactual (row 1) computes."""
        raise NotImplementedError

    def logits(self, states: Sequence[State]) -> Tensor:
        raise NotImplementedError

    def trace(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def logits_of(self, logits: Tensor) -> Tensor:
        """Return the logits (N, V) of the explained token from those of a pass (N, 1, V)."""
        return logits[:, 0].to("cpu", self.model.sums_in["dtype"])

    def ids_of(self, state: State) -> list[int]:
        """Return the token ids that a state reads."""
        pair = self.pair
        if state.read is None:
            return list(pair.ids)
        return [x if p in state.read else c for p, (x, c) in enumerate(zip(pair.ids, pair.ids_c, strict=True))]

    def stack_of(self, token: int) -> int:
        """Return 0 for a token of the encoder or of the only stack, 1 for one of the decoder."""
        batch = self.pair.batch
        return int(batch.decoder is not None and token >= batch.spans[1].start)

    @contextmanager
    def reading(self, batch: Batch, streams: dict[int, Tensor]) -> Iterator[Values]:
        """Record the activations and residual streams of a pass over one prompt."""
        values = Values(self.model, batch, self.pair.sites)
        with ExitStack() as undo:
            undo.enter_context(values.reading(self.model))
            for layer, module in enumerate(self.model.layer_modules):
                undo.callback(module.register_forward_hook(partial(self._store, streams, layer)).remove)
            yield values

    def _store(self, streams: dict[int, Tensor], layer: int, module: Any, args: Any, output: Any) -> None:
        is_tuple = isinstance(output, tuple | list)
        self.outputs[layer] = len(output) if is_tuple else 0
        streams[layer] = (output[0] if is_tuple else output)[0]

    @contextmanager
    def holding(self, states: Sequence[State], start: int) -> Iterator[None]:
        """Hold what each state, a row of the pass, does not recompute. start: the first token of the pass."""
        pair, model, batch = self.pair, self.model, self.pair.batch
        free = {kind: torch.zeros(len(states), len(pair.ids), dtype=torch.bool) for kind in KINDS}
        for kind, mask in free.items():
            for row, state in enumerate(states):
                mask[row, sorted(state.free_tokens(kind))] = True
        on_device = {kind: mask.to(model.device) for kind, mask in free.items()}  # once, not in each layer
        kinds = {site: kind for kind, sites in KINDS.items() for site in sites if site in pair.sites}
        held = [site for site, kind in kinds.items() if not free[kind][:, start:].all()]
        nodes = {site: _together(states, site, model.device) for site in held}

        def hook(site: str, layer: int, x: Tensor) -> Tensor:
            tokens = range(len(pair.ids))[batch.span_of(model.stack_of(layer))] if batch.decoder else None
            begin = tokens.start if tokens else start
            mask = on_device[kinds[site]][:, begin : begin + x.shape[1], None].to(x.device)
            chosen, column = nodes[site], pair.explained - begin
            if chosen is not None and 0 <= column < x.shape[1]:
                mask = mask.repeat(1, 1, x.shape[-1])
                part = chosen[:, layer].to(x.device)
                mask[:, column] |= part.repeat_interleave(x.shape[-1] // part.shape[-1], -1)
            values = pair.counterfactual.activation[site][layer]
            values = values[begin - self.start : begin - self.start + x.shape[1]]
            return torch.where(mask, x, values.to(x))

        with hooks(model, [(site, layer) for site in held for layer in model.layers_with(site)], hook):
            yield


def _together(states: Sequence[State], site: str, device: torch.device) -> Tensor | None:
    """Return the nodes (N, L, W) of a site that states recompute; None if no state has any."""
    known = next((state.nodes[site] for state in states if site in state.nodes), None)
    if known is None:
        return None
    return torch.stack([state.nodes.get(site, torch.zeros_like(known)) for state in states]).to(device)


class CompletePasses(Passes):
    """Passes over all tokens, for models whose tokens attend to later ones or that have no plain cache."""

    def read(self, row: int) -> Reading:
        streams: dict[int, Tensor] = {}
        objective = self.pair.pair.rows([row])
        target = Logits(objective)
        with self.reading(objective.batch, streams) as values:
            forward(self.model, target, [])
        activation = {site: self._placed(row, values.values(0, x)) for site, x in values.activation.items()}
        return Reading(activation, streams, self.logits_of(target.logits)[0])

    def _placed(self, row: int, x: Tensor) -> Tensor:
        """Return activations (L, T, W) at the tokens of the prompt."""
        pair = self.pair
        if pair.is_aligned or not row:
            return x
        placed = x.new_zeros(len(x), len(pair.ids), x.shape[-1])  # only the explained tokens are exchanged
        placed[:, pair.explained] = x[:, pair.explained_c]
        return placed

    def logits(self, states: Sequence[State]) -> Tensor:
        parts = []
        for begin in range(0, len(states), STATES_PER_PASS):
            rows = states[begin : begin + STATES_PER_PASS]
            ids = torch.tensor([self.ids_of(state) for state in rows], device=self.model.device)
            with self.model.lock, torch.no_grad(), self.holding(rows, 0):
                parts.append(self._run(ids))
        return torch.cat(parts)

    def trace(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        rows = [(token, layer) for token in tokens for layer in layers]
        stacks = [0, len(self.model.stacks[0][1])]
        at = [(token, stacks[self.stack_of(token)] + layer) for token, layer in rows]
        logits = []
        for begin in range(0, len(at), STATES_PER_PASS):
            part = at[begin : begin + STATES_PER_PASS]
            ids = torch.tensor([self.pair.ids_c] * len(part), device=self.model.device)
            with self.model.lock, torch.no_grad(), self._patching(part):
                logits.append(self._run(ids))
        return torch.cat(logits).unflatten(0, (len(tokens), len(layers)))

    def _run(self, ids: Tensor) -> Tensor:
        """Return the logits (N, V) of token ids (N, T), the encoder's before the decoder's."""
        objective = self.pair.pair.rows([0] * len(ids))
        batch = objective.batch
        decoder = batch.decoder and replace(batch.decoder, ids=ids[:, batch.spans[1]])
        batch = replace(batch, ids=ids[:, batch.spans[0]], decoder=decoder)
        return self.logits_of(self.model.logits(batch, objective.all_positions))

    @contextmanager
    def _patching(self, rows: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Give each row, a token and a layer, the prompt's residual stream there."""
        batch, streams = self.pair.batch, self.pair.prompt.streams

        def patch(layer: int, module: Any, args: Any, output: Any) -> Any:
            x = (output[0] if isinstance(output, tuple | list) else output).clone()
            begin = batch.span_of(self.model.stack_of(layer)).start
            for row, (token, patched) in enumerate(rows):
                if patched == layer:
                    x[row, token - begin] = streams[layer][token - begin]
            return (x, *output[1:]) if isinstance(output, tuple | list) else x

        with ExitStack() as undo:
            for layer in {layer for _, layer in rows}:
                undo.callback(self.model.layer_modules[layer].register_forward_hook(partial(patch, layer)).remove)
            yield


class CachedPasses(Passes):
    """Passes of a causal model, with the keys and values of earlier tokens."""

    def __init__(self, pair: PatchedPair) -> None:
        super().__init__(pair)
        self.start = pair.first_difference
        self.beginning = Prefix(self.model, [pair.ids[: self.start]]) if self.start and pair.is_aligned else None
        self.prefixes: dict[Any, tuple[Prefix | None, int]] = {}
        """What states do before the explained token -> the keys and values there, and their row."""

    @classmethod
    def fit(cls, pair: PatchedPair) -> bool:
        """Return whether cached keys and values are exact."""
        prefix = Prefix.of(pair.model, [pair.ids[:1]])
        return prefix is not None and max(len(pair.ids), len(pair.ids_c)) < prefix.window

    def read(self, row: int) -> Reading:
        pair = self.pair
        streams: dict[int, Tensor] = {}
        ids = pair.ids_c if row else pair.ids
        begin = self.start if pair.is_aligned else 0
        new = torch.tensor([ids[begin:]], device=self.model.device)
        batch = Batch(new, torch.ones_like(new), (new.shape[1],))
        with self.reading(batch, streams) as values:
            prefix = self._extended([ids[begin:]])
        self.prefixes[self._key(self._plain(row))] = prefix, 0
        activation = {site: values.values(0, x) for site, x in values.activation.items()}
        if not pair.is_aligned:  # only the explained tokens are exchanged
            activation = {site: x[:, -1:] for site, x in activation.items()}
        last = torch.tensor([ids[-1:]], device=self.model.device)
        return Reading(activation, streams, self._last(prefix, [0], last, len(ids) - 1)[0])

    def _plain(self, row: int) -> State:
        """Return the state of the prompt or the counterfactual as it is."""
        everything = frozenset(range(len(self.pair.ids_c if row else self.pair.ids)))
        return State(everything, everything, read=frozenset() if row else None)

    def _key(self, state: State) -> Any:
        """Return what a state does before the explained token."""
        before = frozenset({self.pair.explained})
        return state.attn - before, state.ffn - before, state.read

    def _extended(self, rows: Sequence[Sequence[int]]) -> Prefix | None:
        """Return the prefix of what both prompts begin with and a row of each of the ids; None if it is empty."""
        if self.beginning is None:
            return Prefix(self.model, rows) if rows[0] else None
        return self.beginning.extended(torch.tensor(rows, device=self.model.device)) if rows[0] else self.beginning

    def _read_before(self, states: Sequence[State]) -> None:
        """Compute keys and values before the explained token, of the states where they are not known, in one pass."""
        new = {key: state for state in states if (key := self._key(state)) not in self.prefixes}
        if not new:
            return
        with self.model.lock, self.holding([replace(state, nodes={}) for state in new.values()], self.start):
            prefix = self._extended([self.ids_of(state)[self.start : self.pair.explained] for state in new.values()])
        is_shared = self.start == self.pair.explained
        self.prefixes |= {key: (prefix, 0 if is_shared else row) for row, key in enumerate(new)}

    @torch.no_grad()
    def _last(self, prefix: Prefix | None, rows: list[int], ids: Tensor, start: int) -> Tensor:
        """Return the logits (N, V) after token ids (N, S) that follow the first `start` tokens of rows of a prefix."""
        last = [ids.shape[1] - 1]
        if prefix and start:
            return self.logits_of(prefix.logits(ids, rows, [start] * len(rows), last))
        return self.logits_of(self.model.logits(Batch(ids, torch.ones_like(ids), (ids.shape[1],) * len(ids)), last))

    def logits(self, states: Sequence[State]) -> Tensor:
        explained = self.pair.explained
        logits: dict[int, Tensor] = {}
        self._read_before(states)
        known = [self.prefixes[self._key(state)] for state in states]
        by_prefix: dict[int, list[int]] = {}
        for number, (prefix, _) in enumerate(known):
            by_prefix.setdefault(id(prefix), []).append(number)
        for numbers in by_prefix.values():
            for begin in range(0, len(numbers), STATES_PER_PASS):
                part = numbers[begin : begin + STATES_PER_PASS]
                ids = torch.tensor([self.pair.ids[explained:]] * len(part), device=self.model.device)
                with self.model.lock, self.holding([states[number] for number in part], explained):
                    rows = [known[number][1] for number in part]
                    logits |= zip(part, self._last(known[part[0]][0], rows, ids, explained), strict=True)
        return torch.stack([logits[number] for number in range(len(states))])

    def trace(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        """Rows begin at their layer, and tokens near each other share a pass."""
        known = self.pair.prompt.logits
        logits = known.new_empty(len(tokens), len(layers), len(known))
        for column, layer in enumerate(layers):
            for part in _chunks(tokens):
                rows = [tokens.index(token) for token in part]
                logits[rows, column] = self._traced(part, layer)
        return logits

    def _traced(self, tokens: Sequence[int], layer: int) -> Tensor:
        """Return the logits (N, V) of the counterfactual with the stream of each token patched after a layer."""
        pair, begin = self.pair, min(tokens)
        prompt, counterfactual = (
            reading.streams[layer][begin - self.start :] for reading in (pair.prompt, pair.counterfactual)
        )
        stream = counterfactual.repeat(len(tokens), *[1] * counterfactual.dim())
        for row, token in enumerate(tokens):
            stream[row, token - begin] = prompt[token - begin]
        ids = torch.tensor([pair.ids_c[begin:]] * len(tokens), device=self.model.device)
        with self.model.lock, ExitStack() as undo:
            for module, count in zip(self.model.layer_modules[: layer + 1], self.outputs, strict=False):
                output = (stream, *[None] * (count - 1)) if count else stream
                undo.enter_context(replaced(module, "forward", lambda *_, output=output, **__: output))
            return self._last(self.prefixes[self._key(self._plain(1))][0], [0] * len(tokens), ids, begin)


def _chunks(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield tokens that share a pass, which begins at the first of them."""
    chunk: list[int] = []
    for token in sorted(tokens, reverse=True):
        if chunk and (chunk[-1] - token) * len(chunk) > EXTRA_TOKENS:
            yield chunk
            chunk = []
        chunk.append(token)
    yield chunk
