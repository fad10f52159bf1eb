"""Ranking against a brute-force sort, and what a Relevance turns into."""

import json
import random

import pytest
from conftest import IDS

from concepts import attribute
from db.errors import InputError
from db.records import Neuron, Ranked


def brute(found, site, polarity, positions, sign):
    rows = []
    for layer in range(found.of(site).shape[0]):
        for position in positions:
            for index in range(found.of(site).shape[2]):
                activation = found.activation(site)[layer, position, index].item()
                if (polarity == "+" and activation < 0) or (polarity == "-" and activation >= 0):
                    continue
                value = found.of(site)[layer, position, index].item()
                rows.append(Ranked(Neuron(layer, site, index), position, activation, value))
    return sorted(rows, key=lambda r: (-r.relevance if sign == "+" else r.relevance, r.neuron, r.position))


@pytest.mark.parametrize("site", ["ffn", "attn"])
@pytest.mark.parametrize("polarity", [None, "+", "-"])
@pytest.mark.parametrize("sign", ["+", "-"])
def test_top_equals_a_sort(llama, site, polarity, sign):
    found = attribute(llama, IDS)
    last = len(IDS) - 1
    for position, positions in (("last", [last]), (2, [2]), (-2, [last - 1]), ("all", range(1, last + 1))):
        expected = brute(found, site, polarity, positions, sign)[:7]
        assert found.top(7, site, polarity, position, sign=sign) == expected
    everything = found.top(7, site, polarity, "all", include_sinks=True, sign=sign)
    assert everything == brute(found, site, polarity, range(last + 1), sign)[:7]


def test_ties_go_to_the_smaller_id(llama):
    found = attribute(llama, IDS)
    seed = random.randrange(10**6)
    print("seed", seed)
    generator = random.Random(seed)
    flat = found.ffn.view(-1)
    for place in range(len(flat)):
        flat[place] = generator.choice([-1.0, 0.0, 2.0])
    assert found.top(15, "ffn", position="all") == brute(found, "ffn", None, range(1, len(IDS)), "+")[:15]


def test_sites_rank_together_and_heads_sum(llama):
    found = attribute(llama, IDS)
    both = sorted(found.top(5, "ffn") + found.top(5, "attn"), key=lambda r: -r.relevance)[:5]
    assert found.top(5) == both
    best = found.top(1, "head")[0]
    head_dim = llama.head_dim
    columns = slice(best.neuron.index * head_dim, (best.neuron.index + 1) * head_dim)
    assert best.relevance == pytest.approx(found.attn[best.neuron.layer, -1, columns].sum().item())
    assert found.layers("ffn").shape == (3, len(IDS))


def test_sinks_are_apart_unless_asked_for(llama):
    found = attribute(llama, IDS)
    assert 0 in found.sinks
    assert all(r.position not in found.sinks for r in found.top(1000, position="all"))


def test_what_was_not_recorded_says_how_to_record_it(llama):
    found = attribute(llama, IDS, sites=("ffn",))
    with pytest.raises(InputError, match=r"sites=\('q',\)"):
        _ = found.q
    assert attribute(llama, IDS, sites=("q", "v")).v.shape == (3, len(IDS), 12)


def test_json_frame_and_html(smol):
    found = attribute(smol, "if a < b & c > '\"<script>alert(1)</script>", contrast=" desert")
    data = json.loads(found.to_json(k=3))
    assert len(data["top"]["ffn"]) == 3
    assert data["conservation"]["target"] == pytest.approx(sum(
        value for name, value in data["conservation"].items() if name != "target"
    ))  # fmt: skip
    frame = found.to_frame(5, site="ffn")
    assert list(frame.neuron) == [row["neuron"] for row in json.loads(found.to_json(5))["top"]["ffn"]]
    page = found.to_html()
    assert "<script" not in page
    assert "&lt;" in page
    assert "http" not in page
    assert found._repr_html_() in page or len(page) > len(found._repr_html_())
