"""Dashboards come back as an index: their examples are measured again, their labels scored as any label."""
# ruff: noqa: F811 - fixtures of another file are arguments

import gzip
import json
from pathlib import Path

import jsonschema_rs
import pytest
from click.testing import CliRunner
from test_descriptions import index, made  # noqa: F401
from test_labels import TOPIC, WORD
from test_unpacking import ENCODER

from icebear import Neuron, build_index, describe, embed_examples, open_store
from icebear.actmax.more_examples import more_examples
from icebear.actmax.neuronpedia_export import export_dashboards
from icebear.actmax.neuronpedia_import import Dashboards, score_labels
from icebear.app.cli.main import main
from icebear.app.cli.options import ModelOptions
from icebear.errors import InputError, StoreError

SCHEMA = json.loads((Path(__file__).parent / "data/neuronpedia-upload.schema.json").read_text())
RIGHT, WRONG = "songak songel songir songon", "the old great"
OTHERS = [Neuron(0, "ffn", number) for number in range(8, 30)]


@pytest.fixture
def exported(index, tmp_path):
    """The planted model, the path of its index with labels, and the folder of its dashboards."""
    model, path = index
    with open_store(path) as store:
        store.labels.set_manual(TOPIC, RIGHT)
        for number, neuron in enumerate([WORD, *OTHERS]):
            store.labels.set_manual(neuron, WRONG + " old" * number)
        export_dashboards(store, tmp_path / "out")
    return model, path, tmp_path / "out"


def examples(store):
    """Each side's examples, without the number and the title of their sentences."""
    return {
        (neuron, sign): [(row.sentence.text, row.sentence.tokens, row.token, row.activation) for row in rows]
        for neuron in store.neurons.all_without_heads()
        for sign in "+-"
        if (rows := [row for row in store.examples(neuron, sign) if row.activation * (1 if sign == "+" else -1) > 0])
    }


def test_what_was_exported_comes_back_as_examples_and_scored_labels(exported, tmp_path):
    model, path, folder = exported
    dashboards = Dashboards.of(model, folder)
    with open_store(path) as before, open_store(tmp_path / "theirs.db", create=True) as store:
        build_index(model, dashboards.corpus(), store, k=16, sites=["ffn"])
        embed_examples(store, ENCODER)
        ours = examples(store)
        theirs = {side: rows for side, rows in examples(before).items() if side[0].site == "ffn"}
        assert set(ours) == set(theirs)
        for side, rows in theirs.items():
            assert [row[3] for row in ours[side]] == pytest.approx([row[3] for row in rows], rel=1e-4)
            assert {row[:3] for row in ours[side]} == {row[:3] for row in rows}
        count = sum(map(len, ours.values()))
        assert dashboards.agreement(store) == (count, count, count)
        meanings = score_labels(model, store, dashboards)
        passed = {(row.neuron, row.polarity): row for row in meanings if row.significant}
        assert passed[TOPIC, "+"].text == RIGHT
        assert not {(TOPIC, "-"), (WORD, "+"), (WORD, "-")} & set(passed)
        assert len([meaning for meaning in meanings if meaning.text.startswith(WRONG)]) >= len(OTHERS)
        assert passed[TOPIC, "+"].record["writer"] == "out (icebear, written by a person)"
        assert store.labels.shown(TOPIC, "+") == passed[TOPIC, "+"].badge
        assert store.labels.shown(WORD, "+") is None
        with pytest.raises(StoreError):
            more_examples(model, store, TOPIC)


def test_other_activations_are_counted_as_different(exported, tmp_path):
    model, path, folder = exported
    for file in folder.iterdir():
        document = json.loads(file.read_text())
        for feature in document["features"]:
            for row in feature["activations"]:
                row["values"] = [1.5 * value for value in row["values"]]
        file.write_text(json.dumps(document))
    with open_store(path) as store:
        agreement = Dashboards.of(model, folder).agreement(store)
    assert agreement.exported == agreement.matched > 0 == agreement.equal


FOREIGN = {
    "modelId": "planted",
    "source": "0-ffn-minus",
    "features": [
        {"index": 3, "activations": [{"tokens": ["a", " camel", " a"], "values": [0.1, 2, -0.5]}]},
        {
            "index": 4,
            "density": 0.2,
            "explanations": [
                {"text": "camels", "methodName": "oai_token-act-pair", "modelName": "gpt"},
                {"text": "x"},
                {"text": " "},
            ],
            "activations": [{"tokens": ["a", " camel", " a"], "values": [0, 1, 0], "quantileMin": None}],
        },
    ],
}


def test_files_of_others_are_read(index, tmp_path):
    jsonschema_rs.Draft202012Validator(SCHEMA).validate(FOREIGN)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(FOREIGN))
    dashboards = Dashboards.of(index[0], folder)
    assert [sentence.text for sentence in dashboards.corpus().sentences()] == ["a camel a"]
    labels = [("camels", "theirs (oai_token-act-pair, gpt)"), ("x", "theirs")]
    assert dashboards.labels() == {(Neuron(0, "ffn", 4), "-"): labels}


def export_of(folder, source, is_packed):
    """Write a folder as Neuronpedia's exports have it: a table in each folder, a row in each line."""
    row = {"modelId": "planted", "layer": source}
    tables = {
        "release.jsonl": [{"name": "r", "description": "not a label"}],
        "source.jsonl": [{**row, "id": source}],
        "features/batch-0.jsonl": [{**row, "index": "3", "pos_str": ["a"], "frac_nonzero": 0.5}],
        "activations/batch-0.jsonl": [
            {**row, "index": "3", "tokens": ["a", " camel", " a"], "values": [0.1, 2, -0.5], "maxValue": 2},
            {**row, "index": "3", "tokens": ["no", " camel"], "values": [0, 1], "binMin": None},
        ],
        "explanations/batch-0.jsonl": [
            {**row, "index": "3", "description": "camels", "typeName": "oai_token-act-pair"},
            {**row, "index": "4", "description": "x", "explanationModelName": "gpt"},
        ],
    }
    for name, rows in tables.items():
        path = folder / source / (f"{name}.gz" if is_packed else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{json.dumps(line)}\n" for line in rows).encode()
        path.write_bytes(gzip.compress(text) if is_packed else text)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("source", "polarity"), [("0", "+"), ("0-mlp", "+"), ("0-ffn-minus", "-")])
def test_exports_of_neuronpedia_are_read(source, polarity, is_packed, index, tmp_path):
    export_of(tmp_path / "theirs", source, is_packed)
    dashboards = Dashboards.of(index[0], tmp_path / "theirs")
    assert [sentence.text for sentence in dashboards.corpus().sentences()] == ["a camel a", "no camel"]
    assert dashboards.labels() == {
        (Neuron(0, "ffn", 3), polarity): [("camels", "theirs (oai_token-act-pair)")],
        (Neuron(0, "ffn", 4), polarity): [("x", "theirs (gpt)")],
    }
    assert dashboards.sides == {(Neuron(0, "ffn", 3), polarity), (Neuron(0, "ffn", 4), polarity)}


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b'{"a": 1}', mtime=0)[:-9], gzip.compress(b"{", mtime=0), gzip.compress(b"[]", mtime=0)],
)
def test_a_damaged_export_is_refused(content, index, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.jsonl\.gz"):
        Dashboards.of(index[0], tmp_path)


def test_an_export_of_an_autoencoder_is_refused_by_name(index, tmp_path):
    export_of(tmp_path, "0-res-jb", False)
    with pytest.raises(InputError, match="0-res-jb"):
        Dashboards.of(index[0], tmp_path)


def test_an_index_of_few_dashboards_has_no_other_neurons(exported, tmp_path):
    """Not the sentences in which another neuron is strong among texts that were chosen for these."""
    model, path, _ = exported
    with open_store(path) as before:
        export_dashboards(before, tmp_path / "few", neurons=[TOPIC, WORD])
    dashboards = Dashboards.of(model, tmp_path / "few")
    with open_store(tmp_path / "few.db", create=True) as store:
        build_index(model, dashboards.corpus(), store, k=16, sites=["ffn", "head"])
        embed_examples(store, ENCODER)
        assert {side[0] for side in examples(store)} == {TOPIC, WORD}
        assert {hit.neuron for hit in store.search("songak", 50)} <= {TOPIC, WORD}
        assert {hit.neuron for hit in store.similar(TOPIC, 5, by="examples")} <= {WORD}
        other = describe(store, OTHERS[0])
        assert (other.examples, bool(other.absence("+"))) == ({"+": [], "-": []}, True)
        assert other.absence("+") in other.to_html()
        assert not describe(store, TOPIC).absence("+")
    with open_store(path) as before:
        assert not any(describe(before, neuron).absence(side) for neuron in OTHERS for side in "+-")


def test_labels_of_few_neurons_are_scored_on_another_index(exported, tmp_path):
    model, path, _ = exported
    with open_store(path) as texts:
        export_dashboards(texts, tmp_path / "few", neurons=[TOPIC, WORD])
        dashboards = Dashboards.of(model, tmp_path / "few")
        with open_store(tmp_path / "few.db", create=True) as store:
            build_index(model, dashboards.corpus(), store, k=16, sites=["ffn"])
            with pytest.raises(StoreError):
                score_labels(model, store, dashboards)
            before = texts.labels.all_automatic()
            meanings = score_labels(model, store, dashboards, scored_on=texts)
            significant = {row.neuron for row in meanings if row.significant}
            assert significant == {TOPIC}
            saved = describe(store, TOPIC).meanings["+"]
            assert (saved.text, saved.score) == (RIGHT, next(row.score for row in meanings if row.significant))
            assert path.name in saved.record["writer"]
            assert texts.labels.all_automatic() == before


def feature(explanations=(), **activation):
    return {"index": 1, "explanations": explanations, "activations": [{"tokens": ["a"], "values": [1], **activation}]}


BAD = {
    "not JSON": "{",
    "a list": "[]",
    "features of an autoencoder": json.dumps({**FOREIGN, "source": "6-res-jb"}),
    "another source": json.dumps({**FOREIGN, "source": 6}),
    "a neuron that the model lacks": json.dumps({**FOREIGN, "source": "99-ffn-plus"}),
    "no features": json.dumps({"source": "0-ffn-plus"}),
    "fewer values than tokens": '{"source": "0-ffn-plus", "features": [{"index": 1, "activations": '
    '[{"tokens": ["a", "b"], "values": [1]}]}]}',
    "a text as a value": '{"source": "0-ffn-plus", "features": [{"index": 1, "activations": '
    '[{"tokens": ["a"], "values": ["1"]}]}]}',
    "a text as an index": '{"source": "0-ffn-plus", "features": [{"index": "1", "activations": []}]}',
    "an infinite value": json.dumps({"source": "0-ffn-plus", "features": [feature(values=[float("inf")])]}),
    "a value that is no number": json.dumps({"source": "0-ffn-plus", "features": [feature(values=[float("nan")])]}),
    "a huge value": json.dumps({"source": "0-ffn-plus", "features": [feature(values=[10**400])]}),
    "a text as tokens": json.dumps({"source": "0-ffn-plus", "features": [feature(tokens="a")]}),
    "labels that are texts": json.dumps({"source": "0-ffn-plus", "features": [feature(["camels"])]}),
    "one label for a list": json.dumps({"source": "0-ffn-plus", "features": [feature({"text": "a"})]}),
    "a label that is no text": '{"source": "0-ffn-plus", "features": [{"index": 1, "activations": [], '
    '"explanations": [{"text": 3}]}]}',
}


@pytest.mark.parametrize("fault", BAD)
def test_a_file_of_another_shape_is_refused(fault, index, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "a.json").write_text(BAD[fault])
    with pytest.raises(InputError):
        Dashboards.of(index[0], folder)


def test_a_folder_without_files_is_refused(index, tmp_path):
    with pytest.raises(InputError):
        Dashboards.of(index[0], tmp_path)


@pytest.mark.parametrize("of_other_texts", [False, True])
def test_the_command_says_what_came_back(of_other_texts, exported, tmp_path, monkeypatch):
    model, path, folder = exported
    monkeypatch.setattr(ModelOptions, "load", lambda self: model)
    monkeypatch.setattr("icebear.load_encoder", lambda name: ENCODER)
    store = path if of_other_texts else tmp_path / "theirs.db"
    words = ["index", "--from-neuronpedia", str(folder), "--store", str(store), "--encoder", "planted", "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert ("counts" in document) is ("activations" in document) is not of_other_texts
    significant = {row["neuron"]: row["significant"] for row in document["meanings"] if row["polarity"] == "+"}
    assert (significant[str(TOPIC)], significant[str(WORD)]) == (True, False)


def test_the_command_scores_labels_of_few_neurons_on_the_index_that_comes_with_icebear(exported, tmp_path, monkeypatch):
    model, path, _ = exported
    with open_store(path) as texts:
        export_dashboards(texts, tmp_path / "few", neurons=[TOPIC, WORD])
    monkeypatch.setattr(ModelOptions, "load", lambda self: model)
    monkeypatch.setattr("icebear.shipped_store", lambda model: open_store(path))
    words = ["index", "--from-neuronpedia", str(tmp_path / "few"), "--store", str(tmp_path / "few.db")]
    result = CliRunner().invoke(main, [*words, "--encoder", "none", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert "not_scored" not in document
    (passed,) = [row for row in document["meanings"] if row["significant"]]
    with open_store(tmp_path / "few.db") as store:
        assert store.labels.shown(TOPIC, "+") == f"{RIGHT} ({passed['score']:.2f})"
        assert store.labels.shown(WORD, "+") is None
        with pytest.raises(StoreError):
            more_examples(model, store, TOPIC)
        assert set(store.neurons.sizes()) == {"ffn"}


def test_labels_that_cannot_be_scored_are_not_shown(exported, tmp_path, monkeypatch):
    model, _, folder = exported
    monkeypatch.setattr(ModelOptions, "load", lambda self: model)
    words = ["index", "--from-neuronpedia", str(folder), "--store", str(tmp_path / "b.db"), "--encoder", "none"]
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["meanings"], bool(document["not_scored"])) == ([], True)
    with open_store(tmp_path / "b.db") as store:
        assert store.labels.all_automatic() == []
        assert store.labels.manual(TOPIC) == (None, {})


@pytest.mark.parametrize("option", ["--merge", "--limit 3", "--workers 2", "--part 1/2", "--parts p", "--language es"])
def test_options_of_another_corpus_are_refused(option, tmp_path):
    words = ["index", "--from-neuronpedia", str(tmp_path), "--store", str(tmp_path / "a.db"), *option.split()]
    assert CliRunner().invoke(main, words).exit_code == 2
    assert not (tmp_path / "a.db").exists()
