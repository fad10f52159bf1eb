"""Does a search by words find neurons of what the words are about? Hubs, and sentences that the search did not see.

Half of the articles of each topic are taken out of a copy of the index, which is searched; the neurons that it returns
are judged by their examples in the other half. Then the halves change places.

    icebear index --limit 1000 --store wiki.db
    python -m benchmarks.search wiki.db [--without-encoder]
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.topics import CONCEPTS
from icebear import Model, Store, load_model, open_store
from icebear.actmax.index.neuron_vectors import ensure_vectors
from icebear.actmax.searching import search
from icebear.db.search import _by_output
from icebear.db.terms import query_of, terms, words_of
from icebear.records import POLARITIES
from icebear.values import stable_hash

NOUNS = (
    "water river mountain city king church school book war ship horse dog bird fish tree food bread wine house street "
    "train car football chess money market law doctor disease heart brain child woman sun moon star planet volcano "
    "rain winter gold iron theater film music language computer",
    "man family friend teacher student soldier priest artist poet hospital kitchen window road bridge island forest "
    "garden flower fruit meat milk salt sugar oil coal glass stone wood paper clothes color song dance game ball team "
    "summer night morning wind snow fire blood skin eye hand cat",
)
"""Two sets of 47 nouns of everyday life."""
FIRST, TOP, RANDOM = 5, 10, 2000
OTHER = "another topic's hits"


def main(path: str) -> None:
    model = load_model("smollm2-135m")
    with open_store(path) as store:
        print(f"The index holds {store.sample}: {store.count('sentences'):,} sentences.\n")
        for number, nouns in enumerate(NOUNS, 1):
            hubs(store, nouns.split(), f"nouns {number}")
        with tempfile.TemporaryDirectory() as folder:
            topics(store, [half_of(store, model, Path(folder) / f"{test}.db", test) for test in (0, 1)])


def hubs(store: Store, nouns: list[str], name: str) -> None:
    """Print how often the most frequent neuron is in the top ten of nouns, by sentences and by weights alone."""
    assert len(set(nouns)) == 47, len(set(nouns))
    known = [noun for noun in nouns if store.sentences.count(query_of([noun]))]
    counts: dict[str, Counter] = {"sentences": Counter(), "weights": Counter()}
    empty, lacking = 0, 0
    for noun in nouns:
        for hit in search(store, noun, TOP):
            counts[hit.by][hit.neuron] += 1
            examples = store.examples(hit.neuron, hit.polarity)
            empty += not examples
            has = any(noun in re.findall(r"\w+", example.sentence.text.lower()) for example in examples)
            lacking += hit.by == "sentences" and not has
    both = sum(counts.values(), Counter())
    print(f"{name}: {len(known)} of {len(nouns)} in sentences of the index")
    for by, of in (*counts.items(), ("both", both)):
        (most, times), *_ = of.most_common(1) or [("none", 0)]
        print(f"  by {by}: {of.total()} hits, {len(of)} distinct neurons; the most frequent, {most}, in {times} lists")
    print(f"  without a sentence: {empty}; by sentences without one with the noun: {lacking}\n")


def half_of(store: Store, model: Model, path: Path, test: int) -> Store:
    """Return a copy of the index without the test articles: their sentences, examples and vectors."""
    shutil.copy(store.path, path)
    half = Store(path)
    rows = half.database.execute("SELECT id, title, text FROM sentences").fetchall()
    fold = folds(store)
    if "--without-encoder" in sys.argv:
        half.database.execute("DELETE FROM icebear WHERE name = 'encoder'")
    removed = [(identity,) for identity, title, _ in rows if fold[title] == test]
    deleted = "INSERT INTO sentences_fts (sentences_fts, rowid, text) VALUES ('delete', ?, ?)"
    half.database.conn.executemany(deleted, [(i, terms(text)) for i, title, text in rows if fold[title] == test])
    half.database.execute("PRAGMA foreign_keys = OFF")
    columns = {"examples": "sentence", "sentence_vectors": "sentence", "embeddings": "sentence", "sentences": "id"}
    for table, column in columns.items():
        half.database.conn.executemany(f"DELETE FROM {table} WHERE {column} = ?", removed)
    ensure_vectors(model, half)
    return half


def first_sentences(store: Store) -> dict[str, set[str]]:
    """Return title -> the words of the article's first sentence."""
    first: dict[str, set[str]] = {}
    for title, text in store.database.execute('SELECT title, text FROM sentences ORDER BY title, "start"'):
        first.setdefault(title, set(re.findall(r"[a-z]+", text.lower())))
    return first


def folds(store: Store) -> dict[str, int]:
    """Return title -> 0 or 1: each topic's articles alternate between the halves, in the order of a hash."""
    first = first_sentences(store)

    def key(title: str) -> tuple[list[str], int]:
        own = [name for name, words in CONCEPTS.items() if first[title] & set(words.split())]
        return own, stable_hash(f"half {title}")

    return {title: number % 2 for number, title in enumerate(sorted(first, key=key))}


class Judge:
    """Says which share of a side's test examples are of a topic: of articles whose first sentence has one of its words
    (`topics` of benchmarks/topics.py does the same)."""

    def __init__(self, store: Store, test: int) -> None:
        first, fold = first_sentences(store), folds(store)
        rows = store.database.execute("SELECT id, title FROM sentences")
        tested = {identity: first[title] for identity, title in rows if fold[title] == test}
        words = {name: set(words.split()) for name, words in CONCEPTS.items()}
        self.of = {name: {i for i, have in tested.items() if have & own} for name, own in words.items()}
        rows = store.example_tables.columns()
        rows = rows[np.isin(rows.sentence, list(tested))]
        self.sentences = rows.sentence
        self.bounds = np.searchsorted(rows.key, np.arange(2 * store.count("neurons") + 1))
        known = np.flatnonzero(np.diff(self.bounds))
        self.random = np.random.default_rng(test).choice(known, RANDOM, replace=False).tolist()

    def share(self, sides: Sequence[int], topic: str) -> float:
        """Return the mean share over sides that have test examples."""
        own = [self.sentences[self.bounds[side] : self.bounds[side + 1]].tolist() for side in sides]
        shares = [sum(sentence in self.of[topic] for sentence in one) / len(one) for one in own if one]
        return sum(shares) / len(shares) if shares else 0.0


def first_hits(half: Store, words: str) -> list[int]:
    hits = search(half, words, FIRST)[:FIRST]
    return [2 * half.neurons.id(hit.neuron) + POLARITIES.index(hit.polarity) for hit in hits]


def by_outputs(half: Store, words: str) -> list[int]:
    """Return the sides with the largest z of outputs alone."""
    z = _by_output(half, words_of(words))
    totals = half.example_tables.totals(len(z))
    return [side for side in np.argsort(-z, kind="stable").tolist() if totals[side]][:FIRST]


def topics(store: Store, halves: Sequence[Store]) -> None:
    """Print how many test examples of the first hits are of a topic, beside those of random neurons and of another
    topic's hits. Each half of the articles is searched once and judged once."""
    judges = [Judge(store, test) for test in (0, 1)]
    pairs = list(zip(halves, judges, strict=True))
    names, by_word = list(CONCEPTS), []
    hits = {name: [first_hits(half, words) for half in halves] for name, words in CONCEPTS.items()}
    outputs = {name: [by_outputs(half, words) for half in halves] for name, words in CONCEPTS.items()}
    shares = "first five hits", "random neurons", "ratio", "in each half", OTHER, "by outputs alone"
    columns = "topic", "test sentences", *shares
    print("", *columns, "", sep=" | ")
    print("", *["---"] * len(columns), "", sep=" | ")
    for number, name in enumerate(names):
        random = [judge.share(judge.random, name) for judge in judges]
        own, others, alone = (
            [judge.share(sides, name) for judge, sides in zip(judges, of, strict=True)]
            for of in (hits[name], hits[names[(number + 1) % len(names)]], outputs[name])
        )
        halfs = ", ".join(f"{one / chance:.1f}" if chance else "-" for one, chance in zip(own, random, strict=True))
        count, chance = sum(len(judge.of[name]) for judge in judges), sum(random)
        numbers = f"{sum(own) / 2:.0%}", f"{chance / 2:.1%}", f"{sum(own) / chance:.1f}", halfs
        print("", name, count, *numbers, f"{sum(others) / chance:.1f}", f"{sum(alone) / chance:.1f}", "", sep=" | ")
        for word in CONCEPTS[name].split():
            known = [(half, judge) for half, judge in pairs if half.sentences.count(f'"{word}"') >= 2]
            known = [(half, judge) for half, judge in known if judge.of[name]]
            by_word += [
                judge.share(first_hits(half, word), name) / judge.share(judge.random, name) for half, judge in known
            ]
    above = np.mean(np.array(by_word) >= 3)
    print(
        f"\n{len(by_word)} single words in two sentences or more: median ratio {np.median(by_word):.1f}, "
        f"{above:.0%} at 3 or more"
    )


if __name__ == "__main__":
    main(sys.argv[1])
