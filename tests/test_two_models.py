"""Two models of one shape on the same prompt: what differs is found, adds up, and is nothing where nothing differs."""

import copy

import pytest
import torch
from click.testing import CliRunner
from configurations import dense
from conftest import IDS, Double, Letters, random_model

from icebear import ATTNLRP, CP_LRP, Model, Neuron, attribute
from icebear.app.cli.main import main
from icebear.concepts.attribution.controls import ablation
from icebear.concepts.attribution.two_models import neuron_similarity
from icebear.errors import InputError

CONFIGS = dense()
PLANTED = Neuron(2, "ffn", 7)


def edited(model, change):
    """A copy whose weights were changed."""
    net = copy.deepcopy(model.net)
    with torch.no_grad():
        change(net)
    return Model(net, model.tokenizer, f"{model.name}, edited")


def turned_of(net):
    net.model.layers[2].mlp.down_proj.weight[:, 7] *= -3


def trained(net):
    torch.manual_seed(1)
    for weight in net.parameters():
        weight += 0.05 * torch.randn_like(weight)


@pytest.mark.parametrize("method", [ATTNLRP, CP_LRP])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_the_difference_of_both_answers_is_accounted_for(name, method):
    model = random_model(CONFIGS[name])
    other = edited(model, trained)
    with Double():
        result = attribute(model, IDS, contrast=5, base_model=other, method=method)
        target = result.target.id
        here, there = (attribute(one, IDS, target, 5, method=method) for one in (model, other))
    assert result.conservation().target == pytest.approx(here.conservation().target - there.conservation().target)
    assert abs(result.conservation().remainder) < 1e-8
    torch.testing.assert_close(result.tokens, here.tokens - there.tokens)
    for row in result.top(5, "ffn", position="all"):
        place = row.neuron.layer, row.position, row.neuron.index
        assert row.activation == here.activation("ffn")[place]
        assert row.counterfactual == there.activation("ffn")[place]
        assert row.relevance == pytest.approx((here.ffn - there.ffn)[place].item())


def test_a_model_differs_from_itself_in_nothing(llama):
    result = attribute(llama, IDS, base_model=llama)
    assert not result.tokens.any()
    assert not result.ffn.any()
    assert result.conservation().target == 0
    assert "Compared with the model" in result.comparison_text()


def test_a_planted_edit_is_what_differs_most(llama):
    """Of all neurons at all tokens the one whose W2 was turned; elsewhere its layer hands on what it did."""
    other = edited(llama, turned_of)
    result = attribute(llama, IDS, base_model=other)
    largest = max(
        (r for sign in "+-" for r in result.top(1, "ffn", position="last", sign=sign)), key=lambda r: abs(r.relevance)
    )
    assert largest.neuron == PLANTED
    top = attribute(llama, IDS, base_model=other, keep="top", k=5)
    assert [r.neuron for r in top.top(5, "ffn", position="all")] == [
        r.neuron for r in result.top(5, "ffn", position="all")
    ]
    rows = attribute(llama, IDS, base_model=other, keep="top", k=5, record=[1, -1])
    assert rows.neurons.recorded == (1, len(IDS) - 1)
    alike = neuron_similarity(llama, other, PLANTED)
    assert alike == pytest.approx({"reads": 1, "writes": -1})
    assert neuron_similarity(llama, other, Neuron(1, "ffn", 7)) == pytest.approx({"reads": 1, "writes": 1})


def test_a_list_and_an_exchange(llama):
    """Each prompt for itself; and what exchanging activations with the other model's does is measured."""
    other = edited(llama, trained)
    many = attribute(llama, [IDS, IDS[:5]], [3, 4], base_model=other)
    for result, ids, target in zip(many, (IDS, IDS[:5]), (3, 4), strict=True):
        alone = attribute(llama, ids, target, base_model=other)
        torch.testing.assert_close(result.tokens, alone.tokens, rtol=1e-3, atol=1e-6)
    assert ablation(llama, many[0], 10**6).necessity == pytest.approx(1)


def test_what_cannot_be_compared_is_refused(llama):
    with pytest.raises(InputError, match="gpt2"):
        attribute(llama, IDS, base_model=random_model(CONFIGS["gpt2"]))
    with pytest.raises(InputError, match="base_model"):
        attribute(llama, IDS, counterfactual=IDS[:3], base_model=llama)
    spelled, other = (Model(llama.net, tokenizer, "spelled") for tokenizer in (Letters(), Backwards()))
    with pytest.raises(InputError, match="spelled"):
        attribute(spelled, "abc", base_model=other)


class Backwards(Letters):
    def __call__(self, text, **options):
        return super().__call__(text[::-1], **options)


@pytest.mark.usefixtures("smol")
def test_the_command():
    """Against itself, where nothing differs."""
    request = ["The ice bear lives in the", "--base-model", "smollm2-135m", "--site", "ffn", "--top", "3"]
    result = CliRunner().invoke(main, ["rank", *request])
    assert result.exit_code == 0, result.output
    assert "Compared with the model smollm2-135m" in result.output
    result = CliRunner().invoke(main, ["neuron", "L29.ffn.860", "--base-model", "smollm2-135m", "--top", "3"])
    assert result.exit_code == 0, result.output
    assert "reads 1.0000, writes 1.0000" in result.output
