"""A scan on Ray workers is one run, also when a worker is killed; without Ray, in its place tasks that run at once."""

import os
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from icebear import build_index, open_store
from icebear.actmax.index import build
from icebear.actmax.index.part_files import parts_in
from icebear.actmax.index.parts import merge_parts
from icebear.actmax.index.ray_parts import RETRIES, scan_on_ray
from icebear.errors import InputError

K = 5


@pytest.fixture
def local_ray(monkeypatch):
    """In the place of Ray: a task runs at once, in this process."""
    ray, cluster = ModuleType("ray"), SimpleNamespace(begun=[], options=[], ended=0)
    ray.__spec__ = ModuleSpec("ray", None)
    names = "WorkerCrashedError OutOfMemoryError RayTaskError".split()
    ray.exceptions = SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})

    def remote(**options):
        cluster.options.append(options)
        return lambda function: SimpleNamespace(remote=function)

    def end():
        cluster.ended += 1

    ray.remote, ray.shutdown, ray.is_initialized = remote, end, lambda: False
    ray.init = lambda address, **options: cluster.begun.append((address, options.get("num_cpus")))
    ray.put = ray.get = lambda value: value
    ray.wait = lambda tasks: (tasks[:1], tasks[1:])
    monkeypatch.setitem(sys.modules, "ray", ray)
    return cluster


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


def check_one_run(model, corpus, count, progress, folder):
    """Merged, the parts are what one run scans."""
    assert (count, progress[-1]) == (8, (8, 8))
    assert parts_in(folder / "parts") == {8: dict.fromkeys(range(1, 9), True)}
    with open_store("here.db", create=True) as here, open_store("ray.db", create=True) as there:
        build_index(model, corpus, here, k=K)
        merge_parts(model, "parts", there)
        assert here.checksum() == there.checksum()


@pytest.mark.usefixtures("one_thread")
def test_all_parts_are_tasks_that_are_tried_again(model, corpus, tmp_path, monkeypatch, local_ray):
    monkeypatch.chdir(tmp_path)
    seen = []
    count = scan_on_ray(model, corpus, "parts", 2, on_progress=lambda done, total: seen.append((done, total)), k=K)
    check_one_run(model, corpus, count, seen, tmp_path)
    assert local_ray.options == [{"num_cpus": 1, "num_gpus": 0, "max_retries": RETRIES}]
    assert (local_ray.begun, local_ray.ended) == ([(None, 2)], 1)


@pytest.mark.release
@pytest.mark.usefixtures("one_thread")
def test_ray_is_one_run_even_when_a_worker_is_killed(model, corpus, tmp_path, monkeypatch):
    """In a folder of somebody else, whose files Ray would import."""
    pytest.importorskip("ray")
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
    check_one_run(model, corpus, count, seen, tmp_path)


@pytest.mark.usefixtures("local_ray")
def test_where_no_cluster_answers_the_address_is_named(model, corpus, tmp_path, monkeypatch):
    def refused(*args, **options):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(sys.modules["ray"], "init", refused)
    with pytest.raises(InputError, match="elsewhere:1"):
        scan_on_ray(model, corpus, tmp_path / "parts", 1, "elsewhere:1", k=K)
    with pytest.raises(InputError):
        scan_on_ray(model, corpus, tmp_path / "parts", 0, k=K)
