"""Random nonsense at every public door: what is not used is refused. ICEBEAR_FUZZ=2000 tries more."""

import os
import traceback
from collections import Counter
from contextlib import nullcontext, suppress

import numpy as np
import torch
from conftest import SEED
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from test_arguments import OTHER, PROMPT, at  # noqa: F401

import icebear
from icebear import Chat, Concept, Edit, Neuron, Prompt, Recipe
from icebear.errors import IcebearError

CALLS = int(os.environ.get("ICEBEAR_FUZZ", "200"))

TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(st.characters(), max_size=5).map(lambda text: text + "\udcff"),
    st.sampled_from(
        ["", " ", "\x00", "L1.ffn.3", "L1.ffn.3=2", "head", "last", "\u202e", "a" * 300, "../x", "~", "ice"]
    ),
)
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.complex_numbers(),
    st.sampled_from(
        [10**400, -(10**400), np.float32(2), np.int64(-1), np.bool_(True), torch.tensor(3), torch.tensor(2.5)]
    ),
)
SINGLE = st.one_of(st.none(), NUMBERS, TEXTS, st.binary(max_size=5), st.just(object()), st.just(Ellipsis), st.just(len))
SEVERAL = st.recursive(
    SINGLE,
    lambda part: st.one_of(
        st.lists(part, max_size=3),
        st.tuples(part, part),
        st.dictionaries(st.one_of(TEXTS, st.integers(), st.none()), part, max_size=2),
        st.sets(st.integers(), max_size=2),
        st.lists(part, max_size=2).map(iter),
    ),
    max_leaves=4,
)
ARRAYS = st.sampled_from(
    [
        np.array([], dtype=int),
        np.array([[1, 2], [3, 4]]),
        np.array(["a", "b"]),
        np.zeros((2, 0)),
        torch.zeros(0, dtype=torch.long),
        torch.full((2, 3), torch.nan),
        torch.ones(1, 2, 3, 4),
        torch.tensor([1, 2], dtype=torch.complex64),
    ]
)
REFUSED = ("check", "flip", "Recipe.load", "Concept.load", "concepts", "sources")
"""Doors whose usual arguments name what is not there."""
OURS = ("model", "store", "relevance", "top", "graph", "answer", "concept", "recipe", "corpus", "examples")
ANYTHING = st.one_of(SEVERAL, ARRAYS, st.sampled_from([f"<{name}>" for name in OURS]))


def calls(made):
    """Name -> a public function, and arguments that it takes."""
    model, store, relevance, pair = made.model, made.store, made.relevance, {"prompt": PROMPT, "counterfactual": OTHER}
    words = {"target": "a", "contrast": "b"}
    drawn = {"max_new_tokens": 1, "temperature": 0.0, "seed": 0}
    edit = Edit.parse("L1.ffn.3*0")
    return {
        "attribute": (
            icebear.attribute,
            {
                "model": model,
                **pair,
                **words,
                "method": None,
                "sites": ("ffn",),
                "position": None,
                "number": None,
                "record": "last",
                "keep": "all",
                "k": 3,
                "checkpoint": None,
                "strict": True,
                "prefix": None,
                "target_text": None,
                "base_model": None,
                "span": None,
            },
        ),
        "answers": (
            icebear.attribute,
            {
                "model": model,
                "prompt": made.answer,
                "contrast": None,
                "span": None,
                "sites": (),
                "counterfactual": None,
            },
        ),
        "explain": (
            icebear.explain,
            {
                "model": model,
                **pair,
                **words,
                "top": 2,
                "site": "ffn",
                "store": None,
                "span": None,
                "base_model": None,
            },
        ),
        "circuit": (
            icebear.circuit,
            {
                "model": model,
                **pair,
                **words,
                "nodes": 3,
                "heads": False,
                "edges": 8,
                "position": None,
                "span": None,
            },
        ),
        "ablation": (
            icebear.ablation,
            {"model": model, "relevance": relevance, "k": 3, "site": "ffn", "seed": 0, "by": "positive"},
        ),
        "effects": (relevance.effects, {"nodes": 3}),
        "matrix": (
            icebear.matrix,
            {"model": model, "answer": made.answer, "by": "sentence", "method": icebear.CP_LRP, "checkpoint": None},
        ),
        "source_breakdown": (
            icebear.source_breakdown,
            {
                "model": model,
                "answer": made.answer,
                "span": None,
                "counterfactual": None,
                "contrast": None,
                "number": "logit",
            },
        ),
        "sources": (
            icebear.sources,
            {"model": model, "answer": made.answer, "units": "sentence", "span": None, "seed": 0, "checkpoint": None},
        ),
        "units": (icebear.units, {"relevance": relevance, "by": "word"}),
        "project": (icebear.project, {"model": model, "neuron": "L1.ffn.3", "k": 3, "lens": "direct"}),
        "suggest": (icebear.suggest_counterfactuals, {"model": model, "prompt": PROMPT, "count": 1}),
        "describe": (
            icebear.describe,
            {
                "store": store,
                "neuron": "L1.ffn.3",
                "model": model,
                "k": 2,
                "search_vectors": None,
                "effect_sentences": 1,
            },
        ),
        "annotate": (
            icebear.annotate,
            {"model": model, "store": store, "neurons": ["L1.ffn.3"], "k": 1, "method": icebear.ATTNLRP},
        ),
        "flip": (
            icebear.flip,
            {
                "model": model,
                "prompt": PROMPT,
                "to": "a",
                "source": None,
                "max_neurons": 1,
                "suppress": False,
                "top_k": 5,
                "store": None,
                "unbounded": False,
            },
        ),
        "find_concept": (
            icebear.find_concept,
            {
                "model": model,
                "examples": made.examples,
                "others": made.others,
                "name": "c",
                "max_neurons": 2,
                "sites": ("ffn",),
                "seed": 0,
            },
        ),
        "random_edit_control": (
            icebear.random_edit_control,
            {"model": model, "prompt": PROMPT, "edits": [edit], **words, "position": None, "draws": 2, "seed": 0},
        ),
        "check": (icebear.check, {"model": model, "claims": []}),
        "read_corpus": (
            icebear.read_corpus,
            {
                "name": str(made.folder / "c.txt"),
                "limit": 3,
                "language": "en",
                "column": "text",
                "subset": None,
                "split": None,
                "revision": None,
            },
        ),
        "open_store": (_opened, {"path": str(made.folder / "wiki.db")}),
        "steer": (_steered, {"model": model, "edits": [edit], "prompt_tokens": None}),
        "generate": (model.generate, {"prompt": PROMPT, **drawn}),
        "predict": (model.predict, {"prompt": PROMPT, "k": 3, "also": [1], "position": None}),
        "answer": (model.answer, {"prompt": PROMPT, **drawn}),
        "probability": (model.probability, {"prompt": PROMPT, "answer": "a"}),
        "Neuron": (Neuron, {"layer": 1, "site": "ffn", "index": 3}),
        "Neuron.parse": (Neuron.parse, {"text": "L1.ffn.3"}),
        "Edit": (
            Edit,
            {"neuron": "L1.ffn.3", "op": "set", "value": 1.0, "unit": "", "where": "all", "decay": 1, "share": 1},
        ),
        "Edit.parse": (Edit.parse, {"text": "L1.ffn.3=2"}),
        "Recipe": (
            _saved,
            {
                "folder": made.folder,
                "name": "r",
                "edits": (edit,),
                "model_name": "m",
                "model_fingerprint": "f",
                "provenance": {},
            },
        ),
        "Recipe.from_json": (Recipe.from_json, {"text": made.recipe.to_json()}),
        "Recipe.load": (Recipe.load, {"path": "none.json"}),
        "Recipe.for_model": (Recipe.for_model, {"model": model, "name": "r", "edits": [edit]}),
        "Concept.of": (Concept.of, {"model": model, "name": "c", "weights": {("L1.ffn.3", "+"): 1.0}}),
        "Concept.measure": (made.concept.measure, {"model": model, "text": PROMPT}),
        "Concept.load": (Concept.load, {"path": "none.json"}),
        "Relevance.top": (
            relevance.top,
            {
                "k": 3,
                "site": "ffn",
                "polarity": "+",
                "position": "all",
                "include_sinks": False,
                "by": "positive",
                "layers": None,
                "include_template": False,
            },
        ),
        "Relevance.minus": (relevance.minus, {"other": relevance}),
        "Chat": (Chat, {"messages": [{"role": "user", "content": "a"}], "template": {}}),
        "Prompt.of": (Prompt.of, {"prompt": PROMPT}),
        "search": (store.search, {"text": "bear", "k": 2}),
        "examples": (store.examples, {"neuron": "L1.ffn.3", "polarity": "+", "k": 2, "method": "attnlrp"}),
        "labels": (store.labels.set_manual, {"neuron": "L1.ffn.3", "text": "a"}),
        "concepts": (store.concepts.get, {"name": "c"}),
        "without": (made.graph.without, {"group": made.graph.groups[0]}),
    }


def _opened(path):
    with icebear.open_store(path) as store:
        return store.facts.get("model")


def _steered(model, edits, prompt_tokens):
    with icebear.steer(model, edits, prompt_tokens=prompt_tokens):
        return model.next_logits(PROMPT)


def _saved(folder, **values):
    """What can be made can be saved and loaded."""
    recipe = Recipe(**values)
    recipe.save(folder / "saved.json")
    assert Recipe.load(folder / "saved.json") == recipe


def test_nonsense_is_used_or_refused(at, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("icebear.models.loading.loading.hub_reachable", lambda: False)
    doors, lost, done = calls(at), Counter(), Counter()
    for door, (function, own) in doors.items():
        with suppress(IcebearError) if door in REFUSED else nullcontext():
            function(**own)
    names = st.sampled_from([(door, name) for door, (_, own) in doors.items() for name in own if name != "folder"])

    usual = [value for _, own in doors.values() for value in own.values()]
    anything = st.one_of(ANYTHING, st.sampled_from(range(len(usual))).map(lambda place: usual[place]))

    @seed(SEED)
    @settings(max_examples=CALLS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def call(data):
        door, name = data.draw(names)
        function, own = doors[door]
        value = data.draw(anything)
        if isinstance(value, str) and value[1:-1] in OURS:
            value = getattr(at, value[1:-1])
        try:
            function(**{**own, name: value})
            done["used"] += 1
        except IcebearError:
            done["refused"] += 1
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error!s:.80} {place.filename[-40:]}:{place.lineno}"
            lost[f"{door}.{name}={value!r:.60}: {what}"] += 1

    call()
    print(dict(done))
    assert not lost, "\n".join(sorted(lost))
