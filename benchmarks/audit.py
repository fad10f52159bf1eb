"""Does an audit claim the cause of failures? Beginnings of articles of two topics, of which one fails, as a CSV table.

The index has 1,000 summaries (`icebear index --limit 1000 --store wiki.db`), and the prompts are from other articles:
their first sentences without the last word (of half of these articles: the measure of work was chosen on the others). A
cluster is of a topic if its examples are from articles of the topic at
least three times as often as all examples; how many of all clusters are is the control.

    python -m benchmarks.audit wiki.db --out audit.csv
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

import numpy as np

from benchmarks.topics import CONCEPTS
from icebear import Store, load_model, open_store, read_corpus
from icebear.actmax.atlas import audit as audits
from icebear.actmax.atlas import saved_map
from icebear.actmax.atlas.atlas import Atlas
from icebear.actmax.atlas.audit import Audit, audit
from icebear.concepts.attribution.cases import Case
from icebear.values import stable_hash

SEEDS = 10
SHUFFLES = 20
"""Of the labels of each seed's prompts."""
PROMPTS = 32
"""Of each topic, as many as were enough on the other articles."""
FEWER = 16
MOST_WORDS = 30
RATIO = 3
NAMES = {
    "fails": f"one topic fails, the other does not ({PROMPTS} prompts of each)",
    "fewer": f"the same with {FEWER} prompts of each",
    "mostly": "one topic fails in four of five prompts, the other in one of five",
    "shuffled": "the labels of the first row shuffled",
    "alone": "one topic alone, compared with random neurons",
    "members": "the same, each cluster of random neurons",
}
HEAD = "labels", "audits", "with a claim", "claim of the topic", "clusters claimed, median", "of the topic", "by chance"


def topic_of(sentence: str) -> str | None:
    """Return the topic of which a sentence has words, if it is a single one."""
    words = set(re.findall(r"[a-z]+", sentence.lower()))
    topics = [name for name, known in CONCEPTS.items() if words & set(known.split())]
    return topics[0] if len(topics) == 1 else None


def first_sentences() -> dict[str, str]:
    """Return title -> the first sentence of each article."""
    first: dict[str, str] = {}
    for sentence in read_corpus("wiki-summaries").sentences():
        if sentence.start == 0:
            first.setdefault(sentence.title, sentence.text)
    return first


def prompts_of(first: dict[str, str], indexed: set[str]) -> dict[str, list[str]]:
    """Return topic -> the beginnings of articles that are not in the index."""
    rows: dict[str, list[str]] = {name: [] for name in CONCEPTS}
    for title, sentence in first.items():
        prompt = " ".join(sentence.split()[:-1][:MOST_WORDS])
        topic = topic_of(prompt)
        if title not in indexed and topic and stable_hash(f"audit {title}") % 2:
            rows[topic].append(prompt)
    return rows


def ratios(store: Store, mapped: Atlas, first: dict[str, str]) -> dict[str, np.ndarray]:
    """Return topic -> how many times as often as of all sides the examples of each cluster (C,) are of the topic."""
    rows, titles = store.example_tables.columns(), dict(store.database.execute("SELECT id, title FROM sentences"))
    ids, sentence = np.unique(rows.sentence, return_inverse=True)
    topics = [topic_of(first.get(titles[identity], "")) for identity in ids.tolist()]
    cluster = np.full(rows.key.max() + 1, -1)
    cluster[mapped.sides] = mapped.cluster
    count, result = len(mapped.clusters), {}
    for name in CONCEPTS:
        inside = np.array([topic == name for topic in topics])[sentence]
        label = cluster[rows.key] + 1
        share = np.bincount(label, inside, count + 1) / np.bincount(label, minlength=count + 1).clip(1)
        result[name] = share[1:] / inside.mean()
    return result


def remembering(shares_of: Callable) -> Callable:
    """Return `shares_of` that computes each prompt once."""
    known: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def compute(model, cluster, cases, weights):
        for case in cases:
            if case.prompt not in known:
                known[case.prompt] = shares_of(model, cluster, [case], [1.0])
        rows = [known[case.prompt] for case in cases]
        sides = sum(weight * side for weight, (_, side) in zip(weights, rows, strict=True))
        return np.concatenate([share for share, _ in rows]), sides

    return compute


def row_of(name: str, audited: Iterable[tuple[Audit, np.ndarray]]) -> list[object]:
    """Return a row of the table, of audits with the ratio (C,) of the topic that fails."""
    claims, right, chance, counts = [], [], [], []
    for result, ratio in audited:
        above = [row.number for row in result.claimed if row.score > 0]
        claims.append(bool(result.claimed))
        counts.append(len(above))
        right.append([bool(ratio[number] >= RATIO) for number in above])
        chance.append(np.mean([ratio[row.number] >= RATIO for row in result.clusters]))
    total = sum(counts)
    share = f"{sum(map(sum, right)) / total:.0%}" if total else "-"
    return [
        name,
        len(claims),
        sum(claims),
        sum(map(any, right)),
        f"{median(counts):g}",
        share,
        f"{np.mean(chance):.0%}",
    ]


def shuffled_members(store: Store, mapped: Atlas, generator: np.random.Generator) -> Atlas:
    """Return the atlas with the members of its clusters drawn anew from the same sites and layers."""
    columns, cluster = store.neurons.columns(), mapped.cluster.copy()
    where = np.array([f"{site}{layer}" for site, layer in zip(columns["site"], columns["layer"], strict=True)])
    for name in np.unique(where):
        inside = np.flatnonzero(where[mapped.sides // 2] == name)
        cluster[inside] = generator.permutation(cluster[inside])
    return replace(mapped, cluster=cluster)


def main(path: str, out: str) -> None:
    model, first = load_model("smollm2-135m"), first_sentences()
    rows: dict[str, list] = {name: [] for name in NAMES}
    audits.shares_of = remembering(audits.shares_of)
    with open_store(path) as store:
        mapped = saved_map.mapped(store)
        titles = {title for (title,) in store.database.execute("SELECT title FROM sentences")}
        prompts, of_topic = prompts_of(first, titles), ratios(store, mapped, first)
        for seed in range(SEEDS):
            generator = np.random.default_rng(seed)
            wrong, right = generator.permutation(list(CONCEPTS))[:2].tolist()
            left, other = ([Case(x) for x in generator.permutation(prompts[t])[:PROMPTS]] for t in (wrong, right))
            fails = np.arange(len(left) + len(other)) < len(left)
            mixed = generator.random(len(fails)) < np.where(fails, 0.8, 0.2)

            def audited(name: str, rows_of: list[Case], against: list[Case], on: Atlas = mapped, topic=wrong):
                rows[name].append((audit(model, store, on, rows_of, against), of_topic[topic]))

            def labelled(name: str, labels: np.ndarray, both=(*left, *other), audited=audited):
                audited(name, *([both[at] for at in np.flatnonzero(labels == value)] for value in (True, False)))

            audited("fails", left, other)
            audited("fewer", left[:FEWER], other[:FEWER])
            labelled("mostly", mixed)
            for _ in range(SHUFFLES):
                labelled("shuffled", generator.permutation(fails))
            audited("alone", left, [])
            audited("members", left, [], shuffled_members(store, mapped, generator))
            print(seed, wrong, right, *(len(rows[name][-1][0].claimed) for name in NAMES), flush=True)
    table = [row_of(NAMES[name], audited) for name, audited in rows.items()]
    with open(out, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEAD, *table])
    for row in table:
        print(*row, sep=" | ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    main(options.store, options.out)
