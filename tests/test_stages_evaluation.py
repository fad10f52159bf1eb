"""The evaluation of stages: rankings against all heads tried by hand, models of random weights, a run that resumes."""

import json
from dataclasses import replace
from itertools import chain

import pytest
import torch
from click.testing import CliRunner
from conftest import LLAMA, random_model
from letters import Letters
from reference.stages import Reference

from benchmarks import stage_shares as evaluation
from benchmarks import task_pairs
from benchmarks.task_pairs import Pair
from icebear import stages
from icebear.app.cli.verbs.evaluate import command
from icebear.models.model import Model

PAIR = Pair("The dog is", "The cat is", "x", "y")
SAMPLE = evaluation.Sample("data", PAIR, replace(PAIR, prompt="The cow is"), replace(PAIR, prompt="The fox is"))


@pytest.fixture(scope="module")
def model():
    return Model(random_model(LLAMA, dtype=torch.float64).net, Letters(), "tiny")


@pytest.fixture(scope="module")
def found(model):
    return stages(model, PAIR.prompt, *task_pairs.answers(model, PAIR), counterfactual=PAIR.counterfactual)


def by_hand(model, found):
    """Return the share that any heads give with the neurons and whole parts of stages."""
    ids = [{"input_ids": torch.tensor([model.token_ids(text)])} for text in (PAIR.prompt, PAIR.counterfactual)]
    reference, (answer, other) = Reference(model.net, *ids), task_pairs.answers(model, PAIR)
    neurons = {(node.neuron.layer, node.neuron.index) for node in found.neurons}
    whole = {(part.kind, at) for part in found.whole for at in part.positions}

    def number(logits):
        return (logits[answer] - logits[other]).item()

    def share(heads):
        def free(kind, layer, T, N):
            mask = torch.zeros(T, N, dtype=torch.bool)
            mask[[at for part, at in whole if part == kind]] = True
            width = N // model.heads if kind == "attn" else 1
            chosen = heads if kind == "attn" else neurons
            for _, index in (node for node in chosen if node[0] == layer):
                mask[-1, index * width : (index + 1) * width] = True
            return mask

        ends = [number(logits) for logits in (reference.prompt, reference.counterfactual)]
        return (number(reference.logits(free)) - ends[1]) / (ends[0] - ends[1])

    return share


def test_greedy_heads_are_the_best_of_all_heads_tried_by_hand(model, found):
    share = by_hand(model, found)
    heads = [(node.neuron.layer, node.neuron.index) for node in found.heads]
    assert share(heads) == pytest.approx(found.alone, abs=1e-5)
    every = [(layer, head) for layer in range(model.layers) for head in range(model.heads)]
    chosen, k = [], min(len(heads), evaluation.COMPARED_HEADS)
    for _ in range(k):
        chosen.append(min(set(every) - {*chosen}, key=lambda head: abs(1 - share([*chosen, head]))))
    rankings = evaluation.rankings(model, PAIR, found)
    assert rankings["greedy"] == pytest.approx(share(chosen), abs=1e-5)
    assert rankings["relevance"] == pytest.approx(share(heads[:k]), abs=1e-5)
    assert abs(1 - rankings["greedy"]) <= min(abs(1 - value) for value in rankings.values()) + 1e-9 or k > 1


def test_a_line_has_what_stages_measure(model, found):
    line = evaluation.measured(model, SAMPLE)
    shares = {name: row["share"] for name, row in line["methods"].items()}
    assert (line["heads"], line["neurons"]) == (len(found.heads), len(found.neurons))
    assert (shares["alone"], shares["lost without"]) == pytest.approx((found.alone, found.without))
    moved = found.transfer(evaluation.OPENINGS[1] + PAIR.prompt, evaluation.OPENINGS[1] + PAIR.counterfactual)
    assert shares["opening 2"] == pytest.approx(moved.alone)
    assert shares["other task"] == pytest.approx(found.transfer("The fox is", PAIR.counterfactual).alone)
    assert shares.keys() == evaluation.MEANINGS.keys() - {"reworded"}


def test_models_of_random_weights_have_a_seed_and_the_shape(model):
    same, again, another = (evaluation.with_random_weights(model, seed).net for seed in (0, 0, 1))
    for a, b, c, _ in zip(*(net.parameters() for net in (model.net, same, again, another)), strict=True):
        assert a.shape == b.shape
        assert torch.equal(b, c)
    weights = [net.lm_head.weight for net in (model.net, same, another)]
    assert not any(torch.equal(weights[a], weights[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_other_words_leave_the_difference():
    assert task_pairs.LEXICON["rewordings"].keys() <= evaluation.TASKS.keys()
    for task in task_pairs.LEXICON["rewordings"]:
        reworded = [(pair, task_pairs.reworded(task, pair)) for pair in evaluation.TASKS[task]]
        assert any(other for _, other in reworded)
        for pair, other in reworded:
            assert other is None or (other.prompt != pair.prompt and other.prompt != other.counterfactual)
            assert other is None or (other.answer, other.counterfactual_answer) == (
                pair.answer,
                pair.counterfactual_answer,
            )


def test_prompts_of_other_length_or_ending_are_left_out(model):
    assert evaluation.is_aligned(model, PAIR)
    for changed in (PAIR.prompt, "The cats is", "The cat it"):
        assert not evaluation.is_aligned(model, replace(PAIR, counterfactual=changed))
    assert not evaluation.is_answered(model, replace(PAIR, counterfactual="The cats is"))


def test_it_runs_and_resumes(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pairs = [("The dog is", "The cat is"), ("The cow was", "The fox was")]
    names = ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")
    rows = [dict(zip(names, (*prompts, " a", " b"), strict=True)) for prompts in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(evaluation, "is_answered", lambda model, pair: True)
    monkeypatch.setattr(evaluation, "is_aligned", lambda model, pair: True)
    monkeypatch.setattr(evaluation, "answers", lambda model, pair: (5, 6))
    monkeypatch.setattr(evaluation, "RANDOM_PAIRS", 1)
    words = f"--data pairs.jsonl --device cpu --out out --json --model {tiny_folder}".split()
    done = CliRunner().invoke(command(evaluation.StagesHold), words)
    assert done.exit_code == 0, (done.output, done.exception)
    parts = json.loads(done.stdout)["parts"]
    read = lambda name: [json.loads(line) for line in (tmp_path / "out" / name / "samples.jsonl").open()]  # noqa: E731
    lines, random_lines = read("pairs"), read("random-weights")
    assert len(lines) == 2
    assert [line["seed"] for line in random_lines] == list(range(evaluation.RANDOM_MODELS))
    (listing,) = parts[0]["listings"].values()
    assert [(row["task"], row["pairs"]) for row in listing] == [("data", 2), ("all", 2)]
    monkeypatch.setattr(evaluation, "measured", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(evaluation, "searched", lambda *_: pytest.fail("measured again"))
    again = CliRunner().invoke(command(evaluation.StagesHold), words)
    assert json.loads(again.stdout)["parts"] == parts
    assert {*chain(*(line["methods"] for line in lines))} <= evaluation.MEANINGS.keys()
