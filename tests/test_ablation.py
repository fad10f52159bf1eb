"""What a list of nodes carries: F by its definition, controls, pairs and the evaluation."""

import json
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from conftest import IDS, LLAMA, random_model
from test_differences import OTHER

from benchmarks import ablation as evaluation
from benchmarks import task_pairs
from benchmarks.baselines import with_controls
from icebear import attribute
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.nodes.controls import ablation, largest, nodes_of, random_nodes, recovered_shares
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.errors import InputError, UnknownName
from icebear.models.objective import objective_of


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA)


@pytest.fixture(scope="module")
def result(model):
    return attribute(model, IDS, 11, 12, counterfactual=OTHER)


def by_hand(model, selected, values=None):
    """m with every FFN neuron that is not kept (L, T, F) at its value in the other prompt, by the test's own hooks."""
    values, given = dict(values or {}), values is not None

    def run(ids, hook):
        hooks = [
            layer.mlp.down_proj.register_forward_pre_hook(partial(hook, number))
            for number, layer in enumerate(model.net.model.layers)
        ]
        with torch.no_grad():
            logits = model.net(torch.tensor([ids])).logits[0, -1]
        for one in hooks:
            one.remove()
        return (logits[11] - logits[12]).item()

    if not given:
        run(OTHER, lambda number, module, args: values.__setitem__(number, args[0]))
    return run(IDS, lambda number, module, args: (torch.where(selected[number], args[0], values[number]),))


def test_f_is_its_definition(model, result):
    nodes = nodes_of(model, result)
    choices = [largest(result.ffn, k) for k in (1, 5, 40)]
    selected, left = recovered_shares(nodes, choices)
    everything = torch.ones(nodes.shape, dtype=torch.bool)
    with torch.no_grad():
        at_x, at_c = (model.net(torch.tensor([ids])).logits[0, -1] for ids in (IDS, OTHER))
    at_x, at_c = ((logits[11] - logits[12]).item() for logits in (at_x, at_c))
    assert nodes.ends == pytest.approx((at_x, at_c), rel=1e-5)
    for choice, k, rest in zip(choices, selected, left, strict=True):
        assert k == pytest.approx((by_hand(model, choice) - at_c) / (at_x - at_c), rel=1e-5)
        assert rest == pytest.approx((by_hand(model, ~choice) - at_c) / (at_x - at_c), rel=1e-5)
    empty = (by_hand(model, ~everything) - at_c) / (at_x - at_c)
    assert abs(empty) > 1e-3  # the prompt's own embeddings bring a part of the difference back
    assert nodes.empty_share == pytest.approx(empty, rel=1e-4)
    assert ablation(model, result, 5).empty_sufficiency == nodes.empty_share
    assert recovered_shares(nodes, [everything]) == (pytest.approx([1]), pytest.approx([empty], rel=1e-4))


def test_the_nodes_of_an_ablation_are_those_that_top_lists(model, result):
    nodes = nodes_of(model, result)
    for by in ("positive", "absolute"):
        mask = torch.zeros(nodes.shape, dtype=torch.bool)
        for row in result.top(40, "ffn", position="all", by=by):
            mask[row.neuron.layer, row.position, row.neuron.index] = True
        measured, ((alone,), (others,)) = ablation(model, result, 40, by=by), recovered_shares(nodes, [mask])
        assert (measured.sufficiency, measured.necessity) == pytest.approx((alone, 1 - others))


def test_without_a_counterfactual_neurons_take_their_means_but_not_at_sinks(model):
    alone = attribute(model, IDS, 11, 12, number="logit")
    choice, means = largest(alone.ffn, 40), calibrate(model).means["ffn"]
    at_sinks = torch.tensor([place in alone.prompt.sinks for place in range(len(IDS))])[:, None]
    values = [torch.where(at_sinks, alone.activation("ffn")[layer], means[layer]) for layer in range(model.layers)]
    selected, left = recovered_shares(nodes_of(model, alone), [choice])
    m = [by_hand(model, part, dict(enumerate(values))) for part in (choice, ~choice, choice | True, choice & False)]
    assert selected == [pytest.approx((m[0] - m[3]) / (m[2] - m[3]), rel=1e-5)]
    assert left == [pytest.approx((m[1] - m[3]) / (m[2] - m[3]), rel=1e-5)]


def test_all_heads_are_the_whole_and_none_is_nothing(model, result):
    nodes = nodes_of(model, result, "head")
    assert nodes.shape == result.heads().shape
    everything = torch.ones(nodes.shape, dtype=torch.bool)
    empty = nodes.empty_share
    assert recovered_shares(nodes, [everything, ~everything]) == (
        pytest.approx([1, empty]),
        pytest.approx([empty, 1], abs=1e-9),
    )
    assert (nodes.change() == 0).all(dim=(0, 2)).tolist() == [True, True, *[False] * 6]  # before the prompts differ


def test_matched_nodes_are_as_many_at_the_same_layers_and_tokens():
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(3, 4, 20, generator=generator) < 0.2
    drawn = random_nodes(chosen, "ffn", generator)
    assert torch.equal(drawn.sum(-1), chosen.sum(-1))
    assert not (drawn & chosen).any()
    full = torch.ones(1, 1, 5, dtype=torch.bool)
    assert not random_nodes(full, "ffn", generator).any()
    full[..., :2] = False
    assert torch.equal(random_nodes(full, "ffn", generator), ~full)


def test_random_heads_are_other_heads_of_any_layer_at_the_same_tokens():
    generator = torch.Generator().manual_seed(0)
    chosen = torch.zeros(5, 3, 4, dtype=torch.bool)
    chosen[4, 1, :3] = True  # most heads of a layer, which leave one to draw from
    drawn = torch.stack([random_nodes(chosen, "head", generator) for _ in range(200)])
    assert not (drawn & chosen).any()
    assert (drawn.sum((1, 3)) == torch.tensor([0, 3, 0])).all()
    assert (drawn.any(0)[:, 1] == ~chosen[:, 1]).all()


def test_what_cannot_be_ablated_says_why(model, result):
    with pytest.raises(InputError, match="record='all'"):
        ablation(model, attribute(model, IDS, 11, 12, counterfactual=OTHER, record="last"), 5)
    assert ablation(model, result, 3).nodes == 3


@pytest.fixture
def compared(model, monkeypatch):
    monkeypatch.setattr(evaluation, "answers", lambda *_: (11, 12))
    return evaluation.Compared(model, task_pairs.Pair(IDS, OTHER, "", ""))


def test_ratios_weigh_pairs_by_what_exchanging_all_does():
    lines = [
        {"difference": weight, "methods": {"a": {"sufficiency_100": selected, "sufficiency_1000": 1.0}}}
        for weight, selected in ((3.0, 0.5), (1.0, -0.5))
    ]
    assert evaluation.ratios(lines) == "ratio of means, F of 100 and 1,000 nodes alone: a 0.25 and 1.00"


def test_every_score_ranks(compared):
    shaped = compared.relevance.ffn.shape
    for name, method in with_controls("all", evaluation.METHODS, evaluation.CONTROLS).items():
        values = compared.scores(method)
        assert values.shape == shaped, name
        assert values.abs().sum() > 0, name


def test_templates_are_pairs_that_differ_in_the_answer():
    for name, result in task_pairs.TASKS.items():
        assert len(result) >= 40, name
        assert all(pair.prompt != pair.counterfactual and pair.answer != pair.counterfactual_answer for pair in result)
        assert len({(pair.prompt, pair.counterfactual) for pair in result}) == len(result)
    with pytest.raises(UnknownName, match="capitals"):
        task_pairs.pairs_of("capitls")


def test_a_file_of_pairs(tmp_path):
    file = tmp_path / "pairs.jsonl"
    row = {"clean_prefix": "The keys", "patch_prefix": "The key", "clean_answer": " are", "patch_answer": " is"}
    file.write_text(json.dumps(row) + "\n")
    assert task_pairs.read_pairs(str(file)) == [task_pairs.Pair("The keys", "The key", " are", " is")]
    for text, message in (("{}", "clean_prefix"), ("", r"pairs\.jsonl")):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            task_pairs.read_pairs(str(file))
    with pytest.raises(InputError):
        task_pairs.read_pairs(str(tmp_path / "none"))


def test_only_clear_pairs_of_equal_length_count(smol):
    good = task_pairs.Pair("The keys near the house", "The key near the house", " are", " is")
    assert task_pairs.is_usable(smol, good)
    assert not task_pairs.is_usable(smol, task_pairs.Pair(good.prompt, good.counterfactual, " is", " are"))
    assert not task_pairs.is_usable(
        smol, task_pairs.Pair("The old keys near the house", good.counterfactual, " are", " is")
    )
    plain = objective_of(smol, [good.prompt], " are", " is")
    assert plain.targets[0] != plain.contrasts[0]


@pytest.mark.release
@pytest.mark.real
def test_across_a_clause_difference_rules_find_what_carries_the_answer(smol, tmp_path):
    """A pair of what docs/results.md measures on many; it goes on where it stopped."""
    words = ["--tasks", "across-clause", "--samples", "1", "--out", str(tmp_path / "a")]
    words += ["--methods", "difference,matched", "--json"]
    run = lambda: json.loads(CliRunner().invoke(command(evaluation.AblationCurves), words).stdout)  # noqa: E731
    done = run()
    scores = {row["method"]: row for row in done["parts"][0]["tables"][0]["rows"]}
    assert scores["difference"]["sufficiency_100 median"] > 0.3
    assert scores["difference"]["remaining_1000 median"] < 0.2
    assert abs(scores["matched"]["sufficiency_100 median"]) < 0.1
    lines = (tmp_path / "a" / "across-clause" / "samples.jsonl").read_text()
    assert run() == done
    assert (tmp_path / "a" / "across-clause" / "samples.jsonl").read_text() == lines
