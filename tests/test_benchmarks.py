"""Ground truth for spans: evidence by its text, measures by hand, the control, folders that go on."""

import ast
import json
import random
import re
import types
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pages import ROOT, anchors

from benchmarks import circuit_graph, cost, edits, knowledge, shared_sets, sources, spans
from benchmarks.baselines import OTHERS
from icebear import attribute, load_model
from icebear.app.cli.options import ModelOptions
from icebear.app.cli.verbs.evaluate import command
from icebear.errors import InputError
from icebear.evaluation.baselines import BASELINES, methods_of
from icebear.models.text.context import Context

METHODS = "attnlrp,gxi,random"
FOLDER = ROOT / "benchmarks"
RESULTS = ROOT / "docs" / "results"


@pytest.fixture
def model(tiny_folder):
    return load_model(tiny_folder, device="cpu", dtype="float32")


def some(task, size, count=3, seed=0):
    return list(islice(spans.items(task, size, seed), count))


# --- templates ---


@pytest.mark.parametrize("task", spans.TASKS)
def test_the_evidence_is_where_it_says_and_nowhere_else(task):
    own = spans.TASKS[task]
    for size in {*own.sizes, own.least, own.most}:
        for item in some(task, size):
            texts = [item.prompt[start:end] for start, end in item.places]
            assert texts == list(item.parts)
            evidence = [texts[number] for number in item.evidence]
            *_, answer = item.answer_parts
            assert answer.strip() in evidence[-1]
            assert item.contrast != answer
            others = [text for number, text in enumerate(texts) if number not in item.evidence]
            assert not any(answer.strip() in text for text in others)
            assert answer.strip() not in item.question
            assert item.prompt.endswith(item.question)


def test_two_hops_are_by_way_of_the_models_own_step():
    for item in some("two-hop", 4, 20):
        lead, step, second, city = item.answer_parts
        first, last = (item.parts[number] for number in item.evidence)
        assert first == f"{lead.strip()}{step}."
        assert last == f"{second.removeprefix('. ')}{city}."
        assert step.strip() not in item.question


def test_a_needle_is_in_about_as_many_tokens_at_any_depth():
    for size in (10, 200, 2000):
        result = some("needle", size, 12)
        for item in result:
            (at,) = item.evidence
            words = [part.split() for number, part in enumerate(item.parts) if number != at]
            assert sum(map(len, words)) == round(0.75 * size)
        if size > 10:
            assert len({item.evidence for item in result}) > 3


def test_a_seed_gives_the_same_items_and_another_one_others():
    assert some("facts", 4) == some("facts", 4)
    assert some("facts", 4) != some("facts", 4, seed=1)
    with pytest.raises(InputError, match="not 9"):
        spans.items("two-hop", 9)


# --- measures ---

SCORES = [0.0, 5.0, -1.0, 2.0, 0.0, 3.0]
PARTS = [[0, 1], [2, 3], [4, 5]]


def test_numbers_by_hand():
    result = spans.numbers(SCORES, PARTS, (1, 2), drawn=[[[0, 1], [0, 1]], [[1, 2], [4, 5]]])
    assert result == pytest.approx(
        {
            "pointing": 0,  # 5 is the largest
            "pointing_random": 1,
            "mass": 0.5,
            "mass_random": (0.5 + 0.8) / 2,
            "recall": 0.5,  # of 1, 5, 3 and the first 0 two are evidence
            "recall_random": (0.5 + 0.5) / 2,  # 1 of the two largest; of 1, 5, 3, 0 two
            "first": 0.2,
            "first_random": 0.5,
            "part": 0,
            "part_random": 2 / 3,
        }
    )
    assert spans.numbers(SCORES, PARTS, (0,), drawn=[[[0, 1]]])["part"] == 1


@pytest.mark.release
def test_the_control_is_as_long_as_the_evidence_and_random_scores_do_no_better():
    generator, scores = random.Random(0), np.random.default_rng(0)
    parts = [list(range(start, start + 5)) for start in range(0, 50, 5)]
    rows = []
    for _ in range(600):
        evidence = (generator.randrange(10),)
        drawn = spans.draws(parts, evidence, generator)
        assert len(drawn) == spans.DRAWS
        assert all(len(span) == 5 and span[0] >= 0 and span[-1] < 50 for row in drawn for span in row)
        rows.append(spans.numbers(scores.random(50).tolist(), parts, evidence, drawn))
    for name in ("pointing", "mass", "recall", "part"):
        own, control = (np.mean([row[key] for row in rows]) for key in (name, f"{name}_random"))
        assert own == pytest.approx(0.1, abs=0.03)
        assert control == pytest.approx(0.1, abs=0.01)


# --- a model ---


def test_scores_are_those_of_attribute_and_only_the_context_counts(model):
    (item,) = some("two-hop", 2, 1)
    one = spans.answered(model, item)
    ids = one.answer
    assert model.tokenizer.decode([*ids.prompt_ids, *ids.ids]) == item.prompt + "".join(item.answer_parts)
    assert model.tokenizer.decode(ids.ids[slice(*one.span)]) == item.answer_parts[-1]
    result = spans.sample(model, one, methods_of(METHODS))
    assert [name for name in result["methods"] if "lrp" not in name] == ["gxi", "random"]
    pieces = model.pieces(ids.prompt_ids)
    last = [end - 1 for end in accumulate(map(len, pieces))]  # letter of each token
    inside = [
        [token for token, piece in enumerate(pieces) if last[token] in range(*place) and piece.strip()]
        for place in item.places
    ]
    context = [token for part in inside for token in part if token not in one.sinks]
    assert [len(set(part) - set(one.sinks)) for part in inside] == [len(part) for part in result["parts"]]
    for method in ("attnlrp", "gxi"):
        plain = attribute(model, ids, span=one.span, method=method, sites=(), number="logit").tokens
        assert result["methods"][method]["scores"] == pytest.approx(plain[context].tolist())
    assert model.tokenizer.decode(ids.ids[slice(*one.spans[0])]) == item.answer_parts[1]
    assert "attnlrp, of the step" in result["methods"]
    begins = len(ids.prompt_ids)
    positive = attribute(model, ids, span=one.span, sites=(), number="logit").tokens.clamp(min=0)
    counting = [token for token in range(len(positive)) if token not in one.sinks]
    share = positive[begins:].sum() / positive[counting].sum()
    assert result["methods"]["attnlrp"]["own"] == pytest.approx(share.item())
    assert result["methods"]["attnlrp"]["scores"] != result["methods"]["attnlrp, against"]["scores"]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_what_counts_is_what_greedy_decoding_writes(model):
    (item,) = some("facts", 2, 1)
    assert not spans.answered(model, item).right
    text = model.generate(item.prompt, max_new_tokens=3)
    one = spans.answered(model, spans.Item(item.parts, item.evidence, item.question, ("", text), item.contrast))
    answer = model.answer(item.prompt, max_new_tokens=3)
    if one.answer.ids == answer.ids:  # a text may have other tokens than those that it was written in
        assert one.right
        assert one.answer.probabilities == pytest.approx(answer.probabilities, abs=1e-5)
    assert spans.usable(model, iter([item] * 50), 2) == ([], 2 * spans.TRIES)


def test_slow_methods_are_left_out_of_long_prompts(model, monkeypatch):
    one = spans.answered(model, some("facts", 2, 1)[0])
    monkeypatch.setitem(BASELINES, "alti", OTHERS["alti"])
    wanted = methods_of("occlusion,attnlrp,alti")
    able, unable = spans.able(model, one, wanted)
    assert (list(able), list(unable)) == (["occlusion", "attnlrp"], ["alti"])
    monkeypatch.setattr(spans, "LONG", 10)
    able, unable = spans.able(model, one, wanted)
    assert (list(able), list(unable)) == (["attnlrp"], ["occlusion", "alti"])


# --- as scripts ---


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (spans.Spans, "--task facts --sizes 2,3 --samples 2 --methods attnlrp,gxi,alti"),
        (cost.Cost, "--methods gxi,alti --lengths 8,16 --rounds 2"),
        (knowledge.KnowledgeNeurons, "--data facts.json --top 3"),
        (edits.KnowledgeEdits, "--cases 1 --max-neurons 2"),
    ],
)
def test_a_benchmark_writes_a_table_and_resumes(kind, options, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(BASELINES, "alti", OTHERS["alti"])
    monkeypatch.setattr(spans, "_predicted", lambda logits, token: True)
    monkeypatch.setattr(edits, "_says", lambda model, prompt, answer: answer in ("Paris", "Rome", "Berlin", "Madrid"))
    facts = {
        name: {"answer": f" {name}", "prompts": ["The city of", f"{name} is the city"]} for name in ("Paris", "Rome")
    }
    Path("facts.json").write_text(json.dumps(facts))
    words = [*options.split(), "--model", tiny_folder, "--device", "cpu", "--out", "out", "--json"]
    done = CliRunner().invoke(command(kind), words)
    assert done.exit_code == 0, (done.output, done.exception)
    parts = json.loads(done.stdout)["parts"]
    assert all(row for part in parts for table in part["tables"] for row in table["rows"])
    assert json.loads(CliRunner().invoke(command(kind), words).stdout)["parts"] == parts
    assert len(list(Path("out").rglob("results.json"))) == len(parts)


@pytest.mark.release
def test_circuits_are_checked_by_interventions(smol, tmp_path, monkeypatch):
    monkeypatch.setattr(ModelOptions, "load", lambda self: smol)
    monkeypatch.setattr(circuit_graph, "EDGE_COUNTS", (30, 60))
    words = ["--tasks", "phrase", "--samples", "1", "--nodes", "10", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(command(circuit_graph.Circuits), words)
    assert result.exit_code == 0, (result.output, result.exception)
    (part,) = json.loads(result.stdout)["parts"]
    tables = {table["table"]: table["rows"] for table in part["tables"]}
    assert set(tables) == set(circuit_graph.PARTS)
    assert {row["method"] for row in tables["graph"]} == {"30 edges", "60 edges"}


# --- what the pairs of a task share ---


def test_a_prompt_is_in_one_pair_of_a_task_only():
    pairs = [shared_sets.Pair(a, b, "x", "y") for a in "abcdef" for b in "abcdef" if a != b]
    rows = shared_sets.disjoint(pairs, 9)
    prompts = [row[name] for row in rows for name in ("prompt", "counterfactual")]
    assert sorted(prompts) == list("abcdef")
    assert len(shared_sets.disjoint(pairs, 2)) == 2


def test_facts_have_right_answers_that_differ(model, tmp_path, monkeypatch):
    """Of equally many tokens and the same last one; no subject is in two pairs."""
    subjects = {f"the {letter} bear": shared_sets.first_token(model, f"the {letter} bear is") for letter in "abcdefgh"}
    samples = [{"subject": name, "object": model.text(token).strip()} for name, token in subjects.items()]
    (tmp_path / "r.json").write_text(json.dumps({"prompt_templates": ["{} is"], "samples": samples}))
    monkeypatch.setattr(shared_sets, "is_right", lambda model, prompt, answer: "h" not in prompt[4:6])
    pairs = list(shared_sets.facts(model, tmp_path / "r.json"))
    prompts = [text for pair in pairs for text in (pair.prompt, pair.counterfactual)]
    assert len(prompts) == len(set(prompts))
    assert not any("h bear" in prompt for prompt in prompts)
    for pair in pairs:
        first, second = (subjects[text.removesuffix(" is")] for text in (pair.prompt, pair.counterfactual))
        assert first != second


# --- sources ---


@pytest.mark.parametrize("number", range(3))
def test_scores_of_contextcite_are_those_of_its_package(number):
    """context-cite 0.0.4 gave these scores of these log-probabilities (SmolLM2), with its own masks."""
    known = json.loads((Path(__file__).parent / "data" / "contextcite.json").read_text())[number]
    masks = sources.contextcite_masks(len(known["log_probabilities"]), known["sources"])
    scores = sources.contextcite_scores(masks, np.array(known["log_probabilities"]), known["tokens"])
    assert scores == pytest.approx(known["scores"], abs=1e-3)


def test_eight_removals_are_measured_and_others_are_expected_by_the_slope():
    measured = types.SimpleNamespace(cost=lambda sets: (len(list(sets)), 1.0))
    relevance, losses = np.arange(12.0), np.arange(12.0) * 2
    rows = sources.with_removals(measured, (relevance, 3, 0.5), losses)
    (alone, passes, seconds), (expected, *_) = rows.values()
    assert (passes, seconds) == (11, 1.5)
    assert alone[4:].tolist() == expected[4:].tolist() == losses[4:].tolist()
    assert not alone[:4].any()
    assert expected[:4] == pytest.approx(losses[:4])


def test_a_tools_conversation_has_about_as_many_sources_as_its_size():
    for size in sources.SIZES:
        chat = sources._tool(random.Random(0), size)
        assert abs(len(Context.of(chat).sources) - max(size, 8)) <= 4


# --- the page of the folder ---


def scripts():
    """Each Python file of the folder, without the environment that peers.py makes there."""
    return [path for path in FOLDER.rglob("[!.]*.py") if ".lxt" not in path.parts]


def links():
    """Each link of benchmarks/README.md as a path and an anchor."""
    for link in re.findall(r"\]\(([^)\s]+)\)", (FOLDER / "README.md").read_text()):
        path, _, anchor = link.partition("#")
        yield (FOLDER / path).resolve(), anchor


def test_every_benchmark_and_every_table_is_on_the_page():
    linked = {path for path, _ in links()}
    kinds = ("*.json", "*.sh", "*/*.md", "truth/**/*.safetensors")
    files = {*scripts(), *(path for kind in kinds for path in FOLDER.glob(kind))}
    assert not sorted(path for path in files if not {path, path.parent} & linked)
    assert not sorted({*RESULTS.glob("*.csv")} - linked)


def test_links_of_the_page_lead_somewhere():
    for path, anchor in links():
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), (path, anchor)


def imported(path):
    """The names of the top-level modules that a file imports, also inside of functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_benchmarks_are_run_as_their_imports_need():
    """A file that is run finds its neighbors only, and a module that is run (`-m`) finds the folder only."""
    pages = [*scripts(), FOLDER / "README.md", *(ROOT / "docs").glob("*.md"), RESULTS / "tables.toml"]
    text = "\n".join(path.read_text() for path in pages)
    files = {FOLDER / name for name in re.findall(r"python3? benchmarks/([\w/]+\.py)", text)}
    modules = {FOLDER / f"{name.replace('.', '/')}.py" for name in re.findall(r"-m benchmarks\.(\w+(?:\.\w+)*)", text)}
    assert len(files) > 10
    assert len(modules) > 10
    assert not [path for path in files if "benchmarks" in imported(path)]
    neighbors = {path.stem for path in scripts() if path.parent == FOLDER}
    assert not [path for path in modules if neighbors & imported(path)]


def imports_of_icebear():
    """Each file with the module and the name that it imports from icebear, also inside of functions."""
    for path in scripts():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "icebear":
                yield from ((path, node.module, name.name) for name in node.names)


def test_what_benchmarks_import_from_icebear_is_there():
    for path, module, name in imports_of_icebear():
        home = import_module(module)
        package = hasattr(home, "__path__")
        assert hasattr(home, name) or (package and find_spec(f"{module}.{name}")), (path, module, name)
