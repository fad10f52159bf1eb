"""Search by words: what is a hit, what is not, and which documents an index holds."""

import itertools
import json
import random
import re
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import printed
from planted import CODES, TOPICS, WORDS, bare

from icebear import Encoder, Neuron, build_index, describe, embed_examples, load_encoder, open_store, read_corpus
from icebear.actmax import searching
from icebear.actmax.index import corpus as corpora
from icebear.actmax.index import encoder as index_encoder
from icebear.actmax.index import example_embedding
from icebear.actmax.index.corpus import Corpus
from icebear.app.cli.main import main
from icebear.app.cli.tables.cards import card_report
from icebear.concepts.vocabulary.projection import both_projections
from icebear.concepts.vocabulary.weight_rows import direct_row, unembedding
from icebear.db import search, vectors
from icebear.db.terms import words_of
from icebear.db.vectors import unit
from icebear.errors import StoreError
from icebear.models.loading import encoder
from icebear.values import stable_hash

DRAWN = np.random.default_rng(0).choice(60, search.CHANCE_NEURONS, replace=False)
DETECTOR, HUB, WRITER, SILENT, NEAR, TWIN = (Neuron(0, "ffn", n) for n in np.setdiff1d(range(60), DRAWN)[:6].tolist())
SONG, SHIP, ABSENT = TOPICS["song"], TOPICS["ship"], TOPICS["court"][0]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """An index in which one neuron fires at a word, one writes something like every word, one writes a word that no
    sentence has, and one writes it at activations that it never has."""
    folder, model, seed = tmp_path_factory.mktemp("search"), bare(), random.Random(0)
    block, words = model.net.transformer.h[0], model.net.transformer.wte.weight
    with torch.no_grad():
        model.net.transformer.ln_f.weight.fill_(1)
        common = torch.arange(words.shape[1]).remainder(2) - 0.5
        words += words.std() * common  # so that words have something in common
        written = unembedding(model)
        rows = {HUB: written.mean(0), WRITER: written[CODES[ABSENT]], SILENT: -written[CODES[ABSENT]]}
        for neuron, row in rows.items():
            block.mlp.c_fc.weight[:, neuron.index], block.mlp.c_fc.bias[neuron.index] = 0, 1  # never negative
            block.mlp.c_proj.weight[neuron.index] = row
        block.mlp.c_fc.weight[:, DETECTOR.index] = words[CODES[SONG[0]]] - words[CODES[SHIP[0]]]
        block.mlp.c_proj.weight[TWIN.index] = block.mlp.c_proj.weight[NEAR.index]
    texts = []
    for number in range(120):
        topic = (SONG, SHIP)[number % 2]
        middle = [seed.choice(topic[number % 8 == 0 :]) for _ in range(4)] + ([topic[0]] if number % 8 < 2 else [])
        texts.append(" ".join(["the", *seed.sample(middle, len(middle)), "was old"]) + ".")
    (folder / "c.txt").write_text("\n".join(texts))
    with open_store(folder / "c.db", create=True) as made:
        build_index(model, read_corpus(str(folder / "c.txt")), made, k=8)
    with open_store(folder / "c.db") as opened:
        opened.model = model
        yield opened


def test_the_neuron_whose_sentences_have_the_word_is_first(store):
    hits = store.search(SONG[0], 10)
    assert (hits[0].neuron, hits[0].polarity, hits[0].by) == (DETECTOR, "+", "sentences")
    for hit in hits:
        have = [SONG[0] in example.sentence.text for example in store.examples(hit.neuron, hit.polarity)]
        assert have
        assert any(have) == (hit.by == "sentences")
        if any(have):
            assert hit.why[0].startswith(f"{sum(have)} of {len(have)} examples")
    assert len(hits) <= 10
    both = search.by_words(store, SONG[0], 10)
    assert [hit.by for hit in both] == sorted(hit.by for hit in both)
    assert both[: len(hits)] == hits


def test_a_neuron_that_is_close_to_every_word_is_no_hit(store):
    """By the cosine alone it is among the first three for most words."""
    by_cosine = by_search = 0
    rows = unit(np.array([direct_row(store.model, neuron).numpy() for neuron in store.neurons.all_without_heads()]))
    tokens = unit(unembedding(store.model).numpy())
    for word in WORDS[2:]:
        cosines = np.abs(rows @ tokens[CODES[word]])
        by_cosine += HUB.index in np.argsort(-cosines)[:3]
        by_search += HUB in [hit.neuron for hit in search.by_words(store, word, 10) if hit.by == "weights"]
    assert by_cosine > 0.5 * len(WORDS)
    assert by_search < 0.05 * len(WORDS)


def test_a_side_without_sentences_is_no_hit(store):
    assert not store.examples(SILENT, "-")
    assert search._by_output(store, [ABSENT])[2 * SILENT.index + 1] > store.controls.get("outputs")
    for word in (ABSENT, *SONG, *SHIP):
        assert all(store.examples(hit.neuron, hit.polarity) for hit in store.search(word, 60))


def test_words_of_weights_stand_apart_and_above_their_null(store):
    hits = store.search(ABSENT, 60)
    assert (hits[0].neuron, hits[0].polarity) == (WRITER, "+")
    assert {hit.by for hit in hits} == {"weights"}
    z = search._by_output(store, [ABSENT])
    sides = {2 * hit.neuron.index + "+-".index(hit.polarity) for hit in hits}
    totals = store.example_tables.totals(len(z))
    assert sides == set(np.flatnonzero((z > store.controls.get("outputs")) & (totals > 0)).tolist())
    assert len(sides) < 10


def test_the_z_of_an_output_is_relative_to_the_neuron_s_own_cosines(store):
    """Against the definition, with all tokens: there are fewer than are drawn."""
    rows = unit(np.array([direct_row(store.model, neuron).numpy() for neuron in store.neurons.all_without_heads()]))
    cosines = rows @ unit(unembedding(store.model).numpy()).T  # (N, V)
    expected = (cosines[:, CODES[ABSENT]] - cosines.mean(1)) / cosines.std(1)
    z = search._by_output(store, [ABSENT])[: 2 * store.neurons.count_without_heads()]
    assert z[::2] == pytest.approx(expected, abs=0.02)
    assert z[1::2] == pytest.approx(-expected, abs=0.02)


def test_words_that_no_sentence_has_are_named(store):
    assert search.absent_line(search.absent_words(store, f"the {ABSENT} dragon")) == (
        f"No sentence of this index has '{ABSENT}' or 'dragon'."
    )
    assert search.absent_line(search.absent_words(store, "the")) == ""
    assert store.search("dragon", 10) == []
    for words, headings in (("dragon", 0), (ABSENT, 1), (SONG[0], 1)):
        done = CliRunner().invoke(main, ["search", words, "--store", str(store.path)])
        assert done.exit_code == 0, done.output
        assert ("No sentence of this index has" in done.output) == (words != SONG[0])
        assert sum(title[:20] in done.output for title in searching.headings(store).values()) == headings
    done = CliRunner().invoke(main, ["search", ABSENT, "--store", str(store.path), "--json"])
    document = json.loads(done.output)
    assert document["absent"] == [ABSENT]
    assert {hit["by"] for hit in document["hits"]} == {"weights"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sadness and grief", "sadness grief"),
        ("The COLOR of the sky", "COLOR sky"),
        ("the war", "war"),
        ("women's rights", "women rights"),
        ("and", "and"),
        ("to be or not to be", "to be or not to be"),
        ("der Himmel über Berlin", "der Himmel über Berlin"),
    ],
)
def test_stop_words_count_only_where_there_are_no_others(text, words):
    assert words_of(text) == words.split()


def test_a_search_of_several_words_is_as_without_its_stop_words(store):
    """For hits with their scores and counts, sentences with the words, and words that are absent."""
    text = f"the {SONG[0]} of the {SHIP[0]}"
    plain = f"{SONG[0]} {SHIP[0]}"
    assert search.by_words(store, text, 60) == search.by_words(store, plain, 60)
    assert search.with_and_without(store, text, 20) == search.with_and_without(store, plain, 20)
    assert search.absent_words(store, f"under the {ABSENT}") == [ABSENT]
    assert store.search("the", 5) == store.search("the the", 5) != []
    for hit in store.search(f"the {SONG[0]}", 10):
        have = sum(SONG[0] in example.sentence.text for example in store.examples(hit.neuron, hit.polarity))
        assert hit.why[0].startswith(f"{have} of ")


def test_the_heading_says_whether_a_search_is_by_meaning(store, embedded, monkeypatch):
    """And which download is missing, if it is not."""
    assert "not by meaning" in searching.headings(store)["sentences"]
    with monkeypatch.context() as patch:
        patch.setattr(index_encoder, "_load", lambda name, download: TopicEncoder(name, "1", None, None))
        assert searching.headings(embedded) == search.BY
    embedded.facts.set({"encoder": {**embedded.facts.get("encoder"), "name": "minilm"}})
    monkeypatch.setattr(encoder, "cached", lambda folder: False)
    heading = searching.headings(embedded, download=False)["sentences"]
    assert "not by meaning" in heading
    assert "minilm" in heading
    assert "84 MB" in heading
    assert searching.search(embedded, SONG[0], 5, download=False) == search.by_words(embedded, SONG[0], 5)
    done = CliRunner().invoke(main, ["search", SONG[0], "--store", str(store.path)])
    assert "not by meaning" in " ".join(done.output.split())


def test_sentences_with_a_word_stand_beside_others_of_similar_length(store):
    """Each of the others once, none with a word, and no sentence without them nearer in length."""
    words = f"{SONG[0]} {SHIP[0].upper()}"
    having, lacking = search.with_and_without(store, words, 20)
    has = re.compile(rf"\b({SONG[0]}|{SHIP[0]})\b")
    everything = [sentence.text for sentence in store.sentences.starting_at(0)]
    assert (len(having), len(lacking)) == (len(set(having)), len(set(lacking))) == (20, 20)
    assert all(map(has.search, having))
    assert not any(map(has.search, lacking))
    free = [text for text in everything if not has.search(text) and text not in lacking]
    for sentence, other in zip(having, lacking, strict=True):
        assert all(abs(len(text) - len(sentence)) >= abs(len(other) - len(sentence)) for text in free)
    assert search.with_and_without(store, ABSENT, 20) == ([], [])


def test_neighbors_are_above_those_of_random_neurons(store):
    median, largest = search.nearest_by_chance(store, "writes")
    assert median <= largest < 0.99
    shown = {
        n: [hit.neuron for hit in store.similar(n, 5) if hit.score > largest] for n in store.neurons.all_without_heads()
    }
    assert shown[NEAR] == [TWIN]
    assert sum(map(bool, shown.values())) < 0.2 * len(shown)


def test_words_of_weights_are_shown_above_those_of_random_rows_only(store):
    """By the model and by the index alone; a row that writes one word stands out, most random ones do not."""
    words = {neuron: both_projections(store.model, neuron, 5) for neuron in store.neurons.all_without_heads()}
    assert words[WRITER][0].has_words
    assert words[WRITER][0].promoted[0].text.strip() == ABSENT
    random_ones = [neuron for neuron in words if neuron not in (HUB, WRITER, SILENT)]
    for lens in (0, 1):
        assert sum(words[neuron][lens].has_words for neuron in random_ones) < 0.2 * len(random_ones)
    silent = next(neuron for neuron in random_ones if not any(one.has_words for one in words[neuron]))
    for model in (store.model, None):
        shown, hidden = (describe(store, neuron, model, effect_sentences=0) for neuron in (WRITER, silent))
        assert shown.projection.kurtosis == pytest.approx(words[WRITER][0].kurtosis, rel=0.02)
        assert shown.projection.kurtosis_by_chance == pytest.approx(words[WRITER][0].kurtosis_by_chance, rel=0.05)
        for card, expected in ((shown, True), (hidden, False)):
            assert card.to_dict()["vocabulary"]["has_words"] == expected
            assert ("Promotes at +" in card.to_html()) == expected
            assert ("promotes (+)" in printed(card_report(card))) == expected
            assert (card.projection.no_words in card.to_html().replace("&#39;", "'")) != expected


# --- which documents an index holds ---------------------------------------------------------------------------


def documents(texts):
    return lambda: iter([(f"title {text}", text) for text in texts])


def test_a_sample_is_the_same_in_any_order_and_nested(monkeypatch):
    texts = [f"Document {number}." for number in range(200)]
    samples = {}
    for seed, held in itertools.product(range(3), (1 << 16, 7, 1)):
        monkeypatch.setattr(corpora, "IN_MEMORY", held)
        mixed = random.Random(seed).sample(texts, len(texts))
        for limit in (1, 7, 20, 60, 200, 300):
            drawn = list(Corpus({}, limit, documents(mixed)).documents())
            assert samples.setdefault(limit, drawn) == drawn
    assert all(samples[300][: len(sample)] == sample for sample in samples.values())
    assert sorted(samples[300]) == sorted(documents(texts)())
    assert list(Corpus({}, None, documents(texts)).documents()) == list(documents(texts)())
    assert list(Corpus({}, 20, documents(texts), streamed=True).documents()) == list(documents(texts)())[:20]
    share = np.mean([int(text[9:-1]) < 100 for _, text in samples[60]])
    assert 0.3 < share < 0.7  # of the first half


def test_copies_of_a_document_are_drawn_as_often_as_they_are(monkeypatch):
    monkeypatch.setattr(corpora, "IN_MEMORY", 2)
    texts = ["One.", "Two.", "One.", "", "", "One.", "Half of a pair \ud83d."]
    drawn = [text for _, text in Corpus({}, 50, documents(texts)).documents()]
    assert sorted(drawn) == sorted(texts)


def test_an_index_says_which_documents_it_holds(store, tmp_path):
    assert store.documents_phrase == f"all documents of {store.facts.get('corpus')}"
    path = store.facts.get("corpus")
    with open_store(tmp_path / "i.db", create=True) as made:
        for limit, phrase in ((30, "30 of 120 documents"), (40, "40 of 120 documents"), (120, "all documents")):
            build_index(store.model, read_corpus(path, limit), made, k=2)
            assert made.documents_phrase.startswith(phrase)
        made.facts.set({"limit": 7, "documents": None})
        assert made.documents_phrase == f"the first 7 documents of {path}"


def test_an_index_of_the_first_documents_is_refused_with_the_way_to_make_it_again(store, tmp_path):
    with open_store(tmp_path / "old.db", create=True) as made:
        build_index(store.model, read_corpus(store.facts.get("corpus"), 30), made, k=2)
        made.database.execute("PRAGMA user_version = 8")  # the last that held the first documents
    with pytest.raises(StoreError, match=r"icebear index --store .*old\.db"), open_store(tmp_path / "old.db") as made:
        made.search("the")


class TopicEncoder(Encoder):
    """Encodes how often a text has a word, or a topic, beside noise. "melody", which no sentence has, is the word."""

    def vector(self, text):
        assert len(ENCODED) != STOPPED_AT, "stopped"
        ENCODED.append(text)
        noise = np.random.default_rng(stable_hash(text)).standard_normal(40)
        counts = [sum(text.count(word) for word in words) for words in (("melody", SONG[0]), SHIP)]
        return unit(np.array([[*counts, *noise / 3]], dtype=np.float32))[0]


ENCODED, STOPPED_AT = [], None


@pytest.fixture
def embedded(store, tmp_path):
    """The same index, with vectors by `TopicEncoder`."""
    with open_store(tmp_path / "e.db", create=True) as made:
        build_index(store.model, read_corpus(store.facts.get("corpus")), made, k=8)
        embed_examples(made, TopicEncoder("topics", "1", None, None))
        yield made


def test_a_text_finds_the_neurons_whose_examples_are_about_it(embedded):
    """Against the definition: the mean inner product of the text with the strongest sentences, relative to as many
    random ones."""
    encoder = TopicEncoder("topics", "1", None, None)
    ids, rows = embedded.sentences.vectors(table="embeddings")
    rows = rows.astype(float) - rows.astype(float).mean(0)
    query = unit((encoder.vector("melody") - np.array(embedded.facts.get("encoder")["center"]))[None])[0]
    similar, deviation = dict(zip(ids.tolist(), rows @ query, strict=True)), (rows @ unit(rows).T).std()
    expected = {}
    for neuron, polarity in itertools.product(embedded.neurons.all_without_heads(), "+-"):
        examples = [similar[example.sentence.id] for example in embedded.examples(neuron, polarity, search.STRONGEST)]
        expected[neuron, polarity] = np.mean(examples) * np.sqrt(len(examples)) / deviation if examples else 0.0
    z = search._by_meaning(embedded, encoder.vector("melody"), 2 * embedded.count("neurons"))[0][: len(expected)]
    assert z == pytest.approx(list(expected.values()), abs=0.05)
    assert search.absent_words(embedded, "melody") == ["melody"]
    assert not [hit for hit in embedded.search("melody", 60) if hit.by == "sentences"]
    hits = {(h.neuron, h.polarity) for h in search.by_words(embedded, "melody", 60, encoder.vector("melody"))}
    seed = np.random.default_rng(1)
    largest = max(seed.choice(list(similar.values()), 6).sum() / np.sqrt(6) / deviation for _ in expected)
    clear = {side for side, value in expected.items() if value > 1.3 * largest}
    assert (DETECTOR, "+") in clear
    assert clear <= hits
    assert not hits & {side for side, value in expected.items() if value < largest / 1.3}
    ordered = [h for h in search.by_words(embedded, "melody tune", 60, encoder.vector("melody")) if h.by == "sentences"]
    assert [h.score for h in ordered] == sorted((h.score for h in ordered), reverse=True)
    assert {(h.neuron, h.polarity): h.score for h in ordered}.items() <= dict(
        zip(expected, z.tolist(), strict=True)
    ).items()
    noise = np.float32([0, 0, *np.random.default_rng(0).standard_normal(40)])
    nothing = search.by_words(embedded, "nothing", 60, embedded.facts.get("encoder")["center"] + noise)
    assert not [hit for hit in nothing if hit.by == "sentences"]


def test_a_stopped_encoding_goes_on_and_gives_the_same_vectors(embedded, store, tmp_path, monkeypatch):
    monkeypatch.setattr(example_embedding, "SAVED_AT_ONCE", 8)
    encoder = TopicEncoder("topics", "1", None, None)
    with open_store(tmp_path / "s.db", create=True) as made:
        build_index(store.model, read_corpus(store.facts.get("corpus")), made, k=8)
        before = made.search(SONG[0], 60)
        ENCODED.clear()
        monkeypatch.setattr(sys.modules[__name__], "STOPPED_AT", 20)
        with pytest.raises(AssertionError):
            embed_examples(made, encoder)
        assert made.search(SONG[0], 60) == before
        monkeypatch.setattr(sys.modules[__name__], "STOPPED_AT", None)
        embed_examples(made, encoder)
        assert len(ENCODED) == 4 + len(set(ENCODED))  # those after the last commit are encoded again
        assert vectors.digest(made.vectors.path("examples")) == vectors.digest(embedded.vectors.path("examples"))
        ENCODED.clear()
        embed_examples(made, encoder)
        assert not ENCODED
        embed_examples(made, TopicEncoder("topics", "2", None, None))
        assert len(ENCODED) == made.count("embeddings")


def test_another_encoder_is_refused_and_a_larger_scan_starts_without(embedded, store, monkeypatch):
    monkeypatch.setattr(index_encoder, "_load", lambda name, download: TopicEncoder(name, "2", None, None))
    with pytest.raises(StoreError):
        searching.search(embedded, "melody")
    monkeypatch.setattr(index_encoder, "_load", lambda name, download: TopicEncoder(name, "1", None, None))
    encoder = TopicEncoder("topics", "1", None, None)
    assert searching.search(embedded, "melody", 5) == search.by_words(embedded, "melody", 5, encoder.vector("melody"))
    monkeypatch.setattr(index_encoder, "_load", None)
    assert searching.search(store, SONG[0], 5) == search.by_words(store, SONG[0], 5)


@pytest.mark.real
def test_the_preset_encodes_what_a_text_is_about():
    """Each text by itself, at length 1; the mean over the tokens of the last layer, by the slow way."""
    encoder = load_encoder()
    film, movie, acid = (encoder.vector(text) for text in ("a film", "blockbusters and moviegoers", "nitric acid"))
    assert np.linalg.norm(film) == pytest.approx(1, abs=1e-6)
    assert film @ movie > 2 * film @ acid
    assert (encoder.vector("a film") == film).all()
    ids = torch.tensor([encoder.tokenizer("a film").input_ids])
    with torch.no_grad():
        states = encoder.net(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    assert film == pytest.approx(unit(states.hidden_states[-1][0].numpy().mean(0)[None])[0], abs=1e-6)


def test_an_index_without_a_network_is_made_and_says_what_it_lacks(tiny_folder, tmp_path):
    (tmp_path / "c.txt").write_text("Rome is a city. Paris is one too.\n")
    index = ["index", "--corpus", str(tmp_path / "c.txt"), "--store", str(tmp_path / "i.db"), "--model", tiny_folder]
    done = CliRunner().invoke(main, index)
    assert (done.exit_code, "by words alone" in done.stderr) == (0, True)
    assert CliRunner().invoke(main, [*index, "--encoder", "minilm"]).exit_code == 1
    assert CliRunner().invoke(main, [*index, "--encoder", str(tmp_path)]).exit_code == 1
    done = CliRunner().invoke(main, [*index, "--encoder", "none"])
    assert (done.exit_code, "by words alone" in done.stderr) == (0, False)
    with open_store(tmp_path / "i.db") as made:
        assert not made.count("embeddings")
