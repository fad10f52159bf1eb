"""Sentences that are read for one neuron, beside those of an index."""

from contextlib import contextmanager

import pytest

from icebear import build_index, more_examples, open_store, read_corpus
from icebear.errors import InputError, StoreError

K = 3
TEXTS = [f"{first} {second} {third}" for first in "abcd" for second in ("cat", "dog") for third in ("sat", "ran")]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "c.txt"
    path.write_text("\n".join(TEXTS))
    return path


@contextmanager
def index(model, file, folder, limit):
    with open_store(folder / f"{limit}.db", create=True) as store:
        build_index(model, read_corpus(str(file), limit=limit), store, k=K)
        yield store


def rows(examples):
    return [(round(row.activation, 4), row.token, row.sentence.id, row.sentence.tokens) for row in examples]


@pytest.mark.parametrize("neuron", ["L0.ffn.3", "L2.ffn.11", "L1.head.1"])
def test_a_smaller_index_and_the_rest_are_the_larger_index(model, file, tmp_path, neuron):
    """The strongest sentences of both together are those of an index of all documents, with the same tokens."""
    with index(model, file, tmp_path, 5) as small, index(model, file, tmp_path, None) as large:
        more = more_examples(model, small, neuron, len(TEXTS) - 5, K)
        assert more.sentences == len(TEXTS) - 5
        assert more.examples.keys() == ({"+"} if "head" in neuron else {"+", "-"})
        for side, examples in more.examples.items():
            sign = 1 if side == "+" else -1
            both = sorted((*rows(small.examples(neuron, side)), *rows(examples)), key=lambda row: -sign * row[0])
            expected = rows(large.examples(neuron, side))
            if "head" in neuron:  # one example of each token
                written = [row[3][row[1]] for row in both]
                both = [row for number, row in enumerate(both) if written[number] not in written[:number]]
            assert [row[0] for row in both[:K]] == pytest.approx([row[0] for row in expected], abs=1e-4)
            assert {row for row in expected if row[2] in {x[2] for x in both}} <= set(both)


def test_reading_goes_on(model, file, tmp_path):
    with index(model, file, tmp_path, 5) as store:
        at_once = more_examples(model, store, "L1.ffn.2", 8, K)
        begun = more_examples(model, store, "L1.ffn.2", 3, K)
        steps = more_examples(model, store, "L1.ffn.2", 5, K, begun)
        assert (begun.sentences, steps.sentences) == (3, 8)
        assert {side: rows(x) for side, x in steps.examples.items()} == {
            side: rows(x) for side, x in at_once.examples.items()
        }


def test_what_the_index_shows_is_not_read_again(model, file, tmp_path):
    """Where all documents were scanned, the others of its sentences are read."""
    with index(model, file, tmp_path, None) as store:
        kept = {row.sentence.id for side in "+-" for row in store.examples("L1.ffn.2", side)}
        more = more_examples(model, store, "L1.ffn.2", 100, 100)
        assert more.sentences == len(TEXTS) - len(kept)
        assert not kept & {row.sentence.id for side in more.examples.values() for row in side}


def test_another_corpus_or_neuron_is_refused(model, file, tmp_path):
    with index(model, file, tmp_path, 5) as store:
        with pytest.raises(InputError):
            more_examples(model, store, "L1.ffn.2", 0)
        with pytest.raises(StoreError):
            more_examples(model, store, "L9.ffn.2")
        file.write_text("other text")
        with pytest.raises(StoreError):
            more_examples(model, store, "L1.ffn.2")
        file.unlink()
        with pytest.raises(InputError):
            more_examples(model, store, "L1.ffn.2")
