"""The evaluation of effects: changes by hand, and a run that resumes."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import IDS, LLAMA, random_model
from torch.testing import assert_close

from benchmarks import paraphrases as evaluation
from benchmarks import task_pairs
from benchmarks.task_pairs import Pair
from icebear import Neuron, attribute
from icebear.app.cli.verbs.evaluate import command

OTHER = [9, 3, 31, 44, 5, 17, 21, 8]
EIGHT = [Pair(f"The dog{n}", f"The cat{n}", " a", " b") for n in range(4)]


def test_a_change_to_the_counterfactual_value_has_the_effect_of_the_node():
    model = random_model(LLAMA, dtype=torch.float32)
    relevance = attribute(model, IDS, 5, 6, counterfactual=OTHER)
    nodes = relevance.top(8, "ffn", position="all")
    result = relevance.effects(nodes)
    changes = [
        (node.neuron, node.position, evaluation.change_of(relevance, node.neuron, node.position)) for node in nodes
    ]
    assert [change for *_, change in changes] == pytest.approx([n.counterfactual - n.activation for n in nodes])
    own = evaluation.changed(model, IDS, changes, result.token_ids)
    assert_close(own - own.mean(1, keepdim=True), result.matrix, rtol=1e-4, atol=1e-4)
    moved = evaluation._moved(changes, IDS, [1, 2, *IDS])
    assert [at for _, at, _ in moved] == [node.position + 2 for node in nodes]
    assert {at for _, at, _ in evaluation._moved(changes, IDS, [1, 2])} == {1}


def test_projections_predict_the_effect_of_the_last_layers(smol, few_contexts):
    neuron, tokens = Neuron(29, "ffn", 490), list(range(300, 900))
    rows = evaluation.projections(smol, [(neuron, 5, -2.0), (neuron, 5, 1.0)], tokens)
    for lens in ("direct", "mean"):
        assert_close(rows[lens][0], -2 * rows[lens][1])
    effect = evaluation.changed(smol, smol.token_ids("The ice bear lives in the"), [(neuron, 5, -2.0)], tokens)
    assert evaluation.correlate(rows["direct"][0], effect[0]) > 0.8
    assert evaluation.correlate(rows["mean"][0], effect[0]) > 0.8


def test_correlations_are_those_of_numpy(generator):
    x, y = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    assert evaluation.correlate(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
    assert evaluation.correlate(x, torch.ones(40)) == 0


def test_the_other_pair_is_of_another_task():
    chosen = [("a", EIGHT[0]), ("a", EIGHT[1]), ("b", EIGHT[2])]
    assert [evaluation._other(chosen, number) for number in range(3)] == [EIGHT[2], EIGHT[2], EIGHT[0]]
    assert evaluation._other(chosen[:2], 0) == EIGHT[1]


def test_every_task_has_a_paraphrase():
    assert set(evaluation.PARAPHRASES) == set(task_pairs.TASKS)
    for task, own in task_pairs.TASKS.items():
        longer = evaluation.paraphrase(task, own[0].prompt)
        assert longer[-len(own[0].prompt) + 1 :] == own[0].prompt[1:]
        assert len(longer) > len(own[0].prompt) + 10


@pytest.mark.release
def test_it_runs_and_resumes(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def usable(model, pair):
        ids = [model.token_ids(text) for text in (pair.prompt, pair.counterfactual)]
        return len(ids[0]) == len(ids[1]) and len(ids[0]) < 60

    monkeypatch.setattr(task_pairs, "is_usable", usable)
    monkeypatch.setattr(task_pairs, "answers", lambda model, pair: (5, 6))
    monkeypatch.setattr(evaluation, "answers", lambda model, pair: (5, 6))
    words = "--tasks capitals,pronouns --samples 1 --device cpu --out out --json".split()
    words += ["--model", tiny_folder]
    done = CliRunner().invoke(command(evaluation.EffectsHold), words)
    assert done.exit_code == 0, (done.output, done.exception)
    (part,) = json.loads(done.stdout)["parts"]
    tables = {table["table"]: {row["method"]: row for row in table["rows"]} for table in part["tables"]}
    assert {f"{third}-third-last-token" for third in evaluation.THIRDS} <= set(tables)
    assert set(tables["last-third-last-token"]) == set(evaluation.PREDICTED)
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert sorted(line["task"] for line in lines) == ["capitals", "pronouns"]
    nodes = [node for line in lines for node in line["nodes"]]
    own = [
        n["correlation"]["effect"] for n in nodes if (n["third"], n["place"], n["shown"]) == ("last", "last-token", 0)
    ]
    assert tables["last-third-last-token"]["effect"]["mean mean"] == pytest.approx(sum(own) / len(own))
    (listing,) = part["listings"].values()
    assert sum(row["nodes"] for row in listing) == len(nodes)
    assert json.loads(CliRunner().invoke(command(evaluation.EffectsHold), words).stdout)["parts"] == [part]
