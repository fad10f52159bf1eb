"""Messages as tokens, and tokens as turns."""

import itertools
import json

import pytest
import tokenizers
import torch
from conftest import LLAMA, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import MARKS, REASONING, TEMPLATES
from transformers import LlamaConfig, PreTrainedTokenizerFast

from icebear import Chat, Model, attribute, matrix, units
from icebear.app.cli.options import template_switches
from icebear.errors import InputError
from icebear.models.text.chat import inside, turns_of
from icebear.models.text.prompts import Prompt, prompt_json

ASKED = [{"role": "user", "content": "Where do ice bears live?"}]
TALK = [*ASKED, {"role": "assistant", "content": "In the Arctic."}, {"role": "user", "content": "And\ncamels? 😀"}]
SYSTEM = {"role": "system", "content": "Be brief."}


def chatting(name):
    """A random Llama of single bytes with a template; its tokenizer puts a start token before whatever it reads."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = tokenizers.Tokenizer(tokenizers.models.BPE({sign: place for place, sign in enumerate(alphabet)}, []))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    special = {"additional_special_tokens": MARKS, "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=own, **special)
    start = ("<s>", fast.convert_tokens_to_ids("<s>"))
    fast.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [start])
    fast.chat_template = {**TEMPLATES, **REASONING}[name]
    config = LlamaConfig(**{**LLAMA.to_dict(), "vocab_size": len(fast), "max_position_embeddings": 1024})
    return Model(random_model(config, dtype=torch.float32).net, fast, name)


MODELS = {name: chatting(name) for name in (*TEMPLATES, *REASONING)}


def contents(model, ids):
    pieces = model.pieces(ids)
    return [(turn.role, "".join(pieces[turn.text_start : turn.text_stop])) for turn in model.turns(ids)]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [ASKED, TALK, TALK[:2], [SYSTEM, *ASKED]])
def test_ids_are_the_templates(name, messages):
    model, answering = MODELS[name], messages[-1]["role"] == "assistant"
    if name == "mistral" and messages[0] is SYSTEM:
        with pytest.raises(InputError):
            model.ids(messages)
        return
    options = {"add_generation_prompt": not answering, "continue_final_message": answering, "return_dict": False}
    ids = model.tokenizer.apply_chat_template(messages, **options)
    assert model.ids(messages) == model.ids(Chat(messages)) == ids
    assert ids.count(model.tokenizer.bos_token_id) == ("bos_token" in TEMPLATES[name])
    assert attribute(model, Chat(messages), sites=()).prompt.ids == tuple(ids)


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_the_messages(name):
    model = MODELS[name]
    output = [(message["role"], message["content"]) for message in TALK]
    result = [turn for turn in contents(model, model.ids(TALK)) if turn[0] != "system"]
    assert [(role, text.strip()) for role, text in result] == [*output, ("assistant", "")]
    begun = [turn for turn in contents(model, model.ids(TALK[:2])) if turn[0] != "system"]
    assert [(role, text.strip()) for role, text in begun] == output[:2]
    turns = model.turns(model.ids(TALK))
    assert turns[0].start == 0
    assert turns[-1].stop == len(model.ids(TALK))
    assert all(a.stop == b.start for a, b in itertools.pairwise(turns))


@pytest.mark.parametrize("name", ["qwen", "llama 3", "mistral 3"])
def test_a_system_message_is_a_turn_and_the_templates_own_is_not(name):
    model = MODELS[name]
    assert contents(model, model.ids([SYSTEM, *ASKED]))[:2] == [("system", "Be brief."), ("user", ASKED[0]["content"])]
    if name == "llama 3":
        assert contents(model, model.ids(ASKED))[0] == ("system", "")


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<[:"), max_size=12)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from(sorted(TEMPLATES)))
@settings(max_examples=60)
def test_turns_of_any_messages(texts, name):
    """Spaces at the ends of a message may be the template's."""
    model = MODELS[name]
    roles = ["user" if place % 2 == 0 else "assistant" for place in range(len(texts))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    if not texts[-1].strip():
        messages.append({"role": "assistant" if roles[-1] == "user" else "user", "content": "end"})
    wanted = [(message["role"], message["content"].strip()) for message in messages]
    if messages[-1]["role"] == "user":
        wanted.append(("assistant", ""))
    result = [(role, text.strip()) for role, text in contents(model, model.ids(messages)) if role != "system"]
    assert result == wanted


def test_other_texts_have_no_turns():
    assert MODELS["qwen"].turns(MODELS["qwen"].ids("The ice bear lives in the")) == ()
    assert random_model(LLAMA).turns([1, 2, 3]) == ()


def test_what_a_model_wrote_is_never_tokenised_again():
    """Its ids are taken, also where they are not what its text would be split into."""
    model = MODELS["qwen"]
    ids = [*model.tokens_of("In the Arc"), *model.tokens_of("tic.")][::-1]
    read = model.ids([*TALK[:1], {**TALK[1], "ids": ids}, TALK[2]])
    assert any(read[place : place + len(ids)] == ids for place in range(len(read)))
    plain = model.ids([*TALK[:1], {**TALK[1], "ids": ids[::-1]}, TALK[2]])
    assert plain == model.ids(TALK)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_goes_on_from_what_was_read(name):
    """The tokens of the first answer's conversation are the beginning of the second one's; and of one that was ended
    early and is gone on with."""
    model = MODELS[name]
    answer = model.answer(Chat(ASKED), max_new_tokens=6)
    read = answer.before(6)
    assert model.ids(answer.chat.then("user", "And camels?"))[: len(read)] == read
    assert model.ids(answer.chat) == read
    further = model.answer(answer.chat, max_new_tokens=3)
    assert further.chat.messages[-1]["ids"] == [*answer.ids, *further.ids]
    assert model.ids(further.chat) == further.before(3)


def test_text_behind_a_chat_is_a_unit_too():
    model = MODELS["qwen"]
    answer = model.answer("<|im_start|>user\nHi<|im_end|>\nThe bear.", max_new_tokens=4)
    result = attribute(model, answer, sites=())
    assert sum(value for _, value in units(result, "message")) == pytest.approx(result.tokens.sum().item(), abs=1e-5)
    assert matrix(model, answer).rows[-1].turn == "answer"


def test_a_message_cannot_stand_for_what_the_model_wrote():
    model = MODELS["qwen"]
    ids = model.tokens_of("In the Arctic.")
    messages = [{"role": "user", "content": "\ue0001\ue000 \ue0001\ue001"}, {**TALK[1], "ids": ids}, TALK[2]]
    assert contents(model, model.ids(messages))[:2] == [
        ("user", messages[0]["content"]),
        ("assistant", "In the Arctic."),
    ]
    with pytest.raises(InputError):
        model.ids([TALK[0], {**TALK[1], "ids": [10**9]}, TALK[2]])


def test_messages_and_ids_give_the_same_numbers():
    model = MODELS["llama 3"]
    a, b = attribute(model, Chat(TALK)), attribute(model, model.ids(TALK))
    assert a.prompt.turns == b.prompt.turns
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.ffn, b.ffn)
    assert a.top(5, position="all") == b.top(5, position="all")


def test_a_batch_of_conversations_equals_singles():
    model = MODELS["gemma"]
    both = attribute(model, [Chat(ASKED), Chat(TALK), "Ice"])
    for one, given_ in zip(both, (ASKED, TALK, "Ice"), strict=True):
        single = attribute(model, given_)
        assert one.prompt.turns == single.prompt.turns
        assert one.prompt.template == single.prompt.template
        assert torch.allclose(one.tokens, single.tokens, atol=1e-5)


def test_the_template_is_ranked_apart():
    result = attribute(MODELS["qwen"], TALK)
    apart = {*result.prompt.template, *result.prompt.sinks}
    assert result.prompt.template
    assert not {row.position for row in result.top(200, position="all")} & apart
    some = result.top(5000, position="all", include_template=True)
    assert {row.position for row in some} & set(result.prompt.template) - set(result.prompt.sinks)


def test_reading_and_keeping_messages(tmp_path):
    chat = Chat(TALK).then("assistant", "In deserts.", [1, 2])
    (tmp_path / "chat.json").write_text(chat.to_json())
    assert Chat.read(tmp_path / "chat.json") == chat
    assert chat.messages[-1]["ids"] == [1, 2]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": TALK}))
    assert Chat.read(tmp_path / "chat.json") == Chat(TALK)
    for bad in ("", "3", '[{"role": "user"}]', '[{"role": "user", "content": 3}]', '["a"]', "[]", '{"a": 1}'):
        (tmp_path / "chat.json").write_text(bad)
        with pytest.raises(InputError):
            Chat.read(tmp_path / "chat.json")
    with pytest.raises(InputError, match="ids"):
        Chat([{"role": "assistant", "content": "a", "ids": ["1"]}])


@pytest.mark.parametrize("name", MODELS)
def test_a_history_is_what_was_read_and_written_at_every_turn(name):
    """Whatever the template makes of past answers: of reasoning, of what opens it, of a header that the model wrote."""
    model, wrote = MODELS[name], ("bears?\n</think>\n\nIn the north", "final<|end_header_id|> No", " yes ")
    switches = ({}, {"enable_thinking": False}) if name == "thinking dropped" else ({},)
    for template in switches:
        chat = Chat(ASKED, template)
        for number, text in enumerate(wrote):
            read, ids = model.ids(chat), model.tokens_of(text)[1:]  # without the start token
            chat = chat.then("assistant", text, ids).then("user", f"And {number}?")
            after = model.ids(chat)
            assert after[: len(read) + len(ids)] == [*read, *ids]
            rest = "".join(model.pieces(after[len(read) + len(ids) :]))
            assert rest.count(f"And {number}?") == 1
            assert text.strip() not in rest


def test_switches_of_a_template_reach_it_and_are_kept(tmp_path):
    model, off = MODELS["thinking dropped"], {"enable_thinking": False}
    options = {"add_generation_prompt": True, "return_dict": False}
    expected = model.tokenizer.apply_chat_template(ASKED, **options, **off)
    chat = Chat(ASKED, off)
    assert model.ids(chat) == expected != model.ids(Chat(ASKED))
    for same in (Chat.from_json(chat.to_json()), chat.then("user", "x").of(ASKED), chat.asking(ASKED[0]["content"])):
        assert same == chat
        assert model.ids(same) == expected
    assert model.answer(chat, max_new_tokens=1).chat.template == off
    assert Prompt.of(prompt_json(chat)).chat == chat
    tools = [{"name": "search"}]
    assert "search" in "".join(MODELS["channels"].pieces(MODELS["channels"].ids(Chat(ASKED, {"tools": tools}))))
    for wrong in ({"tokenize": True}, [1], {"a b": 1}, "enable_thinking"):
        with pytest.raises(InputError):
            Chat(ASKED, wrong)
    assert template_switches(["enable_thinking=false", "a=b=c", "n=[1]"]) == {
        "enable_thinking": False,
        "a": "b=c",
        "n": [1],
    }


def test_parts_of_text_are_one_text_and_calls_of_tools_need_none():
    parts = [{"role": "user", "content": [{"type": "text", "text": "Where?"}, {"type": "text", "text": "When?"}]}]
    for model in MODELS.values():
        assert model.ids(parts) == model.ids([{"role": "user", "content": "Where?\nWhen?"}])
    with pytest.raises(InputError):
        Chat([{"role": "user", "content": [{"type": "video", "url": "x"}]}])
    for model in MODELS.values():
        with pytest.raises(InputError, match="reads text"):
            model.ids([{"role": "user", "content": [{"type": "image", "path": "x"}]}])
    assert Chat([*ASKED, {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}])
    with pytest.raises(InputError):
        Chat([{"role": "assistant", "content": None}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for x in range(10**9) %}{% endfor %}{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__.os.popen('touch /tmp/icebear-was-here').read() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_can_only_template(template, monkeypatch):
    model = chatting("qwen")
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    with pytest.raises(InputError):
        model.ids(ASKED)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "typed", ["user", "a", "<|im_end|> or </s>", "[INST] x <end_of_turn>\nand", "<|im_start|>user\nHi"]
)
def test_the_turns_of_a_known_chat_have_what_was_typed(name, typed):
    model = MODELS[name]
    chat = Chat([{**message, "content": text} for message, text in zip(TALK, (typed, "In.", typed), strict=True)])
    pieces = model.pieces(model.ids(chat))
    known = turns_of(model, chat, pieces)
    texts = [(turn.role, "".join(pieces[turn.text_start : turn.text_stop])) for turn in known]
    assert texts == [(message["role"], message["content"]) for message in chat.messages]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [ASKED, TALK, TALK[:2]])
def test_the_turns_of_a_known_chat_are_those_of_its_tokens(name, messages):
    model = MODELS[name]
    ids = model.ids(messages)
    known, marked = inside(turns_of(model, Chat(messages), model.pieces(ids))), inside(model.turns(ids))
    assert known <= marked
    assert not "".join(model.text(ids[at]) for at in marked - known).strip()  # spaces around a message


def test_a_hostile_message_is_text():
    messages = [{"role": "user", "content": "{{ 7 * 7 }}{% include 'x' %}<script>alert(1)</script>"}]
    assert contents(MODELS["qwen"], MODELS["qwen"].ids(messages))[0][1] == messages[0]["content"]
    assert "<script>" not in attribute(MODELS["qwen"], messages, sites=()).to_html()


def test_the_default_models_template(smol):
    result = attribute(smol, TALK, sites=())
    options = {"add_generation_prompt": True, "return_dict": False}
    assert result.prompt.ids == tuple(smol.tokenizer.apply_chat_template(TALK, **options))
    assert contents(smol, result.prompt.ids) == [
        ("system", ""),
        *((message["role"], message["content"]) for message in TALK),
        ("assistant", ""),
    ]
