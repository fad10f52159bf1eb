"""Claims of a server: the probabilities are those of the model behind it, and its faults say what to do."""

import json

import pytest
from test_conditions import claims, other_folder, tiny  # noqa: F401 - fixtures
from test_descriptions import server

from icebear import check
from icebear.claims.kinds.predictions import AnswerClaim
from icebear.claims.served import ServedModel
from icebear.errors import InputError, ModelError

COMPLETIONS = "/v1/completions"


def completions(model):
    """Answer as vLLM does: the log-probability of each token of the prompt, and where it begins."""

    def answer(request):
        assert request["echo"]
        ids = model.ids(request["prompt"])
        pieces = model.pieces(ids)
        logs = [model.next_logits(tuple(ids[:end])).log_softmax(-1)[ids[end]].item() for end in range(1, len(ids))]
        offsets = [sum(map(len, pieces[:number])) for number in range(len(pieces) + 1)]
        logprobs = {"tokens": pieces, "token_logprobs": [None, *logs, -1.0], "text_offset": offsets}
        return 200, json.dumps({"choices": [{"text": request["prompt"], "logprobs": logprobs}]}).encode()

    return answer


def test_the_probability_is_that_of_the_model_behind_it(tiny, claims):  # noqa: F811
    with server(completions(tiny), COMPLETIONS) as (url, calls):
        result = check(tiny, claims, [f"url={url}"])
    answer, node = result.under[0].rows
    assert answer.measured.value == pytest.approx(result.rows[0].measured.value, rel=1e-4)
    assert answer.measured.control == pytest.approx(result.rows[0].measured.control, rel=0.3, abs=1e-6)
    assert answer.verdict == "passed"
    assert node.measured is None
    assert node.verdict == "cannot be measured here"
    assert all(request["prompt"].endswith(claims[0].what.answer) for request, _ in calls)


def test_a_phrase_is_the_product_of_its_tokens(tiny):  # noqa: F811
    phrase = AnswerClaim(" Paris is", " Rome are")
    with server(completions(tiny), COMPLETIONS) as (url, _):
        value = ServedModel.at(url).probability(phrase.prompt, phrase.answer)
    assert value == pytest.approx(phrase.measured(tiny).value, rel=1e-4)


def test_an_answer_inside_a_token_is_refused(tiny):  # noqa: F811
    with server(completions(tiny), COMPLETIONS) as (url, _), pytest.raises(InputError):
        ServedModel.at(url).probability(" Par", "is are")


@pytest.mark.parametrize(
    "reply",
    [b"{}", b"[]", b"no", b'{"choices": [{"logprobs": null}]}', b'{"choices": [{"logprobs": {"text_offset": 3}}]}'],
)
def test_a_server_without_log_probabilities_is_refused(reply):
    with server(lambda request: (200, reply), COMPLETIONS) as (url, _), pytest.raises(ModelError):
        ServedModel.at(url).probability("a", "b")


def test_a_server_that_is_down_is_a_column_that_did_not_run(tiny, claims):  # noqa: F811
    with server(lambda request: (200, b"{}"), COMPLETIONS) as (url, _):
        pass
    result = check(tiny, claims, [f"url={url}", "threads=1"])
    assert {row.verdict for row in result.under[0].rows} == {"cannot be measured here"}
    assert {row.verdict for row in result.under[1].rows} == {"passed"}
