"""Whole results as files: they come back bit for bit, with and without their model, and any other file is refused."""

import json
import os
import pickle
import subprocess
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from inspect import getmembers, isclass, isfunction, isroutine

import pandas
import pytest
import torch
from conftest import LLAMA, Letters, random_model
from hypothesis import given
from hypothesis import strategies as st
from test_two_models import edited, trained
from test_writers import largest_file

import icebear
from icebear import (
    PA_LRP,
    AttnLRP,
    Card,
    Chat,
    Diff,
    Explanation,
    Gamma,
    Graph,
    InputError,
    Neuron,
    Prompt,
    Relevance,
    Stages,
    ablation,
    attribute,
    build_index,
    circuit,
    describe,
    explain,
    open_store,
    project,
    random_edit_control,
    sources,
    stages,
)
from icebear import result_files as files
from icebear.claims.check import check
from icebear.claims.claim import Claim
from icebear.claims.kinds.predictions import AnswerClaim
from icebear.concepts.answers.breakdown import source_breakdown
from icebear.concepts.answers.restoring import Restoring
from icebear.concepts.answers.units import matrix
from icebear.concepts.methods.gradients import IntegratedGradients
from icebear.concepts.results.ranking import Ranking
from icebear.convert import Saved
from icebear.models.model import Model
from icebear.result_files import MissingModel, SavedResult

PROMPT, OTHER = "ice bear", "big cats"
STAGED = {"prompt": PROMPT, "contrast": "z", "counterfactual": "icy bear"}
"""A pair whose stages have heads and neurons."""
IDS = [7, 3, 12, 44, 5]


def letters(seed=0):
    return Model(random_model(LLAMA, dtype=torch.float32, seed=seed).net, Letters(), "letters")


@pytest.fixture(scope="module")
def model():
    return letters()


@pytest.fixture(scope="module")
def base(model):
    return edited(model, trained)


@pytest.fixture
def store(model, corpus, tmp_path):
    with open_store(tmp_path / "wiki.db", create=True) as store:
        build_index(model, corpus, store, k=4)
        store.labels.set_manual(Neuron(1, "ffn", 3), "the <b>north</b>")
        yield store


def alike(one, other, models=True):
    """To the last bit, whatever it is made of. models: whether models must be the same, too."""
    if isinstance(one, Model) or isinstance(other, MissingModel):
        return other is one if models else isinstance(other, MissingModel)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_type = one.dtype == other.dtype and one.shape == other.shape
        return same_type and one.cpu().contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
    if is_dataclass(one):
        names = [field.name for field in fields(one) if field.name != "saved_groups"]
        return all(alike(getattr(one, name), getattr(other, name), models) for name in names)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(alike(*pair, models) for pair in zip(one, other, strict=True))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(alike(one[key], other[key], models) for key in one)
    return one == other or (one != one and other != other)


def asked(relevance):
    """As if other kinds of prompts had been asked for."""
    chat = Chat([{"role": "user", "content": "ice", "ids": [3]}], {"enable_thinking": False})
    prompts = (Prompt(chat=Chat(chat.messages)), Prompt(chat=chat), Prompt(tokens=("a", 3)), Prompt("a", "b"))
    request = replace(relevance.run.request, counterfactuals=prompts, answer=(3, 4), answer_start=2)
    return replace(relevance, run=replace(relevance.run, request=request))


RESULTS = {
    "a prompt": lambda model, base: attribute(model, PROMPT),
    "token ids": lambda model, base: attribute(model, IDS, 1, 2),
    "prompts of every kind": lambda model, base: asked(attribute(model, PROMPT)),
    "a counterfactual": lambda model, base: attribute(model, PROMPT, counterfactual=OTHER),
    "several, by the gradient": lambda model, base: attribute(
        model, PROMPT, counterfactual=[OTHER, "red dogs"], contrast="z", method=AttnLRP()
    ),
    "the largest neurons": lambda model, base: attribute(model, PROMPT, keep="top", k=3, counterfactual=OTHER),
    "no neurons": lambda model, base: attribute(model, PROMPT, sites=()),
    "positions": lambda model, base: attribute(model, PROMPT, method=PA_LRP, sites=("ffn", "q")),
    "a rule with a number": lambda model, base: attribute(model, PROMPT, method=AttnLRP(linear=Gamma(0.1))),
    "another method": lambda model, base: attribute(model, PROMPT, method=IntegratedGradients(3), sites=()),
    "a phrase against another": lambda model, base: attribute(model, PROMPT, target_text="abc", contrast="bcd"),
    "two models": lambda model, base: attribute(model, IDS, 1, 2, base_model=base),
    "a circuit": lambda model, base: circuit(model, PROMPT, counterfactual=OTHER, nodes=8, heads=True),
    "stages": lambda model, base: stages(model, **STAGED),
    "an explanation": lambda model, base: explain(model, PROMPT),
    "an explanation of a pair": lambda model, base: explain(model, **STAGED),
    "an explanation of two models": lambda model, base: explain(model, IDS, target=1, contrast=2, base_model=base),
    "effects": lambda model, base: attribute(model, PROMPT).effects(3),
    "a projection": lambda model, base: project(model, "L1.ffn.3"),
    "a random control": lambda model, base: random_edit_control(model, PROMPT, ["L1.ffn.3=2"], draws=3),
    "sources": lambda model, base: source_breakdown(
        model, model.answer(PROMPT, max_new_tokens=4), counterfactual=OTHER
    ),
    "measured sources": lambda model, base: sources(model, model.answer("Ice. Bears. Cold", max_new_tokens=4)),
    "a matrix": lambda model, base: matrix(model, model.answer(PROMPT, max_new_tokens=4), by="token"),
    "claims": lambda model, base: check(model, [Claim(AnswerClaim(PROMPT, "a"), 0.4, 0.3)], ["seed=1"]),
    "stage shares": lambda model, base: stages(model, **STAGED).transfer("ice bear", "icy bear"),
}


def views(result):
    """What can be seen of a result without its model."""
    names = (
        "to_dict",
        "to_json",
        "to_html",
        "to_svg",
        "_repr_html_",
        "__repr__",
        "conservation_text",
        "by_kind",
        "top",
    )
    seen = {name: getattr(result, name)() for name in names if hasattr(result, name)}
    if hasattr(result, "to_frame"):
        seen["frame"] = result.to_frame().to_csv()
    return seen


@pytest.fixture(scope="module")
def results(model, base):
    """`results(name)` is one of `RESULTS`, made once."""
    return cache(lambda name: RESULTS[name](model, base))


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_comes_back_as_it_was(results, name, model, base, tmp_path):
    result = results(name)
    path, again = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    result.save(path)
    alone = type(result).load(path)
    assert alike(result, alone, models=False)
    assert views(result) == views(alone)
    with_models = type(result).load(path, model, base if "two models" in name else None)
    assert views(result) == views(with_models)
    alone.save(again)  # the model's name and fingerprint stay
    assert again.read_bytes() == path.read_bytes()


def test_a_result_with_its_models_is_the_same(results, model, tmp_path):
    for name in ("a counterfactual", "a circuit", "stages", "an explanation of a pair", "sources"):
        result = results(name)
        result.save(tmp_path / "a.safetensors", overwrite=True)
        assert alike(result, type(result).load(tmp_path / "a.safetensors", model)), name


@pytest.mark.release
def test_another_process_reads_the_same(results, model, tmp_path):
    for name in ("a counterfactual", "two models", "a circuit", "stages", "an explanation of a pair"):
        result = results(name)
        result.save(tmp_path / f"{type(result).__name__}.safetensors")
    script = (
        "import sys, pathlib, icebear\n"
        "for path in map(pathlib.Path, sys.argv[1:]):\n"
        "    result = getattr(icebear, path.stem).load(path)\n"
        "    result.save(path.with_suffix('.copy'))\n"
        "    path.with_suffix('.json').write_text(result.to_json())\n"
        "    path.with_suffix('.html').write_text(result.to_html())\n"
    )
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) == 5
    subprocess.run([sys.executable, "-c", script, *paths], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for path in paths:
        assert path.with_suffix(".copy").read_bytes() == path.read_bytes()
        result = getattr(icebear, path.stem).load(path)
        assert path.with_suffix(".json").read_text() == result.to_json()
        assert path.with_suffix(".html").read_text() == result.to_html()


def test_a_card_comes_back_as_it_was(model, store, tmp_path):
    for neuron in (Neuron(1, "ffn", 3), Neuron(1, "head", 0)):
        result, path = describe(store, neuron, model), tmp_path / f"{neuron}.safetensors"
        result.save(path)
        assert alike(result, Card.load(path))
        assert views(result) == views(Card.load(path, model))
    explanation = explain(model, **STAGED, store=store)
    assert explanation.cards
    explanation.save(tmp_path / "e.safetensors")
    assert alike(explanation, Explanation.load(tmp_path / "e.safetensors", model))


# --- with and without the model ---


def test_what_needs_the_model_says_so(model, base, tmp_path):
    path = tmp_path / "a.safetensors"
    attribute(model, PROMPT, counterfactual=OTHER).save(path)
    alone = Relevance.load(path)
    with pytest.raises(InputError, match="without its model letters"):
        alone.effects(3)
    assert ablation(model, alone, 5) == ablation(model, attribute(model, PROMPT, counterfactual=OTHER), 5)
    circuit(model, PROMPT, counterfactual=OTHER, nodes=8).save(path, overwrite=True)
    for measure in (Graph.ablation, Graph.faithfulness, Graph.mask):
        with pytest.raises(InputError, match="without its model letters"):
            measure(Graph.load(path))
    stages(model, **STAGED).save(path, overwrite=True)
    with pytest.raises(InputError, match="without its model letters"):
        Stages.load(path).swapped(["L1.head.0"])
    attribute(model, IDS, 1, 2, base_model=base).save(path, overwrite=True)
    for given_models in ((), (model,), (None, base)):
        with pytest.raises(InputError, match="without its model letters"):
            Restoring.of(Diff.load(path, *given_models)).number([])


def test_with_the_model_measurements_go_on(model, base, tmp_path):
    path = tmp_path / "a.safetensors"
    relevance = attribute(model, PROMPT, counterfactual=OTHER)
    relevance.save(path)
    for loaded in (Relevance.load(path, model), Relevance.load(path, letters())):  # the same weights
        assert alike(loaded.effects(3), relevance.effects(3))
    graph = circuit(model, PROMPT, counterfactual=OTHER, nodes=8)
    graph.save(path, overwrite=True)
    loaded = Graph.load(path, model)
    assert (loaded.ablation(), loaded.faithfulness()) == (graph.ablation(), graph.faithfulness())
    assert loaded.without(loaded.groups[0]) == graph.without(graph.groups[0])
    shown = stages(model, **STAGED)
    shown.save(path, overwrite=True)
    assert Stages.load(path, model).swapped(["L1.head.0"]) == shown.swapped(["L1.head.0"])
    diff = attribute(model, IDS, 1, 2, base_model=base)
    diff.save(path, overwrite=True)
    assert Restoring.of(Diff.load(path, model, base)).restorations() == Restoring.of(diff).restorations()


def test_another_model_is_refused(results, model, tmp_path):
    for name in ("a counterfactual", "two models", "a circuit", "stages", "an explanation of a pair", "effects"):
        result = results(name)
        result.save(tmp_path / "a.safetensors", overwrite=True)
        with pytest.raises(InputError, match="made with letters"):
            type(result).load(tmp_path / "a.safetensors", letters(1))
    with pytest.raises(InputError, match="model must be"):
        Relevance.load(tmp_path / "a.safetensors", "letters")


# --- values ---


@dataclass(frozen=True)
class Inner(SavedResult):
    neuron: Neuron
    number: float


@dataclass(frozen=True)
class Below(Inner):
    more: int


@dataclass(frozen=True)
class Outer(SavedResult):
    kind: typing.Literal["a", "b"]
    inner: tuple[Inner, ...]
    maybe: int | None
    named: dict[str, list[float]]
    anything: dict[str, typing.Any]
    values: torch.Tensor
    parts: dict[str, torch.Tensor]


NEURONS = st.builds(Neuron, st.integers(0, 99), st.sampled_from(["ffn", "head"]), st.integers(0, 10**8))
TEXTS = st.text() | st.sampled_from(["@tensor", "@number", "@@", "class", "\ud800"])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(TEXTS, parts, max_size=3),
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
TENSORS = st.builds(
    lambda numbers, dtype, view: torch.tensor(numbers, dtype=torch.float64).to(dtype)[::view],
    st.lists(st.floats(width=16), max_size=5),
    st.sampled_from(DTYPES[:4]),
    st.sampled_from([1, 2]),
) | st.sampled_from([torch.tensor(3), torch.zeros(0, 2), torch.ones(2, 3, dtype=torch.bool).T])
OUTER = st.builds(
    Outer,
    st.sampled_from("ab"),
    st.lists(st.builds(Inner, NEURONS, st.floats()) | st.builds(Below, NEURONS, st.floats(), st.integers())).map(tuple),
    st.none() | st.integers(),
    st.dictionaries(TEXTS, st.lists(st.floats())),
    st.dictionaries(TEXTS, PLAIN),
    TENSORS,
    st.dictionaries(TEXTS, TENSORS),
)


def bits(value):
    """Tensors as their bytes: numpy has no bfloat16."""
    flat = torch.empty(value.shape, dtype=value.dtype).copy_(value).view(-1)
    return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist())


@given(OUTER)
def test_any_record_comes_back_bit_for_bit(tmp_path_factory, record):
    path = tmp_path_factory.mktemp("r") / "a.safetensors"
    record.save(path)
    back = Outer.load(path)
    plain = [replace(each, values=torch.zeros(0), parts={}) for each in (record, back)]
    assert alike(*plain)
    assert bits(back.values) == bits(record.values)
    assert {key: bits(x) for key, x in back.parts.items()} == {key: bits(x) for key, x in record.parts.items()}


def test_one_tensor_at_two_fields_is_saved_once(tmp_path):
    x = torch.rand(50_000)
    Outer("a", (), None, {}, {}, x, {"b": x}).save(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_size < 1.5 * 4 * len(x)
    x = torch.rand(100_000)  # and of a view, only what it shows
    Outer("a", (), None, {}, {}, x[:10], {"b": x[5:10]}).save(tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").stat().st_size < 10_000


def test_layers_of_a_ranking_come_back(model, tmp_path):
    explanation = Explanation.of(model, attribute(model, PROMPT), Ranking(3, "ffn", layers=range(2)))
    explanation.save(tmp_path / "a.safetensors")
    assert Explanation.load(tmp_path / "a.safetensors").ranking == replace(explanation.ranking, layers=[0, 1])


# --- files that are refused ---


def opened(path):
    """The JSON and the tensors of a file."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[files.KEY]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def signed(path, text, tensors):
    """Write a file that has the right checksum, whatever is in it."""
    text = {**text, "sha256": files.ZEROS}
    path.write_bytes(files._signed(files._bytes(tensors, json.dumps(text))))


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "a.safetensors"
    attribute(model, PROMPT, counterfactual=OTHER).save(path)
    return path


def field(*names, value):
    def spoil(text, tensors):
        home = text["record"]
        for name in names[:-1]:
            home = home[name]
        home[names[-1]] = value

    return spoil


def version(text, tensors):
    text["icebear_relevance"] = 0


HOSTILE = {
    "another version": version,
    "another kind": lambda text, tensors: text.update(icebear_card=text.pop("icebear_relevance")),
    "another class": field("class", value="Diff"),
    "an unknown class": field("class", value="Path"),
    "no record": lambda text, tensors: text.update(record=[]),
    "a field too much": field("code", value="print()"),
    "a field too little": lambda text, tensors: text["record"].pop("tokens"),
    "a text for a number": field("sums", "target", value="4"),
    "a number for a text": field("prediction", "target_text", value=4),
    "yes for a number": field("prompt", "encoder_length", value=True),
    "a text for tensors": field("tokens", value="4"),
    "numbers for tensors": field("tokens", value=[0.5]),
    "a tensor that is not there": field("tokens", value={"@tensor": "999"}),
    "a tensor too much": lambda text, tensors: tensors.update(more=torch.zeros(1)),
    "an unknown mark": field("made_with", value={"@code": "print()"}),
    "another number": field("sums", "target", value={"@number": "1e5"}),
    "another record for a method": field("method", value="Path('/')"),
    "a part of a method": field("method", value="Gamma(1)"),
    "a method out of range": field("method", value="AttnLRP(softmax='no')"),
    "a model without a name": field("run", "model", value={}),
    "a batch without ids": field("run", "objective", "batch", value={}),
    "lengths of another batch": field("run", "objective", "batch", "lengths", value=[1, 2, 3]),
    "a neuron that is none": field("neurons", "recorded", value=["L1.ffn.x"]),
}


@pytest.mark.parametrize("spoil", HOSTILE.values(), ids=HOSTILE)
def test_a_signed_file_of_other_content_is_refused(saved, tmp_path, spoil):
    path = tmp_path / "a.safetensors"
    text, tensors = opened(saved)
    signed(path, text, tensors)
    assert path.read_bytes() == saved.read_bytes()
    spoil(text, tensors)
    signed(path, text, tensors)
    with pytest.raises(InputError, match=r"a\.safetensors"):
        Relevance.load(path)


def test_changed_json_and_changed_numbers_are_refused(saved, tmp_path):
    path = tmp_path / "a.safetensors"
    text, tensors = opened(saved)
    for spoil in (
        lambda: text["record"]["sums"].update(target=5.0),
        lambda: text.update(sha256="0" * 64),
        lambda: text.update(sha256=""),
        lambda: tensors.update({"0": tensors["0"] * 2}),
        lambda: text.update(note="a"),
    ):
        text, tensors = opened(saved)
        spoil()
        path.write_bytes(files._bytes(tensors, json.dumps(text)))
        with pytest.raises(InputError, match="changed after it was saved"):
            Relevance.load(path)


def test_a_flipped_bit_anywhere_and_a_cut_are_refused(saved, tmp_path, generator):
    data, path = saved.read_bytes(), tmp_path / "a.safetensors"
    spots = [*range(16), *generator.sample(range(len(data)), 120), len(data) - 1]
    for spot in spots:
        spoilt = bytearray(data)
        spoilt[spot] ^= 1 << generator.randrange(8)
        path.write_bytes(spoilt)
        with pytest.raises(InputError, match=r"a\.safetensors"):
            Relevance.load(path)
    for size in (0, 1, 7, 8, 9, *generator.sample(range(len(data)), 20), len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(InputError, match=r"a\.safetensors"):
            Relevance.load(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(InputError, match=r"a\.safetensors"):
        Relevance.load(path)


def test_a_file_of_another_kind_is_refused(saved, model, base, tmp_path):
    for kind in (Diff, Graph, Stages, Explanation, Card):
        with pytest.raises(InputError, match=f"not an icebear {kind.__name__.lower()}"):
            kind.load(saved)
    diff = tmp_path / "diff.safetensors"
    attribute(model, IDS, 1, 2, base_model=base).save(diff)
    with pytest.raises(InputError, match="not an icebear relevance"):
        Relevance.load(diff)


class Malicious:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


FOREIGN = {
    "a pickle": pickle.dumps(Malicious()),
    "JSON": b'{"icebear_relevance": 1}',
    "nothing": b"",
    "zeros": bytes(100),
    "other tensors": files._bytes({"a": torch.zeros(2)}, "{}"),
    "a list": files._bytes({}, "[]"),
    "deep": files._bytes({}, "[" * 100_000),
    "a huge header": (2**62).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_refused(tmp_path, data):
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.safetensors"):
        Relevance.load(tmp_path / "a.safetensors")


def test_no_file_and_no_place_are_refused(model, tmp_path):
    with pytest.raises(InputError, match=r"none\.safetensors"):
        Relevance.load(tmp_path / "none.safetensors")
    with pytest.raises(InputError, match="folder"):
        Relevance.load(tmp_path)
    with pytest.raises(InputError):
        attribute(model, PROMPT).save(tmp_path / "none" / "a.safetensors")


def test_a_file_is_replaced_only_on_request_and_as_a_whole(model, saved, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(saved.read_bytes())
    result = attribute(model, PROMPT)
    with pytest.raises(InputError, match="overwrite=True"):
        result.save(path)
    with largest_file(4000), pytest.raises(InputError):  # a full disk
        result.save(path, overwrite=True)
    assert path.read_bytes() == saved.read_bytes()
    assert list(tmp_path.iterdir()) == [path]
    result.save(path, overwrite=True)
    assert alike(Relevance.load(path, model), result)


def test_texts_of_a_file_are_texts_on_its_page(saved, tmp_path):
    evil, path = "<img src=x onerror=alert(1)>", tmp_path / "a.safetensors"
    text, tensors = opened(saved)
    text["record"]["prompt"]["strings"] = [evil] * len(text["record"]["prompt"]["strings"])
    signed(path, text, tensors)
    assert "&lt;img" in (page := Relevance.load(path).to_html())
    assert "<img" not in page


# --- every result ---


def public():
    """The public names, as their values."""
    names = [line for line in dir(icebear) if not line.startswith("_")]
    return {name: getattr(icebear, name) for name in names}


def classes_of(annotation):
    """The classes that an annotation names, without those in lists."""
    if isclass(annotation) and not typing.get_args(annotation):
        return {annotation}
    return set().union(*map(classes_of, typing.get_args(annotation)))


def returned(function):
    """The classes that a function returns; modules that are imported for type checkers only are public names."""
    annotation = function.__annotations__.get("return")
    home = sys.modules[function.__module__]
    if isinstance(annotation, str):
        annotation = eval(annotation, {**public(), **vars(typing), "pandas": pandas, **vars(home)})
    return annotation


def returned_classes():
    """What public functions return, alone or in lists, and the public classes that methods of public classes return."""
    found = set()
    for value in public().values():
        if isroutine(value):
            found |= classes_of(returned(value))
        for _, method in getmembers(value, isfunction) if isclass(value) else ():
            try:
                annotation = returned(method)
            except NameError:  # of another package, such as pandas
                continue
            if typing.get_origin(annotation) not in (list, tuple, dict):
                found |= classes_of(annotation) & {each for each in public().values() if isclass(each)}
    return {kind for kind in found if isclass(kind) and hasattr(kind, "to_dict") and kind.__module__[:8] == "icebear."}


def test_each_result_that_is_returned_is_saved():
    kinds = returned_classes()
    assert {Relevance, Graph, Diff, Card, Stages, Explanation, icebear.Task, icebear.Effects} <= kinds | {Diff}
    for kind in kinds:
        assert issubclass(kind, (SavedResult, Saved)), kind
        assert callable(kind.save), kind
        assert callable(kind.load), kind


def test_each_saved_result_is_saved_here(results):
    """A new one needs an entry of `RESULTS`."""
    shown = {type(results(name)) for name in RESULTS} | {Card}
    assert {kind for kind in returned_classes() if issubclass(kind, SavedResult)} <= shown
