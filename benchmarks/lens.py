"""How well the averaged Jacobian lens and the logit lens predict what one unit of a neuron does, by layer.

python benchmarks/lens.py --out docs/results/mean-lens.csv [--layers 5 10 15]

Builds the lens in an empty cache, and prints the time. Then one unit is added to random FFN neurons of a layer at a
random token of the first sentence of 20 Wikipedia summaries. Medians over neurons of means over sentences:

correlation   of the predicted and the measured change of the logits, over the vocabulary
words         measured effect on the five words predicted to rise most / on the five that rise most
units         measured / predicted effect on the five words predicted to rise most
ceiling       the correlation of the mean effect in the other 19 sentences
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from sentencex import segment

from icebear import load_model
from icebear.actmax.index.corpus import read_corpus
from icebear.cache import cache_folder
from icebear.concepts.vocabulary.lens import (
    RELIABILITY_SAMPLES,
    Contexts,
    build_mean_lens,
    correlation,
    predicted_and_measured,
    ratio,
)

LAYERS = (5, 10, 15, 20, 22, 25, 28)
HEAD = (
    "layer,logit lens,words,units,averaged Jacobian,words (Jacobian),units (Jacobian),ceiling,"
    "best five words by the ceiling"
)


def row(model, contexts, layer, jacobian):
    """The numbers of a layer: three of the direct projection, three of the lens, two of the ceiling."""
    neurons = []
    for (mean, direct), effects in predicted_and_measured(model, contexts, layer, jacobian):
        others = (effects.sum(0) - effects) / (len(effects) - 1)
        numbers = []
        for one in (direct, mean):
            best = one.topk(5).indices
            units = (effects[:, best].mean() / one[best].mean()).item()
            numbers += [correlation(one, effects), ratio(one, effects), units]
        words = [ratio(own, effect[None]) for own, effect in zip(others, effects, strict=True)]
        neurons.append([*numbers, correlation(others, effects), sum(words) / len(words)])
    return torch.tensor(neurons).median(0).values.tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--out", required=True)
    parser.add_argument("--lens", help="A cache folder whose lens is used, instead of building one.")
    options = parser.parse_args()
    model, generator = load_model(dtype="float32", device="cpu"), random.Random(1)
    last = list(read_corpus("wiki-summaries").documents())[-RELIABILITY_SAMPLES:]
    texts = [model.token_ids(next(iter(segment("en", text))).strip(), 64) for _, text in last]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("models", "calibration"):
            (Path(folder) / name).symlink_to(cache_folder() / name)
        os.environ["ICEBEAR_CACHE"] = options.lens or folder
        begun = time.monotonic()
        lens = build_mean_lens(model)
        print(f"built in {time.monotonic() - begun:.0f} s, {lens.file.stat().st_size / 1e6:.0f} MB", file=sys.stderr)
        contexts = Contexts(model, texts, [generator.randrange(1, len(ids)) for ids in texts])
        with open(options.out, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEAD.split(","))
            for layer in options.layers:
                numbers = row(model, contexts, layer, lens.jacobian("ffn", layer))
                writer.writerow([layer, *(f"{number:.2f}" for number in numbers)])
                file.flush()
