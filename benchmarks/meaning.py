"""Does a search by meaning find neurons that no word finds? Sixty texts whose words no sentence of the index has.

The index has 4,000 summaries and vectors of its examples by the encoder (`icebear index --limit 4000 --store wiki.db`).
Half of the articles of each topic are searched; a side of a neuron is of a topic if its examples in the other half are
of the topic more often than by chance (p < 1e-4, at least five examples). Then the halves change places.

    python -m benchmarks.meaning wiki.db
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import binom
from torch.nn import functional as F

from benchmarks.search import first_sentences, folds
from benchmarks.topics import CONCEPTS
from icebear import Model, Store, load_encoder, load_model, open_store
from icebear.db.search import _by_output
from icebear.db.terms import query_of, words_of
from icebear.db.vectors import unit

TEXTS = {
    "music": "strumming banjos; choirboys; serenade; fiddlers; headliner gig",
    "sport": "goalkeeping; referee whistles; sprinters; dribbling; penalty shootout",
    "animals": "critters; hatchlings; slithering; cubs; songbird",
    "medicine": "ailment; painkillers; bedridden; pharmacist; convalescence",
    "war": "skirmish; gunfire; warfighting; bayonets; ambushes",
    "film": "blockbusters; cinematographer; moviegoers; sequels; thespian",
    "religion": "worshippers; clergymen; chapels; sermons; rabbis",
    "chemistry": "catalysts; beaker; distillation; nitrates; litmus",
    "politics": "lawmakers; incumbents; voters; campaigners; referendum turnout",
    "literature": "sonnets; wordsmith; bestsellers; bookshop; fairytales",
    "astronomy": "stargazing; meteors; planetarium; starlight; moonbeams",
    "computing": "hackers; coders; compilers; cyberspace; downloading",
}
"""Written before any result was seen: the first five of a list whose words no sentence has."""
TOP = 10


class Halves:
    """The examples of each side, by the half of the articles that they are from."""

    def __init__(self, store: Store) -> None:
        rows, self.sides = store.example_tables.columns(), 2 * store.neurons.count_without_heads()
        rows = rows[rows.key < self.sides]
        self.ids, self.rows = store.sentences.vectors(table="embeddings")
        order = np.argsort(self.ids)
        self.ids, self.rows = self.ids[order], self.rows[order].astype(np.float32)
        titles, fold, first = dict(store.database.execute("SELECT id, title FROM sentences")), folds(store), {}
        first = first_sentences(store)
        self.fold = np.array([fold[titles[identity]] for identity in self.ids.tolist()])
        self.of_topic = {
            name: np.array([bool(first[titles[identity]] & set(words.split())) for identity in self.ids.tolist()])
            for name, words in CONCEPTS.items()
        }
        self.key, self.sentence = rows.key, np.searchsorted(self.ids, rows.sentence)

    def of(self, half: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = self.fold[self.sentence] == half
        return self.key[chosen], self.sentence[chosen]

    def means(self, half: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean vectors (sides, D) of the examples in a half, and their numbers."""
        key, sentence = self.of(half)
        starts = np.searchsorted(key, np.arange(self.sides + 1))
        parts = (torch.from_numpy(part.copy()) for part in (sentence, rows, starts[:-1]))
        inside, weight, offsets = parts
        return F.embedding_bag(inside, weight, offsets, mode="mean").numpy(), np.diff(starts)

    def relevant(self, half: int) -> dict[str, np.ndarray]:
        """Return the sides (sides,) that are of each topic by the examples in a half."""
        key, sentence = self.of(half)
        totals = np.bincount(key, minlength=self.sides)
        result = {}
        for name, of_topic in self.of_topic.items():
            have = np.bincount(key[of_topic[sentence]], minlength=self.sides)
            chance = binom.sf(have - 1, np.maximum(totals, 1), of_topic[self.fold == half].mean())
            result[name] = (chance < 1e-4) & (totals >= 5)
        return result


def main(path: str) -> None:
    texts = [(name, text.strip()) for name, several in TEXTS.items() for text in several.split(";")]
    with open_store(path) as store:
        assert not any(store.sentences.count(query_of(words_of(text))) for _, text in texts)
        print(f"The index holds {store.sample}: {store.count('sentences'):,} sentences.\n")
        halves, model, encoder = Halves(store), load_model("smollm2-135m"), load_encoder()
        own = dict(zip(*store.sentences.vectors(), strict=True))
        own_rows = np.array([own[identity] for identity in halves.ids.tolist()], dtype=np.float32)
        sources = {
            "the encoder": (halves.rows, lambda text: encoder.vector(text), False),
            "the model's own means": (own_rows, lambda text: own_vector(model, text), True),
        }
        print(
            "| scored by | reciprocal rank of the first neuron of the topic | of the first ten, of the topic | "
            "most frequent neuron, of 60 lists |\n| --- | --- | --- | --- |"
        )
        for name, (rows, encode, scaled) in sources.items():
            center, spread = rows.mean(0), rows.std(0).clip(1e-6) if scaled else 1.0
            rows = (rows - center) / spread
            queries = [unit((encode(text) - center)[None] / spread)[0] for _, text in texts]
            show(name, halves, texts, by_means(halves, rows, queries, scale=True))
            show(f"{name}, cosine of the mean", halves, texts, by_means(halves, rows, queries, scale=False))
            neighbors(name, halves, rows)
        outputs = [_by_output(store, words_of(text))[: halves.sides] for _, text in texts]
        show("words alone (outputs)", halves, texts, lambda half: outputs)
        drawn = np.random.default_rng(0)
        show("random", halves, texts, lambda half: [drawn.random(halves.sides) for _ in texts])


def own_vector(model: Model, text: str) -> np.ndarray:
    """Return the vector that a scan would give a text: the mean of the residual stream over all but the first token."""
    with torch.no_grad():
        stream = model.final_stream(model.read([model.token_ids(text)]))[0].float()
    return stream[min(1, len(stream) - 1) :].mean(0).numpy()


def by_means(halves: Halves, rows: np.ndarray, queries: list[np.ndarray], scale: bool) -> Callable:
    def scores(half: int) -> list[np.ndarray]:
        means, counts = halves.means(half, rows)
        means = means * np.sqrt(counts)[:, None] if scale else unit(means)
        return [np.where(counts > 0, means @ query, -np.inf) for query in queries]

    return scores


def show(name: str, halves: Halves, texts: list[tuple[str, str]], scores: Callable) -> None:
    ranks, shares, lists = [], [], []
    for half in (0, 1):
        relevant = halves.relevant(1 - half)
        for (topic, _), values in zip(texts, scores(half), strict=True):
            order = np.argsort(-values, kind="stable")
            of_topic = relevant[topic][order]
            ranks.append(1 / (1 + int(of_topic.argmax())) if of_topic.any() else 0.0)
            shares.append(of_topic[:TOP].mean())
            lists.append(order[:TOP])
    often = np.bincount(np.concatenate(lists)).max() / 2
    print(f"| {name} | {np.mean(ranks):.2f} | {np.mean(shares):.0%} | {often:.0f} |", flush=True)


def neighbors(name: str, halves: Halves, rows: np.ndarray) -> None:
    """Print the median cosine of 200 random sides with their nearest side, and with a random one."""
    key, starts = halves.key, np.searchsorted(halves.key, np.arange(halves.sides + 1))
    parts = (torch.from_numpy(part.copy()) for part in (halves.sentence, rows, starts[:-1]))
    inside, weight, offsets = parts
    means = unit(F.embedding_bag(inside, weight, offsets, mode="mean").numpy())[np.unique(key)]
    drawn = np.random.default_rng(0).choice(len(means), 200, replace=False)
    cosines = means[drawn] @ means.T
    cosines[np.arange(200), drawn] = -1
    nearest, random = np.median(cosines.max(1)), np.median(cosines)
    print(f"{name}: cosine with the nearest side {nearest:.2f}, with a random one {random:.2f}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
