"""Ray gives the same index, also when a worker dies."""

import os
import sys
import types

import psutil
import pytest
import torch

from icebear import Edit, Neuron, build_index, open_store
from icebear.actmax.index.engines import on_ray
from icebear.errors import InputError
from icebear.steering.flipping.flip import FlipRequest, _neurons, _start

K = 5


@pytest.fixture
def one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))  # workers unpickle the tests' tokenizer
    yield
    torch.set_num_threads(before)


@pytest.mark.release
@pytest.mark.long
def test_ray_equals_local_even_when_a_worker_is_killed(model, corpus, tmp_path, one_thread, generator, monkeypatch):
    """In a folder of somebody else, whose files Ray would import."""
    pytest.importorskip("ray")
    (tmp_path / "regex.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    killed = []

    def kill(done, total):
        if done and not killed:
            ours = [process for process in psutil.Process().children(recursive=True) if _is_worker(process)]
            killed.append(generator.choice(ours))
            killed[0].kill()

    with open_store(tmp_path / "local.db", create=True) as here, open_store(tmp_path / "ray.db", create=True) as there:
        build_index(model, corpus, here, k=K)
        build_index(model, corpus, there, k=K, engine=on_ray(2), on_progress=kill)
        assert killed
        assert here.checksum() == there.checksum()


def _is_worker(process):
    try:
        return process.cmdline()[0].startswith("ray::_Worker")
    except (psutil.Error, IndexError):
        return False


class FakeRay(types.ModuleType):
    """As much of Ray as a scan uses, in this process; its workers die `deaths` times before they answer."""

    def __init__(self, started, deaths=0):
        super().__init__("ray")
        self.started, self.deaths, self.killed, self.stopped, self.options = started, deaths, [], 0, {}
        self.exceptions = types.SimpleNamespace(
            RayActorError=type("RayActorError", (Exception,), {}),
            OutOfMemoryError=type("OutOfMemoryError", (Exception,), {}),
        )
        self.put = lambda value: value
        self.wait = lambda running: (running[:1], running[1:])
        self.kill = self.killed.append
        self.is_initialized = lambda: self.started
        self.cluster_resources = lambda: {"CPU": 2}

    def init(self, **options):
        if self.started:
            raise RuntimeError("Maybe you called ray.init twice by accident?")
        self.started = True

    def shutdown(self):
        self.started, self.stopped = False, self.stopped + 1

    def remote(self, **options):
        self.options = options
        return lambda cls: types.SimpleNamespace(remote=lambda *args: self.actor(cls(*args)))

    def actor(self, worker):
        return types.SimpleNamespace(
            scan=types.SimpleNamespace(remote=lambda *args: types.MethodType(lambda _: worker.scan(*args), object()))
        )

    def get(self, task):
        if not callable(task):
            return task
        retries = self.options["max_task_retries"]
        if self.deaths > retries >= 0:
            raise self.exceptions.RayActorError("The actor died unexpectedly.\nIt had been restarted.")
        return task()


@pytest.mark.parametrize("started", [True, False])
def test_a_ray_that_the_user_had_started_is_used_and_left_running(model, corpus, tmp_path, monkeypatch, started):
    ray = FakeRay(started)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # its workers are this process
    with open_store(tmp_path / "local.db", create=True) as here, open_store(tmp_path / "ray.db", create=True) as there:
        build_index(model, corpus, here, k=K)
        build_index(model, corpus, there, k=K, engine=on_ray(2))
        assert here.checksum() == there.checksum()
    assert ray.started == started
    assert len(ray.killed) == 2  # of ours nothing goes on
    assert ray.stopped == (not started)


def test_a_ray_worker_that_keeps_dying_ends_the_scan_with_a_sentence(model, corpus, tmp_path, monkeypatch):
    ray = FakeRay(False, deaths=9)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with open_store(tmp_path / "ray.db", create=True) as store:
        with pytest.raises(InputError, match="--workers"):
            build_index(model, corpus, store, k=K, engine=on_ray(2))
        assert store.facts.all() == {}
    assert ray.options["max_restarts"] == ray.options["max_task_retries"] == 3
    assert not ray.started


def test_ray_mistakes():
    with pytest.raises(InputError, match="not 0"):
        on_ray(0)


def test_a_flip_shows_the_sentences_of_its_neurons(model, corpus, tmp_path):
    state = _start(FlipRequest(model, "the ice bear"), (7,))
    edit = Edit(Neuron(2, "ffn", 13), "set", 5.0, where="last")
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=K)
        (row,) = _neurons(state, [edit], store)
        assert row.examples == tuple(e.sentence.text for e in store.examples(edit.neuron, "+", 3))
