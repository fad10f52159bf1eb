"""Descriptions by a server's language model: scored on sentences it did not read, resumed, and its faults explained."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner
from test_labels import SENTENCES, TOPIC, WORD, planted, texts
from test_unpacking import ENCODER
from transformers.utils.import_utils import is_serve_available

from icebear import Neuron, build_index, describe, embed_examples, open_store, openai_server, read_corpus
from icebear.actmax.index import encoder as index_encoder
from icebear.actmax.labels import descriptions, nulls, sample, writer
from icebear.actmax.labels.auto import label_neurons
from icebear.actmax.labels.descriptions import calls_left, describe_neurons, score_label
from icebear.actmax.labels.sample import split_of
from icebear.actmax.labels.writer import Writer
from icebear.app.cli.main import main
from icebear.app.cli.options import ModelOptions
from icebear.errors import InputError, ModelError, StoreError
from icebear.models.loading.conversion import fetch
from icebear.models.loading.presets import PRESETS


@contextmanager
def server(answer, path="/v1/chat/completions"):
    """A server that answers a POST to a path with answer(request), and names the model "m"."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send(200 if self.path == "/v1/models" else 404, json.dumps({"data": [{"id": "m"}]}).encode())

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((request, self.headers.get("Authorization")))
            self.send(*(answer(request) if self.path == path else (404, b"{}")))

        def send(self, status, body):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    running = ThreadingHTTPServer(("localhost", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{running.server_port}/v1", asked
    finally:
        running.shutdown()
        running.server_close()


def says(text):
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def honest(request):
    """Describes what is there: songs where most sentences have their words, else a word that says nothing."""
    text = request["messages"][0]["content"]
    return says("songak songel songir songon" if text.count("song") > 8 else "the old great")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    (folder / "t.txt").write_text("\n".join(texts(1000)))
    model = planted()
    with open_store(folder / "a.db", create=True) as store:
        build_index(model, read_corpus(str(folder / "t.txt")), store, k=16)
        embed_examples(store, ENCODER)
    return model, folder / "a.db"


@pytest.fixture
def index(made, monkeypatch, tmp_path):
    """The planted model, and a copy of its index."""
    monkeypatch.setattr(sample, "SENTENCES", SENTENCES)
    monkeypatch.setattr(nulls, "CONTROLS", 50)
    monkeypatch.setattr(index_encoder, "_load", lambda name, download: ENCODER)
    monkeypatch.setattr(sample, "TOPICS", 6)
    for file in made[1].parent.glob("a.db*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return made[0], tmp_path / "a.db"


def test_a_description_that_tells_other_sentences_is_shown_with_who_wrote_it(index):
    model, path = index
    with server(honest) as (url, asked), open_store(path) as store:
        right, _ = describe_neurons(model, store, [TOPIC], Writer.at(url))
        assert (right.kind, right.text, right.by, right.significant) == (
            "description",
            "songak songel songir songon",
            "sentence",
            True,
        )
        assert right.score > 0.85
        assert right.record["writer"].startswith("m at localhost:")
        card = describe(store, TOPIC)
        assert f"{right.text} ({right.score:.2f} by sentence, written by m at localhost:" in card.to_html()
        read = {line for request, _ in asked for line in request["messages"][0]["content"].splitlines()[2:]}
        tested = {s.text for s in store.sentences.starting_at(0) if split_of(s.title) == "test"}
        assert read
        assert not {line.replace("«", "").replace("»", "").strip() for line in read} & tested


def test_a_description_that_says_nothing_is_not_shown_and_a_better_label_stays(index):
    model, path = index
    with server(lambda request: says("the old great")) as (url, _), open_store(path) as store:
        label_neurons(model, store, [WORD])
        before = store.labels.automatic([WORD])
        rows = describe_neurons(model, store, [WORD], Writer.at(url))
        assert not any(row.significant for row in rows)
        assert store.labels.automatic([WORD]) == before


def test_what_was_answered_is_not_asked_again(index):
    model, path = index
    calls = []

    def answer(request):
        calls.append(request)
        return (500, b"") if len(calls) == 23 else honest(request)

    with server(answer) as (url, _), open_store(path) as store:
        written = Writer.at(url)
        neurons = [TOPIC, Neuron(0, "ffn", 12)]
        assert calls_left(store, neurons, written) == descriptions.OTHERS + 4
        with pytest.raises(ModelError):
            describe_neurons(model, store, neurons, written)
        assert calls_left(store, neurons, written) == 2
        rows = describe_neurons(model, store, neurons, written)
        assert calls_left(store, neurons, written) == 0
        assert len(calls) == descriptions.OTHERS + 4 + 1
        assert rows == describe_neurons(model, store, neurons, written)
        assert len(calls) == descriptions.OTHERS + 4 + 1


def test_the_key_is_sent_and_not_stored(index, monkeypatch):
    model, path = index
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    with server(honest) as (url, asked):
        with open_store(path) as store:
            describe_neurons(model, store, [TOPIC], Writer.at(url))
        assert {key for _, key in asked} == {"Bearer secret-key"}
    assert b"secret-key" not in path.read_bytes()


FAULTS = {
    "html": lambda request: (200, b"<html><body>Welcome</body></html>"),
    "other json": lambda request: (200, b'{"error": "no"}'),
    "a list": lambda request: (200, b"[]"),
    "empty": lambda request: says("  \n"),
    "no text": lambda request: (200, b'{"choices": [{"message": {"content": null}}]}'),
    "refused": lambda request: (401, b"no key"),
    "broken": lambda request: (500, b""),
    "binary": lambda request: (200, bytes(range(256))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_server_is_an_error(fault):
    with server(FAULTS[fault]) as (url, _), pytest.raises(ModelError):
        Writer.at(url).describe([])


def test_a_slow_server_and_one_that_is_down_are_errors(monkeypatch):
    monkeypatch.setattr(openai_server, "SECONDS", 0.3)

    def slow(request):
        time.sleep(1)
        return says("late")

    with server(slow) as (url, _), pytest.raises(ModelError):
        Writer.at(url).describe([])
    with pytest.raises(ModelError):
        Writer.at(url)  # which is down now
    for other in ("localhost:80", "file:///etc/passwd", "ftp://a/b", "http://", ""):
        with pytest.raises(InputError):
            Writer.at(other)


def test_an_answer_is_one_short_line():
    with server(lambda request: says('\n\n "Names of rivers."  \nMore text.')) as (url, _):
        assert Writer.at(url).describe([]) == "Names of rivers"
    with server(lambda request: says("x" * 10_000)) as (url, _):
        assert len(Writer.at(url).describe([])) == writer.LONGEST_DESCRIPTION


def test_what_a_label_of_ones_own_says_is_scored_beside_its_words(index):
    model, path = index
    with open_store(path) as store:
        rows = score_label(model, store, TOPIC, "songak songel songir songon")
        both = [row for row in rows if row.polarity == "+"]
        assert [row.kind for row in both] == ["tokens", "description"]
        assert both[1].significant
        nonsense = [r for r in score_label(model, store, TOPIC, "the old great") if r.kind == "description"]
        assert not any(row.significant for row in nonsense)
        store.labels.set_manual(TOPIC, "songs", rows)
        assert store.labels.manual(TOPIC)[1]["+"]["score"] == max(row.score for row in both if row.significant)


def test_an_index_without_an_encoder_has_no_descriptions(tmp_path, made):
    (tmp_path / "t.txt").write_text("\n".join(texts(300)))
    with open_store(tmp_path / "b.db", create=True) as store:
        build_index(made[0], read_corpus(str(tmp_path / "t.txt")), store, k=4)
        with server(honest) as (url, asked), pytest.raises(StoreError):
            describe_neurons(made[0], store, [TOPIC], Writer.at(url))
    assert not asked


@contextmanager
def transformers_server(folder):
    """`transformers serve` with a model of a folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    serve = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", serve, "serve", folder, "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            while running.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5):
                    break
                time.sleep(0.2)
            assert running.poll() is None
            yield f"http://localhost:{port}/v1"
        finally:
            running.terminate()


@pytest.mark.release
@pytest.mark.skipif(not is_serve_available(), reason="needs the extra servers")
def test_a_server_of_transformers_describes_neurons(index, monkeypatch):
    model, path = index
    monkeypatch.setattr(descriptions, "OTHERS", 2)
    folder = str(fetch(PRESETS["smollm2-135m"]))
    with transformers_server(folder) as url, open_store(path) as store:
        rows = describe_neurons(model, store, [TOPIC], Writer.at(url, folder))
        assert {row.kind for row in rows} == {"description"}
        assert all(row.text and 0 <= row.score <= 1 for row in rows)
        assert {row.record["writer"] for row in rows} == {str(Writer(url, folder))}


def test_an_encoder_that_has_changed_scores_nothing(index, monkeypatch):
    model, path = index
    monkeypatch.setattr(index_encoder, "_load", lambda name, download: replace(ENCODER, fingerprint="2"))
    with open_store(path) as store, server(honest) as (url, asked):
        with pytest.raises(StoreError):
            describe_neurons(model, store, [TOPIC], Writer.at(url))
        assert {row.kind for row in score_label(model, store, TOPIC, "songs")} == {"tokens"}
    assert not asked


def test_the_command_says_how_many_calls_it_makes(index, monkeypatch, tmp_path):
    model, path = index
    monkeypatch.setattr(ModelOptions, "load", lambda self, name=None: model)
    with server(honest) as (url, asked):
        done = CliRunner().invoke(main, ["label", str(TOPIC), "--writer", url, "--store", str(path)])
        assert done.exit_code == 0, done.output
        assert f"{descriptions.OTHERS + 2} calls to m at localhost" in done.stderr
        assert len(asked) == descriptions.OTHERS + 2
        assert "songak songel" in done.stdout
        for wrong in (["label", "--writer", url], ["label", str(TOPIC), "--writer", url, "--score"]):
            assert CliRunner().invoke(main, wrong).exit_code == 2
