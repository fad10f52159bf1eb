"""Dashboards for Neuronpedia: they pass the schema of its upload, and have the numbers of the store."""

import json
import shutil
from bisect import bisect_right
from pathlib import Path

import jsonschema_rs
import pytest
import torch
from click.testing import CliRunner
from conftest import LLAMA, Letters, random_model
from transformers import LlamaConfig

from icebear import Model, build_index, open_store, read_corpus
from icebear.actmax import neuronpedia_export
from icebear.actmax.neuronpedia_export import LOGITS, NEURONS_PER_FILE, estimated_size, export_dashboards
from icebear.app.cli.main import main
from icebear.errors import InputError, StoreError
from icebear.points import Source
from icebear.records import HISTOGRAM_EDGES, AutomaticLabel, Neuron

SCHEMA = json.loads((Path(__file__).parent / "data/neuronpedia-upload.schema.json").read_text())
WORDS = "ice desert camel water north cold snow warm sand old new big".split()
CHECK = jsonschema_rs.Draft202012Validator(SCHEMA)


@pytest.fixture
def thousand(shared, tmp_path, few_draws):
    """A store of 1,020 neurons."""
    config = LlamaConfig(**{**LLAMA.to_dict(), "intermediate_size": 340})

    def build(folder):
        (folder / "c.txt").write_text("\n".join(f"The {word} bear eats {word}s in ice." for word in WORDS))
        wide = Model(random_model(config, dtype=torch.float32).net, Letters(), "Some/Wide")
        with open_store(folder / "wide.db", create=True) as store:
            build_index(wide, read_corpus(str(folder / "c.txt")), store, k=3)

    shutil.copytree(shared("wide", build), tmp_path / "wide")
    with open_store(tmp_path / "wide/wide.db") as store:
        yield store


def exported(folder):
    """Source -> index -> feature, of files that pass the schema."""
    result = {}
    for path in sorted(folder.iterdir()):
        document = json.loads(path.read_text())
        CHECK.validate(document)
        assert document["modelId"] == "wide"
        indices = [feature["index"] for feature in document["features"]]
        assert indices == sorted(set(indices))
        assert len(indices) <= NEURONS_PER_FILE
        result.setdefault(document["source"], {}).update(zip(indices, document["features"], strict=True))
    return result


def test_a_thousand_neurons_pass_the_schema_and_equal_the_store(thousand, tmp_path):
    counts = export_dashboards(thousand, tmp_path / "out")
    features = exported(tmp_path / "out")
    seen = set()
    assert counts == {"neurons": 1020, "sources": 6, "files": len(list((tmp_path / "out").iterdir()))}
    for neuron in thousand.neurons.all_without_heads():
        statistics = thousand.neurons.statistics(neuron)
        projection = thousand.vocabulary(neuron, LOGITS)
        for polarity, sign in (("+", 1), ("-", -1)):
            feature = features[str(Source(neuron.layer, "ffn", polarity))][neuron.index]
            examples = [row for row in thousand.examples(neuron, polarity) if sign * row.activation > 0]
            assert len(feature["activations"]) == len(examples) > 0
            for row, example in zip(feature["activations"], examples, strict=True):
                assert tuple(row["tokens"]) == example.sentence.tokens
                assert max(row["values"]) == row["values"][example.token] == sign * example.activation
                assert row["quantileMin"] <= sign * example.activation <= row["quantileMax"]
                count = statistics.histogram[bisect_right(HISTOGRAM_EDGES, example.activation)]
                assert row["quantileFraction"] == count / sum(statistics.histogram)
            sides = (projection.promoted, projection.suppressed)[::sign]
            for name, tokens in zip(("topLogits", "bottomLogits"), sides, strict=True):
                if not projection.has_words:
                    assert feature[name] is None
                    continue
                assert [row["token"] for row in feature[name]] == [token.text for token in tokens]
                assert [row["value"] for row in feature[name]] == pytest.approx(
                    [sign * token.logit for token in tokens]
                )
                seen.add(neuron)
    assert 20 < len(seen) < 1020, "some have words that stand out"


def test_both_polarities_have_all_tokens_of_the_histogram(thousand):
    for number in range(0, 340, 17):
        statistics = thousand.neurons.statistics(Neuron(1, "ffn", number))
        below = sum(count for count, edge in zip(statistics.histogram, HISTOGRAM_EDGES, strict=False) if edge <= 0)
        assert neuronpedia_export.density(statistics, "-") == below / sum(statistics.histogram)
        assert neuronpedia_export.density(statistics, "+") == statistics.positive


def test_labels_come_with_scores_and_only_significant_ones(thousand, tmp_path):
    def label(index, significant):
        return AutomaticLabel(Neuron(0, "ffn", index), "+", "topic", "ice" * 300, "token", 0.875, 0.01, significant, {})

    thousand.labels.set_automatic([label(1, True), label(2, False)])
    thousand.labels.set_manual(Neuron(0, "ffn", 3), "snow")
    export_dashboards(thousand, tmp_path / "out")
    sources = exported(tmp_path / "out")
    features = sources["0-ffn-plus"]
    (explanation,) = features[1]["explanations"]
    assert explanation["text"] == ("ice" * 300)[:512]
    assert "AUROC 0.88 by token (chance 0.50)" in explanation["methodName"]
    assert features[2]["explanations"] == []
    assert [row["text"] for row in features[3]["explanations"]] == ["snow"]
    assert sources["0-ffn-minus"][1]["explanations"] == []


def test_what_is_there_stays(thousand, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    with pytest.raises(InputError):
        export_dashboards(thousand, folder)
    assert [path.read_text() for path in folder.iterdir()] == ["mine"]
    before = set(tmp_path.iterdir())

    def interrupted(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_dashboards(thousand, tmp_path / "new", interrupted)
    assert set(tmp_path.iterdir()) == before


def test_a_long_sentence_is_cut_around_its_token(monkeypatch, thousand):
    monkeypatch.setattr(neuronpedia_export, "SHOWN_TOKENS", 4)
    for neuron in thousand.neurons.all_without_heads()[:40]:
        for polarity, feature in neuronpedia_export.dashboards(thousand, neuron, None).items():
            for row, example in zip(feature["activations"], thousand.examples(neuron, polarity), strict=False):
                assert len(row["tokens"]) == len(row["values"]) == min(4, len(example.sentence.tokens))
                assert row["tokens"][row["values"].index(max(row["values"]))] == example.token_text


def test_the_command_writes_a_folder(thousand, tmp_path):
    words = ["export", "neuronpedia", "--store", str(thousand.path), "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["counts"]["neurons"] == 1020
    assert CliRunner().invoke(main, words).exit_code == 1
    assert len(exported(tmp_path / "out")["2-ffn-minus"]) == 340


CHOSEN = ["L2.ffn.339", "L0.ffn.7", "0-ffn-minus/200", "L0.ffn.7"]


def test_the_dashboards_of_chosen_neurons_are_those_of_all(thousand, tmp_path):
    command = ["export", "neuronpedia", *CHOSEN, "--store", str(thousand.path), "--json"]
    result = CliRunner().invoke(main, [*command, "--out", str(tmp_path / "few")])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["counts"] == {"neurons": 3, "sources": 4, "files": 4}
    assert "3 neurons" in result.stderr
    export_dashboards(thousand, tmp_path / "all")
    few, every = exported(tmp_path / "few"), exported(tmp_path / "all")
    assert {source: list(features) for source, features in few.items()} == {
        "0-ffn-minus": [7, 200],
        "0-ffn-plus": [7, 200],
        "2-ffn-minus": [339],
        "2-ffn-plus": [339],
    }
    assert all(feature == every[source][index] for source, rows in few.items() for index, feature in rows.items())


def test_the_size_is_known_before(thousand, tmp_path):
    export_dashboards(thousand, tmp_path / "all")
    size = sum(path.stat().st_size for path in (tmp_path / "all").iterdir())
    assert estimated_size(thousand, thousand.neurons.all_without_heads()) == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize(("name", "error"), [("L0.ffn.340", StoreError), ("L0.head.0", InputError)])
def test_what_has_no_dashboard_is_refused(name, error, thousand, tmp_path):
    with pytest.raises(error, match=name):
        export_dashboards(thousand, tmp_path / "out", neurons=[Neuron.parse(name)])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["29-ffn-plus", "0-attn-minus"])
def test_the_name_of_a_source_parses_back(name):
    assert str(Source.parse(name)) == name


@pytest.mark.parametrize("name", ["29", "29-mlp", "29-neurons"])
def test_neuronpedias_sources_of_neurons_have_activations_as_values(name):
    assert Source.parse(name) == Source(29, "ffn", "+")
    assert Source.parse(name).sign == 1


@pytest.mark.parametrize(
    "name", ["", "29-ffn", "29-res-jb", "ffn-plus", "29-ffn-both", "29-FFN-plus", "-1-ffn-plus", "29-ffn-plus\n"]
)
def test_another_text_is_no_source(name):
    with pytest.raises(InputError):
        Source.parse(name)
