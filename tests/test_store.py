"""One file: what is refused, with a sentence that helps; search; readers and writers."""

import contextlib
import copy
import logging
import os
import shutil
import sqlite3
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import LLAMA, Letters, random_model
from transformers import GPT2Config

from icebear import Model, Store, annotate, build_index, describe, open_store, read_corpus
from icebear.actmax.index import build as index
from icebear.concepts.vocabulary.weight_rows import direct_row, w_in_rows
from icebear.db import search, vectors
from icebear.db.search import nearest_by_chance
from icebear.errors import InputError, StoreError, UnknownName
from icebear.records import Neuron

K = 5
pytestmark = pytest.mark.usefixtures("few_draws")


def test_a_store_of_something_else_is_refused(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        with pytest.raises(StoreError, match="not 6"):
            build_index(model, corpus, store, k=6)
        (tmp_path / "other.txt").write_text("Another text.")
        with pytest.raises(StoreError, match=r"other\.txt"):
            build_index(model, read_corpus(str(tmp_path / "other.txt")), store, k=K)
        other = Model(random_model(LLAMA, dtype=torch.float32, seed=3).net, Letters(), "letters")
        with pytest.raises(StoreError, match="letters"):
            build_index(other, corpus, store, k=K)
        with pytest.raises(StoreError, match="L9"):
            store.examples(Neuron(9, "ffn", 0))
        store.database.execute("PRAGMA user_version = 999")
    with pytest.raises(StoreError), open_store(tmp_path / "i.db"):
        pass
    whole = (tmp_path / "i.db").read_bytes()
    for length in (100, len(whole) // 2, len(whole) - 5000):
        (tmp_path / "cut.db").write_bytes(whole[:length])
        with pytest.raises(StoreError, match=r"cut\.db"), open_store(tmp_path / "cut.db") as store:
            store.checksum()
    (tmp_path / "text.db").write_text("not a database, but long enough to look at" * 50)
    with pytest.raises(StoreError, match=r"text\.db"), open_store(tmp_path / "text.db"):
        pass
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)").connection.close()
    for create in (False, True):
        with pytest.raises(StoreError), open_store(tmp_path / "other.db", create):
            open_store(tmp_path / "other.db", create).__enter__().facts.all()


def test_reading_makes_and_changes_nothing(tmp_path):
    (tmp_path / "empty.db").touch()
    os.mkfifo(tmp_path / "pipe.db")
    (tmp_path / "loop.db").symlink_to(tmp_path / "loop.db")
    (tmp_path / "folder.db").mkdir()
    before = sorted(tmp_path.iterdir())
    for name in ("none.db", "empty.db", "no/none.db"):
        for read in (
            lambda store: store.facts.all(),
            Store.checksum,
            lambda store: store.search("bear"),
            lambda store: store.concepts.all(),
            lambda store: store.neurons.all_without_heads(),
        ):
            with (
                pytest.raises(StoreError, match=name),
                open_store(tmp_path / name) as store,
            ):
                read(store)
    for create in (False, True):
        for name in ("pipe.db", "loop.db", "folder.db"):
            with pytest.raises(StoreError, match=name), open_store(tmp_path / name, create) as store:
                store.facts.all()
        with pytest.raises(InputError):
            open_store(tmp_path / ("n" * 300), create).__enter__()
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "empty.db").stat().st_size == 0


def test_a_scan_makes_the_store(model, corpus, tmp_path):
    with open_store(tmp_path / "wiki.db") as store:
        with pytest.raises(StoreError, match=r"wiki\.db"):
            store.labels.set_manual(Neuron(0, "ffn", 0), "x")
        assert not store.path.exists()
        build_index(model, corpus, store, k=K)
        assert store.search("bear")


def test_a_store_that_may_be_made_is_made_by_its_first_use(model, corpus, tmp_path):
    with open_store(tmp_path / "wiki.db", create=True) as store:
        assert not store.path.exists()
        build_index(model, corpus, store, k=K)
        assert store.search("bear")
    with pytest.raises(StoreError), open_store(tmp_path / "no/a.db", create=True) as store:
        store.facts.all()


@pytest.mark.parametrize("name", ["file:evil.db?mode=memory", "file:x.db", ":memory:", "a b#1?%20.db", "'; --.db"])
def test_a_store_is_a_path_whatever_it_is_called(model, corpus, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with open_store(name, create=True) as store:
        build_index(model, corpus, store, k=K)
        checksum = store.checksum()
    assert (tmp_path / name).stat().st_size
    with open_store(name) as store:
        assert store.checksum() == checksum
        assert store.search("bear")


def test_search_fuses_what_neurons_write_and_what_drives_them(model, corpus, tmp_path):
    """Against the definition, computed from the model and the examples."""
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        neuron = Neuron(2, "ffn", 4)
        rows = torch.nn.functional.normalize(
            torch.stack([direct_row(model, Neuron(n // 20, "ffn", n % 20)) for n in range(60)])
        )
        cosines = rows @ rows[44]
        cosines[44] = -2
        (nearest, *_) = store.similar(neuron, 3)
        flipped = cosines.abs()
        flipped[44] = -2
        assert nearest.neuron.index == int(flipped.argmax()) % 20
        assert nearest.score == pytest.approx(flipped.max().item(), abs=2e-3)
        assert nearest.polarity == ("+" if cosines[int(flipped.argmax())] > 0 else "-")
        hits = store.search("bear", k=60)
        counts = {
            (hit.neuron, hit.polarity): sum(
                "bear" in e.sentence.text.lower() for e in store.examples(hit.neuron, hit.polarity)
            )
            for hit in hits
        }
        for hit in hits:
            text = [int(why.split()[0]) for why in hit.why if "contain the words" in why]
            assert text == ([counts[hit.neuron, hit.polarity]] if counts[hit.neuron, hit.polarity] else [])
            assert hit.by == ("sentences" if text else "weights")
        assert any(text > 1 for text in counts.values())
        with pytest.raises(InputError, match=r"\?!"):
            store.search("?!")
        for odd in ('" OR 1', "a*b NEAR (", "'; DROP TABLE neurons; --"):
            store.search(odd)
        assert store.neurons.count_without_heads() == 60
        for name in ("w_out", "w_in", "examples", "tokens"):
            store.vectors.path(name).unlink()
            with pytest.raises(StoreError, match=name):
                store.search("bear")
                store.similar(neuron, by="reads")
            build_index(model, corpus, store, k=K)
            assert store.search("bear", k=60) == hits


def test_example_vectors_are_means_over_what_drives_a_neuron(model, corpus, tmp_path, monkeypatch):
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        ids, rows = store.sentences.vectors()
        of = dict(zip(ids.tolist(), rows.astype(np.float64), strict=True))
        for sentence in list(corpus.sentences())[:5]:
            with torch.no_grad():
                ids = torch.tensor([model.token_ids(sentence.text)])
                stream = model.net(ids, output_hidden_states=True).hidden_states[-1][0]  # (T, D)
            assert of[sentence.id] == pytest.approx(stream[1:].mean(0).numpy(), abs=1e-2)
        centre, spread = (getattr(np, part)(list(of.values()), axis=0) for part in ("mean", "std"))
        saved = store.vectors.get("examples")
        for number in range(0, 60, 11):
            for sign, polarity in enumerate("+-"):
                examples = store.examples(Neuron(number // 20, "ffn", number % 20), polarity)
                mean = (np.mean([of[e.sentence.id] for e in examples], axis=0) - centre) / spread
                row = saved.reconstruct(2 * number + sign)
                assert row == pytest.approx(mean / np.linalg.norm(mean), abs=2e-3)
        monkeypatch.setattr(search, "NOTABLE", 0.0)
        assert any("examples are similar" in why for hit in store.search("bear", 20) for why in hit.why)
        assert store.similar(Neuron(0, "ffn", 3), 3, by="examples")[0].score <= 1.001
        assert store.similar(Neuron(0, "ffn", 3), 3, by="reads")[0].neuron != Neuron(0, "ffn", 3)
        with pytest.raises(UnknownName):
            store.similar(Neuron(0, "ffn", 3), by="smell")


def test_a_second_writer_is_told(model, corpus, tmp_path, monkeypatch):
    with open_store(tmp_path / "i.db", create=True) as first, open_store(tmp_path / "i.db", create=True) as second:
        second.database.conn.execute("PRAGMA busy_timeout = 100")
        with first.writing(), pytest.raises(StoreError):
            second.scan.commit({}, {}, {"k": 1})
        assert second.facts.all() == {}


def test_a_full_disk_loses_nothing(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0)
    with (
        open_store(tmp_path / "full.db", create=True) as store,
        open_store(tmp_path / "whole.db", create=True) as whole,
    ):
        pages = store.database.execute("PRAGMA page_count").fetchone()[0]
        store.database.execute(f"PRAGMA max_page_count = {pages + 9}")  # SQLite fails as on a full disk
        with pytest.raises(StoreError, match="disk"):
            build_index(model, corpus, store, k=K)
        store.database.execute("PRAGMA max_page_count = 1000000")
        build_index(model, corpus, store, k=K)
        build_index(model, corpus, whole, k=K)
        assert store.checksum() == whole.checksum()


def test_folders_that_cannot_be_written(model, corpus, tmp_path):
    with pytest.raises(StoreError), open_store("/proc/icebear.db", create=True) as store:
        store.facts.all()
    with pytest.raises(StoreError):
        Store(tmp_path / "no" / "folder.db").vectors.save("w_out", [np.ones((2, 3))])


@contextlib.contextmanager
def unwritable(folder):
    """Nothing in the folder can be written, not even by root, who is nobody meanwhile."""
    for path in (folder, *folder.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.mark.parametrize("left_in", ["the mode it has", "WAL"])
def test_a_finished_store_opens_where_nothing_can_be_written(model, corpus, left_in):
    with tempfile.TemporaryDirectory() as name:  # nobody may look into pytest's own folders
        path = Path(name) / "a store #1?.db"
        with open_store(path, create=True) as store:
            build_index(model, corpus, store, k=K)
            hits, checksum = store.search("bear"), store.checksum()
        if left_in == "WAL":  # as another program may leave it
            sqlite3.connect(path).execute("PRAGMA journal_mode = WAL").connection.close()
        with unwritable(Path(name)), open_store(path, create=False) as store:
            assert store.search("bear") == hits
            assert store.checksum() == checksum
            with pytest.raises(StoreError):
                store.labels.set_manual(hits[0].neuron, "a name")
            with pytest.raises(StoreError):
                build_index(model, corpus, store, k=K)


def test_what_is_still_in_a_log_is_never_left_out(model, corpus):
    """A store that lies where it cannot be written, and is not whole without the log beside it."""
    with tempfile.TemporaryDirectory() as name, open_store(Path(name) / "i.db", create=True) as store:
        store.database.execute("PRAGMA journal_mode = WAL")
        store.scan.commit({}, {}, {"k": 1})
        for suffix in ("", "-wal"):
            shutil.copy(f"{name}/i.db{suffix}", f"{name}/copy.db{suffix}")
        with unwritable(Path(name)), pytest.raises(StoreError):
            open_store(Path(name) / "copy.db", create=False).__enter__()


def test_what_reads_alike_in_a_gated_ffn_has_no_polarity(model, corpus, tmp_path):
    """There the sign of an activation is that of what the other map reads, and gates that are opposed never agree."""
    neuron = Neuron(1, "ffn", 3)
    plain = GPT2Config(vocab_size=50, n_embd=24, n_layer=3, n_head=4, n_inner=20, n_positions=64)
    ungated = Model(random_model(plain, dtype=torch.float32).net, Letters(), "letters")
    for made, signs in ((model, {""}), (ungated, {"+", "-"})):
        with open_store(tmp_path / f"{len(signs)}.db", create=True) as store:
            build_index(made, corpus, store, k=K)
            rows = torch.nn.functional.normalize(torch.cat([w_in_rows(made, "ffn", layer) for layer in range(3)]))
            cosines = rows @ rows[23]
            hits = store.similar(neuron, 60, by="reads")
            assert {hit.polarity for hit in hits} == signs
            for hit in hits:
                cosine = cosines[20 * hit.neuron.layer + hit.neuron.index].item()
                assert hit.score == pytest.approx(-cosine if hit.polarity == "-" else cosine, abs=2e-3)
            assert {hit.polarity for hit in store.similar(neuron, 60, by="writes")} == {"+", "-"}


def test_a_card_does_without_what_reads_gigabytes(model, corpus, tmp_path, monkeypatch):
    neuron = Neuron(1, "ffn", 3)
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        whole = describe(store, neuron)
        monkeypatch.setattr("icebear.actmax.describe.LARGE", store.vectors.size())
        with monkeypatch.context() as patch:
            patch.setattr(vectors.VectorFiles, "get", None)
            quick = describe(store, neuron)
        assert (quick.projection, quick.left_out) == (None, True)
        assert quick.examples == whole.examples
        assert (whole.left_out, describe(store, neuron, search_vectors=True).projection) == (False, whole.projection)
        assert describe(store, neuron, model).projection.promoted[0].id == whole.projection.promoted[0].id


def test_an_index_in_16_bits_is_one_of_its_own(model, corpus, tmp_path):
    half = Model(random_model(LLAMA, dtype=torch.bfloat16).net, Letters(), model.name)
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(half, corpus, store, k=K)
        assert store.facts.get("dtype") == "bfloat16"
        neuron = Neuron(1, "ffn", 3)
        whole = Model(copy.deepcopy(half.net).float(), Letters(), model.name)
        assert whole.fingerprint == half.fingerprint
        with pytest.raises(StoreError, match="'bfloat16'"):
            build_index(whole, corpus, store, k=K)
        with pytest.raises(StoreError, match="bfloat16"):
            annotate(whole, store, [neuron])


def test_readers_look_on_while_a_scan_writes(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0)
    seen = []
    with open_store(tmp_path / "i.db", create=True) as writer, open_store(tmp_path / "i.db", create=True) as reader:

        def look(done, total):
            with writer.writing():
                seen.append(reader.count("sentences"))

        build_index(model, corpus, writer, k=K, on_progress=look)
        assert seen == sorted(seen)
        assert seen[-1] > seen[0]


VECTORS = ("w_out", "w_in", "examples", "tokens")


@pytest.fixture
def reference_stores(model, tmp_path):
    """Two of one model, of the same shape, from other texts: only vectors of examples differ."""
    made = []
    for name, words in (("a", "ice sea"), ("b", "sun sand")):
        (tmp_path / f"{name}.txt").write_text(
            "\n".join(f"{one} {n} bears live" for n in range(6) for one in words.split())
        )
        with open_store(tmp_path / f"{name}.db", create=True) as store:
            build_index(model, read_corpus(str(tmp_path / f"{name}.txt")), store, k=2)
            made.append(store)
    return [store.path for store in made]


def test_swapped_vectors_are_named_never_searched_and_made_anew(model, reference_stores, tmp_path, caplog):
    one, other = reference_stores
    with open_store(one) as store, open_store(other) as alien:
        hits, checksum = store.search("bears", 60), store.checksum()
        shutil.copy(alien.vectors.path("examples"), store.vectors.path("examples"))
        with pytest.raises(StoreError, match=r"examples\.faiss"):
            store.search("bears")
        with pytest.raises(StoreError, match=r"examples\.faiss"):
            store.similar(Neuron(0, "ffn", 3), by="examples")
        assert store.checksum() != checksum
        with caplog.at_level(logging.INFO, "icebear"):
            build_index(model, read_corpus(str(tmp_path / "a.txt")), store, k=2)
        assert "a.db.examples.faiss does not belong" in caplog.text
        assert (store.search("bears", 60), store.checksum()) == (hits, checksum)


@pytest.mark.parametrize("name", VECTORS)
def test_damaged_missing_and_unmarked_vectors_are_made_anew(model, reference_stores, tmp_path, name):
    with open_store(reference_stores[0]) as store:
        checksum, file = store.checksum(), store.vectors.path(name)
        whole = file.read_bytes()
        for damaged in (b"no index", b"", whole[:-1], whole[: -vectors.TAIL], whole[-vectors.TAIL :], None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(StoreError, match=file.name):
                store.vectors.get(name)
            build_index(model, read_corpus(str(tmp_path / "a.txt")), store, k=2)
            assert (store.checksum(), file.read_bytes()) == (checksum, whole)


def test_the_checksum_is_of_labels_and_vectors_too(model, reference_stores, tmp_path):
    with open_store(reference_stores[0]) as store:
        seen = {store.checksum()}
        store.labels.set_manual(Neuron(0, "ffn", 3), "a name")
        seen.add(store.checksum())
        file = store.vectors.path("w_out")
        flipped = bytearray(file.read_bytes())
        flipped[-vectors.TAIL - 1] ^= 1
        file.write_bytes(flipped)
        seen.add(store.checksum())
        assert len(seen) == 3
        build_index(model, read_corpus(str(tmp_path / "a.txt")), store, k=2)
        assert store.checksum() in seen


def test_vectors_of_earlier_results_are_never_searched(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "c.txt"), 30), store, k=K)
        earlier = store.vectors.path("examples").read_bytes()
        build_index(model, read_corpus(str(tmp_path / "c.txt"), 1000), store, k=K)
        store.vectors.path("examples").write_bytes(earlier)
        with pytest.raises(StoreError, match=r"examples\.faiss"):
            store.search("bear")


def test_a_wrong_site_leaves_no_trace(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db", create=True) as store:
        with pytest.raises(InputError, match="'fnn'"):
            build_index(model, corpus, store, k=K, sites=("fnn",))
        assert store.facts.all() == {}
        build_index(model, corpus, store, k=K, sites=("ffn", "ffn"))
        assert store.count("neurons") == 60


def test_two_scans_of_one_store(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db", create=True) as first, open_store(tmp_path / "i.db", create=True) as second:

        def intrude(done, total):
            with pytest.raises(StoreError):
                build_index(model, corpus, second, k=K)

        build_index(model, corpus, first, k=K, on_progress=intrude)
        assert "finished" in first.facts.all()


def test_what_is_damaged_inside_is_said_in_words(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
    size = (tmp_path / "i.db").stat().st_size
    with (tmp_path / "i.db").open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * (size - 16384))
    with pytest.raises(StoreError, match=r"i\.db"), open_store(tmp_path / "i.db") as store:
        store.checksum()


def test_many_may_open_a_new_store_at_once(tmp_path):
    def look(number):
        with open_store(tmp_path / f"{number // 8}.db", create=True) as store:
            return store.count("sentences")

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(look, range(160))) == {0}


def test_a_scan_goes_on_however_the_paths_are_spelled(model, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = Model(model.net, Letters(), "../somewhere/letters")
    with open_store("i.db", create=True) as store:
        build_index(model, read_corpus("c.txt", 10), store, k=K)
        checksum = store.checksum()
        build_index(other, read_corpus(f"./../{tmp_path.name}/c.txt", 10), store, k=K)
        assert store.checksum() == checksum
        build_index(other, read_corpus(str(tmp_path / "c.txt"), 20), store, k=K)
        assert store.facts.get("limit") == 20


def test_the_null_of_similarity_is_the_nearest_of_random_neurons(model, corpus, tmp_path):
    """Against the definition: all pairs of rows, without the neuron itself."""
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        rows = torch.nn.functional.normalize(
            torch.stack([direct_row(model, Neuron(n // 20, "ffn", n % 20)) for n in range(60)])
        )
        cosines = (rows @ rows.T).abs().fill_diagonal_(0)
        drawn = np.random.default_rng(0).choice(60, search.CHANCE_NEURONS, replace=False)
        nearest = cosines[drawn.tolist()].max(1).values.numpy()
        assert nearest_by_chance(store, "writes") == pytest.approx((np.median(nearest), nearest.max()), abs=2e-3)


def test_a_flipped_bit_of_vectors_is_refused_and_mended(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vectors, "REMEMBERED", 0)
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        for name in vectors.NAMES:
            path = store.vectors.path(name)
            sound = path.read_bytes()
            damaged = bytearray(sound)
            damaged[len(sound) // 2] ^= 1  # the digest at the end is as it was
            path.write_bytes(damaged)
            for _ in range(2):
                with pytest.raises(StoreError, match=name):
                    store.vectors.get(name)
            build_index(model, corpus, store, k=K)
            assert path.read_bytes() == sound
            store.vectors.get(name)
            times = path.stat()
            path.write_bytes(damaged)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            store.vectors.get(name)  # was verified at this time
            with pytest.raises(StoreError, match=name):
                store.vectors.verify(name)
            path.write_bytes(sound)


def test_a_digest_is_computed_once_for_each_file_and_time(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vectors, "REMEMBERED", 0)
    calls, digest = [], vectors.digest
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        monkeypatch.setattr(vectors, "digest", lambda path: calls.append(path) or digest(path))
        vectors._is_verified.cache_clear()  # as in another process
        store.search("bear")
        assert not calls
        os.utime(store.vectors.path("tokens"))
        for _ in range(2):
            vectors._is_verified.cache_clear()
            store.search("bear")
        assert calls == [store.vectors.path("tokens")]
