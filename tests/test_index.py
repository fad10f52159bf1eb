"""The index against everything in memory and sorted; interrupted, killed and shuffled."""

import collections
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import LLAMA, random_model

from actmax import annotate, build_index, index, read_corpus
from actmax.corpus import sentence_id
from actmax.scan import _hash
from actmax.topk import HISTOGRAM_EDGES
from concepts import ATTNLRP, CP_LRP, Model, attribute
from concepts.neuron_attribution import attribute_neurons
from concepts.vocabulary import w2_row
from db import open_store
from db.errors import InputError, StoreError
from db.records import Neuron

K = 5


class Letters:
    """A tokenizer of 50 letters and signs, enough for a random model."""

    all_special_ids = ()

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) % 50 for letter in text][:60]}

    def decode(self, ids):
        return "".join(map(chr, ids))


@pytest.fixture
def model():
    made = random_model(LLAMA, dtype=torch.float32)
    return Model(made.net, Letters(), "letters")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "SHARD", 16)
    seed = random.randrange(10**6)
    print("seed", seed)
    generator = random.Random(seed)
    words = "ice bear desert camel water north cold snow warm sand a of the in to lives eats".split()
    lines = [" ".join(generator.choices(words, k=generator.randint(1, 9))).capitalize() + "." for _ in range(120)]
    (tmp_path / "c.txt").write_text("\n".join([*lines, "", lines[0], "x"]))
    return read_corpus(str(tmp_path / "c.txt"))


def everything(model, sentences):
    """id -> (F activations of every token but the first), by the attribution's own taps."""
    return {
        s.id: attribute(model, s.text, sites=("ffn",)).activation("ffn")[:, 1:].permute(1, 0, 2).flatten(1)
        for s in sentences
        if len(s.text) > 1
    }  # (T-1, L*F)


def test_the_index_equals_brute_force(model, corpus, tmp_path):
    counts = collections.Counter()
    sentences = list(corpus.sentences(counts))
    assert counts["duplicates"] >= 1
    seen = everything(model, sentences)
    with open_store(tmp_path / "i.db") as store:
        build_index(model, corpus, store, k=K)
        stacked = torch.cat(list(seen.values()))
        for number in range(0, 60, 7):
            neuron = Neuron(number // 20, "ffn", number % 20)
            for polarity, sign in (("+", 1), ("-", -1)):
                extremes = [(sign * x[:, number]).max().item() for x in seen.values()]
                expected = sorted(
                    ((v, i) for v, i in zip(extremes, seen, strict=True) if v > 0), key=lambda row: (-row[0], row[1])
                )[:K]
                found = store.examples(neuron, polarity)
                assert [sign * e.activation for e in found] == pytest.approx([v for v, _ in expected], rel=1e-4)
                for example, (value, identity) in zip(found, expected, strict=True):
                    near_tie = sum(abs(value - other) < 1e-4 * abs(value) for other in extremes) > 1
                    assert example.sentence.id == identity or near_tie
                    course = sign * seen[example.sentence.id][:, number]
                    assert course[example.token - 1].item() == pytest.approx(course.max().item(), rel=1e-4)
            column = stacked[:, number].double()
            statistics = store.statistics(neuron)
            assert statistics.mean == pytest.approx(column.mean().item(), abs=1e-5)
            assert statistics.std == pytest.approx(column.std(correction=0).item(), rel=1e-3)
            assert (statistics.min, statistics.max) == pytest.approx(
                (column.min().item(), column.max().item()), rel=1e-4
            )
            assert statistics.positive == pytest.approx((column > 0).double().mean().item(), abs=1e-6)
            sampled = [x[_hash(0, "token", i) % len(x), number].item() for i, x in seen.items()]
            bins = torch.bucketize(torch.tensor(sampled), HISTOGRAM_EDGES, right=True)
            assert list(statistics.histogram) == torch.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1).tolist()
            low, *_, high = store.samples(neuron)
            assert low.activation == pytest.approx(min(sampled), rel=1e-3)
            assert high.activation == pytest.approx(max(sampled), rel=1e-3)


def test_shards_in_any_order_interrupted_or_not(model, corpus, tmp_path, monkeypatch):
    checksums = set()
    for name, order in (("a", None), ("b", lambda n: n[::-1]), ("c", lambda n: n[1::2] + n[::2])):
        with open_store(tmp_path / f"{name}.db") as store:
            build_index(model, corpus, store, k=K, order=order)
            checksums.add(store.checksum())
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0)

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.sentences >= 33:
            raise Stop

    with open_store(tmp_path / "d.db") as store:
        for _ in range(2):
            with pytest.raises(Stop):
                build_index(model, corpus, store, k=K, on_progress=stop)
        build_index(model, corpus, store, k=K)
        checksums.add(store.checksum())
        again = build_index(model, corpus, store, k=K)
        assert again["sentences"]
        checksums.add(store.checksum())
    assert len(checksums) == 1


KILLED = """
import sys
sys.path[:0] = [{tests!r}]
import torch
from test_index import Letters
from conftest import LLAMA, random_model
from actmax import build_index, index, read_corpus
from concepts import Model
from db import open_store
index.SHARD, index.COMMIT_SECONDS = 16, 0
model = Model(random_model(LLAMA, dtype=torch.float32).net, Letters(), "letters")
with open_store({store!r}) as store:
    print("started", flush=True)
    build_index(model, read_corpus({corpus!r}), store, k=5)
    print(store.checksum())
"""


def test_killed_at_random_moments(model, corpus, tmp_path):
    code = KILLED.format(tests=os.path.dirname(__file__), store=str(tmp_path / "k.db"), corpus=str(tmp_path / "c.txt"))
    command = [sys.executable, "-c", code]
    seed = random.randrange(10**6)
    print("seed", seed)
    generator = random.Random(seed)
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        time.sleep(generator.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    with open_store(tmp_path / "whole.db") as store:
        build_index(model, corpus, store, k=K)
        assert store.checksum() == finished


def test_another_batch_size_changes_the_last_digits_only(model, corpus):
    from actmax.scan import scan_shard

    sentences = list(corpus.sentences())
    a, b = (scan_shard(model, sentences, 4 * K, batch_size=size) for size in (32, 5))
    assert torch.allclose(a.values, b.values, rtol=1e-4)
    for polarity, neuron, place in (a.sentences != b.sentences)[:, :, :K].nonzero().tolist():
        row = a.values[polarity, neuron]  # sentences that begin alike tie, but for the last digits
        assert (torch.isclose(row, row[place], rtol=1e-4)).sum() > 1


def test_planted_neuron(tmp_path, monkeypatch):
    """A neuron that fires on one letter only is found with its sentences and token."""
    monkeypatch.setattr(index, "SHARD", 16)
    made = random_model(LLAMA, dtype=torch.float32)
    letter = ord("z") % 50
    with torch.no_grad():
        layer = made.net.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        embedding = made.net.model.embed_tokens.weight
        embedding[:, 5] = 0
        embedding[letter, 5] = 30
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
            projection.weight[7] = 0
            projection.weight[7, 5] = 1
        layer.post_attention_layernorm.weight.fill_(1)
    model = Model(made.net, Letters(), "planted")
    texts = ["The quiet bear sleeps.", "A zebra runs.", "Snow is cold.", "It was a lazy day.", "We eat."]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    with open_store(tmp_path / "p.db") as store:
        build_index(model, read_corpus(str(tmp_path / "p.jsonl")), store, k=3)
        found = store.examples(Neuron(0, "ffn", 7), "+")
    assert {example.sentence.text for example in found[:2]} == {texts[1], texts[3]}
    assert all(example.sentence.text[example.token] == "z" for example in found[:2])
    assert len(found) == 2  # nothing else makes it fire


@pytest.mark.parametrize("method", [ATTNLRP, CP_LRP], ids=lambda m: m.name)
def test_annotations_conserve_and_batch_as_one_by_one(model, corpus, tmp_path, method, monkeypatch):
    neurons = [Neuron(layer, "ffn", index) for layer in range(3) for index in (2, 11)]
    with open_store(tmp_path / "i.db") as store:
        build_index(model, corpus, store, k=K)
        count = annotate(model, store, neurons, k=3, method=method)
        assert count > 10
        assert annotate(model, store, neurons, k=3, method=method) == 0
        rows = store.database.execute("SELECT relevance FROM attributions").fetchall()
        assert len(rows) == count
        for (text,) in rows:
            conserved = json.loads(text)["conservation"]
            assert abs(conserved["rest"]) < 1e-5 * max(1, abs(conserved["target"]))
            assert sum(json.loads(text)["tokens"]) == pytest.approx(conserved["tokens"], abs=1e-4)
            assert method is ATTNLRP or conserved["softmax"] == 0
        for neuron in neurons:
            for polarity in "+-":
                for example in store.examples(neuron, polarity, 3, method.name):
                    (alone,) = attribute_neurons(model, [example.sentence.text], [neuron], [example.token], method)
                    assert alone.conserved.target == pytest.approx(example.activation, rel=1e-4)
                    assert list(example.relevance) == pytest.approx(alone.tokens.tolist(), abs=1e-4)
                    assert not alone.tokens[example.token + 1 :].any()


def test_a_store_of_something_else_is_refused(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db") as store:
        build_index(model, corpus, store, k=K)
        with pytest.raises(StoreError, match="built with k 5, not 6"):
            build_index(model, corpus, store, k=6)
        other = Model(random_model(LLAMA, dtype=torch.float32, seed=3).net, Letters(), "letters")
        with pytest.raises(StoreError, match="built with fingerprint"):
            build_index(other, corpus, store, k=K)
        with pytest.raises(StoreError, match="does not have L9"):
            store.examples(Neuron(9, "ffn", 0))
        checksum = store.checksum()
        store.database.execute("PRAGMA user_version = 999")
    with pytest.raises(StoreError, match="newer icebear"), open_store(tmp_path / "i.db"):
        pass
    (tmp_path / "text.db").write_text("not a database, but long enough to look at" * 50)
    with pytest.raises(StoreError, match="no SQLite file"), open_store(tmp_path / "text.db"):
        pass
    with pytest.raises(StoreError, match="There is no store"), open_store(tmp_path / "none.db", create=False):
        pass
    with pytest.raises(StoreError, match="cannot be written"), open_store(tmp_path / "no" / "folder.db"):
        pass
    import sqlite3

    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(StoreError, match="something else"), open_store(tmp_path / "other.db"):
        pass
    assert checksum


def test_search_fuses_what_neurons_write_and_what_drives_them(model, corpus, tmp_path):
    """Against the definition, computed from the model and the examples."""
    with open_store(tmp_path / "i.db") as store:
        build_index(model, corpus, store, k=K)
        neuron = Neuron(2, "ffn", 4)
        rows = torch.nn.functional.normalize(
            torch.stack([w2_row(model, Neuron(n // 20, "ffn", n % 20)) for n in range(60)])
        )
        cosines = rows @ rows[44]
        cosines[44] = -2
        assert store.similar(neuron, 3)[0][0].index == int(cosines.argmax()) % 20
        assert store.similar(neuron, 3)[0][1] == pytest.approx(cosines.max().item(), abs=2e-3)
        hits = store.search("bear", k=60)
        counts = {
            (hit.neuron, hit.polarity): sum(
                "bear" in e.sentence.text.lower() for e in store.examples(hit.neuron, hit.polarity)
            )
            for hit in hits
        }
        for hit in hits:
            said = [int(why.split()[0]) for why in hit.why if "examples" in why]
            assert said == ([counts[hit.neuron, hit.polarity]] if counts[hit.neuron, hit.polarity] > 1 else [])
        assert any(said > 1 for said in counts.values())
        with pytest.raises(InputError, match="no words"):
            store.search("?!")
        for odd in ('" OR 1', "a*b NEAR (", "'; DROP TABLE neurons; --"):
            store.search(odd)
        assert store.count("neurons") == 60
        store.vectors("w2").unlink()
        with pytest.raises(StoreError, match="run icebear index again"):
            store.search("bear")
        build_index(model, corpus, store, k=K)
        assert store.search("bear", k=60) == hits


def test_a_second_writer_is_told(model, corpus, tmp_path, monkeypatch):
    with open_store(tmp_path / "i.db") as first, open_store(tmp_path / "i.db") as second:
        second.database.conn.execute("PRAGMA busy_timeout = 100")
        with first._writing(), pytest.raises(StoreError, match="Another process is writing"):
            second.claim({"k": 1})
        assert second.facts() == {}


def test_files_of_every_kind(tmp_path):
    import pandas

    rows = [{"text": "One. Two is here.", "title": "T"}, {"text": "Dr. Who came \U0001f43b.", "title": "U"}]
    pandas.DataFrame(rows).to_csv(tmp_path / "a.csv")
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = {s: [(x.text, x.title) for x in read_corpus(str(tmp_path / f"a.{s}")).sentences()] for s in
            ("csv", "parquet", "jsonl")}  # fmt: skip
    assert read["csv"] == read["parquet"] == read["jsonl"]
    assert ("Two is here.", "T") in read["csv"]
    for sentence in read_corpus(str(tmp_path / "a.jsonl")).sentences():
        document = next(row["text"] for row in rows if row["title"] == sentence.title)
        assert document[sentence.start : sentence.end] == sentence.text
        assert sentence.id == sentence_id(sentence.text)


def test_rough_text_is_counted_never_fatal(tmp_path):
    path = tmp_path / "rough.txt"
    path.write_bytes(b"Fine here.\n\n\xff\xfe broken \xc3 bytes.\nFine here.\n" + b"word " * 100_000 + b"\n")
    counts = collections.Counter()
    texts = [s.text for s in read_corpus(str(path)).sentences(counts)]
    assert texts[0] == "Fine here."
    assert len(texts) == 2
    assert counts["duplicates"] == 1
    assert counts["too long"] == 1
    for bad, message in (("none.txt", "no file"), ("x.jsonl", "not JSON"), ("y.jsonl", "no text column")):
        if bad[0] != "n":
            (tmp_path / bad).write_text("{" if bad[0] == "x" else '{"a": 1}')
        with pytest.raises(InputError, match=message):
            list(read_corpus(str(tmp_path / bad)).sentences())
    with pytest.raises(InputError, match="at least 1 document"):
        read_corpus(str(path), limit=0)
