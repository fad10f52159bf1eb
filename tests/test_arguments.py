"""What is given at a public door is used or refused in a sentence of ours: no nonsense is taken, nothing crashes."""

import dataclasses
import types

import numpy as np
import pytest
import torch
from conftest import LLAMA, Letters, random_model

import icebear
from benchmarks.circuit_graph import Circuits
from benchmarks.truth.judge.evaluation import KnownMechanisms
from icebear import (
    AlphaBeta,
    AttnLRP,
    Concept,
    Difference,
    Edit,
    Epsilon,
    Gamma,
    Model,
    Neuron,
    Ranked,
    Recipe,
)
from icebear.actmax.index import build as index
from icebear.claims.claim import Provenance
from icebear.concepts.methods.registry import method_of
from icebear.concepts.vocabulary import calibration
from icebear.errors import IcebearError
from icebear.evaluation.faithfulness import Faithfulness
from icebear.paths import write_file
from icebear.steering.concept import finding
from icebear.steering.concept.detectors import ConceptVector
from icebear.steering.monitor.monitor import Monitor

PROMPT, OTHER = "ice bear", "big cats"
NAN, INF = float("nan"), float("inf")

NO_COUNT = (0, -1, 2.5, True, "5", NAN, 10**30, [1])
NO_SEED = (-1, 2.5, True, "5", 10**23, None)
NO_NUMBER = (NAN, INF, -INF, 1e39, "1", True, None, 10**400)
NO_NEURON = ("L9.ffn.0", "L1.ffn.99", "L1.mlp.3", "ice", "", 3, None, ("L1.ffn.3", "+"), b"L1.ffn.3")
NO_NAME = ("x", "", 3, None, True, ["ffn"], {})
NO_SIGN = ("x", "", 1, True, "+-", ["+"])
NO_EDIT = ("ice", 3, None, "L1.ffn.3", "L9.ffn.1*0", b"x")
NO_FLAG = ("yes", 2, NAN)


MONITOR = Monitor("m", "token", 1.0, 0.1, 9, 0, (), ConceptVector("means", 0, (1.0,), 0.0, 1.0, 0.9), "letters", "0")


def named(at, name):
    """Before anything is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "read", None)
        return icebear.find_concept(at.model, at.examples, at.others, name)


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """A model and something of everything that it can give."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "TEXTS", calibration.TEXTS[::8])
        made = random_model(LLAMA, dtype=torch.float32)
        model = Model(made.net, Letters(), "letters")
        folder = tmp_path_factory.mktemp("doors")
        (folder / "c.txt").write_text("\n".join(f"The {word} bear lives in the north." for word in "a b c d e".split()))
        patch.setattr(index, "SHARD", 4)
        with icebear.open_store(folder / "wiki.db", create=True) as store:
            icebear.build_index(model, icebear.read_corpus(str(folder / "c.txt")), store, k=2)
            yield types.SimpleNamespace(
                model=model,
                store=store,
                folder=folder,
                corpus=icebear.read_corpus(str(folder / "c.txt")),
                new=icebear.Store(folder / "new.db", create=True),
                relevance=icebear.attribute(model, PROMPT, counterfactual=OTHER),
                effects=icebear.attribute(model, PROMPT, counterfactual=OTHER).effects(2),
                top=icebear.attribute(model, PROMPT, keep="top", k=3),
                positions=icebear.attribute(model, PROMPT, method=icebear.PA_LRP, sites=()),
                graph=icebear.circuit(model, PROMPT, counterfactual=OTHER, nodes=5),
                answer=model.answer(PROMPT, 3),
                concept=Concept.of(model, "c", {(Neuron(1, "ffn", 3), "+"): 1.0}),
                recipe=Recipe.for_model(model, "r", [Edit.parse("L1.ffn.3*0")]),
                examples=[f"ice bears {n}" for n in range(16)],
                others=[f"big cats {n}" for n in range(16)],
            )


def neuron(index):
    return Neuron(1, "ffn", index)


def steered(at, edits, **more):
    with icebear.steer(at.model, edits, **more):
        return at.model.next_logits(PROMPT)


DOORS = {
    # records
    "Neuron.layer": (lambda at, x: Neuron(x, "ffn", 3), (-1, 2.5, True, "5", None, NAN, 10**30)),
    "Neuron.index": (lambda at, x: Neuron(1, "ffn", x), (-1, 2.5, True, "5", None, NAN, 10**30)),
    "Neuron.site": (lambda at, x: Neuron(1, x, 3), NO_NAME),
    "Neuron.parse": (lambda at, x: at.model.check(Neuron.parse(x)), NO_NEURON),
    "Ranked.neuron": (lambda at, x: at.model.check(Ranked(x, 0, 1.0, 1.0).neuron), NO_NEURON),
    "Edit.neuron": (lambda at, x: steered(at, Edit(x, "set", 1)), NO_NEURON),
    "Edit.op": (lambda at, x: Edit(neuron(3), x, 1), NO_NAME),
    "Edit.value": (lambda at, x: Edit(neuron(3), "set", x), NO_NUMBER),
    "Edit.unit": (lambda at, x: Edit(neuron(3), "set", 1, x), ("x", 3, None, ["max"])),
    "Edit.where": (lambda at, x: Edit(neuron(3), "set", 1, "", x), (*NO_NAME, "position:5-3", "step:-1", "turn:0")),
    "Edit.decay": (lambda at, x: Edit(neuron(3), "set", 1, decay=x), (*NO_NUMBER, 2, -3, 1.01)),
    "Edit.share": (lambda at, x: Edit(neuron(3), "set", 1, share=x), (*NO_NUMBER, 2, -1, 1.01)),
    "Edit.parse": (
        lambda at, x: Edit.parse(x),
        (
            *NO_EDIT[:4],
            *(f"L1.ffn.3{end}" for end in "=1e39 =1e300 +-1e39 =nan *inf =0~2 =0~-3 =0~nan =0^2 =0^-1".split()),
        ),
    ),
    "Recipe.edits": (
        lambda at, x: Recipe("r", x, "letters", at.model.fingerprint),
        [one for one in NO_EDIT if one != "L9.ffn.1*0"],
    ),
    "Recipe.name": (lambda at, x: Recipe(x, (), "letters", "0"), (5, None, b"r", "\ud800")),
    "Recipe.model_name": (lambda at, x: Recipe("r", (), x, "0"), (5, None, b"r", "\ud800")),
    "Recipe.provenance": (
        lambda at, x: Recipe("r", (), "letters", "0", x).save(at.folder / "r.json"),
        (5, None, [1], {"a": {1, 2}}, {"a": b"x"}, {"a": "\ud800"}, {"a": {"b": 1j}}),
    ),
    "Recipe.for_model": (lambda at, x: Recipe.for_model(at.model, x, []), (5, None, b"r", "\udcff")),
    "Concept.name": (lambda at, x: Concept.of(at.model, x, {("L1.ffn.3", "+"): 1.0}), (5, None, b"c", "\udcff")),
    "find_concept.name": (lambda at, x: named(at, x), (5, None, b"c", "c\udcff")),
    "Monitor.name": (lambda at, x: dataclasses.replace(MONITOR, name=x), (5, None, b"m", "\udcff")),
    "Store.concepts": (lambda at, x: at.store.concepts.set({x: {}}), ("\udcff",)),
    "Store.labels": (lambda at, x: at.store.labels.set_manual("L1.ffn.3", x), (5, None, b"l", "\udcff")),
    "write_file": (lambda at, x: write_file(at.folder / "t.txt", x), ("a\udcff",)),
    "Recipe.from_json": (lambda at, x: Recipe.from_json(x), (None, 3, "", b"\xff", [], "[]")),
    "Recipe + x": (lambda at, x: at.recipe + x, (1, None, "r", [])),
    "Recipe * x": (lambda at, x: at.recipe * x, (*NO_NUMBER, 2, -1)),
    "Concept * x": (lambda at, x: at.concept * x, (*NO_NUMBER, 0, -1)),
    # methods
    "Epsilon": (lambda at, x: Epsilon(x), (*NO_NUMBER, -1)),
    "Gamma": (lambda at, x: Gamma(x), (*NO_NUMBER, -1)),
    "AlphaBeta": (lambda at, x: AlphaBeta(x), (*NO_NUMBER, 0.5)),
    "AttnLRP.softmax": (lambda at, x: AttnLRP(x), NO_NAME),
    "AttnLRP.linear": (lambda at, x: AttnLRP(linear=x), ("gamma", 3, None, Gamma)),
    "AttnLRP.conv": (lambda at, x: AttnLRP(conv=x), ("gamma", 3, Gamma)),
    "AttnLRP.attention_in": (lambda at, x: AttnLRP(attention_in=x), ("gamma", 3, Gamma)),
    "AttnLRP.attention_out": (lambda at, x: AttnLRP(attention_out=x), ("gamma", 3, Gamma)),
    "AttnLRP.positions": (lambda at, x: AttnLRP(positions=x), NO_FLAG),
    "method_of": (lambda at, x: method_of(x), NO_NAME),
    "Difference.softmax": (lambda at, x: Difference(x), NO_NAME),
    # attribute
    "attribute.sites": (
        lambda at, x: icebear.attribute(at.model, PROMPT, sites=x),
        ("x", 3, ["ffn", "x"], [3], b"ffn", "cross"),
    ),
    "attribute.k": (lambda at, x: icebear.attribute(at.model, PROMPT, keep="top", k=x), NO_COUNT),
    "attribute.keep": (lambda at, x: icebear.attribute(at.model, PROMPT, keep=x), NO_NAME),
    "attribute.record": (
        lambda at, x: icebear.attribute(at.model, PROMPT, record=x),
        ("x", 99, [99], [2.5], ["last"], [True], NAN, None),
    ),
    "attribute.method": (lambda at, x: icebear.attribute(at.model, PROMPT, method=x), ("x", 3, ["attnlrp"], AttnLRP)),
    "attribute.target": (
        lambda at, x: icebear.attribute(at.model, PROMPT, x),
        ("", -1, 99, 2.5, ["a", "b"], [2.5], True, NAN),
    ),
    "attribute.contrast": (
        lambda at, x: icebear.attribute(at.model, PROMPT, "a", x),
        ("", -1, 99, 2.5, ["c", "b"], True, NAN),
    ),
    "attribute.target_text": (
        lambda at, x: icebear.attribute(at.model, PROMPT, target_text=x),
        ("", 2.5, ["a", "b"], [2.5]),
    ),
    "attribute.prefix": (lambda at, x: icebear.attribute(at.model, PROMPT, prefix=x), ("x", 3, 2.5)),
    "attribute.position": (lambda at, x: icebear.attribute(at.model, PROMPT, position=x), ("x", 300, 2.5, "prompt")),
    "attribute.position, counterfactual": (
        lambda at, x: icebear.attribute(at.model, PROMPT, counterfactual=OTHER, position=x),
        ("x", 300, 2.5, ""),
    ),
    "attribute.counterfactual": (
        lambda at, x: icebear.attribute(at.model, PROMPT, counterfactual=x),
        ("", 3, 2.5, [], [3.5], PROMPT),
    ),
    "attribute.base_model": (lambda at, x: icebear.attribute(at.model, PROMPT, base_model=x), ("x", 3)),
    "attribute.span": (
        lambda at, x: icebear.attribute(at.model, at.answer, span=x),
        ("", "~~", "9:12", (2, 1), (0, 99), (0,), (0, 1, 2), 3, 2.5, (0.0, 1.0), ("0", "1")),
    ),
    "source_breakdown.span": (lambda at, x: icebear.source_breakdown(at.model, at.answer, x), ("", "~~", (2, 1), 3)),
    "source_breakdown.counterfactual": (
        lambda at, x: icebear.source_breakdown(at.model, at.answer, counterfactual=x),
        ("", 3, 2.5),
    ),
    "sources.units": (lambda at, x: icebear.sources(at.model, at.answer, x), (*NO_NAME, "word")),
    "sources.span": (lambda at, x: icebear.sources(at.model, at.answer, span=x), ("", "~~", (2, 1), 3)),
    "sources.seed": (lambda at, x: icebear.sources(at.model, at.answer, seed=x), (-1, 2.5, "x")),
    "sources.answer": (lambda at, x: icebear.sources(at.model, x), ("ice", 3, None)),
    "matrix.by": (lambda at, x: icebear.matrix(at.model, at.answer, x), NO_NAME),
    "matrix.answer": (lambda at, x: icebear.matrix(at.model, x), ("ice", 3, None)),
    "matrix.method": (lambda at, x: icebear.matrix(at.model, at.answer, method=x), ("x", 3, None)),
    "units.by": (lambda at, x: icebear.units(at.relevance, x), NO_NAME),
    "Answer.token_range": (lambda at, x: at.answer.token_range(x), ("", "~~", (2, 1), (0, 99), (0,), 3, (0.0, 1.0))),
    # a relevance
    "top.k": (lambda at, x: at.relevance.top(x), NO_COUNT),
    "top.k, kept": (lambda at, x: at.top.top(x, position="all"), (*NO_COUNT, 4)),
    "top.site": (lambda at, x: at.relevance.top(site=x), ("x", "", 3, True, ["ffn"], "q")),
    "top.polarity": (lambda at, x: at.relevance.top(polarity=x), NO_SIGN),
    "top.by": (lambda at, x: at.relevance.top(by=x), ("+", "", 3, None, [])),
    "top.position": (lambda at, x: at.relevance.top(position=x), ("x", 99, -99, 2.5, True, None, [0], NAN)),
    "top.layers": (lambda at, x: at.relevance.top(layers=x), (99, -1, [99], range(9), "1", 2.5, [2.5], True)),
    "to_frame.k": (lambda at, x: at.relevance.to_frame(x), NO_COUNT),
    "to_dict.k": (lambda at, x: at.relevance.to_dict(x), NO_COUNT[1:]),
    "to_json.k": (lambda at, x: at.relevance.to_json(x), NO_COUNT[1:]),
    "of": (lambda at, x: at.relevance.of(x), NO_NAME),
    "activation": (lambda at, x: at.relevance.activation(x), NO_NAME),
    "layers": (lambda at, x: at.relevance.layers(x), NO_NAME),
    "of_neuron": (lambda at, x: at.relevance.of_neuron(x), NO_NEURON),
    "of_neuron, head": (lambda at, x: at.relevance.of_neuron(x), ("L1.head.9", "L9.head.0", "L1.q.0")),
    "of_neuron.position": (lambda at, x: at.relevance.of_neuron("L1.ffn.3", x), ("x", 99, 2.5, True, None)),
    "only.k": (lambda at, x: at.relevance.neurons.only(x, [0], at.relevance.prompt), NO_COUNT),
    "only.recorded": (
        lambda at, x: at.relevance.neurons.only(3, x, at.relevance.prompt),
        (["x"], [99], 99, "x", [2.5], None),
    ),
    "minus": (lambda at, x: at.relevance.minus(x), (3, None, "ice")),
    "combined": (lambda at, x: at.positions.combined(x), NO_NAME),
    "ablation.k": (lambda at, x: icebear.ablation(at.model, at.relevance, x), NO_COUNT),
    "ablation.site": (lambda at, x: icebear.ablation(at.model, at.relevance, 3, x), ("x", "", 3, ["ffn"], "q")),
    "ablation.seed": (lambda at, x: icebear.ablation(at.model, at.relevance, 3, seed=x), NO_SEED),
    "ablation.relevance": (lambda at, x: icebear.ablation(at.model, x, 3), (3, None, "ice")),
    # a circuit
    "circuit.nodes": (lambda at, x: icebear.circuit(at.model, PROMPT, counterfactual=OTHER, nodes=x), NO_COUNT),
    "circuit.edges": (
        lambda at, x: icebear.circuit(at.model, PROMPT, counterfactual=OTHER, nodes=3, edges=x),
        NO_COUNT,
    ),
    "circuit.counterfactual": (
        lambda at, x: icebear.circuit(at.model, PROMPT, counterfactual=x),
        (None, 3, "", "ice bears"),
    ),
    "Graph.ablation": (lambda at, x: at.graph.ablation(x), NO_SEED),
    "Graph.faithfulness.edges": (lambda at, x: at.graph.faithfulness(x), NO_COUNT[1:]),
    "Graph.faithfulness.seed": (lambda at, x: at.graph.faithfulness(seed=x), NO_SEED),
    "Graph.sources_of.target": (lambda at, x: at.graph.sources_of(x, 3), ("x", 3, None)),
    "Graph.sources_of.k": (lambda at, x: at.graph.sources_of(at.graph.answer, x), NO_COUNT),
    "Graph.without": (lambda at, x: at.graph.without(x), ("x", 3, None)),
    "Graph.recipe": (lambda at, x: at.graph.recipe(x), ("x", 3, None)),
    "Graph.mask": (lambda at, x: at.graph.mask(x), ("x", 3, [3])),
    "Graph.to_png": (lambda at, x: at.graph.to_png(x), (0, -1, NAN, "2", None, 1e9)),
    # a model
    "generate.prompt": (lambda at, x: at.model.generate(x), ("", 3, None, 2.5, [], [2.5], {})),
    "generate.max_new_tokens": (lambda at, x: at.model.generate(PROMPT, x), (*NO_COUNT, 999)),
    "generate.temperature": (lambda at, x: at.model.generate(PROMPT, 2, x), (*NO_NUMBER, -1, 1e-40, 1e300)),
    "generate.seed": (lambda at, x: at.model.generate(PROMPT, 2, 1.0, x), NO_SEED),
    "answer.max_new_tokens": (lambda at, x: at.model.answer(PROMPT, x), (*NO_COUNT, 999)),
    "answer.temperature": (lambda at, x: at.model.answer(PROMPT, 2, x), (*NO_NUMBER, -1, 1e-40, 1e300)),
    "answer.seed": (lambda at, x: at.model.answer(PROMPT, 2, 1.0, x), NO_SEED),
    "predict.k": (lambda at, x: at.model.predict(PROMPT, x), NO_COUNT),
    "predict.also": (lambda at, x: at.model.predict(PROMPT, 2, x), ([-1], [99], 99, ["ice"], [2.5])),
    "probability": (lambda at, x: at.model.probability(PROMPT, x), ("", "ice", -1, 99, 2.5, None, True)),
    "answer_id": (lambda at, x: at.model.answer_id(x), ("", "ice", -1, 99, 2.5, None, True)),
    "token_ids.limit": (lambda at, x: at.model.token_ids("ice", x), NO_COUNT),
    "token_ids.text": (lambda at, x: at.model.token_ids(x), (3, None, [3])),
    "text": (lambda at, x: at.model.text(x), (-1, "ice", None, 2.5)),
    "width": (lambda at, x: at.model.width(x), NO_NAME),
    "layers_with": (lambda at, x: at.model.layers_with(x), NO_NAME),
    "check": (lambda at, x: at.model.check(x), NO_NEURON),
    "load_model": (lambda at, x: icebear.load_model(x), ("no/such-model-x", 3, None, "")),
    "load_model.bits": (lambda at, x: icebear.load_model(bits=x), (3, "4", True, 2.5)),
    "load_model.dtype": (lambda at, x: icebear.load_model(dtype=x), ("x", 3, True)),
    "load_model.device": (lambda at, x: icebear.load_model(device=x), ("x", 3, None)),
    "project.neuron": (lambda at, x: icebear.project(at.model, x), (*NO_NEURON, "L1.q.0", "L1.head.0")),
    "project.k": (lambda at, x: icebear.project(at.model, neuron(3), x), NO_COUNT),
    # a store
    "search.k": (lambda at, x: at.store.search("bear", x), NO_COUNT),
    "search.text": (lambda at, x: at.store.search(x), ("", " ", 3, None, ["bear"])),
    "similar.neuron": (lambda at, x: at.store.similar(x), NO_NEURON),
    "similar.k": (lambda at, x: at.store.similar(neuron(3), x), NO_COUNT),
    "similar.by": (lambda at, x: at.store.similar(neuron(3), by=x), NO_NAME),
    "similar.polarity": (lambda at, x: at.store.similar(neuron(3), polarity=x), (*NO_SIGN, None)),
    "vocabulary.neuron": (lambda at, x: at.store.vocabulary(x), NO_NEURON),
    "vocabulary.k": (lambda at, x: at.store.vocabulary(neuron(3), x), NO_COUNT),
    "statistics": (lambda at, x: at.store.neurons.statistics(x), NO_NEURON),
    "statistic.neuron": (lambda at, x: at.store.neurons.statistic(x, "max"), NO_NEURON),
    "statistic.unit": (lambda at, x: at.store.neurons.statistic(neuron(3), x), (*NO_NAME, "mean")),
    "examples.neuron": (lambda at, x: at.store.examples(x), NO_NEURON),
    "examples.polarity": (lambda at, x: at.store.examples(neuron(3), x), (*NO_SIGN, None)),
    "examples.k": (lambda at, x: at.store.examples(neuron(3), "+", x), NO_COUNT),
    "w_out_norm": (lambda at, x: at.store.vectors.w_out_norm(x), NO_NEURON),
    "label": (lambda at, x: at.store.labels.manual(x), NO_NEURON),
    "set_label.neuron": (lambda at, x: at.store.labels.set_manual(x, "ice"), NO_NEURON),
    "set_label.text": (lambda at, x: at.store.labels.set_manual(neuron(3), x), (3, None, ["ice"])),
    "meanings": (lambda at, x: at.store.labels.automatic([x]), NO_NEURON[2:]),
    "named.neuron": (lambda at, x: at.store.labels.shown(x, "+"), NO_NEURON[2:]),
    "named.polarity": (lambda at, x: at.store.labels.shown(neuron(3), x), ("x", 1, None, ["+"])),
    "typical": (lambda at, x: at.store.vectors.typical(x), (99, -1, 2.5, "1", None, True)),
    "count": (lambda at, x: at.store.count(x), ("x", 3, None, "neurons; DROP TABLE neurons")),
    "fact": (lambda at, x: at.store.facts.get(x), ("x", 3, None)),
    "concept": (lambda at, x: at.store.concepts.get(x), ("x", 3, None)),
    "Store": (lambda at, x: icebear.Store(x).facts.all(), (3, None, "")),
    "open_store": (lambda at, x: icebear.open_store(x).__enter__(), (3, None, "")),
    "describe.neuron": (lambda at, x: icebear.describe(at.store, x), NO_NEURON),
    "describe.k": (lambda at, x: icebear.describe(at.store, neuron(3), k=x), NO_COUNT),
    "describe.effect_sentences": (
        lambda at, x: icebear.describe(at.store, neuron(3), effect_sentences=x),
        NO_COUNT[1:],
    ),
    "describe.crop": (lambda at, x: icebear.describe(at.store, neuron(3), crop=x), ("x", "", 3, True, ["ffn"], {})),
    "read_images": (lambda at, x: icebear.read_images(x), (3, None, "", "no/such/folder")),
    "read_images.limit": (lambda at, x: icebear.read_images(".", x), NO_COUNT),
    "annotate.neurons": (lambda at, x: icebear.annotate(at.model, at.store, x), (*NO_NEURON[:7], ["x"], [3])),
    "annotate.k": (lambda at, x: icebear.annotate(at.model, at.store, [neuron(3)], x), NO_COUNT),
    "annotate.method": (
        lambda at, x: icebear.annotate(at.model, at.store, [neuron(3)], method=x),
        ("x", 3, Difference()),
    ),
    "build_index.k": (lambda at, x: icebear.build_index(at.model, at.corpus, at.new, x), NO_COUNT),
    "build_index.sites": (
        lambda at, x: icebear.build_index(at.model, at.corpus, at.new, sites=x),
        ("x", 3, [], [3], "cross"),
    ),
    "build_index.by": (lambda at, x: icebear.build_index(at.model, at.corpus, at.new, by=x), NO_NAME),
    "build_index.max_tokens": (
        lambda at, x: icebear.build_index(at.model, at.corpus, at.new, max_tokens=x),
        (*NO_COUNT, 1),
    ),
    "build_index.seed": (lambda at, x: icebear.build_index(at.model, at.corpus, at.new, seed=x), NO_SEED),
    # steering
    "steer.edits": (lambda at, x: steered(at, x), (*NO_EDIT, [3], ["ice"], [None])),
    "steer.statistic": (lambda at, x: steered(at, "L1.ffn.3=1max", statistic=lambda *_: x), (NAN, INF, "x", None)),
    "steer.prompt_tokens": (lambda at, x: steered(at, "L1.ffn.3=1", prompt_tokens=x), NO_COUNT),
    "random_edit_control.edits": (
        lambda at, x: icebear.random_edit_control(at.model, PROMPT, x),
        (*NO_EDIT, [3], ["ice"]),
    ),
    "random_edit_control.draws": (
        lambda at, x: icebear.random_edit_control(at.model, PROMPT, "L1.ffn.3*0", draws=x),
        NO_COUNT,
    ),
    "random_edit_control.seed": (
        lambda at, x: icebear.random_edit_control(at.model, PROMPT, "L1.ffn.3*0", seed=x),
        NO_SEED,
    ),
    "flip.max_neurons": (lambda at, x: icebear.flip(at.model, PROMPT, "a", max_neurons=x), NO_COUNT),
    "flip.top_k": (lambda at, x: icebear.flip(at.model, PROMPT, suppress=True, top_k=x), NO_COUNT),
    "flip.to": (lambda at, x: icebear.flip(at.model, PROMPT, x), (None, "", -1, 99, 2.5, True)),
    "flip.suppress": (lambda at, x: icebear.flip(at.model, PROMPT, suppress=x), (False, 0, 2.5, "")),
    "Concept.of.weights": (
        lambda at, x: Concept.of(at.model, "c", x),
        (
            3,
            "L1.ffn.3",
            [3],
            {"L1.ffn.3": 1.0},
            {("L9.ffn.1", "+"): 1.0},
            {("L1.ffn.3", "x"): 1.0},
            {("L1.ffn.3", "+", 1): 1.0},
            {3: 1.0},
            *({("L1.ffn.3", "+"): weight} for weight in (*NO_NUMBER, 0, -1)),
        ),
    ),
    "Concept.recipe.strength": (
        lambda at, x: at.concept.recipe(at.model, x),
        [x for x in (*NO_NUMBER, -1) if x is not None],
    ),
    "Concept.recipe.kl": (lambda at, x: at.concept.recipe(at.model, kl=x), (NAN, INF, 0, -1, "1", True)),
    "Concept.recipe.where": (lambda at, x: at.concept.recipe(at.model, 1.0, where=x), NO_NAME),
    "Concept.recipe.decay": (lambda at, x: at.concept.recipe(at.model, 1.0, decay=x), (NAN, 2, -1, "1")),
    "Concept.measures": (lambda at, x: at.concept.measures(at.model, x), (3, [3], [""])),
    "find_concept.examples": (
        lambda at, x: icebear.find_concept(at.model, x, at.others),
        ("ice bear", 3, [3] * 20, None),
    ),
    "find_concept.max_neurons": (
        lambda at, x: icebear.find_concept(at.model, at.examples, at.others, max_neurons=x),
        NO_COUNT,
    ),
    "find_concept.sites": (
        lambda at, x: icebear.find_concept(at.model, at.examples, at.others, sites=x),
        ("x", 3, [], [3], "head"),
    ),
    "find_concept.seed": (lambda at, x: icebear.find_concept(at.model, at.examples, at.others, seed=x), NO_SEED),
    "units.relevance": (lambda at, x: icebear.units(x), ("x", None, 3)),
    "Effects.words": (lambda at, x: at.effects.words(x), (99, -1, 2.5, "0", None)),
    "Effects.words.k": (lambda at, x: at.effects.words(0, x), NO_COUNT),
    "steer.rows": (lambda at, x: steered(at, [], rows=x), (-1, "x", [0.5], [None], 10**30)),
    "evaluation.samples": (lambda at, x: Faithfulness(samples=x), (0, -1, 10**20)),
    "evaluation.seed": (lambda at, x: Faithfulness(seed=x), (-1, 10**23)),
    "evaluation of circuits": (lambda at, x: Circuits(nodes=x), (0, 10**20)),
    "evaluation of truth": (lambda at, x: KnownMechanisms(samples=x), (0, 10**20)),
    "Claim.seed": (lambda at, x: Provenance("m", "0", "float32", {}, x, "2026-01-31"), (-1, 2**70, 2.5, None)),
    # files
    **{
        f"{kind.__name__}.load": (lambda at, x, kind=kind: kind.load(x), (3, None, "none.json", ""))
        for kind in (Concept, Recipe, icebear.Monitor, icebear.Task)
    },
    "Chat": (lambda at, x: icebear.Chat(x), (3, None, "ice", [], [3], [{}], [{"role": 3, "content": "x"}])),
}


@pytest.mark.parametrize(("door", "values"), DOORS.values(), ids=DOORS)
def test_nonsense_is_refused_in_a_sentence(at, door, values):
    for value in values:
        with pytest.raises(IcebearError) as caught:
            door(at, value)
            pytest.fail(f"{value!r:.30} is taken")
        assert str(caught.value).strip().endswith((".", "?")), f"{value!r:.30}"


SAME = {
    "project": lambda at, one: icebear.project(at.model, one),
    "of_neuron": lambda at, one: at.relevance.of_neuron(one),
    "check": lambda at, one: at.model.check(one),
    "statistics": lambda at, one: at.store.neurons.statistics(one),
    "statistic": lambda at, one: at.store.neurons.statistic(one, "std"),
    "examples": lambda at, one: at.store.examples(one),
    "similar": lambda at, one: at.store.similar(one),
    "vocabulary": lambda at, one: at.store.vocabulary(one),
    "label": lambda at, one: at.store.labels.manual(one),
    "meanings": lambda at, one: at.store.labels.automatic(one),
    "describe": lambda at, one: icebear.describe(at.store, one),
    "annotate": lambda at, one: icebear.annotate(at.model, at.store, one, 1) * 0,
    "Edit": lambda at, one: Edit(one, "set", 1),
    "Ranked": lambda at, one: Ranked(one, 0, 1.0, 1.0),
    "Concept.of": lambda at, one: Concept.of(at.model, "c", {(one, "+"): 1.0}),
}


@pytest.mark.parametrize("door", SAME.values(), ids=SAME)
def test_a_neuron_s_id_is_the_neuron(at, door):
    assert door(at, "L1.ffn.3") == door(at, neuron(3))


ALONE = {
    "steer": (lambda at, x: steered(at, x), "L1.ffn.3*0"),
    "steer, an Edit": (lambda at, x: steered(at, x), Edit(neuron(3), "scale", 0)),
    "Recipe": (lambda at, x: Recipe("r", x, "letters", "f").edits, "L1.ffn.3*0"),
    "attribute.sites": (lambda at, x: icebear.attribute(at.model, PROMPT, sites=x).ffn, "ffn"),
    "attribute.record": (lambda at, x: icebear.attribute(at.model, PROMPT, record=x).ffn, 1),
    "top.layers": (lambda at, x: at.relevance.top(layers=x), 2),
    "meanings": (lambda at, x: at.store.labels.automatic(x), "L1.ffn.3"),
    "random_edit_control": (
        lambda at, x: icebear.random_edit_control(at.model, PROMPT, x, draws=1).after,
        "L1.ffn.3*0",
    ),
}


@pytest.mark.parametrize(("door", "one"), ALONE.values(), ids=ALONE)
def test_one_alone_is_a_list_of_one(at, door, one):
    alone, listed = door(at, one), door(at, [one])
    assert torch.equal(alone, listed) if isinstance(alone, torch.Tensor) else alone == listed


def test_what_a_smaller_dtype_cannot_hold_is_refused(at):
    half = Model(random_model(LLAMA, dtype=torch.float16).net, Letters(), "half")
    for value in (1e5, -7e4):
        with pytest.raises(IcebearError, match="float16"), icebear.steer(half, [Edit(neuron(3), "set", value)]):
            pass


def test_logits_of_nan_are_no_text(at):
    with icebear.steer(at.model, [f"L0.ffn.{i}=3e38" for i in range(20)]), pytest.raises(IcebearError, match="NaN"):
        at.model.generate(PROMPT, 2)


def test_numbers_of_numpy_are_numbers(at):
    assert at.relevance.top(np.int64(3), position=np.int64(1)) == at.relevance.top(3, position=1)
    assert str(Edit(Neuron(np.int64(1), "ffn", np.int64(3)), "set", np.float64(2.5))) == "L1.ffn.3=2.5"


def test_a_length_that_does_not_fit_is_told_with_the_one_that_does(at):
    for call, numbers in (
        (lambda: at.model.generate(PROMPT, 60), ("8", "56", "64", "60")),
        (lambda: icebear.attribute(at.model, PROMPT, counterfactual="big cat", method="difference"), ("8", "7")),
        (lambda: icebear.circuit(at.model, PROMPT, counterfactual="big cat"), ("8", "7")),
    ):
        with pytest.raises(IcebearError) as caught:
            call()
        assert all(number in str(caught.value) for number in numbers)
