"""A prompt and its counterfactual, and passes in which most parts hold their counterfactual values.

1. Both prompts are read once: the activations of heads and FFN neurons, and the residual stream after each layer.
2. A `State` says what is recomputed; hooks give everything else its counterfactual value.
3. `CompletePasses` read all tokens for each state. `CachedPasses`, of a causal model, read what both prompts begin with
   once, the tokens before the explained one once for all states that agree there, and then its token for each state,
   from the first layer on where it is not that of the prompt or of the counterfactual.
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
from icebear.concepts.passes.prefix import Prefix, logits_at
from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.passes.sites import SkippedForward, hooks
from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.lock import replaced
from icebear.models.model import Model
from icebear.models.objective import Objective

PART_SITES = {"attn": ("attn", "cross"), "ffn": ("ffn", "shared", "router")}
"""The two kinds of parts, and their sites. The FFN of a mixture of experts is held with the weights of its router."""
STATES_PER_PASS = 24
"""The largest number of states that one pass over all tokens computes."""
STATES_OF_ONE_TOKEN = 96
"""The largest number of states that one pass over the explained token computes."""
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

    def recomputed_tokens(self, kind: str) -> frozenset[int]:
        return self.attn if kind == "attn" else self.ffn


@dataclass(frozen=True, eq=False)
class PromptActivations:
    """What a prompt computes, at its S tokens from the first difference on."""

    activation: dict[str, Tensor]
    """Site -> (L, S, W)."""
    streams: dict[int, Tensor]
    """Layer -> (S, D), the residual stream after it; of an encoder-decoder at the tokens of the layer's stack."""
    logits: Tensor
    """(V,)"""


class PatchedPair:
    """Two prompts of equal length whose explained tokens have the same position, or prompts of other lengths, of which
    only the explained tokens are exchanged."""

    def __init__(self, model: Model, objective: Objective) -> None:
        """objective: two rows, the prompt and the counterfactual, with one target token."""
        self.model, self.objective, self.batch = model, objective, objective.rows([0]).batch
        self.is_aligned = len(set(objective.batch.lengths)) == 1
        self.target, self.contrast = (objective.targets[0] or (0,))[0], objective.contrasts[0]
        self.position, self.position_c = (objective.target_positions(row)[0] for row in (0, 1))
        """That of the explained token in the prompt, and in the counterfactual."""
        stops = [position + 1 if model.task.is_causal else None for position in (self.position, self.position_c)]
        self.ids, self.ids_c = (objective.batch.row_ids(row)[: stops[row]] for row in (0, 1))
        self.ends_alike = self.ids[self.position] == self.ids_c[self.position_c]
        unequal = [p for p, ids in enumerate(zip(self.ids, self.ids_c, strict=False)) if ids[0] != ids[1]]
        self.first_difference = min(unequal, default=self.position) if self.is_aligned else self.position
        others = set(range(len(self.ids))) - {self.position} if self.is_aligned else set()
        self.differing = frozenset(others & set(unequal))
        known = self.first_difference if model.task.is_causal else -1
        self.between = frozenset(p for p in others - self.differing if p > known)
        self.sites = [site for sites in PART_SITES.values() for site in sites if site in model.sites]
        with model.lock:  # no other thread may see the hooks that read
            self.passes: Passes = CachedPasses.of(self) or CompletePasses(self)
            self.prompt, self.counterfactual = self.passes.read()
        held = {site: x.to(model.device) for site, x in self.counterfactual.activation.items()}
        self.counterfactual = replace(self.counterfactual, activation=held)

    def number(self, logits: Tensor) -> Tensor:
        """Return target minus contrast (...) of logits (..., V)."""
        number = logits[..., self.target]
        return number if self.contrast is None else number - logits[..., self.contrast]

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The explained number after the prompt and after the counterfactual."""
        return self.number(self.prompt.logits).item(), self.number(self.counterfactual.logits).item()

    def shares(self, logits: Tensor) -> list[float]:
        """Return the share of the difference that each row of logits (N, V) has.

        Raises `InputError` if the explained number is the same after both prompts."""
        number_x, number_c = self.ends
        if number_x == number_c:  # bfloat16 rounds small differences away
            raise InputError(
                f"The {'logit' if self.contrast is None else 'logit difference'} is {number_x:.3g} after both prompts, "
                "so there is nothing to explain; change the target, the contrast or the counterfactual."
            )
        return [(number - number_c) / (number_x - number_c) for number in self.number(logits.double()).tolist()]

    def logits(self, states: Sequence[State]) -> Tensor:
        """Return the logits (N, V) at the explained token in each state."""
        return self.passes.logits(states)

    def read_ahead(self, states: Sequence[State]) -> None:
        """Read the tokens before the explained one for states of several later calls, in one pass."""
        self.passes.read_ahead(states)

    def at_explained(self, site: str) -> tuple[Tensor, Tensor]:
        """Return the activations (L, W) of a site at the explained token, of the prompt and the counterfactual."""
        column = self.position - self.passes.start
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

    def read(self) -> tuple[PromptActivations, PromptActivations]:
        """Return what the prompt and the counterfactual compute."""
        raise NotImplementedError

    def logits(self, states: Sequence[State]) -> Tensor:
        raise NotImplementedError

    def read_ahead(self, states: Sequence[State]) -> None:
        """See `PatchedPair.read_ahead`; nothing where each pass reads all tokens."""

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
        """Record the activations of a pass over N prompts, and layer -> (N, S, D) the residual stream."""
        values = Values(self.model, batch, self.pair.sites)
        with ExitStack() as undo:
            undo.enter_context(values.reading(self.model))
            for layer, module in enumerate(self.model.layer_modules):
                undo.callback(module.register_forward_hook(partial(self._store, streams, layer)).remove)
            yield values

    def _store(self, streams: dict[int, Tensor], layer: int, module: Any, args: Any, output: Any) -> None:
        is_tuple = isinstance(output, tuple | list)
        self.outputs[layer] = len(output) if is_tuple else 0
        streams[layer] = output[0] if is_tuple else output

    @contextmanager
    def holding(self, states: Sequence[State], start: int) -> Iterator[None]:
        """Hold what each state, a row of the pass, does not recompute. start: the first token of the pass."""
        pair, model, batch = self.pair, self.model, self.pair.batch
        free = {kind: torch.zeros(len(states), len(pair.ids), dtype=torch.bool) for kind in PART_SITES}
        for kind, mask in free.items():
            for row, state in enumerate(states):
                mask[row, sorted(state.recomputed_tokens(kind))] = True
        on_device = {kind: mask.to(model.device) for kind, mask in free.items()}  # once, not in each layer
        kinds = {site: kind for kind, sites in PART_SITES.items() for site in sites if site in pair.sites}
        tokens = frozenset(range(start, len(pair.ids)))
        held = [
            site for site, kind in kinds.items() if not all(tokens <= state.recomputed_tokens(kind) for state in states)
        ]
        nodes = {site: self._nodes_of(states, site) for site in held}

        def hook(site: str, layer: int, x: Tensor) -> Tensor:
            begin = batch.span_of(model.stack_of(layer)).start if batch.decoder else start
            mask = on_device[kinds[site]][:, begin : begin + x.shape[1], None].to(x.device)
            values = pair.counterfactual.activation[site][layer]
            result = torch.where(mask, x, values[begin - self.start : begin - self.start + x.shape[1]].to(x))
            chosen, column = nodes[site], pair.position - begin
            if chosen is not None and 0 <= column < x.shape[1]:
                result[:, column] = torch.where(chosen[:, layer].to(x.device), x[:, column], result[:, column])
            return result

        with hooks(model, [(site, layer) for site in held for layer in model.layers_with(site)], hook):
            yield

    def _nodes_of(self, states: Sequence[State], site: str) -> Tensor | None:
        """Return the neurons (N, L, W) of a site that states recompute, of heads all; None if there are none."""
        chosen = _together(states, site)
        if chosen is None:
            return None
        width = self.pair.counterfactual.activation[site].shape[-1]
        return chosen.repeat_interleave(width // chosen.shape[-1], -1).to(self.model.device)

    @contextmanager
    def patching(self, rows: Sequence[tuple[int, int]], start: int) -> Iterator[None]:
        """Give each row, a token and a layer, the prompt's residual stream there. start: the first token of a pass."""
        batch, streams = self.pair.batch, self.pair.prompt.streams

        def patch(layer: int, module: Any, args: Any, output: Any) -> Any:
            x = (output[0] if isinstance(output, tuple | list) else output).clone()
            begin = batch.span_of(self.model.stack_of(layer)).start
            for row, (token, patched) in enumerate(rows):
                if patched == layer:
                    x[row, token - max(begin, start)] = streams[layer][token - max(begin, self.start)]
            return (x, *output[1:]) if isinstance(output, tuple | list) else x

        with ExitStack() as undo:
            for layer in {layer for _, layer in rows}:
                undo.callback(self.model.layer_modules[layer].register_forward_hook(partial(patch, layer)).remove)
            yield


def _row(streams: Mapping[int, Tensor], row: int) -> dict[int, Tensor]:
    return {layer: stream[row] for layer, stream in streams.items()}


def _together(states: Sequence[State], site: str) -> Tensor | None:
    """Return the nodes (N, L, W) of a site that states recompute; None if no state names any."""
    known = next((state.nodes[site] for state in states if site in state.nodes), None)
    if known is None:
        return None
    none = torch.zeros_like(known)
    return torch.stack([state.nodes.get(site, none) for state in states])


class CompletePasses(Passes):
    """Passes over all tokens, for models whose tokens attend to later ones or that have no plain cache."""

    def read(self) -> tuple[PromptActivations, PromptActivations]:
        return self._reading_of(0), self._reading_of(1)

    def _reading_of(self, row: int) -> PromptActivations:
        streams: dict[int, Tensor] = {}
        objective = self.pair.objective.rows([row])
        target = Logits(objective)
        with self.reading(objective.batch, streams) as values:
            forward(self.model, target, [])
        activation = {site: self._placed(row, x) for site, x in values.activations(0).items()}
        return PromptActivations(activation, _row(streams, 0), self.logits_of(target.logits)[0])

    def _placed(self, row: int, x: Tensor) -> Tensor:
        """Return activations (L, T, W) at the tokens of the prompt."""
        pair = self.pair
        if pair.is_aligned or not row:
            return x
        placed = x.new_zeros(len(x), len(pair.ids), x.shape[-1])  # only the explained tokens are exchanged
        placed[:, pair.position] = x[:, pair.position_c]
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
            with self.model.lock, torch.no_grad(), self.patching(part, 0):
                logits.append(self._run(ids))
        return torch.cat(logits).unflatten(0, (len(tokens), len(layers)))

    def _run(self, ids: Tensor) -> Tensor:
        """Return the logits (N, V) of token ids (N, T), the encoder's before the decoder's."""
        objective = self.pair.objective.rows([0] * len(ids))
        batch = objective.batch
        decoder = batch.decoder and replace(batch.decoder, ids=ids[:, batch.spans[1]])
        ids = ids[:, batch.spans[0]]
        batch = replace(batch, ids=ids, mask=batch.mask[:, : ids.shape[1]], decoder=decoder)
        return self.logits_of(self.model.logits(batch, objective.all_positions))


class CachedPasses(Passes):
    """Passes of a causal model, with the keys and values of earlier tokens."""

    def __init__(self, pair: PatchedPair, beginning: Prefix | None) -> None:
        """beginning: of the tokens that both prompts begin with, if there are any."""
        super().__init__(pair)
        self.start, self.beginning = pair.first_difference, beginning
        self.prefixes: dict[Any, tuple[Prefix | None, int]] = {}
        """What states do before the explained token -> the keys and values there, and their row."""

    @classmethod
    def of(cls, pair: PatchedPair) -> CachedPasses | None:
        """Return passes; None where cached keys and values are not exact, or an image would have to be read too."""
        if pair.batch.images is not None:
            return None
        count = pair.first_difference if pair.is_aligned else 0
        prefix = Prefix.of(pair.model, [pair.ids[: count or 1]])
        if prefix is None or max(len(pair.ids), len(pair.ids_c)) >= prefix.window:
            return None
        return cls(pair, prefix if count else None)

    def read(self) -> tuple[PromptActivations, PromptActivations]:
        if self.pair.is_aligned:
            prompt, counterfactual = self._readings([0, 1])
        else:
            (prompt,), (counterfactual,) = self._readings([0]), self._readings([1])
        return prompt, counterfactual

    def _readings(self, rows: Sequence[int]) -> list[PromptActivations]:
        """Read the prompt (row 0), the counterfactual (row 1), or both, of equal length, in one pass."""
        pair, model = self.pair, self.model
        streams: dict[int, Tensor] = {}
        begin = self.start if pair.is_aligned else 0
        ids = torch.tensor([(pair.ids, pair.ids_c)[row][begin:] for row in rows], device=model.device)
        batch = Batch(ids, torch.ones_like(ids), (ids.shape[1],) * len(ids))
        inputs = self.beginning.after(ids) if self.beginning else model.inputs(batch)
        with self.reading(batch, streams) as values, torch.no_grad():
            logits, cache = logits_at(model, inputs, [ids.shape[1] - 1], use_cache=True)
        prefix = Prefix(model, cache, begin + ids.shape[1])
        self.prefixes |= {self._plain_key(row): (prefix, number) for number, row in enumerate(rows)}
        activation = [values.activations(number) for number in range(len(rows))]
        if not pair.is_aligned:  # only the explained tokens are exchanged; a view would keep all
            activation = [{site: x[:, -1:].clone() for site, x in each.items()} for each in activation]
        of_rows = zip(activation, self.logits_of(logits), strict=True)
        return [PromptActivations(each, _row(streams, number), row) for number, (each, row) in enumerate(of_rows)]

    def _plain_key(self, row: int) -> Any:
        """Return the key of the prompt or the counterfactual as it is."""
        before = frozenset(range(len((self.pair.ids, self.pair.ids_c)[row]) - 1))
        return before, before, frozenset() if row else None

    def _key(self, state: State) -> Any:
        """Return what a state does before the explained token."""
        explained = frozenset({self.pair.position})
        return state.attn - explained, state.ffn - explained, state.read

    def _extended(self, rows: Sequence[Sequence[int]]) -> Prefix | None:
        """Return the prefix of what both prompts begin with and a row of each of the ids; None if it is empty."""
        if self.beginning is None:
            return Prefix.read(self.model, rows) if rows[0] else None
        return self.beginning.extended(torch.tensor(rows, device=self.model.device)) if rows[0] else self.beginning

    def read_ahead(self, states: Sequence[State]) -> None:
        """Compute keys and values before the explained token, of the states where they are not known, in one pass."""
        new = {key: state for state in states if (key := self._key(state)) not in self.prefixes}
        if not new:
            return
        with self.model.lock, self.holding([replace(state, nodes={}) for state in new.values()], self.start):
            prefix = self._extended([self.ids_of(state)[self.start : self.pair.position] for state in new.values()])
        is_shared = self.start == self.pair.position
        self.prefixes |= {key: (prefix, 0 if is_shared else row) for row, key in enumerate(new)}

    @torch.no_grad()
    def _last(self, prefix: Prefix | None, rows: list[int], ids: Tensor, start: int) -> Tensor:
        """Return the logits (N, V) after token ids (N, S) that follow the first `start` tokens of rows of a prefix."""
        last = [ids.shape[1] - 1]
        if prefix and start:
            return self.logits_of(prefix.logits(ids, rows, [start] * len(rows), last))
        return self.logits_of(self.model.logits(Batch(ids, torch.ones_like(ids), (ids.shape[1],) * len(ids)), last))

    def logits(self, states: Sequence[State]) -> Tensor:
        logits: dict[int, Tensor] = {}
        self.read_ahead(states)
        begins = self._begins(states)
        by_prefix: dict[int, list[int]] = {}
        for number in sorted(range(len(states)), key=lambda number: -begins[number][0]):
            by_prefix.setdefault(id(self.prefixes[self._key(states[number])][0]), []).append(number)
        for numbers in by_prefix.values():
            for begin in range(0, len(numbers), STATES_OF_ONE_TOKEN):
                part = numbers[begin : begin + STATES_OF_ONE_TOKEN]
                logits |= zip(part, self._computed([states[n] for n in part], [begins[n] for n in part]), strict=True)
        return torch.stack([logits[number] for number in range(len(states))])

    def _computed(self, states: Sequence[State], begins: Sequence[tuple[int, PromptActivations]]) -> Tensor:
        """Return the logits (N, V) of states with one prefix, from their lowest layer on."""
        explained, known = self.pair.position, [self.prefixes[self._key(state)] for state in states]
        ids = torch.tensor([self.pair.ids[explained:]] * len(states), device=self.model.device)
        lowest = min(layer for layer, _ in begins)
        with self.model.lock, ExitStack() as undo:
            undo.enter_context(self.holding(states, explained))
            if lowest:
                streams = torch.stack([reading.streams[lowest - 1][-1:] for _, reading in begins])
                undo.enter_context(self.starting(lowest, streams))
            return self._last(known[0][0], [row for _, row in known], ids, explained)

    def _begins(self, states: Sequence[State]) -> list[tuple[int, PromptActivations]]:
        """Return for each state the first layer whose explained token must be computed, and the prompt or the
        counterfactual, which has the residual stream before it."""
        pair, shape = self.pair, (len(states), self.model.layers)
        is_held, is_free = (torch.ones(shape, dtype=torch.bool) for _ in range(2))  # all of a layer's nodes
        for kind, site in ((kind, site) for kind, sites in PART_SITES.items() for site in sites if site in pair.sites):
            at, nodes = self.model.layers_with(site), _together(states, site)
            free = torch.tensor([[pair.position in state.recomputed_tokens(kind)] for state in states])  # (N, 1)
            has_any, has_all = (free, free) if nodes is None else (nodes.any(-1)[:, at], nodes.all(-1)[:, at])
            is_held[:, at] &= ~(free | has_any)
            is_free[:, at] &= free | has_all
        leading = torch.stack([is_held, is_free], -1).long().cumprod(1).sum(1).tolist()  # layers before the first other
        begins = []
        for state, (held, free) in zip(states, leading, strict=True):
            held *= pair.is_aligned and pair.ends_alike
            free *= self._key(state) == self._plain_key(0)
            begins.append((free, pair.prompt) if free > held else (held, pair.counterfactual))
        return begins

    @contextmanager
    def starting(self, layer: int, stream: Tensor) -> Iterator[None]:
        """Give the layers before one the residual stream (N, S, D) that follows them."""
        with ExitStack() as undo:
            for module, count in zip(self.model.layer_modules[:layer], self.outputs, strict=False):
                output = (stream, *[None] * (count - 1)) if count else stream
                undo.enter_context(replaced(module, "forward", SkippedForward(output)))
            yield

    def trace(self, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
        """Tokens near each other share a pass, and so do their layers unless there are many tokens to read. After the
        last layer the explained token is that of the prompt or of the counterfactual."""
        pair, last = self.pair, self.model.layers - 1
        logits = pair.counterfactual.logits.expand(len(tokens), len(layers), -1).clone()
        for number, layer in enumerate(layers):
            if layer == last and pair.position in tokens:
                logits[tokens.index(pair.position), number] = pair.prompt.logits
        computed = [layer for layer in layers if layer != last]
        for part in _chunks(tokens) if computed else ():
            is_short = len(part) * (pair.position + 1 - min(part)) <= EXTRA_TOKENS
            for group in [computed] if is_short else [[layer] for layer in computed]:
                traced = self._traced([(token, layer) for token in part for layer in group])
                for token, rows in zip(part, traced.split(len(group)), strict=True):
                    logits[tokens.index(token), [layers.index(layer) for layer in group]] = rows
        return logits

    def _traced(self, rows: Sequence[tuple[int, int]]) -> Tensor:
        """Return the logits (N, V) of the counterfactual with the stream of a token patched after a layer."""
        pair = self.pair
        begin, lowest = (min(column) for column in zip(*rows, strict=True))
        stream = pair.counterfactual.streams[lowest][begin - self.start :]
        ids = torch.tensor([pair.ids_c[begin:]] * len(rows), device=self.model.device)
        with self.model.lock, ExitStack() as undo:
            undo.enter_context(self.starting(lowest + 1, stream.repeat(len(rows), *[1] * stream.dim())))
            undo.enter_context(self.patching(rows, begin))
            prefix, row = self.prefixes[self._plain_key(1)]
            return self._last(prefix, [row] * len(rows), ids, begin)


def _chunks(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield tokens that share a pass, which begins at the first of them."""
    chunk: list[int] = []
    for token in sorted(tokens, reverse=True):
        if chunk and (chunk[-1] - token) * len(chunk) > EXTRA_TOKENS:
            yield chunk
            chunk = []
        chunk.append(token)
    yield chunk
