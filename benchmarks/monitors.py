"""Monitors on five sets of texts (`monitor_texts.py`): how often they flag texts with and without a concept.

python benchmarks/monitors.py --data FOLDER --out results    # resumes; 40 minutes on two idle cores
python benchmarks/monitors.py --out results --table          # docs/results/monitors.csv of the lines in results

FOLDER has the public sets, as their repositories have them (docs/results.md). Each detector is fitted to the texts that
find the concept, and gets its threshold from the same negatives. Neurons by number are the first by the difference of
means; "own choice" is what `find_concept` chooses.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import monitor_texts
import numpy as np
import pandas

from icebear import load_model
from icebear.models.model import Model
from icebear.steering.concept.detectors import Detector
from icebear.steering.concept.finding import fitted, fitted_controls, parts_of, ranked, standardized, universal
from icebear.steering.concept.reading import neurons_of, read
from icebear.steering.concept.texts import prepared
from icebear.steering.monitor.controls import BAG, BagOfWords, averaged, longer, without_words
from icebear.steering.monitor.monitor import Rate
from icebear.steering.monitor.text_values import text_values, threshold_of

SIZES = (5, 20, 100)
SHIFTS = ("five times longer", "without keywords")


def sets(data: Path | None) -> Iterator[monitor_texts.TextSet]:
    yield monitor_texts.language()
    yield monitor_texts.harm()
    if data:
        yield monitor_texts.bipia(data)
        yield from monitor_texts.ravel(data)
        yield from monitor_texts.axbench(data)


def detectors(model: Model, texts: monitor_texts.TextSet) -> tuple[list[tuple[str, Detector]], BagOfWords]:
    rows, positive, part = prepared(texts.examples, texts.others, 0)
    seen = read(model, rows, neurons_of(model, ("ffn", "attn")))
    choice = fitted(seen, positive, part, 20, 0)
    rank = np.flatnonzero(part == 0)
    x, center, spread = standardized(seen.means, positive, rank)
    excluded = universal(seen.means[rank[~positive[rank]]]) | (spread == 0)
    order, weights = ranked(x[rank], positive[rank], excluded)
    of = [("own choice", choice.parts)]
    of += [(f"{size} neurons", parts_of(seen, order[:size], weights[order[:size]], center, spread)) for size in SIZES]
    of += [(f"residual stream, {vector.fit}", vector) for vector in choice.vectors]
    of += [
        (control.name, control.parts) for control in fitted_controls(seen, positive, part, choice, 0) if control.parts
    ]
    return of, BagOfWords.fit([rows[row] for row in np.flatnonzero(part < 2)], positive[part < 2])


def measured(model: Model, texts: monitor_texts.TextSet) -> list[Rate]:
    of, bag = detectors(model, texts)
    with_it, without = texts.tests["held out"]
    words = bag.keywords()
    removed = without_words(with_it, words), without_words(without, words)
    tests = {**texts.tests, SHIFTS[0]: longer(with_it, without), SHIFTS[1]: removed}
    every = [*texts.negatives, *(text for pair in tests.values() for kind in pair for text in kind)]
    values = [*text_values(model, [detector for _, detector in of], every, texts.unit), bag(every)]
    names, start, rates = [*(name for name, _ in of), BAG], len(texts.negatives), []
    bars = [threshold_of(scores[:start], texts.fpr)[0] for scores in values]
    for kind, (examples, others) in tests.items():
        stop = start + len(examples) + len(others)
        each = [scores[start:stop] for scores in values]
        rates += averaged(kind, list(zip(names, each, bars, strict=True)), len(examples), len(others))
        start = stop
    return rates


def table(out: Path) -> pandas.DataFrame:
    """Means over the concepts of a set, with standard errors."""
    lines = [json.loads(line) for line in (out / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
    frame = pandas.DataFrame(
        [{"set": line["set"], "concept": line["concept"], **rate} for line in lines for rate in line["rates"]]
    )
    groups = frame.groupby(["set", "texts", "detector"], sort=False)
    names = {"true_positive_rate": "true positives", "false_positive_rate": "false positives"}
    result = groups[["auroc", *names]].mean().rename(columns=names)
    result.insert(1, "auroc ±", groups["auroc"].sem())
    result["concepts"] = groups.size()
    return result.reset_index().round(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    path = options.out / "lines.jsonl"
    if options.table:
        print(table(options.out).to_csv(index=False), end="")
        return
    done = {(line["set"], line["concept"]) for line in map(json.loads, path.open())} if path.exists() else set()
    model = load_model()
    for texts in sets(options.data):
        if (texts.name, texts.concept) in done:
            continue
        start = time.process_time()
        rates = [vars(rate) for rate in measured(model, texts)]
        line = {"set": texts.name, "concept": texts.concept, "seconds": time.process_time() - start, "rates": rates}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{texts.name}, {texts.concept}: {line['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
