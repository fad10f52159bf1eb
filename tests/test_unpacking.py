"""The vectors, labels and map of the index that comes with icebear: what is unpacked is what was packed."""

import numpy as np
import pytest
from test_labels import SENTENCES, planted, texts

from benchmarks import pack_index
from icebear import Encoder, Neuron, build_index, describe, embed_examples, open_store, read_corpus
from icebear.actmax import searching
from icebear.actmax.atlas.atlas import atlas
from icebear.actmax.atlas.saved_map import save_map, saved_drawing, saved_map
from icebear.actmax.index import encoder as index_encoder
from icebear.actmax.labels import nulls, sample
from icebear.actmax.labels.auto import label_neurons
from icebear.actmax.labels.descriptions import score_label
from icebear.actmax.shipped.shipped_index import unpack_index
from icebear.db.vectors import unit
from icebear.values import stable_hash

WORD = Neuron(0, "ffn", 3)


class WordEncoder(Encoder):
    """Encodes the words of a text, and more strongly their topics, with which they begin."""

    def vector(self, text):
        words = [(word, weight) for whole in text.split() for word, weight in ((whole, 1), (whole[:4], 2))]
        rows = [weight * np.random.default_rng(stable_hash(word)).standard_normal(48) for word, weight in words]
        return unit(np.sum(rows, 0)[None])[0].astype(np.float32)


ENCODER = WordEncoder("words", "1", None, None)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """An index with labels and a map, and what is unpacked of it; both open."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "t.txt").write_text("\n".join(texts(1000)))
    model, pieces = planted(), planted().pieces
    model.pieces = lambda ids: (pieces(ids)[0].strip(), *pieces(ids)[1:])  # as in a text, without a space at first
    with pytest.MonkeyPatch.context() as patch, open_store(folder / "a.db", create=True) as store:
        patch.setattr(sample, "SENTENCES", SENTENCES)
        patch.setattr(nulls, "CONTROLS", 50)
        patch.setattr(sample, "TOPICS", 6)
        patch.setattr(pack_index, "VECTOR_BYTES", 24)
        patch.setattr(index_encoder, "_load", lambda name, download: ENCODER)
        build_index(model, read_corpus(str(folder / "t.txt")), store, k=pack_index.EXAMPLES)
        embed_examples(store, ENCODER)
        label_neurons(model, store, store.neurons.all_without_heads()[:40])
        label_neurons(model, store, [Neuron(0, "head", 1)])
        save_map(store, atlas(store))
        pack_index.pack(store, folder / "p.npz")
        unpack_index(folder / "p.npz", model, folder / "b.db")
        with open_store(folder / "b.db") as again:
            yield model, store, again


def test_vectors_are_nearly_those_that_were_packed(stores):
    _, store, again = stores
    (ids, rows), (ids_again, rows_again) = (s.sentence_vectors() for s in (store, again))
    assert np.array_equal(np.sort(ids), np.sort(ids_again))
    rows, rows_again = rows[np.argsort(ids)].astype(float), rows_again[np.argsort(ids_again)].astype(float)
    cosines = (unit(rows) * unit(rows_again)).sum(1)
    shuffled = (unit(rows) * unit(rows_again[::-1])).sum(1)
    assert cosines.mean() > 0.95 > 0.5 > shuffled.mean()


def test_a_search_by_meaning_finds_the_same_neurons(stores):
    _, store, again = stores
    for text in ("songak songel", "court shipem"):
        before, after = ([str(hit) for hit in searching.search(s, text, 10)] for s in (store, again))
        assert len({*before} & {*after}) >= 0.6 * len(before) > 0


def test_the_script_checks_every_part(stores):
    _, store, again = stores
    numbers = pack_index.check(store, again)
    assert numbers["activations, relative"] < 1e-3
    assert numbers["scores of labels"] < 1e-5
    assert 0.5 < min(numbers["ten nearest sentences"], numbers["ten nearest sides"]) <= 1


def test_labels_and_their_scores_come_back(stores):
    _, store, again = stores
    neurons = store.neurons.all_with_heads()
    before, after = (s.labels.automatic(neurons) for s in (store, again))
    assert before.keys() == after.keys()
    assert len(before) == 2 * 41
    assert {m.kind for m in before.values() if m.significant} >= {"topic", "tokens"}
    assert any(not m.significant for m in before.values())
    for key, meaning in before.items():
        again_meaning = after[key]
        names = ("kind", "text", "by", "significant")
        assert [getattr(again_meaning, name) for name in names] == [getattr(meaning, name) for name in names]
        assert (again_meaning.score, again_meaning.p) == pytest.approx((meaning.score, meaning.p), abs=1e-5)
        if meaning.significant:
            for name in ("train", "validation", "test", "token_mean", "auroc", "other_neuron", "thresholds"):
                assert again_meaning.record[name] == pytest.approx(meaning.record[name], abs=1e-5), name
            assert again_meaning.record["sentences"] == meaning.record["sentences"]
            assert again_meaning.record["label"] == meaning.record["label"]
    assert describe(again, WORD).meanings["+"].text == "at 'zebra'"


def test_a_label_of_ones_own_is_scored_as_before_without_new_nulls(stores, monkeypatch):
    model, store, again = stores
    monkeypatch.setattr(sample, "SENTENCES", SENTENCES)
    monkeypatch.setattr(nulls, "null_draws", None)
    monkeypatch.setattr(index_encoder, "_load", lambda name, download: ENCODER)
    before, after = (score_label(model, s, WORD, "zebra") for s in (store, again))
    assert [(m.score, m.p) for m in before[:2]] == [(m.score, m.p) for m in after[:2]]  # of its words
    assert [m.score for m in after[2:]] == pytest.approx([m.score for m in before[2:]], abs=0.1)  # of what it says


def test_the_map_comes_back_to_the_step_of_the_page(stores):
    _, store, again = stores
    before, after = saved_map(store), saved_map(again)
    assert np.array_equal(before.sides, after.sides)
    assert np.array_equal(before.cluster, after.cluster)
    assert (before.clusters, before.layers) == (after.clusters, after.layers)
    assert after.clarity == pytest.approx(before.clarity.clip(0, 1), abs=1e-4)
    assert saved_drawing(again) is not None
    assert after.points == pytest.approx(before.points, abs=1e-4)
