"""A task: heads and neurons of the stages of many pairs, and the set that one half chooses and the other measures."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import LLAMA, random_model
from letters import Letters

from icebear import Task, check, explain_task, stages
from icebear.app.cli.main import main
from icebear.app.cli.options import ModelOptions
from icebear.claims.claim import Claim
from icebear.claims.claims_files import write_claims
from icebear.claims.kinds.predictions import TaskClaim
from icebear.concepts.attribution.cases import read_cases
from icebear.concepts.stages.explained_task import LEAST_PAIRS, halves
from icebear.concepts.stages.task_records import FAILING_SHARE, TaskPair
from icebear.errors import InputError, RecipeError
from icebear.models.model import Model
from icebear.records import Ranked

LETTERS = "abcdefghijklmnopqrstuvwx"
PAIRS = [
    {"prompt": f"{x} a bear", "counterfactual": f"{y} a bear"} for x, y in zip(LETTERS[::2], LETTERS[1::2], strict=True)
]


@pytest.fixture(scope="module")
def model():
    return Model(random_model(LLAMA, dtype=torch.float64).net, Letters(), "tiny")


@pytest.fixture(scope="module")
def pairs(model):
    """Pairs of the tiny model that count, one that has other lengths, and one of the same two prompts as another."""
    backward = {"prompt": PAIRS[0]["counterfactual"], "counterfactual": PAIRS[0]["prompt"]}
    return [*PAIRS, {"prompt": "a a bear", "counterfactual": "aa a bear"}, backward]


@pytest.fixture(scope="module")
def task(model, pairs):
    return explain_task(model, pairs)


def stages_of(model, pair):
    return stages(model, pair.prompt, pair.target.id, pair.contrast.id, counterfactual=pair.counterfactual)


def test_the_own_sets_are_those_of_stages_and_counts_add_up(model, task):
    assert len(task.compared) >= LEAST_PAIRS
    for pair in task.compared:
        result = stages_of(model, pair)
        assert pair.reached == result.reached
        assert [pair.heads, pair.neurons] == [tuple(n.neuron for n in row) for row in (result.heads, result.neurons)]
        assert pair.difference == pytest.approx(result.difference)
    sets = [{*pair.heads, *pair.neurons} for pair in task.compared]
    assert {part.neuron: part.pairs for part in task.parts} == {
        neuron: sum(neuron in chosen for chosen in sets) for chosen in sets for neuron in chosen
    }
    assert sum(part.pairs for part in task.parts) == sum(len(pair.heads) + len(pair.neurons) for pair in task.pairs)


def test_the_share_of_the_shared_set_is_its_transfer(model, task):
    """On every measured pair, with the pair's own whole parts, and so are what is lost without it and the control."""
    for pair in task.measured:
        heads, neurons = (tuple(Ranked(n, 0, None, 0.0) for n in nodes) for nodes in (task.heads, task.neurons))
        shared = replace(stages_of(model, pair), heads=heads, neurons=neurons)
        result = shared.transfer(pair.prompt, pair.counterfactual)
        shares = (pair.share, pair.without, pair.random)
        assert shares == pytest.approx((result.alone, result.without, result.random), abs=1e-6)
    means = [sum(getattr(pair, name) for pair in task.measured) / len(task.measured) for name in ("share", "random")]
    assert means == pytest.approx([task.share, task.random])
    assert task.low <= task.share <= task.high
    assert task.failing == [pair for pair in task.measured if pair.share < FAILING_SHARE]


def test_the_shared_set_is_that_of_pairs_which_do_not_measure_it(model, task):
    """Pairs of the same two prompts are in one half; the measured half may be anything without a change of the set."""
    choosing = [pair for pair in task.compared if pair.share is None]
    prompts = [{frozenset((pair.prompt, pair.counterfactual)) for pair in half} for half in (choosing, task.measured)]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0]) == (len(prompts[0]) + len(prompts[1])) // 2
    sizes = sorted(len(pair.heads) for pair in choosing)
    assert len(task.heads) == sizes[len(sizes) // 2]
    counts = {head: sum(head in pair.heads for pair in choosing) for pair in choosing for head in pair.heads}
    least = min(counts.get(head, 0) for head in task.heads)
    assert all(count <= least for head, count in counts.items() if head not in task.heads)


@pytest.mark.parametrize("seed", range(4))
def test_halves_share_no_prompts(seed):
    rows = [TaskPair(f"p{n % 7}", f"c{n % 7}") for n in range(20)] + [TaskPair("c1", "p1")]
    choosing, measuring = halves(rows, seed)
    assert sorted([*choosing, *measuring]) == list(range(len(rows)))
    texts = [
        {text for at in half for text in (rows[at].prompt, rows[at].counterfactual)} for half in (choosing, measuring)
    ]
    assert not texts[0] & texts[1]
    out = [TaskPair("p", "c", left_out="too long")] * 3
    assert halves([*out, *rows], seed) == tuple([at + 3 for at in half] for half in (choosing, measuring))
    with pytest.raises(InputError, match="too long"):
        halves([*rows[:3], *out], seed)


def test_the_order_of_the_file_does_not_matter(model, pairs, task):
    order = list(range(len(pairs)))
    random.Random(1).shuffle(order)
    again = explain_task(model, [pairs[at] for at in order])
    assert again.pairs == tuple(task.pairs[at] for at in order)
    assert replace(again, pairs=()) == replace(task, pairs=())
    assert {pair.prompt for pair in explain_task(model, pairs, seed=3).measured} != {
        pair.prompt for pair in task.measured
    }


def test_pairs_without_a_share_are_left_out_and_counted(task):
    out = [pair for pair in task.pairs if pair.left_out]
    assert task.pairs[len(PAIRS)] in out
    assert all((pair.heads, pair.share) == ((), None) for pair in out)
    assert len(out) + len(task.compared) == len(task.pairs)
    assert sum(f"{len(task.pairs)} pairs (" in line for line in str(task).splitlines()) >= 1


def test_a_task_is_saved_and_drawn(task, tmp_path):
    assert Task.from_json(task.to_json()) == task
    assert Task.from_dict(task.to_dict()) == task
    frame = task.to_frame()
    assert list(frame["pairs"]) == [part.pairs for part in task.parts]
    assert set(frame["of_pairs"]) == {len(task.compared)}
    hostile = replace(task, pairs=tuple(replace(pair, prompt="<script>alert(1)</script>") for pair in task.pairs))
    assert "<script>alert" not in hostile.to_html(tmp_path / "task.html")
    with pytest.raises(RecipeError):
        Task.from_dict({**task.to_dict(), "made_with": {}})


def test_progress_is_reported_to_its_end(model, pairs):
    steps = []
    explain_task(model, pairs, on_progress=lambda done, total: steps.append((done, total)))
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1] > len(pairs)


def test_a_claim_of_a_task_is_measured_again(model, task, tmp_path):
    ((what, measured),) = TaskClaim.of(model, task)
    again = what.measured(model)
    assert (measured.value, measured.control) == pytest.approx((task.share, task.random))
    assert (again.value, again.control, again.error) == pytest.approx(
        (measured.value, measured.control, measured.error), abs=1e-6
    )
    write_claims(tmp_path / "c.yaml", [Claim(what, measured.value - 0.01, measured.value + 10)])
    assert check(model, tmp_path / "c.yaml").passed
    fewer = replace(what, nodes=what.nodes[:1])
    assert fewer.measured(model).value != pytest.approx(measured.value, abs=1e-3)
    with pytest.raises(InputError):
        TaskClaim(nodes=what.nodes, pairs=())


GOOD = [json.dumps(pair) for pair in PAIRS[:4]]
BAD = {
    "no json": ([*GOOD[:2], "{'prompt': 1}", *GOOD], "Line 3 of"),
    "no counterfactual": ([*GOOD, '{"prompt": "a"}'], "Line 5 of"),
    "no prompt": (['{"counterfactual": "a"}', *GOOD], "Line 1 of"),
    "another key": ([GOOD[0], '{"prompt": "a", "counterfactual": "b", "targt": "c"}', *GOOD], "line 2 of"),
    "few pairs": (["", *GOOD[:3]], "3 pairs"),
    "no pair": ([""], "no prompt"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_a_sentence_before_a_model_is_loaded(name, tmp_path, monkeypatch):
    rows, words = BAD[name]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(ModelOptions, "load", lambda *_: pytest.fail("loads a model"))
    result = CliRunner().invoke(main, ["explain", "--file", str(tmp_path / "pairs.jsonl")])
    assert result.exit_code == 1, repr(result.exception)
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not isinstance(result.exception, (ValueError, KeyError, TypeError))


@pytest.mark.parametrize(
    "pairs", [PAIRS[:3], "pairs.jsonl", [*PAIRS, {"prompt": "a"}], [*PAIRS, 3], [*PAIRS, {**PAIRS[0], "target": 99}]]
)
def test_bad_pairs_are_refused(model, pairs):
    with pytest.raises(InputError):
        explain_task(model, pairs)


def test_a_file_may_have_one_counterfactual_for_all(tmp_path):
    (tmp_path / "p").write_text('{"prompt": "a"}\n{"prompt": "b", "counterfactual": "d", "target": 0}')
    first, second = read_cases(tmp_path / "p", True, counterfactual="c", target=1)
    assert (first.counterfactual, second.counterfactual, first.target, second.target) == ("c", "d", 1, 0)


def test_the_command_explains_a_task(model, tmp_path, monkeypatch):
    """The numbers of a task of the real model are on the page about stages."""
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    monkeypatch.setattr(ModelOptions, "load", lambda *_: model)

    def run(*words):
        result = CliRunner().invoke(main, ["explain", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    document = run("--file", str(tmp_path / "pairs.jsonl"), "--json", "--html", str(tmp_path / "t.html"))
    (tmp_path / "task.json").write_text(document)
    task = Task.load(tmp_path / "task.json")
    pair = next(pair for pair in task.compared if pair.heads)
    assert str(pair.heads[0]) in Path(tmp_path / "t.html").read_text()
