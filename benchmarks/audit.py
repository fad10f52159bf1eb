"""Does an audit claim the cause of failures? Beginnings of articles of two topics, of which one fails, as a CSV table.

The index has 1,000 summaries (`icebear index --limit 1000 --store wiki.db`), and the prompts are from other articles:
their first sentences without the last word (of half of these articles: the measure of work was chosen on the others). A
cluster is of a topic if its examples are from articles of the topic at
least three times as often as all examples; how many of all clusters are is the control.

    python benchmarks/audit.py wiki.db --out audit.csv
"""

from __future__ import annotations

import argparse
import csv
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import numpy as np

from icebear import Store, load_model, open_store, read_corpus
from icebear.actmax.atlas import audit as audits
from icebear.actmax.atlas.atlas import Atlas, atlas
from icebear.actmax.atlas.audit import Audit, audit
from icebear.concepts.answers.cases import Case
from icebear.evaluation.data.topics import CONCEPTS
from icebear.values import stable_hash

SEEDS = 10
SHUFFLES = 20
"""Of the labels of each seed's prompts."""
PROMPTS = 24
"""Of each topic."""
MOST_WORDS = 30
RATIO = 3
NAMES = {
    "fails": "one topic fails, the other does not",
    "mostly": "one topic fails in four of five prompts, the other in one of five",
    "shuffled": "the labels of the first row shuffled",
    "alone": "one topic alone, beside random neurons",
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

    def compute(model, cluster, cases, weights, on_progress):
        for case in cases:
            if case.prompt not in known:
                known[case.prompt] = shares_of(model, cluster, [case], [1.0], on_progress)
        rows = [known[case.prompt] for case in cases]
        sides = sum(weight * side for weight, (_, side) in zip(weights, rows, strict=True))
        return np.concatenate([share for share, _ in rows]), sides

    return compute


def row_of(name: str, audited: Iterable[tuple[Audit, np.ndarray]]) -> list[object]:
    """Return a row of the table, of audits with the ratio (C,) of the topic that fails."""
    claims, right, chance, counts = [], [], [], []
    for result, ratio in audited:
        above = [row.cluster for row in result.claimed if row.score > 0]
        claims.append(bool(result.claimed))
        counts.append(len(above))
        right.append([bool(ratio[number] >= RATIO) for number in above])
        chance.append(np.mean([ratio[row.cluster] >= RATIO for row in result.clusters]))
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


def cached_atlas(store: Store) -> Atlas:
    path = Path(tempfile.gettempdir()) / f"atlas-{store.path.stem}.pickle"
    if not path.exists():
        path.write_bytes(pickle.dumps(atlas(store)))
    return pickle.loads(path.read_bytes())


def main(path: str, out: str) -> None:
    model, first = load_model("smollm2-135m"), first_sentences()
    rows: dict[str, list] = {name: [] for name in ("fails", "mostly", "shuffled", "alone")}
    audits.shares_of = remembering(audits.shares_of)
    with open_store(path) as store:
        mapped = cached_atlas(store)
        titles = {title for (title,) in store.database.execute("SELECT title FROM sentences")}
        prompts, of_topic = prompts_of(first, titles), ratios(store, mapped, first)
        print({name: len(texts) for name, texts in prompts.items()})
        for seed in range(SEEDS):
            generator = np.random.default_rng(seed)
            wrong, right = generator.permutation(list(CONCEPTS))[:2].tolist()
            cases = [Case(text) for name in (wrong, right) for text in generator.permutation(prompts[name])[:PROMPTS]]
            ratio = of_topic[wrong]

            def audited(fails: np.ndarray, cases=cases, seed=seed) -> Audit:
                groups = ([case for case, value in zip(cases, fails, strict=True) if value is x] for x in (True, False))
                return audit(model, store, mapped, *groups, seed)

            fails = np.arange(2 * PROMPTS) < PROMPTS
            rows["fails"].append((audited(fails.tolist()), ratio))
            mixed = generator.random(2 * PROMPTS) < np.where(fails, 0.8, 0.2)
            rows["mostly"].append((audited(mixed.tolist()), ratio))
            rows["shuffled"] += [(audited(generator.permutation(fails).tolist()), ratio) for _ in range(SHUFFLES)]
            rows["alone"].append((audit(model, store, mapped, cases[:PROMPTS], (), seed), ratio))
            print(seed, wrong, right, *(len(parts[-1][0].claimed) for parts in rows.values() if parts), flush=True)
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
