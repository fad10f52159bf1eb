"""The audit of prompts: shares are those of a slow sum, planted causes are claimed, and none is claimed by chance."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from planted import CODES, COMMON, TOPICS, bare

from benchmarks import audit as benchmark
from icebear import attribute, build_index, open_store, read_corpus
from icebear.actmax.atlas import audit as audits
from icebear.actmax.atlas.atlas import Atlas
from icebear.actmax.atlas.audit import audit, clusters_of, differences, random_shares, read_groups, shares_of
from icebear.actmax.atlas.clusters import Cluster
from icebear.app.cli.main import main
from icebear.app.cli.options import ModelOptions
from icebear.concepts.attribution.cases import Case
from icebear.errors import InputError, StoreError

OF_TOPIC = 20
"""The neurons that read the words of a topic; at + they are a cluster."""


def planted():
    made = bare()
    with torch.no_grad():
        block, words = made.net.transformer.h[0], made.net.transformer.wte.weight
        made.net.transformer.wpe.weight.zero_()
        words[:, 5:8] = 0
        for number, topic in enumerate(TOPICS.values()):
            neurons = slice(number * OF_TOPIC, (number + 1) * OF_TOPIC)
            words[[CODES[word] for word in topic], 5 + number] = 20
            block.mlp.c_fc.weight[5 + number, neurons] += 1
    return made


def prompts(topic, count, seed=0):
    generator = np.random.default_rng(seed)
    return [Case(" ".join([*generator.choice(COMMON, 4), generator.choice(TOPICS[topic])])) for _ in range(count)]


def atlas_of(store, labels):
    sides = np.unique(store.example_tables.columns().key)
    sides = sides[sides < 2 * store.neurons.count_without_heads()]
    cluster = np.array([labels[side] for side in sides.tolist()])
    rows = [
        Cluster(int((cluster == n).sum()), ("a", "b")[: n % 2], 1.0, 0.5, ("a", "b")) for n in range(max(labels) + 1)
    ]
    empty = np.zeros(len(sides))
    return Atlas(sides, np.zeros((len(sides), 2)), cluster, empty, tuple(rows), (), {**store.made_with(), "seed": 0})


@pytest.fixture(scope="module")
def of_topics():
    return planted()


@pytest.fixture(scope="module")
def store(of_topics, tmp_path_factory):
    folder, generator = tmp_path_factory.mktemp("audit"), np.random.default_rng(0)
    lines = [
        " ".join([*generator.choice(COMMON, 4), *generator.choice(words, 3)])
        for words in TOPICS.values()
        for _ in range(20)
    ]
    (folder / "c.txt").write_text(".\n".join(lines))
    with open_store(folder / "c.db", create=True) as opened:
        build_index(of_topics, read_corpus(str(folder / "c.txt")), opened, k=4)
    with open_store(folder / "c.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def atlas(store):
    """Clusters 0 to 2: the neurons of a topic at +; 3 to 5: random neurons at -; the other sides have none."""
    generator, count = np.random.default_rng(0), 2 * store.neurons.count_without_heads()
    labels = generator.integers(-1, 6, count)
    labels = np.where(labels < 3, -1, labels)
    labels[: 6 * OF_TOPIC : 2] = np.repeat([0, 1, 2], OF_TOPIC)
    return atlas_of(store, labels)


def test_shares_are_those_of_the_ranked_nodes(model, tmp_path):
    """The slow way: node by node, in three layers."""
    (tmp_path / "c.txt").write_text("the ice bear eats.\nwarm sand and water.\na camel lives in snow.")
    generator, weights = np.random.default_rng(0), np.array([0.5, 0.25, -1])
    with open_store(tmp_path / "c.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "c.txt")), store, k=2)
        atlas = atlas_of(store, generator.integers(-1, 6, 2 * store.neurons.count_without_heads()))
        cluster = clusters_of(model, store, atlas)
        cases = [Case("the bear"), Case("sand and"), Case("snow", "c", "w")]
        shares, sides = shares_of(model, cluster, cases, weights)
        label = dict(zip(atlas.sides.tolist(), atlas.cluster.tolist(), strict=True))
        expected, of_sides = np.zeros((3, 6)), np.zeros(cluster.shape)
        for row, case in enumerate(cases):
            nodes = attribute(model, **vars(case), sites=("ffn",)).top(10**6, position="all")
            total = sum(node.relevance for node in nodes)
            for node in nodes:
                minus, share = int(node.activation < 0), node.relevance / total
                of_sides[minus, node.neuron.layer, node.neuron.index] += weights[row] * share
                number = label.get(2 * store.neurons.id(node.neuron) + minus, -1)
                if number >= 0:
                    expected[row, number] += share
    assert len({*np.nonzero(of_sides)[1].tolist()}) == 3
    assert shares == pytest.approx(expected, abs=1e-6)
    assert sides == pytest.approx(of_sides, abs=1e-6)


def test_differences_are_in_standard_deviations_within_the_groups():
    generator = np.random.default_rng(0)
    shares, group = generator.random((11, 5)), np.array([generator.permutation(11) < 4 for _ in range(3)])
    shares[:, 3] = 0.25
    for row, result in zip(group, differences(shares, group), strict=True):
        left, right = shares[row], shares[~row]
        pooled = np.sqrt((3 * left.var(0, ddof=1) + 6 * right.var(0, ddof=1)) / 9)
        pooled[3] = 1
        assert result == pytest.approx((left.mean(0) - right.mean(0)) / pooled, abs=1e-9)
        assert result[3] == 0


def test_random_sides_are_of_the_same_layers(monkeypatch):
    """Layers of which all sides have the same value leave every draw its sums; sides that are not on the map have no
    part in it."""
    monkeypatch.setattr(audits, "PERMUTATIONS", 20)
    generator = np.random.default_rng(0)
    cluster = generator.integers(-2, 4, (2, 3, 30))
    by_layer = np.broadcast_to(np.array([1.0, 10, 100])[:, None], cluster.shape)
    sides = np.where(cluster == -2, 1e9, by_layer)
    expected = [by_layer[cluster == number].sum() for number in range(4)]
    assert random_shares(sides, cluster, generator) == pytest.approx(np.tile(expected, (21, 1)))
    drawn = random_shares(np.where(cluster == 1, 1.0, 0), cluster, generator)
    assert drawn[0].tolist() == [0, (cluster == 1).sum(), 0, 0]
    assert drawn[1:, 1].max() < drawn[0, 1]
    assert len({tuple(row) for row in drawn.tolist()}) > 15


def test_the_cause_of_a_failure_is_claimed_and_none_for_shuffled_prompts(of_topics, store, atlas):
    claims = []
    for seed in range(10):
        wrong, right = prompts("song", 8, seed), [*prompts("ship", 4, seed), *prompts("court", 4, seed)]
        result = audit(of_topics, store, atlas, wrong, right)
        above = [row.number for row in result.claimed if row.score > 0]
        assert above == [0]
        assert all(abs(row.score) >= result.threshold for row in result.claimed)
        assert [len(row.examples) for row in result.claimed] == [3] * len(result.claimed)
        for side, example in result.claimed[0].examples:
            assert any(word in example.sentence.text for word in TOPICS["song"]), side
        both = np.random.default_rng(seed).permutation(len(wrong) + len(right))
        shuffled = [[*wrong, *right][number] for number in both]
        for start in (0, 4):
            rows = shuffled[start : start + 8], [*shuffled[:start], *shuffled[start + 8 :]]
            claims.append(bool(audit(of_topics, store, atlas, *rows).claimed))
    assert sum(claims) <= 3  # of 20 at 5 %: more by chance in 1.6 % of cases


def test_one_group_is_compared_with_random_neurons(of_topics, store, atlas):
    result = audit(of_topics, store, atlas, prompts("song", 6))
    assert [row.number for row in result.claimed] == [0]
    row = result.claimed[0]
    assert row.share > 2 * row.compared
    assert (result.others, row.cluster.name, row.cluster.tested_words) == (0, "", ("a", "b"))


@pytest.mark.release
@pytest.mark.parametrize("others", [0, 9])
def test_none_is_claimed_by_chance_in_nineteen_of_twenty(of_topics, store, atlas, others, monkeypatch):
    monkeypatch.setattr(audits, "PERMUTATIONS", 199)
    cluster, claims = clusters_of(of_topics, store, atlas), []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        shares, sides = generator.exponential(1, (9 + others, 6)) ** 2, generator.exponential(1, cluster.shape) ** 2
        monkeypatch.setattr(audits, "shares_of", lambda *_, drawn=(shares, sides): drawn)
        result = audit(of_topics, store, atlas, [Case("a")] * 9, [Case("b")] * others)
        claims.append(bool(result.claimed))
    assert 0 < sum(claims) <= 18  # of 200 at 5 %: more in 0.6 % of cases


def test_the_benchmark_remembers_shares_and_draws_members_of_the_same_layers(of_topics, store, atlas):
    cluster, cases, weights = clusters_of(of_topics, store, atlas), prompts("song", 3), np.array([0.5, 0.5, -1])
    compute = benchmark.remembering(shares_of)
    for _ in range(2):
        for result, expected in zip(
            compute(of_topics, cluster, cases, weights), shares_of(of_topics, cluster, cases, weights), strict=True
        ):
            assert result == pytest.approx(expected, abs=1e-6)
    drawn = benchmark.shuffled_members(store, atlas, np.random.default_rng(0))
    is_ffn = np.array([store.neurons.columns()["site"][side // 2] == "ffn" for side in atlas.sides.tolist()])
    assert (drawn.cluster != atlas.cluster).any()
    assert np.array_equal(np.sort(drawn.cluster[is_ffn]), np.sort(atlas.cluster[is_ffn]))


# --- what is audited ---


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_groups_are_read_from_files(tmp_path, monkeypatch):
    monkeypatch.setattr(audits, "FEWEST_PROMPTS", 1)
    (tmp_path / "a.txt").write_text("the ice bear \n\n  the camel\n")
    rows = write(tmp_path / "b.jsonl", {"prompt": "p", "target": " t"}, {"prompt": "q", "contrast": "c"})
    labelled = write(tmp_path / "c", {"prompt": "p", "right": True}, {"prompt": "q", "right": False})
    assert read_groups(tmp_path / "a.txt") == ([Case("the ice bear"), Case("the camel")], [])
    assert read_groups(rows, tmp_path / "a.txt") == (
        [Case("p", " t"), Case("q", None, "c")],
        [Case("the ice bear"), Case("the camel")],
    )
    assert read_groups(labelled) == ([Case("q")], [Case("p")])
    with pytest.raises(InputError):
        read_groups(labelled, rows)
    for row in ({"prompt": "p"}, *({"prompt": "p", "right": value} for value in (1, "yes", True))):
        with pytest.raises(InputError):
            read_groups(write(tmp_path / "d", {"prompt": "p", "right": True}, row))
    monkeypatch.setattr(audits, "FEWEST_PROMPTS", 3)
    with pytest.raises(InputError):
        read_groups(rows, tmp_path / "a.txt")
    with pytest.raises(InputError, match="right"):  # of the second file, two groups are no group
        read_groups(rows, labelled)


def test_what_cannot_be_audited_is_refused(of_topics, store, atlas):
    four = prompts("song", 4)
    for groups in ((four, four[:3]), (four[:3], four), ([], four), ([], []), ([Case("a", counterfactual="b")],)):
        with pytest.raises(InputError):
            audit(of_topics, store, atlas, *groups)
    with pytest.raises(StoreError):
        audit(of_topics, store, atlas_of(store, np.full(2 * store.neurons.count_without_heads(), -1)), four)
    with pytest.raises(StoreError):
        audit(bare(), store, atlas, four)


@pytest.mark.parametrize("topic", ["ship", "song"])
def test_the_command_prints_the_audit(of_topics, store, atlas, topic, tmp_path, monkeypatch):
    """Of different prompts a claim, and of equal ones a sentence."""
    monkeypatch.setattr("icebear.actmax.atlas.saved_map.mapped", lambda store: atlas)
    monkeypatch.setattr(ModelOptions, "load", lambda *_: of_topics)
    write(tmp_path / "a.jsonl", *({"prompt": case.prompt} for case in prompts("song", 6)))
    (tmp_path / "b.txt").write_text("\n".join(case.prompt for case in prompts(topic, 6)))
    words = ["atlas", "--store", str(store.path), "--prompts", str(tmp_path / "a.jsonl")]
    words += ["--against", str(tmp_path / "b.txt")]
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    result = audit(of_topics, store, atlas, prompts("song", 6), prompts(topic, 6))
    assert [row["score"] for row in document["clusters"]] == pytest.approx([row.score for row in result.clusters])
    tested = [list(row.cluster.tested_words) for row in result.clusters]
    assert [row["cluster"]["strongest"] for row in document["clusters"]] == tested
    assert (document["prompts"], document["others"], document["model"]["name"]) == (6, 6, "planted")
    assert bool(result.claimed) is (topic == "ship")
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert ("«" in shown.stdout) is bool(result.claimed)
    assert f"{result.threshold:.1f}" in shown.stdout
    alone = CliRunner().invoke(main, ["atlas", "--store", str(store.path), "--against", str(tmp_path / "b.txt")])
    assert alone.exit_code == 2
