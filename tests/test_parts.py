"""A scan in parts against one run: any order, killed parts, parts of other scans."""

import contextlib
import random
import signal
import sqlite3
import time

import pytest
import torch
from conftest import LLAMA, Letters, random_model, started_alone
from few import few_of
from test_cli import run

from icebear import Model, build_index, open_store, read_corpus
from icebear.actmax.index import build, parts
from icebear.actmax.index.part_files import parts_in, remove_parts
from icebear.actmax.index.parts import merge_parts, scan_part
from icebear.concepts.vocabulary import calibration
from icebear.db.scan_tables import ScanTables
from icebear.errors import InputError, StoreError
from icebear.paths import locked

K = 5


@pytest.fixture(autouse=True)
def _small_shards(corpus, monkeypatch):
    monkeypatch.setattr(build, "SHARD", 4)
    monkeypatch.setattr(build, "COMMIT_SECONDS", 0)


@pytest.fixture
def whole(model, corpus, tmp_path):
    """The checksum of one run."""
    with open_store(tmp_path / "whole.db", create=True) as store:
        counts = build_index(model, corpus, store, k=K)
        return store.checksum(), counts


def stopping(after):
    def stop(done, total):
        if done >= after:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("count", few_of([1, 3, 8], 8))
def test_parts_in_any_order_are_one_run(model, corpus, tmp_path, whole, count):
    """Some are interrupted and run again; some have no shard."""
    order = random.Random(count).sample(range(1, count + 1), count)
    for part in order:
        if part % 3 == 0:
            with pytest.raises(KeyboardInterrupt):
                scan_part(model, corpus, tmp_path / "parts", part, count, k=K, on_progress=stopping(8))
            assert parts_in(tmp_path / "parts")[count][part] is False
        path = scan_part(model, corpus, tmp_path / "parts", part, count, k=K)
        assert scan_part(model, corpus, tmp_path / "parts", part, count, k=K) == path
    assert parts_in(tmp_path / "parts") == {count: dict.fromkeys(range(1, count + 1), True)}
    with open_store(tmp_path / "merged.db", create=True) as store:
        assert merge_parts(model, tmp_path / "parts", store) == whole[1]
        assert store.checksum() == whole[0]
        assert store.is_complete
        assert sum(store.scan.shards().values()) == store.count("sentences")


def scan_alone(folder, corpus, texts, part, pause, started):
    """In a process of its own, which commits each shard of 4 sentences. pause: seconds before each commit."""
    build.SHARD, build.COMMIT_SECONDS, calibration.TEXTS, commit = 4, 0, texts, ScanTables.commit
    ScanTables.commit = lambda *arguments: time.sleep(pause) or commit(*arguments)
    model = Model(random_model(LLAMA, dtype=torch.float32).net, Letters(), "letters")
    started.set()
    scan_part(model, read_corpus(corpus), folder, part, 8, k=K)


@pytest.mark.long
def test_killed_parts_run_again_and_merge_in_any_order_to_one_run(model, corpus, tmp_path, monkeypatch, whole):
    """Three of eight, by a signal after their first shard; the checksum is that of the command."""
    merge = parts._merge
    folder, text, killed = tmp_path / "parts", str(tmp_path / "c.txt"), (2, 5, 8)
    for part in killed:
        process = started_alone(scan_alone, folder, text, calibration.TEXTS, part, 0.2)
        partial, deadline = folder / f"part-{part}-of-8.partial", time.monotonic() + 60
        while not shards(partial) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert parts_in(folder) == {8: dict.fromkeys(killed, False)}
    for part in (8, 1, 3, 5, 4, 7, 2, 6):
        scan_part(model, corpus, folder, part, 8, k=K)
    for name, order in (("up", 1), ("down", -1)):
        with open_store(tmp_path / f"{name}.db", create=True) as store, monkeypatch.context() as patch:
            patch.setattr(parts, "_merge", lambda model, stores, *more, by=order: merge(model, stores[::by], *more))
            merge_parts(model, folder, store)
        assert run("doctor", "--checksum", str(tmp_path / f"{name}.db")).strip() == whole[0]


def shards(path):
    with contextlib.suppress(StoreError, sqlite3.Error), open_store(path) as store:
        return len(store.scan.shards())


def test_a_merged_index_goes_on_to_a_larger_limit(model, corpus, tmp_path):
    few, more = (read_corpus(corpus.facts["corpus"], limit=limit) for limit in (5, 30))
    for part in (1, 2):
        scan_part(model, few, tmp_path / "parts", part, 2, k=K)
    with open_store(tmp_path / "merged.db", create=True) as store, open_store(tmp_path / "one.db", create=True) as one:
        merge_parts(model, tmp_path / "parts", store)
        build_index(model, more, store, k=K)
        build_index(model, more, one, k=K)
        assert store.checksum() == one.checksum()


def test_missing_and_other_parts_are_named(model, corpus, tmp_path):
    folder = tmp_path / "parts"

    def merged():
        with open_store(tmp_path / "merged.db", create=True) as store:
            return merge_parts(model, folder, store)

    with pytest.raises(StoreError, match="no parts"):
        merged()
    scan_part(model, corpus, folder, 2, 3, k=K)
    with pytest.raises(StoreError, match="2 of 3 parts") as error:
        merged()
    assert "1, 3" in str(error.value)
    scan_part(model, corpus, folder, 1, 3, k=K)
    scan_part(model, corpus, folder, 3, 3, k=K + 1)
    with pytest.raises(StoreError, match="k 6"):
        merged()
    with pytest.raises(StoreError):
        scan_part(model, read_corpus(corpus.facts["corpus"], limit=5), folder, 1, 3, k=K)
    with pytest.raises(InputError):
        scan_part(model, corpus, folder, 1, 2, k=K)
    (folder / "part-3-of-3.db").unlink()
    scan_part(model, corpus, folder, 3, 3, k=K)
    with pytest.raises(StoreError):
        scan_part(model, corpus, folder, 3, 3, k=K + 1)
    (folder / "part-1-of-2.partial").write_bytes(b"")
    with pytest.raises(StoreError, match="and of"):
        merged()
    (folder / "part-1-of-2.partial").unlink()
    twice = (folder / "part-2-of-3.db").read_bytes()
    kept = (folder / "part-1-of-3.db").read_bytes()
    (folder / "part-1-of-3.db").write_bytes(twice)
    with pytest.raises(StoreError, match="part-1-of-3"):
        merged()
    (folder / "part-1-of-3.db").write_bytes(kept)
    assert merged() == merged()
    for wrong in ((0, 3), (4, 3), (1, 0)):
        with pytest.raises(InputError):
            scan_part(model, corpus, folder, *wrong, k=K)


def test_a_part_that_another_process_scans_is_left_to_it(model, corpus, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    with locked(folder / "part-1-of-2.db"), pytest.raises(StoreError):
        scan_part(model, corpus, folder, 1, 2, k=K)
    scan_part(model, corpus, folder, 1, 2, k=K)


def test_a_part_that_was_stopped_before_its_file_was_renamed_is_complete(model, corpus, tmp_path, monkeypatch, whole):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts.Path, "replace", killed)
        scan_part(model, corpus, tmp_path / "parts", 1, 1, k=K)
    scan_part(model, corpus, tmp_path / "parts", 1, 1, k=K)
    with open_store(tmp_path / "merged.db", create=True) as store:
        merge_parts(model, tmp_path / "parts", store)
        assert store.checksum() == whole[0]


def test_the_means_of_heads_are_those_of_the_first_part(model, corpus, tmp_path, monkeypatch):
    """Another machine would measure others."""
    seen, means = [], parts.head_means(model)

    def measured(model):
        seen.append(1)
        return means + len(seen)

    monkeypatch.setattr(parts, "head_means", measured)
    few = read_corpus(corpus.facts["corpus"], limit=20)
    for part in (1, 2):
        scan_part(model, few, tmp_path / "parts", part, 2, k=K)
    assert len(seen) == 1
    with open_store(tmp_path / "merged.db", create=True) as store:
        merge_parts(model, tmp_path / "parts", store)
        assert torch.equal(build.load(store.scan.progress()["head_means"])["head_means"], means + 1)
    scan_part(model, few, tmp_path / "others", 1, 1, k=K)
    (tmp_path / "others" / "part-1-of-1.db").rename(tmp_path / "parts" / "part-1-of-1.db")
    with pytest.raises(StoreError), open_store(tmp_path / "mixed.db", create=True) as store:
        merge_parts(model, tmp_path / "parts", store)


def test_a_merge_that_was_stopped_goes_on(model, corpus, tmp_path, monkeypatch, whole):
    for part in (1, 2):
        scan_part(model, corpus, tmp_path / "parts", part, 2, k=K)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, open_store(tmp_path / "merged.db", create=True) as store:
        patch.setattr(parts, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            merge_parts(model, tmp_path / "parts", store)
    with open_store(tmp_path / "merged.db", create=True) as store:
        merge_parts(model, tmp_path / "parts", store)
        assert store.checksum() == whole[0]


def test_a_part_that_another_program_reads_is_not_renamed_without_its_log(model, corpus, tmp_path, monkeypatch, whole):
    (tmp_path / "parts").mkdir()
    partial = tmp_path / "parts" / "part-1-of-1.partial"
    readers = []

    def read(done, total):
        if partial.exists() and not readers:
            readers.append(sqlite3.connect(partial))
            readers[0].execute("BEGIN")
            readers[0].execute("SELECT COUNT(*) FROM sqlite_master").fetchone()

    with pytest.raises(StoreError):
        scan_part(model, corpus, tmp_path / "parts", 1, 1, k=K, on_progress=read)
    assert readers
    readers[0].close()
    scan_part(model, corpus, tmp_path / "parts", 1, 1, k=K)
    with open_store(tmp_path / "merged.db", create=True) as store:
        merge_parts(model, tmp_path / "parts", store)
        assert store.checksum() == whole[0]


def test_only_parts_are_removed(model, corpus, tmp_path):
    scan_part(model, corpus, tmp_path / "parts", 1, 2, k=K)
    (tmp_path / "parts" / "mine.txt").write_text("mine")
    remove_parts(tmp_path / "parts")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["mine.txt"]
    scan_part(model, corpus, tmp_path / "others", 1, 2, k=K)
    remove_parts(tmp_path / "others")
    assert not (tmp_path / "others").exists()
