"""Direct edges: the effect of the tokens and of all neurons below on each node, through no other neuron.

The gradient stops at all neurons of all layers and tokens, shown or not, so that an edge does not depend on what is
shown. It passes only whole parts: attention or the FFN of all layers at a token, which are then no source.

1. A forward pass of the prompt, B times side by side, in which every neuron is a leaf of the graph.
2. A backward pass from B targets, one a row. The gradient at every leaf and token is the direct influence of each
   source on each target; times the difference of the source between both prompts it is an edge.
3. The next B targets, from the same forward pass; each costs one backward pass from its own layer down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.methods.difference_rules import Difference
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neuron_recorders import NeuronRecorder
from icebear.concepts.passes.prompt import prompt_relevance
from icebear.concepts.passes.run import Logits, Target, TokenNode, first_layers, forward, forward_backward
from icebear.concepts.passes.sites import by_site_layer, hooks
from icebear.models.model import Model
from icebear.models.objective import Objective

RecomputedTokens = Mapping[str, Tensor]
"""Site -> tokens (T,), as a mask, of whole parts; only the sites that have any."""
TOKENS_PER_PASS = 64
"""Rows times tokens of a pass: few rows, because a backward pass of rows costs what its highest layer does."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A number inside the model: a direction (N,) in a part of the activations of a site at a token."""

    site: str
    layer: int
    position: int
    columns: slice
    direction: Tensor


class Probes(Target):
    """S times B numbers to explain, one a row; None is the answer. With difference rules, the second half of the rows
    are counterfactuals."""

    def __init__(self, objective: Objective, chosen: Sequence[Sequence[Probe | None]]) -> None:
        self.objective, self.chosen = objective, chosen
        self.seen: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        site_layers = {(probe.site, probe.layer) for row in self.chosen for probe in row if probe}
        with hooks(model, site_layers, lambda site, layer, x: self.seen.update({(site, layer): x})):
            yield

    def numbers(self, model: Model) -> list[Tensor]:
        _, answers = self.objective.evaluate(model.logits(self.objective.batch, self.objective.all_positions))

        def number(row: int, probe: Probe | None) -> Tensor:
            if probe is None:
                return answers[row]
            position = probe.position - self.objective.batch.span_of(model.stack_of(probe.layer)).start
            x = self.seen[probe.site, probe.layer][row, position, probe.columns]
            return (x * probe.direction.to(x)).sum()

        return [torch.stack([number(*pair) for pair in enumerate(row)]) for row in self.chosen]


class SourceGradients(NeuronRecorder):
    """Stop the gradient at all neurons, and multiply it by the difference (L, T, N) of their activations."""

    stop = True

    def __init__(
        self,
        model: Model,
        objective: Objective,
        rows: int,
        inputs: Inputs,
        input_differences: Sequence[Tensor],
        difference: dict[str, Tensor],
        nodes: Sequence[TokenNode],
        on_targets: Callable[[int], None],
        recomputed: RecomputedTokens,
    ) -> None:
        """The first `rows` rows have a target; for the other arguments see `direct`."""
        super().__init__(model, objective.batch, tuple(difference))
        self.objective, self.rows, self.inputs, self.difference, self.nodes = objective, rows, inputs, difference, nodes
        self.input_differences, self.on_targets, self.recomputed = input_differences, on_targets, recomputed
        self.numbers = by_site_layer(neuron for neuron, _ in nodes)
        self.edges: list[Tensor] = []

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        span, rows, dtype = self.objective.batch.spans[1].stop, self.rows, self.options["dtype"]
        self.remainders = torch.zeros(rows, self.model.layers, span, **self.options)
        self.from_nodes = torch.zeros(rows, len(self.nodes), **self.options)
        super().finish(gradients)
        entries = [neuron.layer * span + position for neuron, position in self.nodes]
        index = torch.tensor(entries, dtype=torch.long, device=self.remainders.device)
        self.remainders.view(rows, -1).index_add_(1, index, -self.from_nodes)
        parts = [
            g[:rows].to(dtype) * d.to(dtype) for g, d in zip(self.inputs.gradients, self.input_differences, strict=True)
        ]
        tokens = [
            prompt_relevance(self.model, self.objective, row, [part[row] for part in parts])[0] for row in range(rows)
        ]
        self.edges.append(torch.cat((torch.stack(tokens), self.from_nodes.cpu(), self.remainders.flatten(1).cpu()), 1))
        self.on_targets(rows)

    def _see(self, site: str, layer: int, x: Tensor) -> Tensor | None:
        stopped = super()._see(site, layer, x)
        assert stopped is not None
        return (
            torch.where(self.recomputed[site].to(x.device)[:, None], x, stopped) if site in self.recomputed else stopped
        )

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        span = self.span(layer)
        edges = gradient[: self.rows].to(self.options["dtype"]) * self.difference[site][layer, span].to(gradient.device)
        self.remainders[:, layer, span] += edges.sum(-1)
        name = "head" if site == "attn" else site
        if site == "attn":
            edges = edges.unflatten(-1, (self.model.heads, -1)).sum(-1)
        numbers = self.numbers.get((name, layer), [])
        positions = [self.nodes[number][1] - span.start for number in numbers]
        self.from_nodes[:, numbers] = edges[:, positions, [self.nodes[number][0].index for number in numbers]]


def direct(
    model: Model,
    pair: Objective,
    targets: Sequence[Probe | None],
    nodes: Sequence[TokenNode],
    input_differences: Sequence[Tensor],
    difference: dict[str, Tensor],
    on_targets: Callable[[int], None],
    recomputed: RecomputedTokens,
    method: Difference | None = None,
) -> Tensor:
    """Return the edges (K, T + nodes + L * T) into each target (K) from tokens, nodes and remainders.

    pair: an objective of two rows, the prompt and the counterfactual prompt.
    input_differences: the input of each stack in the prompt minus that in the counterfactual prompt.
    difference: site -> activations (L, T, N) in the prompt minus those in the counterfactual prompt, for the sites
        where gradients stop.
    on_targets: called after each backward pass with the number of its targets.
    recomputed: site -> tokens whose activations are recomputed in all layers, and stop no gradient.
    method: None for estimates (the gradient at the prompt); difference rules for contributions, which sum to the
        difference of the target.
    """
    rows = max(1, min(len(targets), TOKENS_PER_PASS // (pair.batch.before + pair.batch.spans[1].stop)))
    padded = [*targets, *[targets[-1]] * (-len(targets) % rows)]
    chosen = [padded[start : start + rows] for start in range(0, len(padded), rows)]
    many = pair.rows([0] * rows + [1] * rows * (method is not None))
    inputs = Inputs()
    sources = SourceGradients(model, many, rows, inputs, input_differences, difference, nodes, on_targets, recomputed)
    forward_backward(model, Probes(many, chosen), [inputs, sources], method)
    return torch.cat(sources.edges)[: len(targets)]


def inputs_of(model: Model, pair: Objective) -> list[Tensor]:
    """Return the input of each stack, for both rows."""
    inputs = Inputs()
    with model.lock, ExitStack() as undo:
        if model.task.stacks == 1:  # else the decoder's comes after the encoder's layers
            undo.enter_context(first_layers(model, 1))
        layers = range(1 if model.task.stacks == 1 else model.layers)
        ffn = {*model.layers_with("ffn")} if "ffn" in model.sites else set()
        # Hooks take a mixture past its kernels, as in `forward_backward`.
        undo.enter_context(hooks(model, [("ffn", layer) for layer in layers if layer in ffn], lambda *_: None))
        forward(model, Logits(pair), [inputs])
    return [leaf.detach() for leaf in inputs.leaves]
