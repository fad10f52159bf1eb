"""Ray gives the same index, also when a worker dies; RelMax against its definition."""

import os
import sys
import types

import psutil
import pytest
import torch
from conftest import printed

from icebear import Edit, Neuron, annotate, attribute, build_index, describe, open_store, read_corpus
from icebear.actmax.index.engines import on_ray
from icebear.app.cli.tables.cards import card_report
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError, StoreError
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


def test_relmax_equals_its_definition(model, corpus, tmp_path):
    """The relevance of a token's neurons for the top prediction at each prefix, by one attribution each."""
    sentences = [s for s in corpus.sentences() if 2 < len(s.text) < 30][:9]
    seen = {}
    for sentence in sentences:
        ids = model.token_ids(sentence.text)
        total = torch.zeros(3, len(ids), 20)
        for end in range(1, len(ids) + 1):
            relevance: Relevance = attribute(model, ids[:end], sites=("ffn",), number="logit")
            total[:, :end] += relevance.ffn
        seen[sentence.id] = total
    (tmp_path / "short.txt").write_text("\n".join(s.text for s in sentences))
    with open_store(tmp_path / "r.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "short.txt")), store, k=K, by="relevance")
        for layer, neuron in ((0, 3), (1, 0), (2, 13)):
            for polarity, sign in (("+", 1), ("-", -1)):
                best = sorted(((sign * x[layer, 1:, neuron]).max().item() for x in seen.values()), reverse=True)
                result = store.examples(Neuron(layer, "ffn", neuron), polarity)
                expected = [value for value in best[:K] if value > 0]
                assert [sign * e.value for e in result] == pytest.approx(expected, rel=1e-3, abs=1e-5)
                for example in result:
                    course = sign * seen[example.sentence.id][layer, :, neuron]
                    assert course[example.token].item() == pytest.approx(sign * example.value, rel=1e-3, abs=1e-5)
            activations = torch.cat(
                [attribute(model, s.text, sites=("ffn",)).activation("ffn")[layer, 1:, neuron] for s in sentences]
            )
            assert store.neurons.statistics(Neuron(layer, "ffn", neuron)).max == pytest.approx(
                activations.max().item(), rel=1e-4
            )
        with pytest.raises(InputError, match="'magic'"):
            build_index(model, corpus, store, by="magic")


def test_an_index_by_relevance_says_so(model, corpus, tmp_path):
    neuron = Neuron(2, "ffn", 13)
    with open_store(tmp_path / "r.db", create=True) as store:
        build_index(model, corpus, store, k=K, by="relevance")
        result = describe(store, neuron, model)
        for shown in (printed(card_report(result)), result.to_html()):
            assert "This index is by relevance" in shown
        heads = [
            line.split() for line in printed(card_report(result)).splitlines() if line.strip().endswith("sentence")
        ]
        assert heads == [["relevance", "sentence"]] * 2
        assert "Strongest positive" not in result.to_html()
        data = result.to_dict()
        assert data["by"] == "relevance"
        for polarity in "+-":
            for row, example in zip(data["examples"][polarity], result.examples[polarity], strict=True):
                assert row["relevance"] == example.value
                assert "activation" not in row
        why = [why for hit in [*store.search("bear", 60), *store.similar(neuron, by="examples")] for why in hit.why]
        assert {"by relevance" in reason for reason in why if "examples" in reason} == {True}
        with pytest.raises(InputError):
            _ = result.examples["+"][0].activation


def test_what_needs_extremes_of_the_activation_takes_no_index_by_relevance(model, corpus, tmp_path):
    state = _start(FlipRequest(model, "the ice bear"), (7,))
    edit = Edit(Neuron(2, "ffn", 13), "set", 5.0, where="last")
    output = {}
    for by in ("activation", "relevance"):
        with open_store(tmp_path / f"{by}.db", create=True) as store:
            build_index(model, corpus, store, k=K, by=by)
            output[by] = len(_neurons(state, [edit], store)[0].examples)
    assert output == {"activation": 3, "relevance": 0}
    with (
        open_store(tmp_path / "relevance.db") as store,
        pytest.raises(StoreError, match="relevance"),
    ):
        annotate(model, store, [edit.neuron])
