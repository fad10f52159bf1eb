"""Models with scans, from Python: what a counterfactual makes possible, and what is refused."""

import pytest
import torch
from pages import script

from icebear import Neuron, attribute, circuit, explain, flip
from icebear.errors import InputError, MissingRule

IDS = [5, 9, 23, 42, 7, 31, 12, 50]
OTHER = [*IDS[:3], 33, *IDS[4:]]


@pytest.fixture(scope="module")
def qwen():
    return script("families").small_model("qwen3_5_text")


@pytest.fixture(scope="module")
def relevance(qwen):
    return attribute(qwen, IDS, 11, 12, counterfactual=OTHER)


def test_only_layers_with_attention_have_heads(qwen, relevance):
    assert qwen.layers_with("attn") == [1]
    assert qwen.layers_with("mixer") == [0]
    assert {row.neuron.layer for row in relevance.top(1000, "head", position="all")} == {1}
    assert {row.neuron.layer for row in relevance.top(1000, "mixer", position="all")} == {0}
    with pytest.raises(InputError):
        qwen.check(Neuron(0, "head", 0))


@pytest.mark.parametrize("site", ["ffn", "mixer", "head"])
def test_an_explanation_beside_a_counterfactual_needs_no_other_pass(qwen, relevance, site):
    explanation = explain(qwen, relevance, site=site)
    assert explanation.stages is None
    assert explanation.nodes[0].ranked.neuron.site == site
    assert explanation.to_html()


def test_a_model_of_scans_only_has_mixer_neurons():
    model = script("families").small_model("mamba")
    explanation = explain(model, attribute(model, IDS, 11, 12, counterfactual=OTHER))
    assert {node.ranked.neuron.site for node in explanation.nodes} == {"mixer"}


def test_a_flip_reads_the_whole_prompt(qwen):
    """The state of a mixer is not cached for several rows."""
    with torch.no_grad():
        wanted = int(qwen.net(torch.tensor([IDS])).logits[0, -1].topk(2).indices[1])
    recipe = flip(qwen, IDS, to=wanted)
    assert recipe.edits
    assert recipe.provenance["after"][0]["id"] == wanted


@pytest.mark.parametrize("kind", ["jamba", "qwen3_5_text"])
def test_contributions_in_a_hybrid_sum_to_the_difference_of_each_node(kind):
    model = script("families").small_model(kind)
    graph = circuit(model, IDS, 11, 12, counterfactual=OTHER, nodes=6, heads=True)
    assert (graph.difference - graph.contribution.sum(-1)).abs().max() < 1e-5


def test_circuits_are_refused_where_there_are_no_nodes():
    model = script("families").small_model("mamba")
    with pytest.raises(InputError, match="neurons instead"):
        circuit(model, IDS, 11, 12, counterfactual=OTHER, nodes=6)


def test_without_a_counterfactual_the_refusal_names_it(qwen):
    with pytest.raises(MissingRule, match="--counterfactual"):
        attribute(qwen, IDS, 11)
