"""Two models compared by their sentences: neurons that were exchanged have moved, and no other."""

import json
import re
from base64 import b64decode

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from planted import TOPICS, bare

from icebear import Encoder, Neuron, build_index, embed_examples, open_store, read_corpus
from icebear.actmax.atlas import compare as comparing
from icebear.actmax.atlas.atlas import atlas
from icebear.actmax.atlas.compare import compare_indexes
from icebear.app.cli.main import main
from icebear.db.vectors import unit
from icebear.errors import StoreError
from icebear.values import stable_hash

EXCHANGED = 3, 7


class Counts(Encoder):
    """How often a text has words of each topic, beside noise."""

    def vector(self, text):
        noise = np.random.default_rng(stable_hash(text)).standard_normal(40) / 9
        return np.array([*(text.count(topic) for topic in TOPICS), *noise], dtype=np.float32)


def indexed(path, model, corpus, k=6):
    with open_store(path, create=True) as opened:
        build_index(model, corpus, opened, k=k)
        embed_examples(opened, Counts("counts", "1", None, None))
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Indexes of a model, of a copy in which two neurons changed places, and of the model with other texts."""
    folder, generator = tmp_path_factory.mktemp("compare"), np.random.default_rng(0)
    texts = [f"the {' '.join(generator.choice(topic, 5))}." for _ in range(30) for topic in TOPICS.values()]
    (folder / "c.txt").write_text("\n".join(texts))
    (folder / "d.txt").write_text("\n".join(texts[:-1]))
    models = bare(), bare()
    with torch.no_grad():
        for neuron, topic in zip(EXCHANGED, ("song", "ship"), strict=True):
            for model in models:
                embeddings = model.net.transformer.wte.weight[[model.ids(word)[0] for word in TOPICS[topic]]]
                model.net.transformer.h[0].mlp.c_fc.weight[:, neuron] = embeddings.mean(0)
        block = models[1].net.transformer.h[0].mlp.c_fc
        block.weight[:, EXCHANGED] = block.weight[:, EXCHANGED[::-1]].clone()
        block.bias[list(EXCHANGED)] = block.bias[list(EXCHANGED[::-1])].clone()
    corpus = read_corpus(str(folder / "c.txt"))
    return (
        indexed(folder / "before.db", models[0], corpus),
        indexed(folder / "after.db", models[1], corpus),
        indexed(folder / "other.db", models[0], read_corpus(str(folder / "d.txt"))),
    )


def test_exchanged_neurons_move_and_no_other_does(paths):
    with open_store(paths[0]) as before, open_store(paths[1]) as after:
        result, back = compare_indexes(before, after), compare_indexes(after, before)
        itself = compare_indexes(before, before)
    ids = result.sides // 2
    moved = np.isin(ids, EXCHANGED)
    assert result.moved[~moved].tolist() == [0] * (~moved).sum()
    assert result.exchanged[~moved].tolist() == [0] * (~moved).sum()
    assert {*ids[result.order[: moved.sum()]].tolist()} == {*EXCHANGED}
    assert result.moved[moved].max() > 0.5 > result.least
    assert back.moved == pytest.approx(result.moved, abs=1e-5)
    assert not itself.moved.any()
    assert not itself.exchanged.any()


def test_moved_is_the_distance_of_means_less_that_of_random_signs(paths):
    with open_store(paths[0]) as before, open_store(paths[1]) as after:
        result, side = compare_indexes(before, after), 2 * EXCHANGED[0]
        neuron = Neuron(0, "ffn", EXCHANGED[0])
        ids = [{e.sentence.id for e in store.examples(neuron, "+")} for store in (before, after)]
        known, vectors = before.sentence_vectors(sorted(ids[0] | ids[1]))
        rows = dict(zip(known.tolist(), unit(before.vectors.standardized(vectors.astype(np.float32))), strict=True))
    number = result.sides.tolist().index(side)
    means = [np.mean([rows[i] for i in sorted(members)], 0) for members in ids]
    weights = [(i in ids[0]) / len(ids[0]) - (i in ids[1]) / len(ids[1]) for i in sorted(ids[0] | ids[1])]
    expected = ((means[0] - means[1]) ** 2).sum() - np.square(weights).sum()
    assert result.moved[number] == pytest.approx(expected, abs=1e-4)
    assert result.exchanged[number] == pytest.approx(len(ids[0] - ids[1]) / len(ids[0]))


def test_by_chance_no_side_moves_on_average():
    """Sentences that are exchanged for others of the same meaning."""
    from scipy.sparse import csr_matrix

    generator = np.random.default_rng(0)
    meanings = unit(generator.standard_normal((400, 24)))
    indices = np.stack([generator.choice(400, 16, replace=False) for _ in range(3000)])
    signs = np.tile(np.repeat([1 / 8, -1 / 8], 8), 3000)
    differences = csr_matrix((signs, indices.ravel(), np.arange(3001) * 16), (3000, 400))
    moved, by_chance = comparing._moved(differences, meanings, generator)
    assert moved.mean() == pytest.approx(0, abs=4 * moved.std() / 3000**0.5)
    assert (moved > np.percentile(by_chance, 95)).mean() == pytest.approx(0.05, abs=0.02)


def test_indexes_that_cannot_be_compared_are_refused(paths, tmp_path):
    plain = tmp_path / "plain.db"
    corpus = read_corpus(str(paths[0].with_name("c.txt")))
    with open_store(plain, create=True) as opened:
        build_index(bare(), corpus, opened, k=6)
    for other in (paths[2], plain):
        with open_store(paths[0]) as before, open_store(other) as after, pytest.raises(StoreError):
            compare_indexes(before, after)


def test_the_command_lists_what_moved(paths, tmp_path):
    command = ["atlas", "--store", str(paths[0]), "--compare", str(paths[1])]
    done = CliRunner().invoke(main, [*command, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    with open_store(paths[0]) as before, open_store(paths[1]) as after:
        result = compare_indexes(before, after)
    first = result.order[: len(document["sides"])]
    assert [row["moved"] for row in document["sides"]] == pytest.approx(result.moved[first].tolist())
    assert [row["exchanged"] for row in document["sides"]] == pytest.approx(result.exchanged[first].tolist())
    assert {row["neuron"] for row in document["sides"]} == {f"L0.ffn.{neuron}" for neuron in EXCHANGED}
    assert document["moved"] == (result.moved > result.least).sum() > document["moved_by_chance"]
    printed = CliRunner().invoke(main, [*command, "--html", str(tmp_path / "a.html")])
    assert (printed.exit_code, f"L0.ffn.{EXCHANGED[0]}" in printed.stdout) == (0, True)
    page = re.search(r'"exchanged": \["u2", "(.*?)"\]', (tmp_path / "a.html").read_text())[1]
    with open_store(paths[0]) as before:
        sides = atlas(before).sides
    shown = dict(zip(sides.tolist(), np.frombuffer(b64decode(page), "<u2") / 65535, strict=True))
    assert [shown[side] for side in result.sides.tolist()] == pytest.approx(result.exchanged.tolist(), abs=1e-4)
