"""The atlas: neighbors stay neighbors, clusters and names are the planted ones, and none is claimed by chance."""

import itertools
import json
import re
from base64 import b64decode

import numpy as np
import pytest
from click.testing import CliRunner
from planted import TOPICS, bare
from scipy.sparse import csr_matrix

from icebear import build_index, open_store, read_corpus
from icebear.actmax.atlas import clusters, layer_meanings, saved_map
from icebear.actmax.atlas.atlas import atlas
from icebear.actmax.atlas.atlas_page import atlas_page, packed, safe_json
from icebear.actmax.atlas.neighbor_map import PAGE_STEPS, apart, neighbors, on_page, plane, principal
from icebear.actmax.atlas.side_data import SideData
from icebear.app.cli.main import main
from icebear.db.vectors import unit
from icebear.errors import StoreError
from icebear.records import AutomaticLabel, Neuron, Sentence

GROUPS, SIZE, WIDTH = 6, 60, 24
OF_EACH = 8
"""The number of sentences of a side."""


@pytest.fixture(scope="module")
def rows():
    """Rows around six directions, (360, 24)."""
    generator = np.random.default_rng(0)
    middles = unit(generator.standard_normal((GROUPS, WIDTH)))
    return np.repeat(middles, SIZE, 0) + 0.15 * generator.standard_normal((GROUPS * SIZE, WIDTH))


@pytest.fixture(scope="module")
def points(rows):
    return plane(principal(rows), neighbors(principal(rows)), 0)


def share(rows, points, k=15):
    """The share of the nearest neighbors by cosine that are among the nearest in the plane, the slow way."""
    cosines = unit(rows) @ unit(rows).T - 9 * np.eye(len(rows))
    distances = ((points[:, None] - points) ** 2).sum(-1) + 9e9 * np.eye(len(rows))
    both = zip(np.argsort(-cosines)[:, :k], np.argsort(distances)[:, :k], strict=True)
    return np.mean([len({*a} & {*b}) / k for a, b in both])


def test_neighbors_are_those_of_all_cosines(rows):
    components = principal(rows)
    ids, distances = neighbors(components)
    cosines = unit(components) @ unit(components).T - 9 * np.eye(len(rows))
    assert np.array_equal(ids[:, 0], cosines.argmax(1))
    assert distances[:, 0] == pytest.approx(np.sqrt(2 - 2 * cosines.max(1)), abs=1e-3)
    assert not (ids == np.arange(len(rows))[:, None]).any()


def test_the_plane_keeps_more_neighbors_than_two_components_and_is_the_same_to_the_bit(rows, points):
    assert np.abs(points).max() == 1
    assert share(rows, points) > 1.3 * share(rows, principal(rows)[:, :2])
    assert share(rows, points) > 5 * share(rows, np.random.default_rng(0).normal(size=points.shape))
    assert np.array_equal(points, plane(principal(rows), neighbors(principal(rows)), 0))


@pytest.mark.parametrize("kind", ["all equal", "a corner", "within a step", "many places", "all apart"])
def test_no_two_points_are_in_one_step_of_the_page(kind):
    """Points that were alone stay, and the others go no farther than their number needs."""
    generator = np.random.default_rng(0)
    before = {
        "all equal": np.zeros((50, 2)),
        "a corner": np.full((50, 2), -1.0),
        "within a step": generator.uniform(-0.2, 0.2, (40, 2)) / PAGE_STEPS,
        "many places": np.repeat(generator.uniform(-1, 1, (30, 2)), 7, 0),
        "all apart": generator.uniform(-1, 1, (40, 2)),
    }[kind].astype(np.float32)
    after = apart(before)
    places, steps = ([tuple(row) for row in on_page(points).tolist()] for points in (before, after))
    assert len(set(steps)) == len(steps)
    assert {*itertools.chain(*steps)} <= {*range(PAGE_STEPS + 1)}
    assert all(row == old for row, old in zip(steps, places, strict=True) if places.count(old) == 1)
    assert {*places} <= {*steps}
    assert (
        np.abs(after - before).max() <= 2 * 8 / PAGE_STEPS
    )  # a square of 8 steps around has room for 288, a corner for 80


def test_clusters_are_the_planted_groups(points):
    labels = clusters.grouped(points)
    assert labels.max() + 1 == GROUPS
    for group in labels.reshape(GROUPS, SIZE):
        assert len({*group[group >= 0].tolist()}) == 1
        assert (group >= 0).mean() > 0.8
    sizes = np.bincount(labels[labels >= 0])
    assert np.array_equal(sizes, np.sort(sizes)[::-1])


def sentences_of(topics, generator, count=480):
    """Sentences with two words of a topic among others."""
    common = [f"{a}{b}{c}ing" for a in "bdfgk" for b in "aeiou" for c in "lmnr"]
    result = []
    for number in range(count):
        words = [*generator.choice(topics[number % len(topics)], 2), *generator.choice(common, 5)]
        text = " ".join(generator.permutation(words).tolist())
        result.append(Sentence(number, text, f"document {number // 2}", 0, len(text), (text,)))
    return result


def examples_of(topic, generator, sentences, topics):
    """Sides (N, S): each has sentences of the topic (N,), or of any where it is -1."""
    indices = []
    for wanted in topic:
        pool = [s.id for s in sentences if wanted < 0 or s.id % len(topics) == wanted]
        indices += generator.choice(pool, OF_EACH, replace=False).tolist()
    starts = np.arange(len(topic) + 1) * OF_EACH
    return csr_matrix((np.ones(len(indices), np.float32), indices, starts), shape=(len(topic), len(sentences)))


def data_of(examples, sentences, sentence_vectors=None, layer=0):
    """Sides with these sentences."""
    sentence_vectors = np.ones((len(sentences), 1)) if sentence_vectors is None else sentence_vectors
    count = examples.shape[0]
    layers = np.broadcast_to(layer, count)
    return SideData(
        np.arange(count),
        np.full(count, "ffn"),
        layers,
        examples @ sentence_vectors,
        examples,
        sentence_vectors,
        sentences,
    )


def test_a_cluster_is_named_by_the_words_of_its_topic_and_random_sides_have_no_name():
    topics, generator = [words[:16] for words in TOPICS.values()], np.random.default_rng(1)
    sentences = sentences_of(topics, generator)
    cluster = np.repeat([0, 1, 2, 3, 4, 5, -1], 40)
    topic = np.where(cluster < 3, cluster, -1)
    result = clusters.named(cluster, data_of(examples_of(topic, generator, sentences, topics), sentences), 0)
    for number, row in enumerate(result[:3]):
        assert {*row.words} <= {*topics[number]}
        assert len(row.words) == clusters.NAME_WORDS
        assert row.score > row.by_chance
    assert [row.words for row in result[3:]] == [()] * 3
    assert [row.size for row in result] == [40] * 6


def test_shuffled_clusters_are_named_in_a_twentieth_of_cases_at_most():
    topics, generator = [words[:16] for words in TOPICS.values()], np.random.default_rng(2)
    sentences, cluster = sentences_of(topics, generator), np.repeat(np.arange(40), 12)
    data = data_of(examples_of(np.arange(480) % 3, generator, sentences, topics), sentences)
    names = [row.words for seed in range(3) for row in clusters.named(generator.permutation(cluster), data, seed)]
    assert np.mean([bool(words) for words in names]) <= 0.05


def test_clarity_is_the_mean_cosine_of_pairs(rows):
    generator = np.random.default_rng(0)
    sentence_vectors, chosen = unit(rows), [generator.choice(len(rows), count, replace=False) for count in (1, 2, 5)]
    examples = csr_matrix((np.ones(8), np.concatenate(chosen), [0, 1, 3, 8]), shape=(3, len(rows)))
    expected = [0.0]
    for ids in chosen[1:]:
        cosines = sentence_vectors[ids] @ sentence_vectors[ids].T
        expected.append(cosines[~np.eye(len(ids), dtype=bool)].mean())
    assert layer_meanings.clarity(examples, sentence_vectors) == pytest.approx(expected, abs=1e-6)


def test_layers_have_the_meanings_and_partners_that_were_planted():
    """Layer 0: sentences of one topic; layer 1: random ones; the last two sides of layer 0 have the same sentences."""
    generator, topics = np.random.default_rng(3), [words[:16] for words in TOPICS.values()]
    sentences = sentences_of(topics, generator)
    middles = unit(generator.standard_normal((3, WIDTH)))
    sentence_vectors = unit(
        np.array([middles[s.id % 3] for s in sentences]) + 0.3 * generator.standard_normal((480, WIDTH))
    )
    sentence_vectors = unit(sentence_vectors - sentence_vectors.mean(0))
    layer = np.repeat([0, 1], 100)
    examples = examples_of(np.where(layer == 0, np.arange(200) % 3, -1), generator, sentences, topics).tolil()
    examples[99] = examples[98]
    examples = csr_matrix(examples)
    data = data_of(examples, sentences, sentence_vectors, layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_meanings, "IDENTICAL_COSINE", 0.999)
        clear, random = layer_meanings.layer_meanings(data, 0)
    assert (clear.sides, clear.layer, random.layer) == (100, 0, 1)
    assert clear.clarity > 0.1 > abs(random.clarity)
    assert abs(random.clarity_by_chance) < 0.02
    assert clear.without_meaning < 0.05
    assert 0.85 <= random.without_meaning <= 1
    assert (clear.redundant, random.redundant, clear.redundant_by_chance) == (0.02, 0, 0)


def test_what_tests_the_names_does_not_make_the_map():
    topics, generator = [words[:16] for words in TOPICS.values()], np.random.default_rng(4)
    sentences, sentence_vectors = sentences_of(topics, generator), generator.standard_normal((480, WIDTH))
    examples = examples_of(np.arange(90) % 3, generator, sentences, topics)
    data = data_of(examples, sentences, sentence_vectors)
    other = sentence_vectors.copy()
    other[~data.chosen_from] = generator.standard_normal(((~data.chosen_from).sum(), WIDTH))
    (before, inside), (after, _) = data.half(), data_of(examples, sentences, other).half()
    assert np.array_equal(before[inside], after[inside])
    assert inside.mean() > 0.9
    titles = {(sentence.title, chosen) for sentence, chosen in zip(sentences, data.chosen_from, strict=True)}
    assert len(titles) == 240  # no document is in both halves


def test_partners_by_chance_have_sentences_of_their_layer():
    """Layer 0: all sides have the same sentences, and still do when these are shuffled; layer 1: all have others."""
    layer, sentence_vectors = np.repeat([0, 1], 60), np.eye(240)
    indices = np.concatenate([np.tile([0, 1], 60), np.arange(120, 240)])
    examples = csr_matrix((np.ones(240), indices, np.arange(121) * 2), shape=(120, 240))
    sentences = [Sentence(number, "a", str(number), 0, 1, ("a",)) for number in range(240)]
    sides, cosines = layer_meanings.partners_by_chance(data_of(examples, sentences, sentence_vectors, layer), 0)
    assert {*sides.tolist()} == {*range(120)}
    assert cosines[sides < 60].min() > 0.7
    assert cosines[sides >= 60].max() == 0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A small index; one sentence has what would end a script element."""
    folder, generator = tmp_path_factory.mktemp("atlas"), np.random.default_rng(0)
    words = [" ".join(generator.choice(topic, 5)) for _ in range(30) for topic in TOPICS.values()]
    (folder / "c.txt").write_text("\n".join([f"the {text}." for text in words] + ["the </script><b>song</b> & ship."]))
    with open_store(folder / "c.db", create=True) as opened:
        build_index(bare(), read_corpus(str(folder / "c.txt")), opened, k=6)
    with open_store(folder / "c.db") as opened:
        yield opened


@pytest.mark.usefixtures("few_contexts")
def test_the_map_of_an_index_is_the_same_to_the_bit(store):
    result, again = atlas(store), atlas(store)
    assert np.array_equal(result.points, again.points)
    assert result.clusters == again.clusters
    assert result.sides.tolist() == np.unique(store.example_tables.columns().key).tolist()
    assert len(result.points) == len(result.cluster) == len(result.clarity) == len(result.sides)
    assert sum(layer.sides for layer in result.layers) == len(result.sides)
    assert result.made_with["model"]["name"] == "planted"


@pytest.mark.usefixtures("few_contexts")
def test_the_page_has_the_strongest_sentence_of_each_side_and_no_request(store):
    result = atlas(store)
    data = packed(store, result)
    columns = {name: np.frombuffer(b64decode(text), f"<{kind}") for name, (kind, text) in data["arrays"].items()}
    for number in range(0, len(result.sides), 7):
        neuron = store.neurons.of([int(result.sides[number]) // 2])[int(result.sides[number]) // 2]
        example = store.examples(neuron, "+-"[columns["minus"][number]], 1)[0]
        text = data["sentences"][columns["sentence"][number]]
        assert text == "".join(example.sentence.tokens)
        assert text[columns["start"][number] : columns["end"][number]] == example.token_text.strip()
        assert (columns["layer"][number], columns["index"][number]) == (neuron.layer, neuron.index)
        assert columns["x"][number] / 65535 * 2 - 1 == pytest.approx(result.points[number, 0], abs=1e-4)
    page = atlas_page(store, result)
    assert not re.search(r"""(src|href)=|url\(|https?://|fetch\(|import\(""", page)
    inside = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(inside) == json.loads(json.dumps({**data, "labels": {}}))
    assert "<b>song" not in page
    assert safe_json("</script>") == '"\\u003c/script>"'


@pytest.fixture
def copied(store, tmp_path):
    """A copy of the index, without its map, which may be changed."""
    for path in {*store.path.parent.glob("c.db*")} - {saved_map.map_path(store)}:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with open_store(tmp_path / "c.db") as opened:
        yield opened


@pytest.mark.usefixtures("few_contexts")
def test_a_map_is_drawn_once_for_a_state_of_the_index(copied, monkeypatch):
    drawn = []
    monkeypatch.setattr(saved_map, "atlas", lambda *args, **options: (drawn.append(args), atlas(*args, **options))[1])
    steps = []
    result, again = (saved_map.mapped(copied, lambda *step: steps.append(step)) for _ in range(2))
    assert len(drawn) == 1
    assert steps == sorted(steps)
    for name in saved_map.ARRAYS:
        assert np.array_equal(getattr(result, name), getattr(again, name))
    assert (result.clusters, result.layers, result.made_with) == (again.clusters, again.layers, again.made_with)
    path = saved_map.map_path(copied)
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content[:300] + b"\0" * 99 + content[399:]):
        path.write_bytes(damaged)
        assert saved_map.saved_map(copied) is None
    path.write_bytes(content)
    rows = copied.vectors.get("examples")
    copied.vectors.save("examples", [rows.reconstruct_n(0, rows.ntotal)[::-1]])
    assert saved_map.saved_map(copied) is None


@pytest.mark.usefixtures("few_contexts")
def test_a_saved_drawing_is_what_the_page_draws_with_the_labels_of_now(copied):
    result = saved_map.mapped(copied)
    labels = [
        AutomaticLabel(Neuron(0, "ffn", number), "-", "words", text, "token", 0.9, 0.01, significant, {})
        for number, text, significant in ((1, "ships", True), (2, "songs", True), (3, "nothing", False))
    ]
    copied.labels.set_automatic(labels)
    copied.labels.set_manual("L0.ffn.2", 'a "song" \U0001f3b5')
    data = json.loads(saved_map.saved_drawing(copied))
    mine = 'a "song" \U0001f3b5'
    assert data.pop("labels") == {"L0.ffn.1 -": "ships", "L0.ffn.2 +": mine, "L0.ffn.2 -": mine}
    assert data == json.loads(json.dumps(packed(copied, result)))


@pytest.mark.usefixtures("few_contexts")
def test_the_command_prints_what_the_map_has(store, tmp_path):
    done = CliRunner().invoke(main, ["atlas", "--store", str(store.path), "--html", str(tmp_path / "a.html"), "--json"])
    assert done.exit_code == 0, done.output
    document, result = json.loads(done.stdout), atlas(store)
    assert document["sides"] == len(result.sides)
    expected = [(row.size, list(row.tested_words)) for row in result.clusters]
    assert [(row["size"], row["strongest"]) for row in document["clusters"]] == expected
    assert document["layers"][0]["clarity"] == pytest.approx(result.layers[0].clarity)
    assert (tmp_path / "a.html").read_text() == atlas_page(store, result)
    printed = CliRunner().invoke(main, ["atlas", "--store", str(store.path)])
    assert (printed.exit_code, "L0.ffn" in printed.stdout) == (0, True)


def test_an_index_without_vectors_of_sentences_has_no_map(store, tmp_path):
    path = tmp_path / "c.db"
    path.write_bytes(store.path.read_bytes())
    with open_store(path) as copy, pytest.raises(StoreError):
        copy.refill("sentence_vectors", [])
        atlas(copy)
