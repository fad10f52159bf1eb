"""Forward passes in which every neuron where edges stop keeps its value in one of two prompts, or takes a given value.

A node is read before it is fixed. Whole parts are recomputed. A pass may take values that a node has in another one of
the same batch: layers run in order, and the values that a layer reads are those of lower layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.circuits.edges import inputs_of
from icebear.concepts.circuits.nodes import pair_of, probes
from icebear.concepts.circuits.stages_set import whole_tokens
from icebear.concepts.passes.inputs import input_hooks
from icebear.concepts.passes.prefix import after_beginning, after_common_beginning
from icebear.concepts.passes.run import Logits, TokenNode, forward
from icebear.concepts.passes.sites import by_site_layer, hooks
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.stage_records import WholePart
from icebear.models.model import Model
from icebear.models.text import images

TOKENS_PER_PASS = 512
"""Rows times tokens of a forward pass; tokens whose keys and values are known count a sixteenth."""


@dataclass(frozen=True, eq=False)
class FixedPass:
    """A forward pass in which everything keeps its value in one prompt, with exceptions."""

    base: int
    """0 for the prompt, 1 for the counterfactual prompt."""
    tokens: Sequence[int] = ()
    """Tokens with the embedding (patches with the pixels) that they have in the other prompt."""
    nodes: Mapping[int, Tensor | FixedPass] = field(default_factory=dict)
    """Number of a node -> the values (n,) that it takes, or the pass before whose fixing it has them."""


class _Passes:
    """Passes without repetitions, each after those whose values it takes: few sources of low nodes are connected, so
    many are alike."""

    def __init__(self, rows: Sequence[FixedPass]) -> None:
        self._numbers: dict[FixedPass, int] = {}
        self._by_key: dict[tuple[Any, ...], int] = {}
        self.different: list[FixedPass] = []
        self.of_rows = [self.number(row) for row in rows]

    def number(self, row: FixedPass) -> int:
        """Return the number of the pass among the different ones."""
        if row not in self._numbers:
            values = {
                n: self.number(x) if isinstance(x, FixedPass) else tuple(x.tolist()) for n, x in row.nodes.items()
            }
            key = row.base, tuple(sorted(row.tokens)), tuple(sorted(values.items()))
            if key not in self._by_key:
                self._by_key[key] = len(self.different)
                self.different.append(row)
            self._numbers[row] = self._by_key[key]
        return self._numbers[row]


class FixedNeurons:
    """The neurons of both prompts of a pair, some of them as nodes."""

    def __init__(
        self,
        model: Model,
        relevance: Relevance,
        token_nodes: Sequence[TokenNode],
        whole_parts: Sequence[WholePart] = (),
        in_prompt: bool = False,
    ) -> None:
        """in_prompt: everything but nodes keeps its value in the prompt, so that the tokens before the earliest node,
        on which no node has an influence, are read once (of a causal model)."""
        self.model = model
        earliest = min(token for _, token in token_nodes)
        pair = pair_of(relevance)
        if in_prompt:
            self.pair, self.start = after_beginning(model, pair.rows([0, 0]), earliest)
        else:
            self.pair, self.start = after_common_beginning(model, pair, earliest)
        self.recomputed = whole_tokens(whole_parts, len(relevance.tokens))
        self.nodes = [replace(probe, position=probe.position - self.start) for probe in probes(relevance, token_nodes)]
        both = relevance.neurons.activation, relevance.neurons.counterfactual
        self.values = [{site: x[:, self.start :] for site, x in values.items()} for values in both]
        """Site -> activations (L, T, N) after the common beginning, in the prompt and in the counterfactual prompt."""
        self.inputs = inputs_of(model, self.pair)
        """The input (2, T, D) of each stack, or the pixels (2, C, H, W)."""
        self.numbers = by_site_layer(self.nodes)

    @property
    def differing(self) -> list[int]:
        """The tokens (or patches) that differ between the prompts."""
        batch = self.pair.batch
        if batch.pixels is not None:
            return list(range(len(images.own_names(self.model)), batch.ids.shape[1]))
        both = zip(batch.row_ids(0), batch.row_ids(1), strict=True)
        return [self.start + number for number, (id, other) in enumerate(both) if id != other]

    def value(self, number: int, base: int) -> Tensor:
        """Return the activations (n,) of a node in one of the prompts."""
        probe = self.nodes[number]
        return self.values[base][probe.site][probe.layer, probe.position, probe.columns]

    def exchanged(self, number: int) -> FixedPass:
        """Return the pass of the prompt in which one node takes its value in the counterfactual prompt."""
        return FixedPass(0, nodes={number: self.value(number, 1)})

    def run(
        self, rows: Sequence[FixedPass], on_rows: Callable[[int], None] = lambda rows: None
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Return the activations (R, n) of each node before it is fixed, and the numbers explained (R,).

        on_rows: called after each pass with the number of its rows.
        """
        size = max(1, int(TOKENS_PER_PASS / (self.pair.batch.spans[1].stop + self.pair.batch.before / 16)))
        passes, answers = _Passes(rows), []
        seen: dict[int, list[Tensor]] = {number: [] for number in range(len(self.nodes))}
        with self.model.lock:
            for start in range(0, len(passes.different), size):
                part = passes.different[start : start + size]
                answers.append(self._run(part, passes, seen))
                on_rows(len(part))
        of_rows = passes.of_rows
        return {n: torch.stack(values)[of_rows] for n, values in seen.items()}, torch.cat(answers)[of_rows]

    def measured(
        self, rows: Sequence[FixedPass], count: int, on_rows: Callable[[int], None] = lambda rows: None
    ) -> Tensor:
        """Return the values (count + 1, R) of the first nodes, before they are fixed, and of the number explained."""
        activations, answers = self.run(rows, on_rows=on_rows)
        return torch.stack([*(activations[n] @ probe.direction for n, probe in enumerate(self.nodes[:count])), answers])

    def _run(self, rows: Sequence[FixedPass], passes: _Passes, seen: dict[int, list[Tensor]]) -> Tensor:
        """Return the numbers explained (R,) of the next rows.

        seen: for each node its values in the passes before, to which those in these rows are appended.
        """
        objective = self.pair.rows([row.base for row in rows])

        def value(number: int, source: Tensor | FixedPass) -> Tensor:
            return seen[number][passes.number(source)] if isinstance(source, FixedPass) else source

        def fix(site: str, layer: int, x: Tensor) -> Tensor:
            span = objective.batch.span_of(self.model.stack_of(layer))
            fixed = torch.stack([self.values[row.base][site][layer, span] for row in rows]).to(x)
            for number in self.numbers.get((site, layer), []):
                position, columns = self.nodes[number].position - span.start, self.nodes[number].columns
                seen[number].extend(x[:, position, columns].to("cpu", self.model.sums_in["dtype"]))
                for index, row in enumerate(rows):
                    if number in row.nodes:
                        fixed[index, position, columns] = value(number, row.nodes[number]).to(x)
            if site not in self.recomputed:
                return fixed
            return torch.where(self.recomputed[site][self.start :, None].to(x.device), x, fixed)

        def read(stack: int, x: Tensor) -> Tensor:
            return torch.stack([self._input(stack, row) for row in rows]).to(x)

        site_layers = [(site, layer) for site in self.values[0] for layer in self.model.layers_with(site)]
        with input_hooks(self.model, read), hooks(self.model, site_layers, fix):
            answers = forward(self.model, Logits(objective), [])
        return answers.to("cpu", self.model.sums_in["dtype"])

    def _input(self, stack: int, row: FixedPass) -> Tensor:
        """Return what a stack reads in a row, with the exchanged tokens or patches."""
        inputs, other = self.inputs[stack][row.base].clone(), self.inputs[stack][1 - row.base]
        span = self.pair.batch.spans[stack]
        for token in row.tokens:
            if self.pair.batch.pixels is not None:
                patch = images.pixels_of(self.model, inputs, token)
                inputs[patch] = other[patch]
            elif span.start <= token - self.start < span.stop:
                at = token - self.start - span.start
                inputs[at] = other[at]
        return inputs
