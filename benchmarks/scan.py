"""Speed of the scan against a bare forward pass over the same batches, in one run, in turn.

    python benchmarks/scan.py [--documents 300] [--rounds 2]

The scan of each k goes through all shards with the running top-k table, both signs, sample and statistics included;
the forward pass computes no logits either. Read the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from actmax import index, read_corpus
from actmax.scan import BATCH, empty_table, neuron_count, scan_shard, shards
from actmax.topk import merge
from concepts import load_model


def forward(model, parts) -> float:
    start = time.perf_counter()
    for shard in parts:
        rows = sorted((model.encode([s.text]).ids[0].tolist() for s in shard), key=len)
        for place in range(0, len(rows), BATCH):
            with torch.no_grad():
                model.net.base_model(**model.inputs(model.encode(rows[place : place + BATCH])), use_cache=False)
    return time.perf_counter() - start


def scan(model, parts, k: int) -> list[float]:
    """Seconds of each shard."""
    table, seconds = empty_table(neuron_count(model, ("ffn",)), k), []
    for shard in parts:
        start = time.perf_counter()
        table = merge(table, scan_shard(model, shard, k, threshold=table.values[:, :, -1]))
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    model = load_model()
    parts = list(shards(read_corpus("wiki-summaries", limit=options.documents).sentences(), index.SHARD))
    tokens = sum(len(model.encode([s.text]).ids[0]) for shard in parts for s in shard)
    print(f"{model!r}, {options.documents} summaries, {tokens} tokens, {len(parts)} shards of {index.SHARD}\n")
    ratios: dict[int, list[float]] = {10: [], 32: [], 100: []}
    last: dict[int, list[float]] = {10: [], 32: [], 100: []}
    for _ in range(options.rounds):
        for k in ratios:
            bare, seconds = forward(model, parts), scan(model, parts, k)
            ratios[k].append(bare / sum(seconds))
            last[k].append(forward(model, parts[-2:-1]) / seconds[-2])
    print("| k | scan speed / forward, whole | the last full shard |\n| --- | --- | --- |")
    for k in ratios:
        print(f"| {k} | {statistics.median(ratios[k]):.2f} | {statistics.median(last[k]):.2f} |")
