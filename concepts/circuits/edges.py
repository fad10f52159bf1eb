"""Direct edges: what each node is given by the tokens and by all neurons below it, past no other neuron.

All neurons of all layers and tokens are cut, shown or not, so that an edge does not depend on what is shown:

1. A forward pass of the prompt, B times side by side, in which every neuron is a leaf of the graph.
2. A backward pass from B targets, one a row: the gradient at every leaf and token is the direct influence of each
   source on each target; times the source's difference between both prompts it is an edge.
3. The next B targets, from the same forward pass; each costs one backward pass from its own layer down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.attribution.recorded import token_relevance
from icebear.concepts.methods.lrp import Difference
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Objective
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neurons import Recorder
from icebear.concepts.passes.run import forward, forward_backward
from icebear.concepts.passes.sites import hooks
from icebear.concepts.passes.targets import Logits

TOKENS = 128
"""Rows times tokens of a pass, about: few rows, because a backward pass of rows costs what its highest layer does."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A number inside the model: a direction (N,) in a part of a site's activations at a token."""

    site: str
    layer: int
    position: int
    places: slice
    direction: Tensor


Target = Probe | None
"""None is the answer, as the plan says."""


class Targets:
    """S times B numbers, one a row. Rows beyond B are partners, which have none."""

    def __init__(self, plan: Objective, chosen: Sequence[Sequence[Target]]) -> None:
        self.plan, self.chosen = plan, chosen
        self.seen: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def reading(self, model: Model) -> Iterator[None]:
        places = {(probe.site, probe.layer) for row in self.chosen for probe in row if probe}
        with hooks(model, places, lambda site, layer, x: self.seen.update({(site, layer): x})):
            yield

    def numbers(self, model: Model) -> list[Tensor]:
        _, answers = self.plan.evaluate(model.logits(self.plan.batch, self.plan.all_positions))

        def number(row: int, target: Target) -> Tensor:
            if target is None:
                return answers[row]
            position = target.position - self.plan.batch.span_of(model, target.layer).start
            x = self.seen[target.site, target.layer][row, position, target.places]
            return (x * target.direction.to(x)).sum()

        return [torch.stack([number(*pair) for pair in enumerate(row)]) for row in self.chosen]


@dataclass(frozen=True, eq=False)
class EdgeSums:
    """What each target is given: by the tokens (K, T), by chosen nodes (K, n), and by all neurons of a layer and token,
    those chosen among them, (K, L, T)."""

    tokens: Tensor
    nodes: Tensor
    sums: Tensor


Place = tuple[str, int, int, int]
"""Of a node: its site (``head`` for whole heads), layer, token and index."""


class Sources(Recorder):
    """Stops the gradient at all neurons, and multiplies what comes to them by their difference (L, T, N)."""

    def __init__(
        self,
        model: Model,
        plan: Objective,
        rows: int,
        inputs: Inputs,
        read: Sequence[Tensor],
        difference: dict[str, Tensor],
        nodes: Sequence[Place],
        told: Callable[[int], None],
    ) -> None:
        """read: what each stack reads, as differences. told: is told, after each backward pass, of how many targets it
        was."""
        super().__init__(model, plan.batch, tuple(difference), stop=True)
        self.plan, self.rows, self.inputs, self.difference, self.nodes = plan, rows, inputs, difference, nodes
        self.read, self.told = read, told
        self.found: list[EdgeSums] = []

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        span, rows = self.plan.batch.spans[1].stop, self.rows
        self.sums = torch.zeros(rows, self.model.layers, span, **self.options)
        self.given = torch.zeros(rows, len(self.nodes), **self.options)
        super().finish(gradients)
        dtype = self.options["dtype"]
        parts = [g[:rows].to(dtype) * d.to(dtype) for g, d in zip(self.inputs.gradients, self.read, strict=True)]
        tokens = [token_relevance(self.model, self.plan, row, [part[row] for part in parts])[0] for row in range(rows)]
        self.found.append(EdgeSums(torch.stack(tokens), self.given.cpu(), self.sums.cpu()))
        self.told(rows)

    def end(self, site: str, layer: int, activation: Tensor, gradient: Tensor) -> None:
        span = self.span(layer)
        here = gradient[: self.rows].to(self.options["dtype"]) * self.difference[site][layer, span].to(gradient.device)
        self.sums[:, layer, span] += here.sum(-1)
        name = "head" if site == "attn" else site
        if site == "attn":
            here = here.unflatten(-1, (self.model.heads, -1)).sum(-1)
        for number, (of, at, position, index) in enumerate(self.nodes):
            if (of, at) == (name, layer):
                self.given[:, number] = here[:, position - span.start, index]


def direct(
    model: Model,
    pair: Objective,
    targets: Sequence[Target],
    nodes: Sequence[Place],
    read: Sequence[Tensor],
    difference: dict[str, Tensor],
    method: Difference | None = None,
    held: bool = False,
    told: Callable[[int], None] = lambda targets: None,
) -> EdgeSums:
    """What is given to each target (K) by the sources, of a plan of two rows, the prompt and the other one.

    read: what each stack reads in the prompt less that in the other one.
    difference: site -> (L, T, N) activations in the prompt less those in the other; the sites that are cut.
    method: None for effects, the gradient at the prompt; difference rules for contributions, which sum to the target's
        own difference.
    held: attention weights are constants.
    told: is told of how many targets are done, after each backward pass.
    """
    rows = max(1, min(len(targets), TOKENS // pair.batch.spans[1].stop))
    padded = [*targets, *[targets[-1]] * (-len(targets) % rows)]
    many = pair.rows([0] * rows + [1] * rows * (method is not None))
    inputs = Inputs()
    sources = Sources(model, many, rows, inputs, read, difference, nodes, told)
    with model.lock, constant_attention(model) if held else nullcontext():
        chosen = [padded[start : start + rows] for start in range(0, len(padded), rows)]
        forward_backward(model, Targets(many, chosen), [inputs, sources], method)
    found = ([getattr(part, name) for part in sources.found] for name in ("tokens", "nodes", "sums"))
    return EdgeSums(*(torch.cat(part)[: len(targets)] for part in found))


def inputs_of(model: Model, pair: Objective) -> list[Tensor]:
    """What each stack reads, of both rows."""
    inputs = Inputs()
    forward(
        model, Logits(pair), [inputs, Recorder(model, pair.batch, ("ffn",))]
    )  # past a mixture's kernels, as in `forward_backward`
    return [leaf.detach() for leaf in inputs.leaves]


@contextmanager
def constant_attention(model: Model) -> Iterator[None]:
    """No gradient goes through attention weights, as none goes to queries and keys."""
    places = [(site, layer) for site in ("q", "k") for layer in model.layers_with(site)]
    with hooks(model, places, lambda site, layer, x: x.detach()):
        yield
