"""Ray gives the same index, also when a worker dies; RelMax against its definition."""

import os
import random
import signal

import pytest
import torch

from actmax import build_index, on_ray, read_corpus
from concepts import Neuron, attribute
from concepts.relevance import Relevance
from db import open_store
from db.errors import InputError

K = 5


@pytest.fixture
def one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))  # workers unpickle the tests' tokenizer
    yield
    torch.set_num_threads(before)


def test_ray_equals_local_even_when_a_worker_is_killed(model, corpus, tmp_path, one_thread):
    pytest.importorskip("ray")
    killed = []

    def kill(progress):
        if not killed:
            pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_worker(int(pid))]
            killed.append(random.choice(pids))
            os.kill(killed[0], signal.SIGKILL)

    with open_store(tmp_path / "local.db") as here, open_store(tmp_path / "ray.db") as there:
        build_index(model, corpus, here, k=K)
        build_index(model, corpus, there, k=K, engine=on_ray(2), on_progress=kill)
        assert killed
        assert here.checksum() == there.checksum()


def _is_worker(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"ray::_Worker")
    except OSError:
        return False


def test_ray_mistakes():
    with pytest.raises(InputError, match="at least 1 worker"):
        on_ray(0)


def test_relmax_equals_its_definition(model, corpus, tmp_path):
    """The relevance of a token's neurons for the top prediction at each prefix, by one attribution each."""
    sentences = [s for s in corpus.sentences() if 2 < len(s.text) < 30][:20]
    seen = {}
    for sentence in sentences:
        ids = model.token_ids(sentence.text)
        total = torch.zeros(3, len(ids), 20)
        for end in range(1, len(ids) + 1):
            relevance: Relevance = attribute(model, ids[:end], sites=("ffn",))
            total[:, :end] += relevance.ffn
        seen[sentence.id] = total
    (tmp_path / "short.txt").write_text("\n".join(s.text for s in sentences))
    with open_store(tmp_path / "r.db") as store:
        build_index(model, read_corpus(str(tmp_path / "short.txt")), store, k=K, by="relevance")
        for layer, neuron in ((0, 3), (1, 0), (2, 13)):
            for polarity, sign in (("+", 1), ("-", -1)):
                best = sorted(((sign * x[layer, 1:, neuron]).max().item() for x in seen.values()), reverse=True)
                found = store.examples(Neuron(layer, "ffn", neuron), polarity)
                expected = [value for value in best[:K] if value > 0]
                assert [sign * e.activation for e in found] == pytest.approx(expected, rel=1e-3, abs=1e-5)
                for example in found:
                    course = sign * seen[example.sentence.id][layer, :, neuron]
                    assert course[example.token].item() == pytest.approx(sign * example.activation, rel=1e-3, abs=1e-5)
            activations = torch.cat(
                [attribute(model, s.text, sites=("ffn",)).activation("ffn")[layer, 1:, neuron] for s in sentences]
            )
            assert store.statistics(Neuron(layer, "ffn", neuron)).max == pytest.approx(
                activations.max().item(), rel=1e-4
            )
        with pytest.raises(InputError, match="not by 'magic'"):
            build_index(model, corpus, store, by="magic")
