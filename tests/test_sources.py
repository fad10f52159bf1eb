"""Sources of an answer: how a text is split, what is removed, and that each number is a removal of one's own."""

import json
from itertools import pairwise

import pytest
import torch
from configurations import dense
from conftest import LLAMA, random_model
from hypothesis import given
from hypothesis import strategies as st
from templates import TEMPLATES
from test_chat import MODELS

from icebear import Chat, InputError, Model, Sources, sources
from icebear.concepts.answers import source_measurement
from icebear.concepts.answers.removals import Removals
from icebear.concepts.answers.sources import effect_of_source
from icebear.models.text.answer import Answer
from icebear.models.text.context import Context
from icebear.models.text.splitting import bounds_of, covering, removed

FACTS = "Ann is in Rome. Tom is in Oslo. A dog ran. It was cold.\nSnow fell. Eve sang. I sat. He ate. Ned ran. "
TALK = [
    {"role": "user", "content": "Who are you? I am Bo."},
    {"role": "assistant", "content": "I am Zed. I can help."},
    {"role": "user", "content": f"{FACTS}Where is Tom?"},
]


def parts(text, by="sentence"):
    return [text[start:stop] for start, stop in bounds_of(text, by)]


# --- the splitter ---------------------------------------------------------------------------------------


def test_prose_is_split_into_sentences():
    assert parts("Mr. Fox ate 3.5 kg. Ok?\n\nBye. ") == ["Mr. Fox ate 3.5 kg. ", "Ok?\n\n", "Bye. "]
    wrapped = "The quick brown fox jumps over the lazy dog, and then the\nUnited States sent it a letter. It was long."
    assert parts(wrapped) == [wrapped[: wrapped.index("It")], "It was long."]


def test_list_items_are_parts_with_their_further_lines():
    text = "Buy:\n- milk. Or tea.\n  Not cold.\n- bread\n2. tea\n"
    assert parts(text) == ["Buy:\n", "- milk. Or tea.\n  Not cold.\n", "- bread\n", "2. tea\n"]


def test_rows_of_a_table_are_parts_and_its_header_is_none():
    text = "| city | country |\n|---|:-:|\n| Oslo | Norway |\n| Rome | Italy |\nThat is all."
    assert parts(text) == ["| Oslo | Norway |\n", "| Rome | Italy |\n", "That is all."]
    assert removed(text, bounds_of(text)[:1]) == text.replace("| Oslo | Norway |\n", "")


def test_lines_of_code_and_of_a_tools_output_are_parts():
    assert parts("Run:\n```sh\ncd /tmp\n\nrm -r a\n```\nDone.") == ["Run:\n", "cd /tmp\n\n", "rm -r a\n", "Done."]
    log = "-rw-r--r-- 1 root root 1481 Nov 29 17:10 README.md\ndrwxr-xr-x 2 root root 4096 Nov 29 17:10 a\n"
    assert parts(log) == log.splitlines(keepends=True)


def test_members_of_json_are_parts_and_what_is_left_is_json():
    data = {"rows": [{"id": 1, "text": "Snow fell. It, [too]."}, {"id": 2, "tags": ["x", "y"]}], "n": 2}
    text = json.dumps(data)
    assert [part.strip(", ") for part in parts(text)] == [
        '"id": 1',
        "Snow fell.",
        "It, [too].",
        '"id": 2',
        '"x"',
        '"y"',
        '"n": 2',
    ]
    assert [part.strip(", ") for part in parts('{"rows": [{"a": 1}, {"b": 2}]}', "document")] == [
        '{"a": 1}',
        '{"b": 2}',
    ]
    for number, part in enumerate(bounds_of(text)):
        left = json.loads(removed(text, [part]))
        assert left != data, number
    assert json.loads(removed(text, bounds_of(text))) == {"rows": [{"text": ""}, {"tags": []}]}
    assert parts("[1, 2") == ["[1, 2"]  # no JSON


def test_documents_and_messages():
    text = "One. Two.\nThree.\n\nFour."
    assert parts(text, "document") == ["One. Two.\nThree.\n\n", "Four."]
    assert parts(text, "message") == [text]
    assert parts("  ", "message") == parts(" \n ") == []


@given(st.lists(st.sampled_from(["- a. ", "| b | c |", "```", '{"a": [1, "d. E."]}', "f g. H", "\n", " ", "  "])))
def test_parts_of_any_text_are_in_order_and_cover_it(pieces):
    text = "".join(pieces)
    bounds = bounds_of(text)
    assert all(start < stop for start, stop in bounds)
    assert all(left[1] <= right[0] for left, right in pairwise(bounds))
    assert "".join(covering(text)) == text
    assert removed(text, []) == text


# --- the sources ----------------------------------------------------------------------------------------


def test_the_question_stays_and_a_call_is_a_source():
    call = {"type": "function", "function": {"name": "rm", "arguments": {"path": "a"}}}
    chat = Chat([*TALK[:2], {"role": "assistant", "content": None, "tool_calls": [call]}, TALK[2]])
    context = Context.of(chat)
    assert context.question.text == "Where is Tom?"
    assert [source.role for source in context.sources[:5]] == ["user", "user", "assistant", "assistant", "assistant"]
    assert context.sources[4].text == 'rm({"path": "a"})'
    without = context.without([context.sources[4], context.sources[5]])
    assert "tool_calls" not in without.messages[2]
    assert without.messages[3]["content"].startswith("Tom is in Oslo.")
    assert Context.of("Ann is in Rome. She eats.").question is None
    assert Context.of(chat, "message").question is None


def log_probability(model, messages, answer):
    """The slow way: messages, a template, one pass over all of it."""
    ids = model.ids(messages)
    read = torch.tensor([[*ids, *answer.ids]])
    with torch.no_grad():
        logits = model.net(input_ids=read, use_cache=False).logits[0, len(ids) - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(answer.ids)), list(answer.ids)]


def changed(messages, *texts):
    """The messages without some texts."""
    result = [dict(message) for message in messages]
    for text in texts:
        for message in result:
            message["content"] = message["content"].replace(text, "")
    return result


def check_numbers(model, messages, answer, result):
    base = log_probability(model, messages, answer)
    read = [source.text for source in Context.of(Chat(messages)).sources]
    for sentence in result.sentences:
        span = slice(sentence.start, sentence.stop)

        def change(*texts, span=span):
            return (log_probability(model, changed(messages, *texts), answer) - base)[span].sum().item()

        assert sentence.log_probability == pytest.approx(base[span].sum().item(), abs=1e-3)
        for source in sentence.sources:
            assert source.change == pytest.approx(change(source.text), abs=1e-3)
        first = [source.text for source in sentence.leading]
        assert sentence.together == pytest.approx(change(*first), abs=1e-3)
        assert sentence.only == pytest.approx(change(*(text for text in read if text not in first)), abs=1e-3)
        others = [change(text) for text in read if text not in first]
        assert all(min(abs(one - other) for other in others) < 1e-3 for one in sentence.random.singles)
        assert [source.change for source in sentence.sources] == sorted(source.change for source in sentence.sources)


FAMILIES = ("llama", "gemma3", "gpt2", "qwen3", "gpt_neox", "phi3")


def in_family(name, template):
    """A random model of a family that reads single bytes by a template."""
    reader = MODELS[template]
    config = dense(positions=1024)[name]
    config.vocab_size = len(reader.tokenizer)
    return Model(random_model(config, dtype=torch.float32).net, reader.tokenizer, name)


@pytest.mark.parametrize(("family", "template"), list(zip(FAMILIES, TEMPLATES, strict=True)))
def test_every_number_is_a_removal_of_ones_own(family, template):
    model = in_family(family, template)
    messages = [TALK[2]] if template == "gemma" else TALK
    written = tuple(model.tokens_of("Tom is in Oslo. He is cold."))
    question = Chat(messages)
    answer = Answer(tuple(model.ids(question)), written, model.pieces(written), (0.5,) * len(written), True, question)
    result = sources(model, answer)
    assert [sentence.text.strip() for sentence in result.sentences] == ["Tom is in Oslo.", "He is cold."]
    check_numbers(model, messages, answer, result)
    chat = Chat([*messages, {"role": "assistant", "content": answer.text}])
    again = sources(model, chat)
    assert again.sentences == result.sentences
    assert again.reader == model.name


def test_every_number_of_the_default_model_is_a_removal_of_ones_own(smol):
    answer = smol.answer(Chat(TALK), max_new_tokens=24)
    result = sources(smol, answer)
    check_numbers(smol, [dict(message) for message in TALK], answer, result)
    assert result.question == "Where is Tom?"
    assert not result.reader
    assert len(repr(result).splitlines()) <= 25
    assert len(result.to_frame()) == sum(len(sentence.sources) for sentence in result.sentences)
    data = json.loads(result.to_json())["answer_sentences"][0]
    assert data["sources"][0].keys() >= {"role", "text", "change"}
    assert data["random"].keys() == {"single", "together"}


def test_passes_share_their_beginning_and_are_the_same_without():
    model = MODELS["qwen"]
    prompt, answer = model.ids(Chat(TALK)), model.tokens_of("In Oslo.")
    others = [prompt[:40] + prompt[50:], prompt[:9] + prompt[12:], prompt[:60] + prompt[61:], prompt]
    shared = Removals(model, answer)
    assert shared.shares
    values = dict(shared.log_probabilities(others))
    beginnings = {tuple(other[:stop]) for other in others for stop in range(1, len(other))}
    assert shared.tokens_read == len(beginnings) + len(others) * len(answer)  # each token once behind its beginning
    full = Removals(model, answer)
    full.shares = False
    for index, plain in full.log_probabilities(others):
        assert torch.allclose(values[index], plain, atol=1e-4)


def test_a_long_prompt_is_read_in_chunks(monkeypatch):
    model = MODELS["qwen"]
    prompt, answer = model.ids(Chat(TALK)), model.tokens_of("In Oslo. " * 3)
    [(_, at_once)] = Removals(model, answer).log_probabilities([prompt])
    monkeypatch.setattr("icebear.concepts.answers.removals.CHUNK", 7)
    [(_, in_chunks)] = Removals(model, answer).log_probabilities([prompt])
    assert torch.allclose(at_once, in_chunks, atol=1e-4)


def test_a_model_with_a_state_reads_each_prompt_anew():
    from transformers import Mamba2Config

    config = Mamba2Config(
        vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1
    )
    assert not Removals(random_model(config, "eager", torch.float32), [4]).shares


def test_sources_that_stand_in_for_each_other(monkeypatch):
    """A model for which any of three sentences is enough."""
    model = MODELS["qwen"]
    text = "Tom is in Oslo. Tom sits in Oslo. Tom ran in Oslo. A dog ran. It was cold. Snow fell. Eve sang. Where?"
    names = [f"{sentence}." for sentence in text.split(". ")[:3]]

    def by_hand(self, prompts):
        for index, prompt in enumerate(prompts):
            read = "".join(self.model.pieces(prompt))
            yield index, torch.full((len(self.answer),), -0.1 if any(name in read for name in names) else -5.0)

    monkeypatch.setattr(Removals, "log_probabilities", by_hand)
    monkeypatch.setattr(source_measurement, "REMOVED_SOURCES", 3)
    order = torch.tensor([[3.0, 2.0, 1.0, 0, 0, 0, 0]])
    monkeypatch.setattr(source_measurement.Measurement, "_order", lambda self, _: setattr(self, "relevance", order))
    answer = model.answer(Chat([{"role": "user", "content": text}]), max_new_tokens=4)
    [sentence] = sources(model, answer, span=(0, 4)).sentences
    assert [source.change for source in sentence.leading] == [0, 0, 0]
    assert sentence.together == pytest.approx(-4.9 * 4)
    assert sentence.stand_in.each_suffices
    assert sentence.stand_in.alone == (0, 0, 0)
    assert not sentence.is_decided


def test_what_ctrl_c_keeps(monkeypatch):
    model, calls = MODELS["qwen"], []

    def interrupted(done, total):
        calls.append(done)
        if done == 3:
            raise KeyboardInterrupt

    chat = Chat([*TALK, {"role": "assistant", "content": "In Oslo."}])
    result = sources(model, chat, on_progress=interrupted)
    assert not result.is_complete
    assert calls == [1, 2, 3]
    [sentence] = result.sentences
    assert 1 <= len(sentence.sources) + len(sentence.random.singles) <= 3
    assert sentence.together is None
    assert "Stopped" in str(result)
    assert "hangs" not in str(result)


def test_what_a_template_drops_is_told():
    model = MODELS["thinking dropped"]
    talk = [TALK[0], {"role": "assistant", "content": "<think>He asks. I think.</think>I am Al."}, TALK[2]]
    result = sources(model, Chat([*talk, {"role": "assistant", "content": "In Oslo."}]))
    assert "I think." in "".join(text.text for text in result.dropped)
    assert {text.role for text in result.dropped} == {"assistant"}
    assert "I think." not in "".join(source.text for part in result.sentences for source in part.sources)
    assert not sources(MODELS["qwen"], Chat([*talk, {"role": "assistant", "content": "In Oslo."}])).dropped


def test_the_effect_of_one_source():
    model = MODELS["qwen"]
    chat = Chat([*TALK, {"role": "assistant", "content": "Tom is in Oslo. He is cold."}])
    at = TALK[2]["content"].index("dog")
    effect = effect_of_source(model, chat, 2, at)
    assert effect.text.strip() == "A dog ran."
    known = [source for part in sources(model, chat).sentences for source in part.sources if "dog" in source.text]
    assert len(effect.sentences) == 2
    assert {round(source.change, 3) for source in known} <= {round(part.change, 3) for part in effect.sentences}
    asked = effect_of_source(model, chat, 2, len(TALK[2]["content"]) - 2)
    assert asked.text == "Where is Tom?"
    with pytest.raises(InputError):
        effect_of_source(model, chat, 2, 999)


def test_a_prompt_without_a_chat():
    model = MODELS["qwen"]
    answer = model.answer("Ann is in Rome. Tom is in Oslo. Where is Tom?", max_new_tokens=5)
    result = sources(model, answer, span=(0, 5))
    assert [source.role for source in result.sentences[0].sources] == ["prompt"] * 2
    no_text = Model(random_model(LLAMA, dtype=torch.float32).net)
    with pytest.raises(InputError):
        sources(no_text, no_text.answer([5, 4, 3], max_new_tokens=2))


def test_hostile_texts_are_escaped_on_the_page():
    model = MODELS["qwen"]
    bad = "<script>alert(1)</script> is in Rome. [b]x[/b] ran."
    result = sources(model, Chat([{"role": "user", "content": bad}, {"role": "assistant", "content": f"{bad}"}]))
    assert isinstance(result, Sources)
    assert "<script>alert" not in result.to_html()
    assert "&lt;script&gt;alert" in result.to_html()
