"""The index against everything in memory and sorted; interrupted, killed and shuffled."""

import collections
import contextlib
import functools
import json
import re
import signal
import sqlite3
import time
from pathlib import Path

import pytest
import torch
from conftest import LLAMA, Letters, random_model, started_alone

from icebear import ATTNLRP, CP_LRP, Model, annotate, attribute, build_index, describe, open_store, read_corpus
from icebear.actmax.index import build as index
from icebear.actmax.index.activation_statistics import BIN_EDGES, STATISTICS, Statistic
from icebear.actmax.index.annotation import attribute_neurons
from icebear.actmax.index.corpus import sentence_id
from icebear.actmax.index.scan import Settings, _hash, has_statistics, scan_shard
from icebear.actmax.index.top_activations import merge
from icebear.concepts.methods.registry import name_of
from icebear.concepts.vocabulary import calibration
from icebear.concepts.vocabulary.projection import project
from icebear.db.scan_tables import ScanTables
from icebear.db.vectors import VectorFiles
from icebear.errors import InputError, StoreError
from icebear.records import Neuron, Sentence

K = 5


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
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        assert store.database.execute("PRAGMA foreign_key_check").fetchall() == []
        assert store.database.execute("PRAGMA foreign_keys").fetchone() == (1,)
        summed = {s.id for place, s in enumerate(sentences) if has_statistics(place // index.SHARD, 0)} & set(seen)
        assert 0 < len(summed) < len(seen)
        assert store.made_with()["index"]["statistics_tokens"] == sum(len(seen[i]) for i in summed)
        for number in range(0, 60, 7):
            neuron = Neuron(number // 20, "ffn", number % 20)
            for polarity, sign in (("+", 1), ("-", -1)):
                extremes = [(sign * x[:, number]).max().item() for x in seen.values()]
                expected = sorted(
                    ((v, i) for v, i in zip(extremes, seen, strict=True) if v > 0), key=lambda row: (-row[0], row[1])
                )[:K]
                result = store.examples(neuron, polarity)
                assert [sign * e.activation for e in result] == pytest.approx([v for v, _ in expected], rel=1e-4)
                for example, (value, identity) in zip(result, expected, strict=True):
                    near_tie = sum(abs(value - other) < 1e-4 * abs(value) for other in extremes) > 1
                    assert example.sentence.id == identity or near_tie
                    course = sign * seen[example.sentence.id][:, number]
                    assert course[example.token - 1].item() == pytest.approx(course.max().item(), rel=1e-4)
            column = torch.cat([x[:, number] for i, x in seen.items() if i in summed]).double()
            statistics = store.neurons.statistics(neuron)
            assert statistics.mean == pytest.approx(column.mean().item(), abs=1e-5)
            assert statistics.std == pytest.approx(column.std(correction=0).item(), rel=1e-3)
            every = torch.cat([x[:, number] for x in seen.values()])
            assert (statistics.min, statistics.max) == pytest.approx((every.min().item(), every.max().item()), rel=1e-4)
            zero = 1e-5 * column.abs().max()  # what rounds to one side alone may round to the other in a batch
            low, high = ((column > bound).double().mean().item() for bound in (zero, -zero))
            assert low - 1e-6 <= statistics.positive <= high + 1e-6
            seeded = {i: x[_hash(0, "token", i) % len(x), number].item() for i, x in seen.items()}
            bins = torch.bucketize(torch.tensor([seeded[i] for i in summed]), BIN_EDGES, right=True)
            assert list(statistics.histogram) == torch.bincount(bins, minlength=len(BIN_EDGES) + 1).tolist()


class Above(Statistic):
    """(N,) how many activations are above a tenth."""

    all_shards = True

    def empty(self, neurons):
        return torch.zeros(neurons, dtype=torch.int64)

    def add(self, state, seen):
        state += (seen.counted @ (seen.flat > 0.1).float()).long()

    def columns(self, state, tokens):
        return {"above": state.tolist()}


def test_a_new_statistic_is_one_class_and_its_line(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(STATISTICS, "above", Above())
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0)
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, read_corpus(corpus.facts["corpus"], limit=10), store, k=K)
        build_index(model, read_corpus(corpus.facts["corpus"], limit=1000), store, k=K)  # packed and unpacked between
        seen = everything(model, list(corpus.sentences()))
        for number in range(0, 60, 7):
            neuron = Neuron(number // 20, "ffn", number % 20)
            above = sum(int((x[:, number] > 0.1).sum()) for x in seen.values())
            assert store.neurons.statistics(neuron).more == {"above": above}
            assert describe(store, neuron).to_dict()["statistics"]["above"] == above


def test_shards_interrupted_or_not(model, corpus, tmp_path, monkeypatch):
    checksums = set()
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        checksums.add(store.checksum())
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0)

    class Stop(Exception):
        pass

    def stop(most, done, total):
        if done >= most:
            raise Stop

    with open_store(tmp_path / "d.db", create=True) as store:
        for most in (33, 66):
            with pytest.raises(Stop):
                build_index(model, corpus, store, k=K, on_progress=functools.partial(stop, most))
        build_index(model, corpus, store, k=K)
        checksums.add(store.checksum())
        again = build_index(model, corpus, store, k=K)
        assert again["sentences"]
        checksums.add(store.checksum())
    assert len(checksums) == 1


def scan(model, path, store, limit, **options):
    """How many sentences were read to build the index of `limit` documents."""
    corpus, seen = read_corpus(str(path), limit), [(0, 0)]
    build_index(model, corpus, store, k=K, on_progress=lambda *step: seen.append(step), **options)
    (begun, _), (done, total) = seen[:2][-1], seen[-1]
    assert done == total
    return done - begun


def same_index(a, b):
    assert a.neurons.columns() == b.neurons.columns()
    assert a.search("bear", 60) == b.search("bear", 60)
    assert a.checksum() == b.checksum()


LIMITS = [(16, 32, 33, 10**6)]
LIMITS += [pytest.param(limits, marks=pytest.mark.release) for limits in ((20, 50), (5, 7), (121, 500))]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_larger_limit_goes_on_and_ends_as_one_scan(model, corpus, tmp_path, limits):
    """To the bit. Only full shards are left alone: the last one gets more sentences."""
    path = tmp_path / "c.txt"
    sizes = [sum(1 for _ in read_corpus(str(path), limit).sentences()) for limit in limits]
    with open_store(tmp_path / "one.db", create=True) as one, open_store(tmp_path / "parts.db", create=True) as parts:
        scan(model, path, one, limits[-1])
        read = [scan(model, path, parts, limit) for limit in limits]
        assert read == [size - before // 16 * 16 for before, size in zip([0, *sizes], sizes, strict=False)]
        same_index(parts, one)
        assert scan(model, path, parts, limits[-1]) == 0


def test_a_scan_that_goes_on_leaves_the_index_before_until_it_is_done(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0)
    path, neuron = tmp_path / "c.txt", Neuron(1, "ffn", 3)

    class Stop(Exception):
        pass

    begun = []

    def stop(done, total):
        begun.append(done)
        if done > begun[0] + 32:
            raise Stop

    with open_store(tmp_path / "one.db", create=True) as one, open_store(tmp_path / "parts.db", create=True) as parts:
        scan(model, path, one, 100)
        scan(model, path, parts, 40)
        parts.labels.set_manual(neuron, "a name")
        annotate(model, parts, [neuron], k=2)
        before = parts.neurons.columns(), parts.examples(neuron), parts.similar(neuron)
        with pytest.raises(Stop):
            build_index(model, read_corpus(str(path), 100), parts, k=K, on_progress=stop)
        assert parts.facts.get("limit") == 40
        assert parts.neurons.columns() == before[0]
        assert [e.activation for e in parts.examples(neuron)] == [e.activation for e in before[1]]
        assert parts.similar(neuron) == before[2]
        with pytest.raises(StoreError, match="not 99"):
            scan(model, path, parts, 99)
        scan(model, path, parts, 100)
        assert parts.labels.manual(neuron)[0] == "a name"
        parts.labels.set_manual(neuron, "")
        parts.database.execute("DELETE FROM attributions")
        same_index(parts, one)


@pytest.mark.parametrize("text", ["", "\n\n", "\n".join("abcdefghijklmnopqrstuvwxyz")], ids=["", "blank", "a-z"])
def test_a_first_scan_that_fails_claims_nothing(model, corpus, tmp_path, monkeypatch, text):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0)
    (tmp_path / "empty.txt").write_text(text)
    with open_store(tmp_path / "i.db", create=True) as store, open_store(tmp_path / "one.db", create=True) as one:
        with pytest.raises(InputError):
            build_index(model, read_corpus(str(tmp_path / "empty.txt")), store, k=3)
        assert store.facts.all() == {}
        for ask in (lambda: store.search("bear"), store.neurons.columns, lambda: store.similar(Neuron(0, "ffn", 1))):
            with pytest.raises(StoreError):
                ask()
        scan(model, tmp_path / "c.txt", store, None)
        scan(model, tmp_path / "c.txt", one, None)
        same_index(store, one)


def test_what_a_corpus_was_is_told_in_words(model, corpus, tmp_path):
    path = tmp_path / "c.txt"
    with open_store(tmp_path / "i.db", create=True) as store:
        scan(model, path, store, 30)
        more = path.read_text() + "\nAnother line."
        for wrong, output in (
            (lambda: scan(model, path, store, 20), "not 20"),
            (lambda: build_index(model, read_corpus(str(path), 30, "fr"), store, k=K), "'en'"),
            (lambda: build_index(model, read_corpus(str(path), 30, column="t"), store, k=K), "'text'"),
            (lambda: scan(model, path, store, None), "larger limit"),
            (lambda: path.write_text(more) and scan(model, path, store, 30), "c.txt"),
        ):
            with pytest.raises(StoreError, match=output) as caught:
                wrong()
            assert not re.search("[0-9a-f]{8}", str(caught.value).replace(str(tmp_path), ""))


def test_what_is_not_read_is_counted(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db", create=True) as store:
        counts = build_index(model, corpus, store, k=K, max_tokens=20)
        long = sum(len(model.token_ids(s.text)) >= 20 for s in corpus.sentences())
        assert (counts["without tokens"], counts["cut at 20 tokens"]) == (1, long)


def test_sums_are_of_one_shard_in_ten():
    for seed in range(3):
        chosen = [number for number in range(101) if has_statistics(number, seed)]
        assert chosen[0] == 0
        assert [(number - 1) // 10 for number in chosen[1:]] == list(range(10))


def scan_alone(store, corpus, texts, pause, started):
    """In a process of its own. pause: seconds before each commit of shards and before each file of vectors."""
    index.SHARD, index.COMMIT_SECONDS, calibration.TEXTS = 16, 0, texts
    for where, name in ((ScanTables, "commit"), (VectorFiles, "save")):
        setattr(where, name, _late(getattr(where, name), pause))
    model = Model(random_model(LLAMA, dtype=torch.float32).net, Letters(), "letters")
    with open_store(store, create=True) as opened:
        started.set()
        build_index(model, read_corpus(corpus), opened, k=K)


def _late(work, seconds):
    def run(*arguments, **options):
        time.sleep(seconds)
        return work(*arguments, **options)

    return run


def _shards(path, count):
    """Whether so many shards are committed, and no result is there."""
    with contextlib.suppress(StoreError, sqlite3.Error), open_store(path) as store:
        return len(store.scan.shards()) >= count and "finished" not in store.facts.all()


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([lambda path, n=n: _shards(path, n) for n in (1, 3, 4)], marks=pytest.mark.release),
        [lambda path, name=name: Path(f"{path}.{name}.faiss").exists() for name in ("w_out", "examples")],
    ],
    ids=["across shards", "during vectors"],
)
def test_killed_at_any_stage(model, corpus, tmp_path, moments):
    killed, arguments = tmp_path / "k.db", (str(tmp_path / "c.txt"), calibration.TEXTS)
    for reached in moments:
        process = started_alone(scan_alone, killed, *arguments, 0.3)
        deadline = time.monotonic() + 60
        while not reached(killed) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert reached(killed)
        assert not Path(f"{killed}.tokens.faiss").exists()
    with open_store(killed) as finished, open_store(tmp_path / "whole.db", create=True) as store:
        build_index(model, corpus, finished, k=K)
        build_index(model, corpus, store, k=K)
        assert store.checksum() == finished.checksum()
        assert store.search("bear", 60) == finished.search("bear", 60)


def test_killed_at_random_moments(model, corpus, tmp_path, generator):
    killed, arguments = tmp_path / "k.db", (str(tmp_path / "c.txt"), calibration.TEXTS)
    for moment in [generator.uniform(0, 0.5) for _ in range(3)] + [None]:
        process = started_alone(scan_alone, killed, *arguments, 0)
        if moment is not None:
            time.sleep(moment)
            process.kill()
        process.join()
    assert process.exitcode == 0
    with open_store(killed) as finished, open_store(tmp_path / "whole.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        assert store.checksum() == finished.checksum()


def test_another_batch_size_changes_the_last_digits_only(model, corpus):
    sentences = list(corpus.sentences())
    (a, v), (b, w) = (scan_shard(model, sentences, Settings(k=4 * K), batch_size=size) for size in (32, 5))
    assert torch.allclose(v.float(), w.float(), rtol=1e-2, atol=1e-3)
    assert torch.allclose(a.values, b.values, rtol=1e-4)
    assert_same_but_for_ties(a, b, K)


def assert_same_but_for_ties(a, b, k):
    """Sentences that begin alike tie, but for the last digits; of those a head has one, for the same token."""
    heads = len(a.values[0]) - len(a.written_at)
    for polarity, neuron, place in (a.sentences != b.sentences)[:, :, :k].nonzero().tolist():
        row, head = a.values[polarity, neuron], neuron - heads
        tied = torch.isclose(row, row[place], rtol=1e-4).sum() > 1
        assert tied or (head >= 0 and a.written_at[head, place] == b.written_at[head, place])


def test_summaries_merge_in_any_order_bit_for_bit(model, corpus):
    sentences = list(corpus.sentences())
    parts = [scan_shard(model, sentences[n : n + 16], Settings(k=K))[0] for n in range(0, len(sentences), 16)]
    forwards = functools.reduce(merge, parts)
    for order in (parts[::-1], parts[1::2] + parts[::2]):
        other = functools.reduce(merge, order)
        assert index.pack(other) == index.pack(forwards)


def test_special_tokens_in_a_text_count_the_same_beside_others_as_alone(model):
    """Dumps have them at the end of a text, however long."""

    class Marked(Letters):
        all_special_ids = (ord("~") % 50,)

    marked = Model(model.net, Marked(), "marked")
    texts = ["A cat" + 6 * "~", "A bird.", "The bear ~ eats~~", "Snow is cold~", "One fish here."]
    sentences = [Sentence(sentence_id(text), text, "", 0, len(text)) for text in texts]
    together, _ = scan_shard(marked, sentences, Settings(k=5))
    alone = functools.reduce(merge, (scan_shard(marked, [sentence], Settings(k=5))[0] for sentence in sentences))
    assert torch.allclose(together.values, alone.values, rtol=1e-4)
    assert torch.allclose(together.statistics["extremes"], alone.statistics["extremes"], rtol=1e-4)
    assert_same_but_for_ties(together, alone, 5)
    same = together.sentences == alone.sentences
    assert together.tokens[same].equal(alone.tokens[same])


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
        made.net.model.norm.weight.fill_(1)
        layer.mlp.down_proj.weight[:, 7] = made.net.lm_head.weight[letter]
    model = Model(made.net, Letters(), "planted")
    bare = [f"{start} {end}" for start in ("The bear", "Snow", "A fish") for end in ("sleeps.", "is cold.", "eats it.")]
    texts = [*bare, "A zebra runs.", "My old zebra.", "One zebra here."]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    planted = Neuron(0, "ffn", 7)
    with open_store(tmp_path / "p.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "p.jsonl")), store, k=4)
        card = describe(store, planted, model)
        result = card.examples["+"]
        assert {example.sentence.text for example in result} == set(texts[-3:])  # nothing else makes it fire
        assert all(example.token_text == "z" for example in result)
        assert card.meanings == {}
        assert card.projection.promoted[0].id == letter
        assert card.statistics.min > -1e-3
        assert [hit.neuron for hit in store.search("zebra", 3)].index(planted) == 0


def test_vocabulary_without_the_model(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        for neuron in (Neuron(0, "ffn", 0), Neuron(2, "ffn", 19)):
            exact, selected = project(model, neuron, 5), store.vocabulary(neuron, 5)
            for a, b in ((exact.promoted, selected.promoted), (exact.suppressed, selected.suppressed)):
                assert [t.logit for t in a] == pytest.approx([t.logit for t in b], rel=2e-3)
                assert [t.z for t in a] == pytest.approx([t.z for t in b], rel=5e-3)
                assert [t.id for t in a] == [t.id for t in b]


def test_a_card_as_a_page_keeps_text_text(model, tmp_path):
    nasty = [
        "<script>alert(1)</script> bears <img src=x onerror=alert(2)>",
        "\u202eright to left \U0001f43b `x` 'q' \"d\"",
    ]
    (tmp_path / "n.jsonl").write_text("\n".join(json.dumps({"text": t, "title": "<b>T</b>"}) for t in nasty))
    with open_store(tmp_path / "n.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "n.jsonl")), store, k=2)
        neuron = Neuron(1, "ffn", 3)
        store.labels.set_manual(neuron, "</h2><script>alert(3)</script>")
        annotate(model, store, [neuron], k=1)
        page = describe(store, neuron, model).to_html()
        assert describe(store, neuron, model)._repr_html_().startswith("<style>.card{")
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>T" not in page
    assert "&lt;/h2&gt;&lt;script&gt;" in page
    assert 'class="bars"' in page


@pytest.mark.parametrize("method", [ATTNLRP, CP_LRP], ids=repr)
def test_annotations_conserve_and_batch_as_one_by_one(model, corpus, tmp_path, method, monkeypatch):
    neurons = [Neuron(layer, "ffn", index) for layer in range(3) for index in (2, 11)]
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        count = annotate(model, store, neurons, k=3, method=method)
        assert count > 10
        assert annotate(model, store, neurons, k=3, method=method) == 0
        rows = store.database.execute("SELECT relevance FROM attributions").fetchall()
        assert len(rows) == count
        for (text,) in rows:
            conserved = json.loads(text)["conservation"]
            assert abs(conserved["remainder"]) < 1e-5 * max(1, abs(conserved["target"]))
            assert sum(json.loads(text)["tokens"]) == pytest.approx(conserved["tokens"], abs=1e-4)
            assert method is ATTNLRP or conserved["softmax"] == 0
        for neuron in neurons:
            for polarity in "+-":
                for example in store.examples(neuron, polarity, 3, name_of(method)):
                    prompts, positions = [example.sentence.text], [example.token]
                    ((tokens, sums),) = attribute_neurons(model, prompts, [neuron], positions, method)
                    assert sums.target == pytest.approx(example.activation, rel=1e-4)
                    assert list(example.relevance) == pytest.approx(tokens.tolist(), abs=1e-4)
                    assert not tokens[example.token + 1 :].any()
