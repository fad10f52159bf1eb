"""Circuits: direct edges against explicit paths, sums that must hold, interventions, groups, files."""

import json
import re
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from configurations import DIFFERENT, dense, mixtures
from conftest import IDS, LLAMA, Double, Letters, random_model
from few import few_of, third_of
from reference import differences as pair_reference
from reference import models as reference_models
from test_cli import RUN, main, run
from test_differences import OTHER, pair_of
from test_tasks import make
from torch.autograd.functional import jacobian

from benchmarks.circuit_graph import interventions
from icebear import Model, attribute, stages, steer
from icebear.concepts.circuits import checks, drawing, edges, fixed_neurons, nodes
from icebear.concepts.circuits.circuit import circuit, graph_of
from icebear.concepts.circuits.circuit_records import CircuitToken, Group, Node, Remainder, below
from icebear.concepts.circuits.fixed_neurons import FixedPass
from icebear.concepts.circuits.groups import grouped
from icebear.concepts.circuits.measured_edges import EdgeMeasurement
from icebear.concepts.passes import prefix
from icebear.concepts.passes.sites import hooks
from icebear.concepts.stages.stage_records import WholePart
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.errors import InputError

pytestmark = pytest.mark.usefixtures("few_texts")
FOUR = ["llama", "gpt2", "gemma3", "mixtral"]
KNOWN = {**dense(layers=4), "mixtral": mixtures()["mixtral"], "qwen3_moe": mixtures()["qwen3_moe"], "llama": LLAMA}


def calibrated(config):
    """Its gain is measured before, in float32."""
    model = random_model(config, "eager")
    model.net.set_experts_implementation("eager")  # torch has no float64 for grouped matrix products
    calibrate(model)
    return model


def made(name="llama", count=12, answers=(11, 12), heads=False, **options):
    model = calibrated(KNOWN[name])
    with Double():
        return circuit(model, IDS, *answers, counterfactual=OTHER, nodes=count, heads=heads, **options)


@pytest.fixture(scope="module")
def graph():
    return made()


# --- edges ---------------------------------------------------------------------------------------------


class Layers:
    """Each layer of a model by itself, called as in a forward pass of the prompt, its neurons held as they were."""

    def __init__(self, model):
        self.model, self.calls, self.neurons = model, [], {}
        with ExitStack() as undo:
            for layer in model.layer_modules:
                hook = lambda module, args, kwargs: self.calls.append((args, kwargs))  # noqa: E731
                undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            seen = lambda site, layer, x: self.neurons.update({layer: x.detach()})  # noqa: E731
            undo.enter_context(hooks(model, [("ffn", m) for m in range(model.layers)], seen))
            with torch.no_grad():
                model.net(torch.tensor([IDS]), use_cache=False)
        self.streams = [args[0].detach() for args, _ in self.calls]

    def out(self, number, stream, neurons):
        """(1, T, D) behind a layer, of the stream before it and its neurons."""
        (_, *rest), kwargs = self.calls[number]
        with hooks(self.model, [("ffn", number)], lambda *_: neurons):
            result = self.model.layer_modules[number](stream, *rest, **kwargs)
        return result[0] if isinstance(result, tuple) else result

    def activations(self, number, stream):
        """(1, T, N) of a layer's neurons, of the stream before it."""
        seen = []
        (_, *rest), kwargs = self.calls[number]
        with hooks(self.model, [("ffn", number)], lambda site, layer, x: seen.append(x)):
            self.model.layer_modules[number](stream, *rest, **kwargs)
        return seen[0]

    def past(self, number):
        """(TD, TD) what a layer adds to a change of the stream: through attention, and a router."""
        stream = self.streams[number]
        whole = jacobian(lambda x: self.out(number, x, self.neurons[number]), stream)
        return whole.reshape(stream.numel(), -1) - torch.eye(stream.numel())

    def write(self, source):
        """(TD,) what a unit of a neuron changes behind its layer."""
        layer, position, index = source
        result = jacobian(lambda x: self.out(layer, self.streams[layer], x), self.neurons[layer])
        return result[..., 0, position, index].flatten()

    def read(self, target):
        """(TD,) the gradient of a neuron by the stream before its layer; of None that of the answer."""
        if target is None:
            stream = self.streams[-1]
            last = self.out(self.model.layers - 1, stream, self.neurons[self.model.layers - 1]).detach()

            def answer(x):
                final = self.model.net.get_submodule(self.model.family.final_norm)
                logits = self.model.net.get_output_embeddings()(final(x))[0, -1]
                return logits[11] - logits[12]

            return jacobian(answer, last).flatten()
        layer, position, index = target
        return jacobian(lambda x: self.activations(layer, x)[0, position, index], self.streams[layer]).flatten()


@pytest.mark.parametrize("tokens", [1, 20, 10_000])  # one row, a few, or all rows in a pass
def test_a_pass_takes_the_values_of_another_as_if_run_after_it(graph, monkeypatch, tokens):
    fixed = checks.fixed_neurons(graph)
    heights = [node.height for node in graph.nodes]
    low, middle, high = (heights.index(height) for height in sorted(set(heights))[:3])

    def chained(take):
        """(4,) the answers of passes in each of which a node has its value in the pass before."""
        rows = [FixedPass(1, fixed.differing)]
        for node in (low, middle, high):
            rows.append(FixedPass(1, [], {node: take(rows[-1], node)}))
        return fixed.run(rows)[1]

    with Double():
        expected = chained(lambda row, node: fixed.run([row])[0][node][0])
        monkeypatch.setattr(fixed_neurons, "TOKENS_PER_PASS", tokens)
        result = chained(lambda row, node: row)
    assert torch.allclose(result, expected, rtol=1e-9)
    assert (expected[1:] - expected[0]).abs().min() > 1e-6


@pytest.mark.parametrize("name", few_of(FOUR, "llama", "mixtral"))
def test_estimates_are_the_sum_over_explicit_paths(name):
    """A path goes past each layer in between, or through its attention (or router)."""
    graph = made(name, 10)
    model = graph.model
    with Double():
        layers = Layers(model)
        past = [layers.past(number) for number in range(model.layers)]
        writes = {node: layers.write((node.neuron.layer, node.position, node.neuron.index)) for node in graph.nodes}
        checked = 0
        for row, target in enumerate(graph.targets):
            to = (target.neuron.layer, target.position, target.neuron.index) if isinstance(target, Node) else None
            top = to[0] if to else model.layers
            gradient = layers.read(to)
            for column, source in enumerate(graph.sources):
                if not isinstance(source, Node):
                    continue
                layer, expected = source.neuron.layer, 0.0
                between = range(layer + 1, top)
                for count in range(len(between) + 1 if layer < top else 0):
                    for through in combinations(between, count):
                        change = writes[source]
                        for number in through:
                            change = past[number] @ change
                        expected = expected + gradient @ change
                difference = source.activation - source.counterfactual
                assert graph.estimate[row, column].item() == pytest.approx(float(expected) * difference, abs=1e-8)
                checked += float(expected) != 0
    assert checked > 20


@pytest.mark.parametrize(("name", "build"), [("llama", reference_models.llama), ("gpt2", reference_models.gpt)])
def test_contributions_are_those_of_the_reference(name, build):
    """The pair's tape, its messages stopped at all neurons but the target itself."""
    graph = made(name, 8)
    model = graph.model
    with Double(), torch.no_grad():
        for row, target in enumerate(graph.targets):
            mine, theirs = pair_reference.PairTape(), pair_reference.PairTape()
            leaves, logits = build(mine, model.net, IDS)
            build(theirs, model.net, OTHER)
            if isinstance(target, Node):
                start = mine.sites["ffn"][target.neuron.layer]
                start.R[target.position, target.neuron.index] = 1
            else:
                start = logits
                logits.R[11], logits.R[12] = 1, -1
            stops = {id(value) for value in mine.sites["ffn"].values()} - {id(start)}
            for v, w in zip(reversed(mine.values), reversed(theirs.values), strict=True):
                if v.messages and v.R.any() and id(v) not in stops:
                    for source, m in zip(v.sources, v.messages(v.R, w), strict=True):
                        source.R = source.R + m
            start.R = torch.zeros_like(start.R)
            for v, w in zip(mine.values, theirs.values, strict=True):
                v.R = v.R * (v.x - w.x)
            result = mine.site("ffn", model.layers, len(IDS))
            assert torch.allclose(graph.contribution[row, : len(IDS)], leaves[0].R.sum(-1), atol=1e-9)
            for column, source in enumerate(graph.nodes, len(IDS)):
                expected = result[source.neuron.layer, source.position, source.neuron.index]
                assert graph.contribution[row, column].item() == pytest.approx(expected.item(), abs=1e-9)


@pytest.mark.parametrize("name", third_of([name for name in KNOWN if name in DIFFERENT]))
def test_contributions_sum_to_each_targets_own_difference(name):
    graph = made(name, 8, heads=name in ("llama", "gpt2", "mixtral"))
    assert (graph.difference - graph.contribution.sum(-1)).abs().max() < 1e-6
    assert graph.difference[-1].item() == pytest.approx(graph.relevance.conservation().target)
    for node, difference in zip(graph.nodes, graph.difference.tolist(), strict=False):
        assert difference == pytest.approx(node.activation - node.counterfactual)
    lost = graph.estimate.abs().sum(-1)[[not isinstance(target, Node) for target in graph.targets]]
    assert (lost > 0).all()


def test_a_chunk_of_targets_is_one_by_one(graph, monkeypatch):
    monkeypatch.setattr(edges, "TOKENS_PER_PASS", 1)
    alone = made()
    for name in ("estimate", "contribution"):
        assert torch.allclose(getattr(alone, name), getattr(graph, name), rtol=1e-9, atol=1e-12)


def test_a_chunk_of_sources_is_one_by_one(graph, monkeypatch):
    monkeypatch.setattr(fixed_neurons, "TOKENS_PER_PASS", 1)
    alone = made()
    for name in ("effect", "random_effect"):
        assert torch.allclose(getattr(alone, name), getattr(graph, name), atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", few_of(FOUR, "llama", "mixtral"))
@pytest.mark.parametrize("heads", [False, True])
def test_a_common_beginning_is_read_once_and_adds_nothing(name, heads, monkeypatch):
    model, late = calibrated(KNOWN[name]), [*IDS[:3], 17, *IDS[4:]]
    after, lengths, graphs = prefix.Prefix.after, [], []
    monkeypatch.setattr(prefix.Prefix, "after", lambda self, ids: lengths.append(ids.shape[1]) or after(self, ids))
    monkeypatch.setattr(prefix, "COMMON", 2)
    with Double(), monkeypatch.context() as without:
        without.setattr(prefix.Prefix, "of", lambda model, rows: None)
        graphs.append(circuit(model, IDS, 11, 12, counterfactual=late, nodes=10, heads=heads))
        assert not lengths
    with Double():
        graphs.append(circuit(model, IDS, 11, 12, counterfactual=late, nodes=10, heads=heads))
    assert lengths
    (pair,) = graphs[0].relevance.counterfactual.pairs
    assert prefix.after_common_beginning(model, pair, 3)[1] == 3
    monkeypatch.setattr(prefix, "COMMON", 99)
    assert prefix.after_common_beginning(model, pair, 3) == (pair, 0)
    whole, short = graphs
    for part in ("effect", "random_effect", "estimate", "contribution"):
        assert torch.allclose(getattr(short, part), getattr(whole, part), atol=1e-9, equal_nan=True), part


def test_edges_do_not_depend_on_what_is_shown(graph):
    more = made(count=20)
    shown = [number for number, node in enumerate(more.nodes) if node in graph.nodes]
    assert len(shown) == len(graph.nodes)
    columns = [*range(len(IDS)), *(len(IDS) + number for number in shown)]
    part = more.effect[[*shown, len(more.nodes)]][:, columns]
    assert torch.allclose(part, graph.effect, atol=1e-12)
    assert torch.allclose(more.estimate.sum(-1)[-1], graph.estimate.sum(-1)[-1])


def test_exchanging_the_prompts_changes_the_sign_of_contributions():
    """To nodes; those to the answer stay, if target and contrast are exchanged too."""
    one = made()
    with Double():
        two = circuit(one.model, OTHER, 12, 11, counterfactual=IDS, nodes=12, heads=False)
    assert [node.neuron for node in one.nodes] == [node.neuron for node in two.nodes]
    assert torch.allclose(one.contribution[:-1], -two.contribution[:-1], atol=1e-12)
    assert torch.allclose(one.contribution[-1], two.contribution[-1], atol=1e-12)


# --- the graph -----------------------------------------------------------------------------------------


def test_influence_is_the_sum_over_all_paths(graph):
    """circuit-tracer's definition, by powers of the normalised matrix."""
    sizes = graph.contribution.abs().double()
    shares = sizes / sizes.sum(-1, keepdim=True)
    first, count = len(graph.tokens), len(graph.nodes)
    square = torch.zeros(count + 1, count + 1).double()
    square[:, :count] = shares[:, first : first + count]
    start = torch.zeros(count + 1).double()
    start[-1] = 1
    weights, step = start.clone(), start
    for _ in range(count):
        step = step @ square
        weights = weights + step
    expected = weights[:, None] * shares
    assert torch.allclose(graph.influence, expected / expected.sum())


def test_edges_are_the_most_influential_between_tokens_and_nodes(graph):
    shown = graph.influence[:, : len(graph.shown)].flatten().sort(descending=True).values
    for count in (0, 1, 7, 10_000):
        edges = replace(graph, edge_count=count).edges
        assert len(edges) == min(count, int(shown.count_nonzero()))
        assert [edge.influence for edge in edges] == shown[: len(edges)].tolist()
    for edge in graph.edges:
        row, column = graph.targets.index(edge.target), graph.sources.index(edge.source)
        assert (edge.effect, edge.contribution) == (graph.effect[row, column], graph.contribution[row, column])
    assert len(made(edges=3).edges) == 3


def test_nodes_are_the_most_relevant_and_the_rest_is_not_lost(graph):
    ranked = graph.relevance.top(12, "ffn", position="all")
    assert {(node.neuron, node.position) for node in graph.nodes} == {(row.neuron, row.position) for row in ranked}
    kinds = {type(source) for source in graph.sources}
    assert kinds == {CircuitToken, Node, Remainder}
    assert len(graph.sources) == graph.estimate.shape[1]
    frame = graph.to_frame()
    assert list(frame.columns[:3]) == ["source", "target", "effect"]
    assert len(frame) == len(graph.edges)


def test_all_edges_between_nodes_are_the_nodes_ablation(graph, few_contexts):
    """The graph's own faithfulness with every edge is F with the prompt's embeddings; along none nothing comes."""
    everything = made(count=1024)
    with Double():
        result = graph.faithfulness()
        nothing = graph.faithfulness(0)
        whole = everything.faithfulness()
    assert nothing.sufficiency == pytest.approx(0, abs=1e-9)
    assert nothing.all_edges == pytest.approx(result.all_edges)
    assert whole.all_edges == pytest.approx(everything.ablation().sufficiency, rel=1e-5)


@pytest.mark.parametrize("name", few_of(FOUR[:3], "llama", "gemma3"))
def test_whole_parts_are_recomputed(name):
    """Contributions still sum to each target's difference, no edge comes from a whole part, and the model run along all
    edges is the nodes' ablation beside the whole parts."""
    few = made(name, heads=True, count=30)
    relevance, at = few.relevance, few.relevance.predicted_at
    last = few.mask() & (torch.arange(len(IDS)) == at)[:, None]
    whole = (WholePart("ffn", "differing", (2,)), WholePart("attn", "differing", (2,)))
    with Double():
        scores = nodes.scored(few.model, relevance, True)
        graph, stopped = (graph_of(few.model, relevance, scores, last, True, 10_000, x) for x in (whole, ()))
        measured, ablation = graph.faithfulness(), graph.ablation()
    assert 0 < len(graph.nodes) < 30
    assert (graph.difference - graph.contribution.sum(-1)).abs().max() < 1e-8
    for part in ("estimate", "contribution"):
        remainders = [
            getattr(one, part)[:, len(IDS) + len(graph.nodes) :].unflatten(-1, (-1, len(IDS)))
            for one in (graph, stopped)
        ]
        assert [bool(each[..., 2].any()) for each in remainders] == [False, True]
        assert torch.equal(remainders[0][..., 3:] != 0, remainders[1][..., 3:] != 0)
    with Double():
        by_hand = Hooks(graph, IDS, recomputed=2)
        before = by_hand.numbers()
        for column, source in enumerate(graph.nodes, len(IDS)):
            assert torch.allclose(graph.effect[:, column].double(), before - by_hand.numbers(source), atol=1e-6)
    narrow = replace(graph, whole_parts=whole[:1]), replace(graph, whole_parts=())
    assert measured.sufficiency == pytest.approx(measured.all_edges) == pytest.approx(ablation.sufficiency, rel=1e-5)
    with Double():
        others = [other.ablation() for other in narrow]
    assert len({round(row.sufficiency, 9) for row in (ablation, *others)}) == 3
    assert len({row.necessity for row in (ablation, *others)}) == 1


@pytest.mark.parametrize(
    ("everything", "shares", "random", "shown", "checked"),
    [
        (0.8, {1: 0.1, 2: 0.3, 4: 0.65, 8: 0.7}, 0.0, 4, 4),
        (0.8, {1: 0.1, 2: 0.3, 4: 0.65, 8: 0.7}, 0.6, 0, 4),
        (0.8, {1: 0.1, 2: 0.3, 4: 0.4, 8: 0.5}, 0.1, 100, 100),
        (-0.4, {1: -0.1, 2: -0.2, 4: -0.4, 8: -0.4}, -0.5, 0, 1),
    ],
)
def test_the_least_enough_edges_are_shown(graph, monkeypatch, everything, shares, random, shown, checked):
    """Unless random ones recover as much, or all nothing."""
    rest = [0.6 if everything == 0.8 else everything] * (len(checks.EDGE_COUNTS) - 4)
    measured = iter([[everything, *shares.values(), *rest], [random] * checks.RANDOM_EDGE_SETS])
    monkeypatch.setattr(checks, "recovered", lambda *_: next(measured))
    hundred = replace(graph, edge_count=100)
    count, check = checks.enough_edges(hundred)
    assert (count, check.edges) == (min(shown, len(hundred.edges)), min(checked, len(hundred.edges)))
    assert check.random_sufficiency == pytest.approx(random)


def lettered(seed):
    """A random model that reads letters. Test_app_circuit.py and docs/circuits.md have the circuits of a real one."""
    return Model(random_model(LLAMA, dtype=torch.float32, seed=seed).net, Letters(), "letters")


def test_a_circuit_has_the_heads_and_neurons_of_the_stages(few_contexts):
    request = {"contrast": "z", "counterfactual": "ice bear"}
    graph, staged = (find(lettered(2), "the bear", **request) for find in (circuit, stages))
    assert (len(staged.heads), len(staged.neurons), len(graph.whole_parts)) == (3, 3, 3)
    assert {node.neuron for node in graph.nodes} == {row.neuron for row in (*staged.heads, *staged.neurons)}
    assert graph.whole_parts == staged.whole
    assert graph.ablation().sufficiency == pytest.approx(staged.alone, abs=1e-4)
    assert graph.ablation().necessity == pytest.approx(staged.without, abs=1e-4)
    check = graph.edge_check
    assert check.all_edges == pytest.approx(staged.alone, abs=1e-4)
    assert len(graph.edges) == check.edges
    assert check.sufficiency >= 0.8 * check.all_edges
    assert check.random_sufficiency < 0.2
    again = graph.faithfulness()
    assert (again.edges, again.sufficiency) == (check.edges, pytest.approx(check.sufficiency, abs=1e-5))


def test_edges_that_random_ones_equal_are_not_shown(few_contexts):
    """Where no small set gives the difference."""
    graph = circuit(lettered(3), "ice bear", contrast="z", counterfactual="ice cats")
    assert graph.edge_check.all_edges < 0.05
    assert (graph.whole_parts, graph.edges, len(graph.nodes)) == ((), (), 15)
    assert graph.to_svg()
    assert graph.to_html()


class Hooks:
    """Numbers of a graph's targets in a pass whose neurons, and heads if they are nodes, are held, by own hooks."""

    def __init__(self, graph, ids, recomputed=None):
        """recomputed: a token whose neurons and heads are not held."""
        self.graph, self.ids, self.recomputed, relevance = graph, ids, recomputed, graph.relevance
        self.sites = ("ffn", "attn") if graph.heads else ("ffn",)
        self.here = {site: relevance.activation(site) for site in self.sites}
        self.there = {site: relevance.neurons.counterfactual[site] for site in self.sites}

    def part(self, neuron):
        dim = self.graph.model.head_dim if neuron.site == "head" else 1
        return slice(neuron.index * dim, (neuron.index + 1) * dim), "attn" if neuron.site == "head" else "ffn"

    def number(self, node, x):
        (columns, site), at = self.part(node.neuron), (node.neuron.layer, node.position)
        if site == "ffn":
            return x[0, node.position, columns].item()
        weights = self.graph.relevance.attn[at][columns] / (self.here[site][at] - self.there[site][at])[columns]
        return (x[0, node.position, columns] @ weights).item()

    def numbers(self, exchanged=None, ids=None):
        """exchanged: a head or neuron that takes its counterfactual value."""
        seen = {}
        held = {site: x.clone() for site, x in self.here.items()}
        if exchanged:
            (columns, site), at = self.part(exchanged.neuron), (exchanged.neuron.layer, exchanged.position)
            held[site][at][columns] = self.there[site][at][columns]

        def hook(site, layer, x):
            seen[site, layer] = x.clone()
            fixed = held[site][layer][None].clone()
            if self.recomputed is not None:
                fixed[:, self.recomputed] = x[:, self.recomputed]
            return fixed

        model = self.graph.model
        places = [(site, layer) for site in self.sites for layer in range(model.layers)]
        with hooks(model, places, hook), torch.no_grad():
            logits = model.net(torch.tensor([ids or self.ids])).logits[0, -1]
        sites = [(self.part(node.neuron)[1], node.neuron.layer) for node in self.graph.nodes]
        nodes = [self.number(node, seen[at]) for node, at in zip(self.graph.nodes, sites, strict=True)]
        return torch.tensor([*nodes, (logits[11] - logits[12]).item()]).double()


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("name", few_of(FOUR, "llama", "mixtral"))
def test_effects_are_interventions(name, heads):
    """One source exchanged, all other heads and neurons held at their values in the prompt."""
    model = calibrated(KNOWN[name])
    for other in (OTHER, [*IDS[:3], 17, *IDS[4:]], [*IDS[:2], 21, 22, *IDS[4:]]):
        with Double():
            graph = circuit(model, IDS, 11, 12, counterfactual=other, nodes=10, heads=heads)
            by_hand = Hooks(graph, IDS)
            before = by_hand.numbers()
            for column, source in enumerate(graph.shown):
                if isinstance(source, Node):
                    expected = before - by_hand.numbers(source)
                else:
                    ids = [*IDS[: source.position], other[source.position], *IDS[source.position + 1 :]]
                    expected = before - by_hand.numbers(ids=ids)
                assert torch.allclose(graph.effect[:, column].double(), expected, atol=1e-6), source
        assert graph.effect.count_nonzero() > 10


@pytest.mark.parametrize("heads", [False, True])
def test_the_control_is_that_of_random_sources_below_the_target(heads):
    graph = made(heads=heads, count=12)
    with Double():
        random = EdgeMeasurement(graph.model, graph.relevance, graph.targets, ()).random
        by_hand = Hooks(graph, IDS)
        before = by_hand.numbers()
        sizes = torch.stack([(before - by_hand.numbers(source)).abs() for source in random], 1)  # (K + 1, 20)
    own = {(node.neuron.layer, node.neuron.site, node.position) for node in graph.nodes}
    assert {(one.neuron.layer, one.neuron.site, one.position) for one in random} <= own
    assert not {one.id for one in random} & {node.id for node in graph.nodes}
    assert len({one.id for one in random}) == len(random)
    counts = []
    for row, target in enumerate(graph.targets):
        limit = graph.random_effect[row].item()
        lower = torch.tensor([below(one, target, True) for one in random])
        affecting = sizes[row][lower & (sizes[row] > 1e-6 * before[row].abs())].numpy()
        counts.append(len(affecting))
        assert (limit != limit) is (len(affecting) < 10)
        if len(affecting) >= 10:
            assert limit == pytest.approx(np.percentile(affecting, 95), abs=1e-6)
    assert min(counts) < 10 <= counts[-1]
    assert {edge.random_effect for edge in graph.edges} <= {
        None,
        *(limit for limit in graph.random_effect.tolist() if limit == limit),
    }


def test_a_target_that_hardly_differs_has_no_share(graph):
    values = graph.values.clone()
    values[1, 0] = values[0, 0] * (1 + 1e-7)
    alike = replace(graph, values=values, edge_count=10_000)
    for edge in alike.edges:
        assert ((edge.effect_share, edge.contribution_share) == (None, None)) is (edge.target is alike.nodes[0])
    assert alike.sources_of(alike.nodes[0], 3)[1] is None
    assert alike.to_svg()
    assert alike.to_html()
    assert drawing.top_sources(alike, alike.nodes[0], 3)


def test_heads_are_nodes(graph):
    result = made(heads=True, count=20)
    heads = [node for node in result.nodes if node.neuron.site == "head"]
    assert heads
    assert len(heads) < 20
    for node in heads:
        assert node.score == pytest.approx(node.activation - node.counterfactual, abs=1e-9)
    with Double():
        assert 0 <= result.faithfulness().edges <= len(result.edges)


# --- groups --------------------------------------------------------------------------------------------


def test_groups_are_a_partition_and_know_their_members(graph, monkeypatch):
    result = graph.groups
    assert graph.groups is result
    for distance, counts in (
        (0.6, {len(result)}),
        (0.5, range(len(graph.nodes))),
        (1e-9, {len(graph.nodes)}),
        (3, {1}),
    ):
        monkeypatch.setattr("icebear.concepts.circuits.groups.DISTANCE", distance)
        groups = grouped(graph)
        assert len(groups) in counts
        assert sorted(node.id for group in groups for node in group.nodes) == sorted(node.id for node in graph.nodes)
    alone = made(count=1)
    assert len(alone.groups) == 1


def words(effects, tokens, k=4):
    """Of the first 100 likely tokens, one after the other."""
    order = sorted(range(min(100, len(tokens))), key=lambda place: -effects[place])
    up, down = [], []
    for places, chosen, sign in ((order, up, 1), (order[::-1], down, -1)):
        for place in places:
            word = tokens[place].strip()
            said = any(map(str.isalnum, word)) and not (len(word) == 1 and word.isascii())
            if sign * effects[place] >= 1e-3 and said and word.casefold() not in map(str.casefold, chosen):
                chosen.append(word)
    return tuple(up[:k]), tuple(down[:k])


def without(model, ids, nodes):
    """Logits of the next token, by the test's own hooks. nodes: (neuron, position, value) each."""

    def hook(site, layer, x):
        x = x.clone()
        for neuron, position, value in nodes:
            if (neuron.layer, "attn" if neuron.site == "head" else neuron.site) == (layer, site):
                x[0, position, neuron.index * len(value) : (neuron.index + 1) * len(value)] = value
        return x

    places = [(site, layer) for site in ("ffn", "attn") for layer in range(model.layers)]
    with hooks(model, places, hook), torch.no_grad():
        return model.net(torch.tensor([ids])).logits[0, -1].double()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_words_are_those_of_measured_effects(name):
    """Of each node alone, and of a group's nodes together."""
    model = calibrated(KNOWN[name])
    with Double():
        result = circuit(model, IDS, 11, 12, counterfactual=OTHER, nodes=16, heads=True)
        groups = result.groups
        plain, there = without(model, IDS, []), without(model, OTHER, [])
        likely = sorted(range(len(plain)), key=lambda id: -max(plain.softmax(-1)[id], there.softmax(-1)[id]))
        tokens, dim = [model.answer_text(id) for id in likely], model.head_dim

        def said(nodes):
            rows = []
            for node in nodes:
                width, site = (dim, "attn") if node.neuron.site == "head" else (1, node.neuron.site)
                values = result.relevance.neurons.counterfactual[site][node.neuron.layer, node.position]
                rows.append((node.neuron, node.position, values[node.neuron.index * width :][:width]))
            effects = (plain - without(model, IDS, rows))[likely]
            return words(effects - effects.mean(), tokens)

        assert {node.neuron.site for node in result.nodes} == {"ffn", "head"}
        for node in result.nodes:
            assert (node.raises, node.lowers) == said([node])
        for group in groups:
            raises, lowers = said(group.nodes)
            assert (group.raises, group.lowers) == (raises, lowers)
            assert not raises or group.name.startswith(
                f"raises {', '.join(raises[:2])}; lowers {', '.join(lowers[:2])}"
            )
    assert len({group.name for group in groups}) == len(groups)
    assert any(len(group.nodes) > 1 for group in groups)
    assert any(node.raises and node.lowers for node in result.nodes)


def test_groups_without_words_are_named_by_tokens_and_layers(graph, monkeypatch):
    monkeypatch.setattr("icebear.concepts.circuits.groups.moved_words", lambda _, __, sets: [((), ())] * len(sets))
    monkeypatch.setattr("icebear.concepts.circuits.groups.DISTANCE", 1e-9)
    groups = grouped(graph)
    assert len({group.name for group in groups}) == len(groups)
    for group in groups:
        (node,) = group.nodes
        name = f"{graph.tokens[node.position].text!r} L{node.neuron.layer}"
        assert re.fullmatch(rf"{re.escape(name)}( \(\d+\))?", group.name)
        assert replace(graph).group(group.name).nodes == group.nodes


@pytest.mark.parametrize("heads", [False, True])
def test_a_groups_recipe_is_its_exchange(heads):
    graph = made(heads=heads, count=20)
    group = Group("all", graph.nodes)
    assert heads is any(node.neuron.site == "head" for node in graph.nodes)
    with Double():
        output = graph.without(group)
        recipe = graph.recipe(group)
        with steer(graph.model, recipe), torch.no_grad():
            logits = graph.model.net(torch.tensor([IDS])).logits[0, -1]
    assert output.predictions[0].id == int(logits.argmax())
    assert output.predictions[0].logit == pytest.approx(logits.max().item())
    assert len(graph.recipe(group, off=True)) == len(graph.nodes)
    assert all(edit.op == "scale" for edit in graph.recipe(group, off=True))


def test_fed_by_tokens_is_a_share(graph):
    """What a node is fed by sums to one, where nothing is lost."""
    from icebear.concepts.circuits.groups import input_profiles

    assert torch.allclose(input_profiles(graph).sum(-1), torch.ones(len(graph.nodes)).double(), atol=1e-6)


# --- impossible wishes ---------------------------------------------------------------------------------


def test_impossible_wishes_get_a_sentence(graph):
    model = graph.model
    for wish, says in (
        ({"nodes": 0}, "not 0"),
        ({"counterfactual": [7, 3, 14]}, "8"),
        ({"counterfactual": [OTHER, OTHER[::-1]]}, "counterfactual"),
        ({"counterfactual": IDS}, "counterfactual"),
    ):
        with pytest.raises(InputError, match=says):
            circuit(model, IDS, 11, 12, **{"counterfactual": OTHER, **wish})
    with pytest.raises(InputError, match="each of them"):
        circuit(model, [IDS, IDS], 11, 12, counterfactual=OTHER)


def test_other_families_have_circuits_too(monkeypatch):
    """Encoders, encoder-decoders and images; what is only for one stack of layers says so."""
    for name in ("bert", "t5", "vit", "dinov2"):
        model, (one, other) = make(name), pair_of(name)
        calibrate(model)
        with Double():
            graph = circuit(model, one, 1, 2, counterfactual=other, nodes=8, heads=False)
        assert (graph.difference - graph.contribution.sum(-1)).abs().max() < 1e-6, name
        assert graph.to_svg()
        if name == "t5":
            with pytest.raises(InputError):
                graph.ablation()
        else:
            with Double():
                assert graph.ablation().nodes == 8
        with Double():
            whole = replace(graph, edge_count=10_000).faithfulness()
            assert whole.sufficiency == pytest.approx(whole.all_edges, abs=1e-6), name  # later tokens count as well
            measured = interventions(graph)
        drawn = {(edge.source.id, edge.target.id): edge.effect for edge in graph.edges}
        for row in measured.itertuples():
            effect = drawn.get((row.source, row.target), row.one_sided)
            assert effect == pytest.approx(row.one_sided, abs=1e-9), (name, row)
        measured = measured[~measured.source.str.startswith("token")]
        assert measured.estimate.corr(measured.one_sided) > 0.9, name


def test_another_thread_waits_while_the_model_is_changed(graph):
    """Runs of the first layers only are of whoever has the model."""
    model, seen = graph.model, []
    with model.lock:
        other = threading.Thread(target=lambda: seen.append(graph.faithfulness()))
        other.start()
        time.sleep(0.3)
        assert len(model.net.model.layers) == model.layers
        assert not seen
    other.join()
    assert seen


@pytest.mark.release
@pytest.mark.real
def test_the_ice_bears_circuit(smol):
    pair = {"contrast": " desert", "counterfactual": "The wild camel lives in the"}
    result = circuit(smol, "The ice bear lives in the", " Arctic", **pair, nodes=10, heads=False)
    assert len(result.nodes) == 10
    assert (result.difference - result.contribution.sum(-1)).abs().max() < 1e-3
    measured = interventions(result)
    measured = measured[~measured.source.str.startswith("token")]
    assert measured.estimate.corr(measured.one_sided) > 0.97
    relevance = attribute(smol, "The ice bear lives in the", " Arctic", **pair)
    assert {node.neuron for node in result.nodes} >= {row.neuron for row in relevance.top(10, "ffn", position="all")}
    assert result.without(result.groups[0]).predictions


def test_a_number_that_both_prompts_give_alike_has_no_circuit(graph, monkeypatch):
    alike = replace(graph.relevance, sums=replace(graph.relevance.sums, target=0.0))
    monkeypatch.setattr("icebear.concepts.circuits.circuit.attribute", lambda *args, **options: alike)
    with pytest.raises(InputError):
        circuit(graph.model, IDS, 11, 12, counterfactual=OTHER)


# --- files ---------------------------------------------------------------------------------------------


def test_the_picture_is_one_svg_with_a_place_for_everything(graph):
    """Every node, token and drawn edge, none over another, text escaped."""
    root = ElementTree.fromstring(graph.to_svg())
    boxes = [part for part in root.iter() if part.get("class") == "node"]
    assert {part.get("data-id") for part in boxes} == {what.id for what in (*graph.tokens, *graph.targets)}
    assert all(part.findall("{*}text") for part in boxes)
    places = drawing.layout(graph).boxes.values()
    for one, other in combinations(places, 2):
        apart = one.x + one.wide <= other.x or other.x + other.wide <= one.x
        assert apart or one.y + one.high <= other.y or other.y + other.high <= one.y
    curves = [part for part in root.iter() if part.get("class") == "edge"]
    assert len(curves) == len(graph.edges)
    assert len([part for part in root.iter() if part.get("class") == "group"]) == len(graph.groups)


def test_the_picture_begins_with_what_of_the_answer_it_shows(graph):
    """As a bar; a circuit that carries little says so."""
    shares = drawing.direct_shares(graph)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-4)
    bar = [part for part in ElementTree.fromstring(graph.to_svg()).iter() if part.get("class") == "share"]
    widths = {part.get("data-share"): float(part.get("width")) for part in bar}
    assert max(widths, key=widths.get) == max(shares, key=lambda name: abs(shares[name]))
    for first, outside in ((0.1, 0.9), (0.3, 0.7)):
        parts = {"nodes": first, "tokens": 0.0, "outside the circuit": outside}
        assert ("elsewhere" in drawing.caption(parts)) is (first < 0.2)


def test_hostile_words_stay_text(graph):
    nasty = "</script><script>alert(1)</script>\x00\x1b\ud800"
    hostile = replace(
        graph,
        nodes=tuple(replace(node, raises=(nasty,), lowers=(nasty,)) for node in graph.nodes),
    )
    groups = (replace(group, name=nasty, raises=(nasty,), lowers=(nasty,)) for group in graph.groups)
    vars(hostile)["groups"] = tuple(groups)
    page = hostile.to_html()
    assert "<script>alert" not in page
    page.encode()
    assert page.count("<script") == 2  # the data's and ours
    ElementTree.fromstring(hostile.to_svg())
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_json_has_everything(graph):
    output = json.loads(graph.to_json(), parse_constant=pytest.fail)
    assert output["icebear_circuit"] == 1
    assert {row["id"] for row in output["nodes"]} == {node.id for node in graph.nodes}
    assert len(output["edges"]) == len(graph.edges)
    assert sum(len(group["nodes"]) for group in output["groups"]) == len(graph.nodes)
    for kind in ("nodes", "groups"):
        for row, one in zip(output[kind], getattr(graph, kind), strict=True):
            assert (row["raises"], row["lowers"]) == (list(one.raises), list(one.lowers))
    assert output["model"]["fingerprint"] == graph.model.fingerprint
    assert graph.to_png(1)[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_command_tells_and_writes_it(tiny_folder, few_contexts, tmp_path):
    """Of a random model; docs/circuits.md has it with the real one."""
    files = {name: tmp_path / f"graph.{name}" for name in ("html", "png")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    query = ["circuit", "abc", "--contrast", "b", "--nodes", "6", "--model", tiny_folder]
    output = run(*query, "--counterfactual", "cbc", "--ablate", *flags)
    assert "All edges between the nodes" in output
    assert all(path.stat().st_size > 1000 for path in files.values())
    for wrong, says in (
        ([*query, "--counterfactual", "cb"], "3"),
        ([*query], "--counterfactual"),
        ([*query, "--counterfactual", "cbc", "--nodes", "2000"], "1024"),
    ):
        result = RUN.invoke(main, wrong)
        assert result.exit_code
        assert says in result.output


def test_the_outputs_of_a_card_are_its_largest_effects_with_their_unit(model):
    graph = circuit(model, "ice bear", counterfactual="big cats", nodes=8, heads=True)
    seen = 0
    for part in graph.shown:
        edges = [edge for edge in graph.edges if edge.source.id == part.id]
        rows = drawing.cards(graph)[part.id]["lists"].get("Strongest outputs (effect)", [])
        numbers = [float(text.split()[0]) for _, _, text in rows]
        largest = sorted((edge.effect for edge in edges), key=abs, reverse=True)[: len(rows)]
        assert numbers == pytest.approx(largest, abs=0.006)
        assert len(rows) == min(len(edges), drawing.STRONGEST)
        assert all((" logits" in text) is (id == "answer") for id, _, text in rows)
        seen += len(rows) > 1
    assert seen
