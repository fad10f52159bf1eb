"""What an index costs: speed, memory, room, reading, annotation. Each part prints a table; read the ratios.

python benchmarks/scan.py speed     the scan against a bare forward pass over the same batches, shard by shard
python benchmarks/scan.py later     the same behind all shards of a finished index (--store), as most of a scan is
python benchmarks/scan.py memory    peak memory of a scan of 300 and of 3,000 summaries, in fresh processes
python benchmarks/scan.py reading   bytes a neuron, card and search time, annotation in batches and one by one
python benchmarks/scan.py large     cards of a made store of an 8B model's size (459,000 neurons, 29 million examples)
python benchmarks/scan.py million   a million made sentences through a random model of two layers, 64 wide
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from icebear import Model, Neuron, annotate, attribute, build_index, describe, load_model, open_store, read_corpus
from icebear.actmax.index import build as index
from icebear.actmax.index.annotation import attribute_neurons
from icebear.actmax.index.scan import Settings, index_size, scan_shard, shards
from icebear.actmax.index.top_activations import empty_summary, merge
from icebear.actmax.reading import TEXTS_PER_PASS
from icebear.records import Sentence


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forward(model, shard) -> None:
    """No logits, as in the scan."""
    rows = sorted((model.token_ids(s.text) for s in shard), key=len)
    for place in range(0, len(rows), TEXTS_PER_PASS):
        with torch.no_grad():
            model.net.base_model(**model.inputs(model.encode(rows[place : place + TEXTS_PER_PASS])), use_cache=False)


def speed(documents: int) -> None:
    model = load_model()
    parts = list(shards(read_corpus("wiki-summaries", limit=documents).sentences(), index.SHARD))
    parts = [part for part in parts if len(part) == index.SHARD]
    tables = {k: empty_summary(index_size(model, ("ffn",)), k) for k in (10, 32, 100)}
    ratios: dict[int, list[float]] = {k: [] for k in tables}
    forward(model, parts[0])
    for shard in parts:
        for k, table in tables.items():
            bare = seconds(lambda: forward(model, shard))  # noqa: B023
            start = time.perf_counter()
            scanned, _ = scan_shard(model, shard, Settings(k), table.values[:, :, -1])
            tables[k] = merge(table, scanned)
            ratios[k].append(bare / (time.perf_counter() - start))
    print(f"{len(parts)} shards of {index.SHARD} sentences\n")
    print("| k | scan speed / forward: first shard | median of the rest | last |\n| --- | --- | --- | --- |")
    for k, speeds in ratios.items():
        print(f"| {k} | {speeds[0]:.2f} | {statistics.median(speeds[1:]):.2f} | {speeds[-1]:.2f} |")


def later(documents: int, path: str) -> None:
    model = load_model()
    with open_store(path) as store:
        k, shape = store.facts.get("k"), (2, store.count("neurons"))
        threshold = torch.full(shape, -torch.inf)
        query = "SELECT polarity, neuron, ABS(activation) FROM examples WHERE rank = ?"
        for polarity, neuron, value in store.database.execute(query, (k - 1,)):
            threshold[polarity, neuron] = value
    parts = [
        p for p in shards(read_corpus("wiki-summaries", limit=documents).sentences(), index.SHARD) if len(p) == 256
    ]
    ratios: dict[bool, list[float]] = {True: [], False: []}
    forward(model, parts[0])
    table = empty_summary(shape[1], k)
    for shard in parts:
        for sums in ratios:
            bare = seconds(lambda: forward(model, shard))  # noqa: B023
            start = time.perf_counter()
            merge(table, scan_shard(model, shard, Settings(k), threshold, sums=sums)[0])
            ratios[sums].append(bare / (time.perf_counter() - start))
    summing, others = (statistics.median(speeds) for speeds in ratios.values())
    whole = 1 / (0.1 / summing + 0.9 / others)
    print(f"k = {k}, {len(parts)} shards: scan / forward {others:.3f}, with sums {summing:.3f}, in all {whole:.3f}")


def memory() -> None:
    print("| summaries | peak MB | of which before the scan |\n| --- | --- | --- |")
    for documents in (300, 3000):
        code = f"import sys; sys.argv = ['x']; from benchmarks.scan import one_scan; one_scan({documents})"
        root = Path(__file__).parent.parent
        subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def one_scan(documents: int) -> None:
    model = load_model()
    forward(model, next(shards(read_corpus("wiki-summaries", limit=300).sentences(), index.SHARD)))
    before = peak()
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "b.db", create=True) as store:
        build_index(model, read_corpus("wiki-summaries", limit=documents), store)
    print(f"| {documents} | {peak()} | {before} |", flush=True)


def large(neurons: int) -> None:
    """32 layers of 14,336 FFN neurons, 4,096 wide; made numbers in the tables, files of vectors that are only long."""
    layers, k, count = 32, 32, 36_000
    each = neurons // layers
    generator = numpy.random.default_rng(0)
    facts = {"by": "activation", "gated": True, "sites": ["ffn"], "corpus": "made", "limit": None, "finished": True}
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "b.db", create=True) as store:
        texts = [f"Sentence {i} of a corpus that was made for its size." for i in range(count)]
        made = [Sentence(i, text, "", 0, len(text), tuple(text.split())) for i, text in enumerate(texts)]

        def examples():
            for neuron in range(neurons):
                chosen = generator.integers(0, count, (2, k)).tolist()
                for polarity in (0, 1):
                    for rank in range(k):
                        value = (1 - 2 * polarity) * float(k - rank)
                        yield neuron, polarity, rank, chosen[polarity][rank], 3, value

        numbers = {"mean": 0.0, "std": 1.0, "min": -9.0, "max": 9.0, "positive": 0.5, "histogram": "[1, 2, 1]"}
        rows = ({"id": n, "layer": n // each, "site": "ffn", "idx": n % each, **numbers} for n in range(neurons))
        with store.exclusively():
            store.scan.commit({0: [(sentence, b"") for sentence in made]}, {}, facts)
            store.scan.finish(rows, examples(), facts)
        for name, length in (("w2", neurons), ("w1", neurons), ("examples", 2 * neurons), ("tokens", 128_256)):
            with store.vectors.path(name).open("wb") as file:
                file.truncate(length * 4096 * 2)  # float16
        print(f"database {store.path.stat().st_size / 1e9:.1f} GB, vectors {store.vectors.size() / 1e9:.1f} GB")
        drawn = [Neuron(int(layer), "ffn", int(i)) for layer, i in generator.integers(0, (layers, each), (100, 2))]
        before = read_bytes()
        cards = [1000 * seconds(lambda: describe(store, neuron)) for neuron in drawn]  # noqa: B023
        print(
            f"card: first {cards[0]:.0f} ms, median {statistics.median(cards[1:]):.1f} ms, most {max(cards[1:]):.0f} ms"
        )
        print(f"read for 100 cards: {(read_bytes() - before) / 1e6:.0f} MB")


def read_bytes() -> int:
    """What this process has read so far, from disk or its cache (Linux)."""
    return int(Path("/proc/self/io").read_text().split()[1])


def million(documents: int) -> None:
    """Memory while it scans, the store's size, and cards; real words in a made order, by Zipf's law."""
    tokenizer = load_model().tokenizer
    words = sorted(word[1:] for word in tokenizer.get_vocab() if word[0] == "Ġ" and word[1:].isalpha())
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=tokenizer.vocab_size,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Model(LlamaForCausalLM(config), tokenizer, name="made, 2 layers, 64 wide")
    generator = numpy.random.default_rng(0)
    share = 1 / numpy.arange(1, len(words) + 1)
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "b.db", create=True) as store:
        lines = Path(folder) / "made.txt"
        with lines.open("w") as file:
            for _ in range(documents // 1000):
                drawn = generator.choice(len(words), (1000, 12), p=share / share.sum())
                file.writelines(" ".join(words[i] for i in row).capitalize() + ".\n" for row in drawn)
        print(f"{documents} lines, {lines.stat().st_size / 1e6:.0f} MB\n")
        print("| sentences | seconds | resident, MB |\n| --- | --- | --- |")
        printed, begun = [0], time.monotonic()

        def progress(done, total) -> None:
            if done >= printed[0]:
                now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
                print(f"| {done} | {time.monotonic() - begun:.0f} | {now:.0f} |", flush=True)
                printed[0] += documents // 10

        took = seconds(lambda: build_index(model, read_corpus(str(lines)), store, on_progress=progress))
        print(f"\nin all {took:.0f} s, peak {peak()} MB, database {store.path.stat().st_size / 1e6:.0f} MB")
        neurons = [Neuron(layer, "ffn", index) for layer in (0, 1) for index in range(0, 250, 10)]
        cards = [1000 * seconds(lambda: describe(store, neuron)) for neuron in neurons]  # noqa: B023
        print(f"card: first {cards[0]:.0f} ms, then median {statistics.median(cards[1:]):.0f} ms")
        times = [1000 * seconds(lambda: store.search(text)) for text in words[:3000:300]]  # noqa: B023
        print(f"search: median {statistics.median(times):.0f} ms")


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def reading(documents: int) -> None:
    model = load_model()
    neurons = [Neuron(layer, "ffn", 37 * layer + 5) for layer in range(30)]
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "b.db", create=True) as store:
        build_index(model, read_corpus("wiki-summaries", limit=documents), store)
        count = store.count("neurons")
        print(f"{documents} summaries, k = 32, {count} neurons\n")
        size = store.path.stat().st_size
        print(f"database: {size / 1e6:.0f} MB, {size / count:.0f} bytes a neuron")
        examples = [seconds(lambda: [store.examples(n, p) for p in "+-"]) for n in neurons]  # noqa: B023
        print(f"examples of both signs: {1000 * statistics.median(examples):.2f} ms")
        cards = [seconds(lambda: describe(store, n)) for n in neurons]  # noqa: B023
        print(
            f"card with vocabulary and nearest neurons, no model: first {1000 * cards[0]:.0f} ms, then "
            f"{1000 * statistics.median(cards[1:]):.0f} ms"
        )
        words = ["water", "Arctic ice", "music", "war", "king of France"]
        times = [seconds(lambda: store.search(text)) for text in words]  # noqa: B023
        print(f"search: {1000 * statistics.median(times):.0f} ms")
        pairs = [(n, e) for n in neurons for p in "+-" for e in store.examples(n, p, 4)][::6]
        times: dict[str, list[float]] = {"batched": [], "one by one": [], "a whole pass each": []}
        for _ in range(3):
            store.database["attributions"].delete_where()
            times["batched"].append(seconds(lambda: annotate(model, store, neurons, k=4)) / (8 * len(neurons)))
            for name, one in {
                "one by one": lambda n, e: attribute_neurons(model, [e.sentence.text], [n], [e.token]),
                "a whole pass each": lambda n, e: attribute(model, e.sentence.text, sites=()),
            }.items():
                times[name].append(seconds(lambda: [one(n, e) for n, e in pairs]) / len(pairs))  # noqa: B023
        for name, taken in times.items():
            ratio = statistics.median(a / b for a, b in zip(taken, times["batched"], strict=True))
            print(f"annotation, {name}: {1000 * statistics.median(taken):.0f} ms an example ({ratio:.2f} of batched)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "later", "memory", "reading", "large", "million"))
    parser.add_argument("--store")
    parser.add_argument("--documents", type=int)
    options = parser.parse_args()
    if options.part == "memory":
        memory()
    elif options.part == "later":
        later(options.documents or 300, options.store)
    elif options.part == "large":
        large(options.documents or 32 * 14_336)
    elif options.part == "million":
        million(options.documents or 1_000_000)
    else:
        {"speed": speed, "reading": reading}[options.part](options.documents or 300)
