"""`icebear serve`, called by Neuronpedia's own client, by schemathesis, and by many at once, with a small model."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import httpx
import neuronpedia_inference_client as client
import pytest
import schemathesis
import torch
import uvicorn
from click.testing import CliRunner
from conftest import LLAMA, Letters, random_model
from few import few_of
from hypothesis import HealthCheck, given, settings
from pages import ROOT, script
from schemathesis.checks import not_a_server_error
from starlette.testclient import TestClient

from icebear import Edit, Model, attribute, stages, steer
from icebear.app.api import calls as computed
from icebear.app.api import schemas
from icebear.app.api import server as api
from icebear.app.api.calls import CALLS
from icebear.app.api.schemas import LIMITS, Limits
from icebear.app.cli.main import main
from icebear.app.session import Session
from icebear.concepts.passes.active_neurons import most_active
from icebear.concepts.vocabulary.prompt_lens import logit_lens
from icebear.errors import InputError
from icebear.models.text.chat import Chat

PROMPT = "ice bear"
CASES = int(os.environ.get("ICEBEAR_SERVE_CASES", "64"))
FEATURE = {"model": "letters", "source": "1-ffn-minus", "index": 3, "strength": 5.0}
STEER = {
    "prompt": PROMPT,
    "steerMethod": "SIMPLE_ADDITIVE",
    "normalizeSteering": False,
    "types": ["STEERED", "DEFAULT"],
    "features": [FEATURE],
    "nCompletionTokens": 6,
    "temperature": 0,
    "strengthMultiplier": 2,
    "freqPenalty": 0,
    "seed": 16,
}


@pytest.fixture(scope="module")
def letters():
    """Its own name, so that tests may change `model`."""
    return Model(random_model(LLAMA, dtype=torch.float32).net, Letters(), "letters")


def application(model):
    session = Session(model.name)
    session.model = model
    return api.server(session)


@pytest.fixture(scope="module")
def asgi(letters):
    return application(letters)


@pytest.fixture(scope="module")
def address(asgi):
    with running(asgi) as result:
        yield result


@pytest.fixture(scope="module")
def calls(address):
    """`calls(path, **body)` is the answer."""
    with httpx.Client(base_url=address, timeout=60, trust_env=False) as asked:

        def call(path, **body):
            return asked.post(f"/v1/{path}", json={"model": "letters", **body})

        call.client = asked
        yield call


def snake(body):
    """The names as Neuronpedia's Python client has them."""
    return {re.sub("([A-Z])", lambda match: f"_{match[1].lower()}", name): value for name, value in body.items()}


def answer(response):
    assert response.status_code == 200, response.text
    return response.json()


def sentence(response, status=400):
    """The one sentence of a refusal."""
    assert response.status_code == status, response.text
    (text,) = response.json().values()
    assert text.endswith(".")
    assert "Traceback" not in text
    return text


@contextmanager
def running(application):
    """A real server on a free port; yields its address."""
    server = uvicorn.Server(uvicorn.Config(application, host="localhost", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield f"http://localhost:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


# --- answers ------------------------------------------------------------------------------------------


def test_neuronpedias_client_runs_its_calls(address, letters):
    neuronpedia = client.DefaultApi(client.ApiClient(client.Configuration(host=f"{address}/v1")))
    tokens = neuronpedia.tokenize_post(client.TokenizePostRequest(model="letters", text=PROMPT))
    assert (tokens.tokens, "".join(tokens.token_strings)) == (letters.ids(PROMPT), PROMPT)
    body = {"model": "letters", "prompt": PROMPT, "source": "1-ffn-plus"}
    activation = neuronpedia.activation_single_post(client.ActivationSinglePostRequest(**body, index="3"))
    assert len(activation.activation.values) == len(activation.tokens) == 8
    top = neuronpedia.activation_topk_by_token_post(
        client.ActivationTopkByTokenPostRequest(**body, top_k=20, ignore_bos=False)
    )
    at = activation.activation.max_value_index
    values = {row.feature_index: row.activation_value for row in top.results[at].top_features}
    assert values[3] == activation.activation.max_value
    every = neuronpedia.activation_all_post(
        client.ActivationAllPostRequest.from_dict(
            {**body, "source_set": "ffn-plus", "selected_sources": [], "sort_by_token_indexes": [], "ignore_bos": False}
        )
    )
    assert len(every.activations) == 25
    request = client.SteerCompletionRequest.from_dict({**snake(STEER), "model": "letters"})
    steered = neuronpedia.steer_completion_post(request)
    assert [output.type for output in steered.outputs] == ["STEERED", "DEFAULT"]
    with pytest.raises(client.exceptions.BadRequestException):
        neuronpedia.tokenize_post(client.TokenizePostRequest(model="gpt2-small", text=PROMPT))


PROMPTS = ["ice bear", "a camel", "i"]


def test_a_batch_of_neuronpedias_client_has_the_answers_of_each_prompt(address):
    neuronpedia = client.DefaultApi(client.ApiClient(client.Configuration(host=f"{address}/v1")))
    at_source = {"model": "letters", "source": "1-ffn-plus"}
    of_set = {"model": "letters", "source_set": "ffn-plus", "selected_sources": [], "sort_by_token_indexes": [0]}
    for alone, batch, request, of_batch, body in (
        (
            neuronpedia.activation_single_post,
            neuronpedia.activation_single_batch_post,
            client.ActivationSinglePostRequest,
            client.ActivationSingleBatchPostRequest,
            {**at_source, "index": "3"},
        ),
        (
            neuronpedia.activation_all_post,
            neuronpedia.activation_all_batch_post,
            client.ActivationAllPostRequest,
            client.ActivationAllBatchPostRequest,
            {**of_set, "ignore_bos": False, "num_results": 4},
        ),
        (
            neuronpedia.activation_topk_by_token_post,
            neuronpedia.activation_topk_by_token_batch_post,
            client.ActivationTopkByTokenPostRequest,
            client.ActivationTopkByTokenBatchPostRequest,
            {**at_source, "top_k": 2, "ignore_bos": True},
        ),
    ):
        expected = [alone(request.from_dict({**body, "prompt": prompt})).to_dict() for prompt in PROMPTS]
        results = batch(of_batch.from_dict({**body, "prompts": PROMPTS})).results
        assert [row.to_dict() for row in results] == expected
        assert len({str(row) for row in expected}) == len(PROMPTS)


@pytest.mark.parametrize(("source", "sign"), [("1-ffn-plus", 1), ("2-ffn-minus", -1)])
def test_a_source_of_neuronpedias_client_has_each_positive_value(address, letters, source, sign):
    neuronpedia = client.DefaultApi(client.ApiClient(client.Configuration(host=f"{address}/v1")))
    request = client.ActivationSourcePostRequest(model="letters", source=source, prompts=PROMPTS)
    results = neuronpedia.activation_source_post(request).results
    for prompt, row in zip(PROMPTS, results, strict=True):
        values = sign * attribute(letters, prompt, sites=("ffn",)).activation("ffn")[int(source[0])]  # (T, N)
        dense = torch.zeros_like(values)
        for index, pairs in row.active_features.items():
            for position, value in pairs:
                dense[position, int(index)] = value
        assert "".join(row.tokens) == prompt
        assert torch.allclose(dense, values.clamp(min=0), atol=1e-6)


def test_a_source_has_a_limit_on_tokens_times_neurons(letters, monkeypatch):
    request = schemas.ActivationSourceRequest(model="letters", source="1-ffn-plus", prompts=PROMPTS)
    total, width = sum(len(letters.ids(prompt)) for prompt in PROMPTS), letters.width("ffn")
    for values, is_allowed in ((total * width, True), (total * width - 1, False)):
        monkeypatch.setattr(computed, "LIMITS", replace(LIMITS, source_values=values))
        with nullcontext() if is_allowed else pytest.raises(InputError):
            computed.activation_source(letters, request)


CHAT = [{"role": "user", "content": "Where do ice bears live?"}]


@pytest.mark.real
@pytest.mark.parametrize("special", few_of([True, False], False))
def test_neuronpedias_client_steers_a_conversation(smol, special):
    feature = {"model": "smollm2-135m", "source": "12-ffn-plus", "index": 77, "strength": -20.0}
    body = {**snake(STEER), "model": "smollm2-135m", "prompt": CHAT, "features": [feature], "strength_multiplier": 1}
    with running(application(smol)) as at:
        neuronpedia = client.DefaultApi(client.ApiClient(client.Configuration(host=f"{at}/v1")))
        request = client.SteerCompletionChatPostRequest.from_dict({**body, "steer_special_tokens": special})
        result = neuronpedia.steer_completion_chat_post(request)
    chat, ids = Chat(CHAT), smol.ids(Chat(CHAT))
    ordinary = ",".join(str(at) for at, token in enumerate(ids) if token not in smol.special_ids())
    edits = ["L12.ffn.77+-20"] if special else [f"L12.ffn.77+-20@position:{ordinary}", "L12.ffn.77+-20@generated"]
    with steer(smol, edits):
        steered = smol.generate(chat, max_new_tokens=6)
    plain = smol.generate(chat, max_new_tokens=6)
    assert steered != plain
    assert [(row.type, row.chat_template[-1].content) for row in result.outputs] == [
        ("STEERED", steered),
        ("DEFAULT", plain),
    ]
    assert result.input.raw == smol.tokenizer.decode(ids)
    assert result.outputs[1].raw == result.input.raw + plain
    assert [message.to_dict() for message in result.input.chat_template] == CHAT


@pytest.mark.parametrize(("source", "sign"), [("1-ffn-plus", 1), ("2-ffn-minus", -1), ("0-attn-plus", 1)])
def test_activations_are_those_of_attribution(calls, letters, source, sign):
    layer, site, _ = source.split("-")
    values = sign * attribute(letters, PROMPT, sites=(site,)).activation(site)[int(layer)]  # (T, N)
    for index in ("0", "7"):
        row = answer(calls("activation/single", prompt=PROMPT, source=source, index=index))
        expected = values[:, int(index)].tolist()
        assert row["activation"]["values"] == pytest.approx(expected, abs=1e-6)
        assert row["activation"]["maxValueIndex"] == expected.index(max(expected))
    rows = answer(calls("activation/topk-by-token", prompt=PROMPT, source=source, ignoreBos=True, topK=3))["results"]
    for row, expected in zip(rows, values, strict=True):
        assert [one["featureIndex"] for one in row["topFeatures"]] == expected.topk(3).indices.tolist()
        assert [one["activationValue"] for one in row["topFeatures"]] == pytest.approx(expected.topk(3).values.tolist())


@pytest.mark.parametrize("at", [[], [2, 5]])
def test_the_most_active_neurons_are_those_of_all_sorted(calls, letters, at):
    body = {"sourceSet": "ffn-minus", "selectedSources": ["0-ffn-minus", "2-ffn-minus"], "ignoreBos": False}
    rows = answer(calls("activation/all", prompt=PROMPT, **body, sortByTokenIndexes=at, numResults=7))["activations"]
    values = -attribute(letters, PROMPT, sites=("ffn",)).activation("ffn")[[0, 2]]  # (2, T, N)
    scores = values[:, at].sum(1) if at else values.amax(1)
    expected = scores.flatten().topk(7)
    assert [(row["source"], row["index"]) for row in rows] == [
        (f"{2 * (number // 20)}-ffn-minus", number % 20) for number in expected.indices.tolist()
    ]
    for row in rows:
        layer, index = int(row["source"][0]) // 2, row["index"]
        assert row["values"] == pytest.approx(values[layer, :, index].tolist(), abs=1e-6)
        assert row["values"][row["maxValueIndex"]] == row["maxValue"] == max(row["values"])


def test_an_ignored_token_counts_as_zero(letters):
    ids = letters.ids(PROMPT)
    (row,) = most_active(letters, ids, [("ffn", 1, 1)], 1)
    at = row.argmax
    ignored = most_active(letters, ids, [("ffn", 1, 1)], 20, ignored={at})
    assert {other.values[at] for other in ignored} == {0}


@pytest.mark.parametrize("first_is_sink", [True, False])
def test_a_first_token_that_is_a_sink_is_ignored_as_bos(first_is_sink, calls, letters, monkeypatch):
    """Letters have no BOS; a list of single tokens, and a prompt of a single token, keep theirs."""
    family = replace(letters.family, first_is_sink=first_is_sink)
    monkeypatch.setitem(vars(letters), "family", family)
    body = {"sourceSet": "ffn-plus", "selectedSources": ["1-ffn-plus"], "sortByTokenIndexes": [], "numResults": 20}
    plain, ignoring = (
        {
            row["index"]: row["values"]
            for row in answer(calls("activation/all", prompt=PROMPT, **body, **how))["activations"]
        }
        for how in ({"ignoreBos": False}, {"ignoreBos": True})
    )
    if first_is_sink:
        assert {row[0] for row in ignoring.values()} == {0.0} != {row[0] for row in plain.values()}
    else:
        assert ignoring == plain
    assert all(row[1:] == plain[index][1:] for index, row in ignoring.items() if index in plain)
    (row, *_) = answer(calls("activation/all", prompt="a", **body, ignoreBos=True))["activations"]
    assert row["maxValue"] > 0
    by_token = {"source": "1-ffn-plus", "topK": 1, "ignoreBos": True}
    results = answer(calls("activation/topk-by-token", prompt=PROMPT, **by_token))["results"]
    assert [row["tokenPosition"] for row in results] == list(range(len(letters.ids(PROMPT))))


def test_an_ignored_token_changes_no_other(letters):
    """Also in later layers, which read what the earlier ones wrote."""
    sides = [("ffn", layer, 1) for layer in range(letters.layers)]
    plain, ignored = (most_active(letters, letters.ids(PROMPT), sides, 10**6, (), at) for at in ((), {0}))
    values = {(row.neuron, row.sign): row.values[1:] for row in plain}
    assert all(row.values[1:] == values[row.neuron, row.sign] for row in ignored)


def test_a_continuation_is_steers(calls, letters):
    outputs = answer(calls("steer/completion", **STEER))["outputs"]
    with steer(letters, [Edit("L1.ffn.3", "add", -10.0)]):
        steered = letters.generate(PROMPT, 6)
    plain = letters.generate(PROMPT, 6)
    assert outputs == [
        {"type": "STEERED", "output": PROMPT + steered},
        {"type": "DEFAULT", "output": PROMPT + plain},
    ]
    assert steered != plain
    nothing = {**STEER, "features": [{**FEATURE, "strength": 0}]}
    first, second = answer(calls("steer/completion", **nothing))["outputs"]
    assert first["output"] == second["output"]


def test_a_frequency_penalty_forbids_repetition(calls):
    text = answer(calls("steer/completion", **{**STEER, "types": ["DEFAULT"], "freqPenalty": 10, "seed": 1}))
    new = text["outputs"][0]["output"].removeprefix(PROMPT)
    assert len(set(new)) == len(new)


def test_the_last_layer_of_the_lens_is_the_model(calls, letters):
    body = {"type": ["LOGIT_LENS"], "topN": 4, "stream": False, "filterNonWordTokens": False}
    document = answer(calls("lens/prompt", prompt=PROMPT, **body))
    assert [token["position"] for token in document["tokens"]] == list(range(8))
    for token in document["tokens"]:
        (read,) = token["results"]
        expected = letters.predict(list(letters.ids(PROMPT)[: token["position"] + 1]), 4)
        assert read["top_tokens"][-1] == [row.text for row in expected]
        assert read["top_probs"][-1] == pytest.approx([row.probability for row in expected], abs=1e-5)
        assert all(sum(row) <= 1 + 1e-6 for row in read["top_probs"])
    lines = calls("lens/prompt", **{**body, "stream": True}, prompt=PROMPT, layers=[1]).text.splitlines()
    messages = [json.loads(line) for line in lines]
    assert [message["kind"] for message in messages] == ["meta", *["token"] * 8, "done"]
    assert messages[0]["layers_by_type"] == {"LOGIT_LENS": [1, 2]}


def test_the_lens_is_the_stream_through_norm_and_unembedding(letters):
    ids, streams = letters.ids(PROMPT), []
    hook = letters.layer_modules[1].register_forward_hook(lambda *args: streams.append(args[2]))
    with torch.no_grad():
        letters.final_stream(letters.read_ids([ids]))
        hook.remove()
        stream = streams[0][0] if isinstance(streams[0], tuple) else streams[0]
        logits = letters.net.lm_head(letters.net.model.norm(stream))[0]
    for read, row in zip(logit_lens(letters, ids, [1], 5), logits.softmax(-1), strict=True):
        assert read.probabilities[0] == pytest.approx(row.topk(5).values.tolist(), abs=1e-6)
    for read in logit_lens(letters, ids, [0, 2], 50, words=True):
        assert all(text.strip().isalnum() for text in read.tokens[0])


def test_stages_are_stages(calls, letters):
    document = answer(calls("stages", prompt=PROMPT, counterfactual="big cats"))
    assert document == json.loads(stages(letters, PROMPT, counterfactual="big cats").to_json())


def test_what_the_server_has_is_what_it_says(calls, letters):
    document = answer(calls.client.get("/v1/capabilities"))
    assert document["model"] == "letters"
    body = {"prompt": PROMPT, "selectedSources": [], "sortByTokenIndexes": [], "ignoreBos": False, "numResults": 1}
    for group in document["source_sets"]:
        (row,) = answer(calls("activation/all", sourceSet=group, **body))["activations"]
        assert row["source"].endswith(f"-{group}")


@pytest.mark.parametrize("path", ["/", "/v1"])
def test_the_root_lists_every_path(calls, asgi, path):
    document = answer(calls.client.get(path))
    assert document["model"] == "letters"
    ways = {name: {way.lower() for way in row} for name, row in document["paths"].items()}
    assert ways == {name: set(row) for name, row in asgi.openapi()["paths"].items()}
    assert set(CALLS) | {"/", "/v1", "/v1/capabilities"} == set(ways)
    assert all(text for row in document["paths"].values() for text in row.values())


# --- refusals -----------------------------------------------------------------------------------------

SINGLE = {"prompt": PROMPT, "source": "1-ffn-plus", "index": "3"}
BATCH = {"source": "1-ffn-plus", "index": "3"}
ALL = {"prompt": PROMPT, "sourceSet": "ffn-plus", "selectedSources": [], "sortByTokenIndexes": [], "ignoreBos": False}
LENS = {"prompt": PROMPT, "type": ["LOGIT_LENS"]}
REFUSED = {
    "another model": ("activation/single", {**SINGLE, "model": "smollm2-135m"}),
    "a path": ("activation/single", {**SINGLE, "model": "/etc/passwd"}),
    "a path as source": ("activation/single", {**SINGLE, "source": "../../etc/passwd"}),
    "no such layer": ("activation/single", {**SINGLE, "source": "99-ffn-plus"}),
    "no such site": ("activation/single", {**SINGLE, "source": "1-mixer-plus"}),
    "no such neuron": ("activation/single", {**SINGLE, "index": "20"}),
    "a head": ("activation/single", {**SINGLE, "source": "1-head-plus"}),
    "an index of digits that are none": ("activation/single", {**SINGLE, "index": "²"}),
    "a vector": ("activation/single", {"prompt": PROMPT, "vector": [1.0], "hook": "blocks.0.hook_resid_post"}),
    "an unknown field": ("activation/single", {**SINGLE, "file": "/tmp/x"}),
    "no prompt": ("activation/single", {"source": "1-ffn-plus", "index": "3"}),
    "an empty prompt": ("activation/single", {**SINGLE, "prompt": ""}),
    "a very long prompt": ("activation/single", {**SINGLE, "prompt": "a" * (LIMITS.characters + 1)}),
    "a position outside": ("activation/all", {**ALL, "sortByTokenIndexes": [8]}),
    "a negative position": ("activation/all", {**ALL, "sortByTokenIndexes": [-1]}),
    "another set": ("activation/all", {**ALL, "selectedSources": ["1-ffn-minus"]}),
    "too many prompts": ("activation/single-batch", {**BATCH, "prompts": ["a"] * (LIMITS.prompts + 1)}),
    "no prompts": ("activation/single-batch", {**BATCH, "prompts": []}),
    "many tokens together": ("activation/source", {"source": "1-ffn-plus", "prompts": ["a" * 60] * 18}),
    "too many results": ("activation/all", {**ALL, "numResults": LIMITS.results + 1}),
    "too many tokens": ("steer/completion", {**STEER, "nCompletionTokens": LIMITS.new_tokens + 1}),
    "no room": ("steer/completion", {**STEER, "nCompletionTokens": 60}),
    "half a seed": ("steer/completion", {**STEER, "seed": 0.5}),
    "a huge strength": ("steer/completion", {**STEER, "features": [{**FEATURE, "strength": 1e300}]}),
    "another method": ("steer/completion", {**STEER, "steerMethod": "PROJECTION_CAP"}),
    "another model of a feature": ("steer/completion", {**STEER, "features": [{**FEATURE, "model": "gpt2"}]}),
    "a stream": ("steer/completion", {**STEER, "stream": True}),
    "no lens": ("lens/prompt", {**LENS, "type": ["JACOBIAN_LENS"]}),
    "neither prompt nor chat": ("lens/prompt", {"type": ["LOGIT_LENS"]}),
    "a chat without a template": ("lens/prompt", {"chat": [{"role": "user", "content": "x"}], "type": ["LOGIT_LENS"]}),
    "another length": ("stages", {"prompt": PROMPT, "counterfactual": PROMPT}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_answered_is_refused_in_a_sentence(calls, what):
    path, body = REFUSED[what]
    assert len(sentence(calls(path, **body))) < 600


def test_a_prompt_of_too_many_tokens_is_refused(calls, monkeypatch):
    monkeypatch.setattr(computed, "LIMITS", Limits(tokens=7))
    assert "8" in sentence(calls("activation/single", **SINGLE))
    assert "8" in sentence(calls("stages", prompt="ice", counterfactual=PROMPT))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"[" * 100_000, b'{"model": ' + b"9" * 5000, b"\xff"])
def test_what_is_not_json_is_refused(calls, content):
    headers = {"content-type": "application/json"}
    response = calls.client.post("/v1/tokenize", content=content, headers=headers)
    assert response.status_code == 400
    assert list(response.json()) == ["error"]


@pytest.mark.parametrize("text", [r"\ud800", r"\u0000", r"\udfff x"])
def test_any_text_in_json_gets_json(calls, text):
    content = f'{{"model": "letters", "text": "{text}"}}'
    response = calls.client.post("/v1/tokenize", content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400)
    assert response.json()


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:8502", ""])
def test_another_host_is_refused(calls, host):
    response = calls.client.post("/v1/tokenize", json={"model": "letters", "text": "a"}, headers={"host": host})
    sentence(response, 403)


def test_a_form_of_a_website_is_refused(calls):
    """A browser sends these without asking first."""
    content = json.dumps({"model": "letters", "text": "a"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = calls.client.post("/v1/tokenize", content=content, headers={"content-type": kind})
        assert response.status_code == 400
    assert "access-control-allow-origin" not in calls.client.options("/v1/tokenize").headers


def test_a_large_body_is_refused_while_it_is_received(calls):
    def parts():
        for number in range(10_000):
            received.append(number)
            yield b"x" * 10_000

    received = []
    sentence(calls.client.post("/v1/tokenize", content=parts()), 413)
    response = calls.client.post("/v1/tokenize", content=b" " * (LIMITS.body + 1))
    sentence(response, 413)


def test_an_unknown_path_gets_json(calls):
    assert calls.client.get("/v1/nothing").json() == {"error": "Not Found"}
    assert calls.client.get("/docs").status_code == 404  # of FastAPI, which reads from the web


def test_a_failure_is_one_answer_and_no_more(letters, monkeypatch):
    def fails(model, request):
        with model.lock:
            raise RuntimeError("secret")

    monkeypatch.setitem(CALLS, "/v1/tokenize", (fails, CALLS["/v1/tokenize"][1]))
    asked = TestClient(application(letters), base_url="http://localhost", raise_server_exceptions=False)
    for _ in range(LIMITS.waiting + 1):
        text = sentence(asked.post("/v1/tokenize", json={"model": "letters", "text": "a"}), 500)
        assert "secret" not in text
    answer(asked.post("/v1/activation/single", json={"model": "letters", **SINGLE}))


def test_a_request_that_takes_too_long_ends(letters, monkeypatch):
    def endless(model, request):
        while True:
            torch.ones(2) + 1

    monkeypatch.setattr(api, "LIMITS", Limits(seconds=0.3))
    monkeypatch.setitem(CALLS, "/v1/tokenize", (endless, CALLS["/v1/tokenize"][1]))
    asked = TestClient(application(letters), base_url="http://localhost")
    sentence(asked.post("/v1/tokenize", json={"model": "letters", "text": "a"}), 503)
    answer(asked.post("/v1/activation/single", json={"model": "letters", **SINGLE}))


def test_a_request_whose_client_goes_ends_where_it_is(letters, monkeypatch):
    """While it runs, and while it waits; the next call is answered at once."""
    begun, ended, started = threading.Event(), threading.Event(), []

    def endless(model, request):
        started.append(request.text)
        begun.set()
        try:
            while True:
                torch.ones(2) + 1
        finally:
            ended.set()

    monkeypatch.setitem(CALLS, "/v1/tokenize", (endless, CALLS["/v1/tokenize"][1]))
    with running(application(letters)) as address, httpx.Client(base_url=address, trust_env=False) as asked:
        closing = [gone(address, text) for text in ("runs", "waits")]
        next(closing[0])
        assert begun.wait(20)
        next(closing[1])
        for one in reversed(closing):
            time.sleep(0.2)
            next(one)
        assert ended.wait(20)
        answer(asked.post("/v1/activation/single", json={"model": "letters", **SINGLE}, timeout=20))
    assert started == ["runs"]


def gone(address, text):
    """Send a request at the first step, and close the connection without an answer at the second."""
    body = json.dumps({"model": "letters", "text": text})
    head = "POST /v1/tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield
    yield


# --- many ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waiting", "options"), [(LIMITS.waiting, {}), (1, {"fail_if_busy": True})])
def test_one_more_than_may_wait_is_refused(waiting, options):
    queue = api.Queue(Session("letters"))
    queue.waiting = waiting
    response = asyncio.run(queue.answer(None, SimpleNamespace(**options), None))
    assert response.status_code == 429
    assert queue.waiting == waiting


@pytest.mark.release
def test_two_hundred_calls_at_once_are_answered_or_refused(address):
    bodies = {
        "steer/completion": {**STEER, "temperature": 1.0, "nCompletionTokens": 20},
        "activation/all": ALL,
        "tokenize": {"text": PROMPT},
        "activation/single": {**SINGLE, "source": "nonsense"},
    }
    limits = httpx.Limits(max_connections=200)
    with ThreadPoolExecutor(200) as pool, httpx.Client(timeout=120, trust_env=False, limits=limits) as asked:
        together = threading.Barrier(200)

        def call(number):
            path = list(bodies)[number % len(bodies)]
            together.wait(60)
            response = asked.post(f"{address}/v1/{path}", json={"model": "letters", **bodies[path]})
            return path, response.status_code, response.text

        results = list(pool.map(call, range(200)))
        again = httpx.post(f"{address}/v1/tokenize", json={"model": "letters", "text": PROMPT}, trust_env=False)
    answers = {}
    for path, status, text in results:
        assert status in ((400, 429) if path == "activation/single" else (200, 429))
        answers.setdefault((path, status), set()).add(text)
    assert all(len(texts) == 1 for texts in answers.values())
    assert sum(status == 429 for _, status, _ in results) > 0
    assert sum(status != 429 for _, status, _ in results) >= LIMITS.waiting
    assert again.status_code == 200


@pytest.fixture(scope="module")
def fuzzed(address):
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


WORDS = {
    **{"model": "letters", "source": "1-ffn-plus", "index": "3", "prompt": PROMPT, "chat": None},
    **{"sourceSet": "ffn-plus", "selectedSources": [], "sortByTokenIndexes": [7], "type": ["LOGIT_LENS"]},
    **{"features": [FEATURE], "seed": 1, "nCompletionTokens": 3, "counterfactual": "big cats"},
}
"""What makes random requests such that are computed: each in three of four cases."""


def test_no_request_is_a_failure_of_the_server(fuzzed):
    statuses = Counter()

    def send(case):
        if isinstance(case.body, dict):
            drawn = zlib.crc32(repr(case.body).encode(errors="replace"))
            known = {name: word for n, (name, word) in enumerate(WORDS.items()) if drawn >> 2 * n & 3}
            case.body = {name: known.get(name, value) for name, value in case.body.items()}
        response = case.call(timeout=100)
        case.validate_response(response, checks=[not_a_server_error])
        json.loads(response.text.splitlines()[0])
        statuses[case.operation.path, response.status_code] += 1

    operations = [operation.ok() for operation in fuzzed.get_all_operations()]
    for operation in operations:
        run = settings(max_examples=CASES // len(operations), suppress_health_check=list(HealthCheck))(
            given(operation.as_strategy())(send)
        )
        run()
    print(statuses.total(), "cases:", dict(statuses))
    assert {status for _, status in statuses} == {200, 400}


def test_the_openapi_document_is_the_codes():
    assert (ROOT / "docs" / "openapi.json").read_text() == script("openapi").text()


def test_no_answer_has_a_path_of_this_machine(model, tmp_path, monkeypatch):
    """The name of a model that was loaded from a folder is its path, in provenance and in errors."""
    folder = tmp_path / "secret" / "Letters"
    folder.mkdir(parents=True)
    model.name, served = str(folder), []
    monkeypatch.setattr("icebear.app.cli.options.ModelOptions.load", lambda *_: model)
    monkeypatch.setattr("icebear.app.cli.verbs.serve.check_model_path", lambda *_: None)
    monkeypatch.setattr(uvicorn, "run", lambda application, **_: served.append(application))
    done = CliRunner().invoke(main, ["serve", "--model", str(folder), "--port", "47611"])
    assert done.exit_code == 0, done.output
    asked = TestClient(*served, base_url="http://localhost")
    bodies = {
        "tokenize": {"text": "a", "prependBos": True},
        "activation/single": {**SINGLE, "source": "99-ffn-plus"},
        "activation/all": ALL,
        "activation/topk-by-token": {"prompt": "a" * 900, "source": "0-ffn-plus", "ignoreBos": False},
        "steer/completion": {**STEER, "features": [], "nCompletionTokens": 250},
        "lens/prompt": {"type": ["LOGIT_LENS"], "chat": [{"role": "user", "content": "a"}]},
        "stages": {"prompt": PROMPT, "counterfactual": "big cats", "target": "a"},
    }
    texts = [asked.get("/v1/capabilities").text]
    for path, body in bodies.items():
        for name in ("letters", str(folder)):
            texts.append(asked.post(f"/v1/{path}", json={"model": name, **body}).text)
    assert not any("secret" in text for text in texts)
    assert '"letters"' in texts[-2]


@pytest.mark.release
def test_the_command_serves_until_it_is_ended(tiny_folder):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "icebear", "serve", "--model", tiny_folder, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        for line in process.stderr:
            if "http://localhost" in line:
                break
        with httpx.Client(trust_env=False, timeout=60, transport=httpx.HTTPTransport(retries=8)) as asked:
            facts = asked.get(f"http://localhost:{port}/v1/capabilities").json()
            body = {"model": facts["model"], "text": " Paris"}
            assert asked.post(f"http://localhost:{port}/v1/tokenize", json=body).json()["tokenStrings"] == [" Paris"]
        result = CliRunner().invoke(main, ["serve", "--model", tiny_folder, "--port", str(port)])
        assert (result.exit_code, str(port) in result.stderr) == (1, True)
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
