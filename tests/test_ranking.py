"""Ranking against a brute-force sort, and what a Relevance turns into."""

import json
from itertools import product

import pytest
from click.testing import CliRunner
from conftest import IDS

from icebear import attribute
from icebear.app.cli.main import main
from icebear.errors import InputError
from icebear.evaluation.baselines import Occlusion
from icebear.records import Neuron, Ranked

SIZE = {"positive": lambda r: r, "negative": lambda r: -r, "absolute": abs}


def brute(result, site, polarity, positions, by="positive"):
    rows = []
    for layer in range(result.of(site).shape[0]):
        for position in positions:
            for index in range(result.of(site).shape[2]):
                activation = result.activation(site)[layer, position, index].item()
                if (polarity == "+" and activation < 0) or (polarity == "-" and activation >= 0):
                    continue
                value = result.of(site)[layer, position, index].item()
                if SIZE[by](value) > 0:
                    rows.append(Ranked(Neuron(layer, site, index), position, activation, value))
    return sorted(rows, key=lambda r: (-SIZE[by](r.relevance), r.neuron, r.position))


@pytest.mark.parametrize("site", ["ffn", "attn"])
@pytest.mark.parametrize("polarity", [None, "+", "-"])
@pytest.mark.parametrize("by", SIZE)
def test_top_equals_a_sort(llama, site, polarity, by):
    result = attribute(llama, IDS)
    last = len(IDS) - 1
    for position, positions in (("last", [last]), (2, [2]), (-2, [last - 1]), ("all", range(1, last + 1))):
        expected = brute(result, site, polarity, positions, by)[:7]
        assert result.top(7, site, polarity, position, by=by) == expected
    everything = result.top(7, site, polarity, "all", include_sinks=True, by=by)
    assert everything == brute(result, site, polarity, range(last + 1), by)[:7]


def test_ties_go_to_the_smaller_id(llama, generator):
    result = attribute(llama, IDS)
    flat = result.ffn.view(-1)
    for place in range(len(flat)):
        flat[place] = generator.choice([-1.0, 0.0, 2.0])
    assert result.top(15, "ffn", position="all") == brute(result, "ffn", None, range(1, len(IDS)))[:15]


def test_sites_rank_together_and_heads_sum(llama):
    result = attribute(llama, IDS)
    both = sorted(result.top(5, "ffn") + result.top(5, "attn"), key=lambda r: -r.relevance)[:5]
    assert result.top(5) == both
    best = result.top(1, "head")[0]
    head_dim = llama.head_dim
    columns = slice(best.neuron.index * head_dim, (best.neuron.index + 1) * head_dim)
    assert best.relevance == pytest.approx(result.attn[best.neuron.layer, -1, columns].sum().item())
    assert result.layers("ffn").shape == (3, len(IDS))


def test_sinks_are_apart_unless_asked_for(llama):
    result = attribute(llama, IDS)
    assert 0 in result.prompt.sinks
    assert all(r.position not in result.prompt.sinks for r in result.top(1000, position="all"))


def test_several_explained_tokens_are_ranked_by_their_sum(model):
    """At the position that gave most of it, with the activation there; on the page and in JSON too."""
    result = attribute(model, "ice", target_text="bear")
    places = range(2, 6)  # where each of the four letters is predicted
    for by, polarity in product(("positive", "negative"), (None, "+", "-")):
        rows = []
        for layer, index in product(range(model.layers), range(model.width("ffn"))):
            parts = [result.ffn[layer, place, index].item() for place in places]
            place = places[parts.index(max(parts) if by == "positive" else min(parts))]
            activation = result.activation("ffn")[layer, place, index].item()
            row = Ranked(Neuron(layer, "ffn", index), place, activation, sum(parts))
            assert result.of_neuron(row.neuron) == pytest.approx(row.relevance, abs=1e-5)
            rows += [row] * (polarity in (None, row.polarity) and SIZE[by](row.relevance) > 0)
        rows.sort(key=lambda row: -SIZE[by](row.relevance))
        ranked = result.top(9, "ffn", polarity, by=by)
        assert [(r.neuron, r.position, r.activation) for r in ranked] == [
            (r.neuron, r.position, r.activation) for r in rows[:9]
        ]
        assert [r.relevance for r in ranked] == pytest.approx([r.relevance for r in rows[:9]], abs=1e-5)
    best = result.top(1)[0]
    assert f"{best.relevance:+.4f}" in result.to_html()
    assert result.to_dict(1)["top"][best.neuron.site][0]["relevance"] == best.relevance
    assert result.to_dict()["target_positions"] == list(places)
    assert result.top(1, "head")[0].relevance == pytest.approx(result.heads()[:, places].sum(1).max().item())


def test_a_contrast_that_explains_nothing_is_refused(model):
    """The target itself, given or left open, alone or in a batch, for every method; and one for several tokens."""
    first = model.predict("ice bear", 1)[0].text
    for target, method in product(("b", None), ("attnlrp", "gxi", Occlusion())):
        contrast = target or first
        with pytest.raises(InputError, match="contrast"):
            attribute(model, "ice bear", target, contrast, method=method)
        with pytest.raises(InputError, match="contrast"):
            attribute(model, ["bear", "ice bear"], target, [chr(ord(contrast) + 1), contrast], method=method)
    with pytest.raises(InputError, match="contrast"):
        attribute(model, "ice", target_text="bear", contrast="bear")


def test_heads_have_no_polarity(llama):
    with pytest.raises(InputError, match="polarity"):
        attribute(llama, IDS).top(5, "head", "-")


def test_the_site_of_heads_records_what_heads_are_sums_of(llama):
    result = attribute(llama, IDS, sites=("head",))
    both = attribute(llama, IDS, sites=("attn", "head"))
    assert result.sites == both.sites == ("attn",)
    assert result.of("head").equal(result.heads())
    assert result.layers("head").allclose(result.layers("attn"), atol=1e-6)
    assert result.top(3, site="head") == both.top(3, site="head") != []
    kept = attribute(llama, IDS, sites=("head",), keep="top")
    assert kept.layers("head").allclose(result.layers("head"), atol=1e-6)
    with pytest.raises(InputError, match="unflatten"):
        result.activation("head")
    components = result.activation("attn").unflatten(-1, (llama.heads, -1))  # as the error says
    assert components.shape[-2:] == (llama.heads, llama.head_dim)
    with pytest.raises(InputError, match="attn"):
        attribute(llama, IDS, sites=("ffn",)).of("head")


def test_the_verbs_refuse_the_same(tiny_folder):
    for words, message in (
        (["explain", "A bear", "--target", " is", "--contrast", " is"], "contrast"),
        (["rank", "A bear", "--target", " is", "--contrast", " is"], "contrast"),
        (["explain", "A bear", "--target-text", " is", "--contrast", " is"], "contrast"),
        (["rank", "A bear", "--site", "head", "--polarity", "-"], "polarity"),
    ):
        result = CliRunner().invoke(main, [*words, "--model", tiny_folder, "--device", "cpu"])
        assert (result.exit_code, message in result.stderr, result.stdout) == (1, True, "")


@pytest.mark.parametrize("record", ["none", [8], [-9]])
def test_positions_to_record_that_are_none_are_refused(llama, record):
    with pytest.raises(InputError):
        attribute(llama, IDS, record=record)


def test_what_was_not_recorded_says_how_to_record_it(llama):
    result = attribute(llama, IDS, sites=("ffn",))
    with pytest.raises(InputError, match="'q'"):
        result.of("q")
    assert attribute(llama, IDS, sites=("q", "v")).of("v").shape == (3, len(IDS), 12)


def test_json_frame_and_html(smol):
    result = attribute(smol, "if a < b & c > '\"<script>alert(1)</script>", contrast=" desert")
    data = json.loads(result.to_json(k=3))
    assert len(data["top"]["ffn"]) == 3
    assert data["conservation"]["target"] == pytest.approx(
        sum(value for name, value in data["conservation"].items() if name != "target")
    )
    frame = result.to_frame(5, site="ffn")
    assert list(frame.neuron) == [row["neuron"] for row in json.loads(result.to_json(5))["top"]["ffn"]]
    page = result.to_html()
    assert "<script" not in page
    assert "&lt;" in page
    assert "http" not in page
    assert result._repr_html_() in page or len(page) > len(result._repr_html_())
