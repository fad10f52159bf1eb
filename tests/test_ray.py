"""A scan on Ray workers is one run, also when a worker is killed."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from icebear import build_index, open_store
from icebear.actmax.index import build
from icebear.actmax.index.part_files import parts_in
from icebear.actmax.index.parts import merge_parts
from icebear.errors import InputError

ray = pytest.importorskip("ray", reason="ray is not installed; .ci/run installs it")
from icebear.actmax.index.ray_parts import scan_on_ray  # noqa: E402

K = 5


@pytest.fixture
def one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))  # workers unpickle the tests' tokenizer
    yield
    torch.set_num_threads(before)


def workers():
    """The processes that scan a part."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::_scanned"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def kill_one(stop, killed):
    while not stop.is_set() and not killed:
        for process in workers()[:1]:
            os.kill(process, 9)
            killed.append(process)
        time.sleep(0.002)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_ray_is_one_run_even_when_a_worker_is_killed(model, corpus, tmp_path, monkeypatch):
    """In a folder of somebody else, whose files Ray would import."""
    (tmp_path / "regex.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "SHARD", 256)  # that of workers
    stop, killed = threading.Event(), []
    killing = threading.Thread(target=kill_one, args=(stop, killed))
    killing.start()
    seen = []
    try:
        count = scan_on_ray(model, corpus, "parts", 2, on_progress=lambda done, total: seen.append((done, total)), k=K)
    finally:
        stop.set()
        killing.join()
    assert killed
    assert (count, seen[-1]) == (8, (8, 8))
    assert parts_in(tmp_path / "parts") == {8: dict.fromkeys(range(1, 9), True)}
    with open_store("here.db", create=True) as here, open_store("ray.db", create=True) as there:
        build_index(model, corpus, here, k=K)
        merge_parts(model, "parts", there)
        assert here.checksum() == there.checksum()


def test_where_no_cluster_answers_the_address_is_named(model, corpus, tmp_path, monkeypatch):
    def refused(*args, **options):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refused)
    with pytest.raises(InputError, match="elsewhere:1"):
        scan_on_ray(model, corpus, tmp_path / "parts", 1, "elsewhere:1", k=K)
    with pytest.raises(InputError):
        scan_on_ray(model, corpus, tmp_path / "parts", 0, k=K)
