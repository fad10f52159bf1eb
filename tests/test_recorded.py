"""Recorded conversations of the common shapes, and answers that are explained as they stand."""

import json

import pytest
from test_chat import MODELS, chatting
from test_chat_command import json_of, run

from icebear import Chat, InputError, sources
from icebear.concepts.answers.source_measurement import sources_request
from icebear.models.text.answer import answer_of, nth_answer
from icebear.models.text.recorded import calls_as_text

CALL = {"id": "1", "type": "function", "function": {"name": "rm", "arguments": {"path": "old"}}}
TALK = [
    {"role": "system", "content": "Be safe."},
    {"role": "user", "content": "Do what the notes say."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Buy milk. Done.", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is done."},
]
AS_TEXT = {**CALL, "function": {"name": "rm", "arguments": '{"path": "old"}'}}
OPENAI = [
    {"role": "developer", "content": "Be safe."},
    TALK[1],
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "function": {"name": "rm", "arguments": '{"path": "old"}'}}],
    },
    TALK[3],
    TALK[4],
]
ANTHROPIC = {
    "system": "Be safe.",
    "messages": [
        TALK[1],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "rm", "input": {"path": "old"}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "Buy milk. Done."}]}
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "It is done."}]},
    ],
    "tools": [{"name": "rm", "description": "Remove", "input_schema": {"type": "object"}}],
}
WITH_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + ' ' + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


WITH_REASONING = WITH_CALLS.replace(
    "+ m.content", "+ ('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '') + m.content"
)


@pytest.fixture(scope="module")
def thinker():
    """A model whose template writes reasoning and calls of tools."""
    model = chatting("qwen")
    model.tokenizer.chat_template = WITH_REASONING
    return model


@pytest.fixture(scope="module")
def caller():
    """A model whose template writes calls of tools."""
    model = chatting("qwen")
    model.tokenizer.chat_template = WITH_CALLS
    return model


def test_all_shapes_are_the_same_conversation():
    assert list(Chat(OPENAI).messages) == list(Chat(TALK).messages) == TALK
    read = Chat.from_json(json.dumps(ANTHROPIC))
    assert list(read.messages) == TALK
    assert read.template["tools"][0]["function"] == {
        "name": "rm",
        "description": "Remove",
        "parameters": {"type": "object"},
    }
    assert Chat(TALK).messages == Chat(Chat(TALK).messages).messages


def test_reasoning_stands_beside_the_text():
    hidden = {"type": "redacted_thinking", "data": "x"}
    blocks = [{"type": "thinking", "thinking": "Hm."}, hidden, {"type": "text", "text": "Yes."}]
    [message] = Chat([{"role": "assistant", "content": blocks}]).messages
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": ["rm"]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image", "source": {}}]}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "tool_calls": "rm"},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "rm", "input": {}}], "tool_calls": "rm"},
        {"role": "assistant", "content": [{"type": "tool_use", "input": {}}]},
        {"role": "assistant", "content": "Yes.", "reasoning_content": 3},
    ],
)
def test_what_cannot_be_read_is_refused(message):
    with pytest.raises(InputError):
        Chat([message])


def test_a_call_is_an_answer_as_the_template_writes_it(caller):
    answer = answer_of(caller, Chat(TALK), 2)
    assert answer.text == '<tool_call>rm {"path": "old"}</tool_call>'
    assert list(answer.prompt_ids) == caller.ids(Chat(TALK[:2]))
    read = [*answer.prompt_ids, *answer.ids]
    assert caller.ids(Chat(TALK))[: len(read)] == read  # what it reads later on
    plain = answer_of(MODELS["qwen"], Chat(TALK), 2)
    assert plain.text == '<tool_call>{"name": "rm", "arguments": {"path": "old"}}</tool_call>'
    assert calls_as_text(TALK[4]) == TALK[4]


def test_a_call_is_one_sentence_and_a_source(caller):
    [sentence] = sources(caller, Chat(TALK[:3])).sentences
    assert sentence.text == '<tool_call>rm {"path": "old"}</tool_call>'
    [source] = sentence.sources  # of two, the other one is the control
    assert source.text in ("Be safe.", "Do what the notes say.")
    request = sources_request(caller, Chat(TALK), "sentence", None)
    assert 'rm({"path": "old"})' in {source.text for source in request.sources}
    dropped = sources(MODELS["qwen"], Chat(TALK)).dropped
    assert [text.text for text in dropped] == ['rm({"path": "old"})']


def test_each_call_is_a_sentence(caller):
    calls = [CALL, {"id": "2", "function": {"name": "ls", "arguments": {"path": "One. Two."}}}]
    message = {"role": "assistant", "content": "I look. I remove.", "tool_calls": calls}
    for model, count in ((caller, 2), (MODELS["qwen"], 2)):
        texts = [sentence.text.strip() for sentence in sources(model, Chat([*TALK[:2], message])).sentences]
        assert [text for text in texts if "tool_call" not in text] == ["I look.", "I remove."]
        written = [text for text in texts if "tool_call" in text]
        assert len(written) == count
        assert "rm" in written[0]
        assert "One. Two." in written[1]


def test_reasoning_that_a_template_writes_is_read(thinker):
    thoughtful = {**TALK[4], "reasoning_content": "Notes say milk. So it is done."}
    answer = answer_of(thinker, Chat([*TALK[:4], thoughtful]), 4)
    assert answer.text == "<think>Notes say milk. So it is done.</think>It is done."
    later = Chat([*TALK[:4], thoughtful, TALK[1], TALK[4]])
    request = sources_request(thinker, later, "sentence", None)
    assert {"Notes say milk. ", "So it is done."} <= {source.text for source in request.sources}
    without = request.without([[source.text for source in request.sources].index("Notes say milk. ")])
    assert without.chat.messages[4]["reasoning_content"] == "So it is done."
    assert without.chat.messages[4]["content"] == "It is done."


def test_reasoning_is_written_where_the_template_opens_it():
    thoughtful = {**TALK[4], "reasoning_content": "Hm."}
    answer = answer_of(MODELS["thinking dropped"], Chat([TALK[1], thoughtful]), 1)
    assert answer.text == "Hm.\n</think>\n\nIt is done."
    answer = answer_of(MODELS["qwen"], Chat([TALK[1], thoughtful]), 1)
    assert (answer.text, answer.dropped) == ("It is done.", "Hm.")
    dropped = sources(MODELS["qwen"], Chat([TALK[0], TALK[1], thoughtful])).dropped
    assert [(text.message, text.text) for text in dropped] == [(2, "Hm.")]


def test_reasoning_that_a_template_leaves_out_is_told(caller):
    thinking = {**TALK[2], "reasoning_content": "The user wants it."}
    result = sources(caller, Chat([*TALK[:2], thinking, *TALK[3:]]))
    assert [(text.role, text.text) for text in result.dropped] == [("assistant", "The user wants it.")]


def test_the_nth_answer_is_explained_as_it_stands(tmp_path, monkeypatch):
    model = MODELS["qwen"]
    monkeypatch.setattr("icebear.load_model", lambda *_, **__: model)
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(ANTHROPIC))
    result = json_of("explain", "--sources", "--messages", str(path), "--answer", "2")
    assert result["answer"] == "It is done."
    assert result["reader"] == model.name
    wanted = sources(model, nth_answer(model, Chat.from_json(json.dumps(ANTHROPIC)), 2))
    assert result["answer_sentences"] == json.loads(wanted.to_json())["answer_sentences"]
    explained = json_of("explain", "--messages", str(path), "--answer", "2", "--span", "done")
    assert explained["target"] is None or explained["tokens"]
    run("explain", "--messages", str(path), "--answer", "3", code=1)
    run("explain", "a", "--answer", "1", code=2)


@pytest.mark.parametrize("arguments", ['"5"', "5", '"{}"', "no JSON", '{"a": "5"}'])
def test_arguments_are_read_once(arguments):
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    chat = Chat([message])
    read = chat.messages[0]["tool_calls"][0]["function"]["arguments"]
    assert read == ({"a": "5"} if arguments.startswith("{") else arguments)
    assert Chat(chat.messages) == chat


@pytest.mark.parametrize("messages", [[TALK[2]], [TALK[4]], [TALK[2], TALK[3], TALK[4]]])
def test_an_answer_to_nothing_is_refused_or_measured(caller, messages):
    """A conversation that begins with the assistant."""
    try:
        sources(caller, Chat(messages))
    except InputError:
        assert len(messages) == 1
