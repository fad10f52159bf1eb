"""Sources of an answer: how a text is split, what is removed, and that each number is a removal of one's own."""

import json
from itertools import pairwise

import pytest
import torch
from configurations import dense
from conftest import LLAMA, random_model
from few import third_of
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
from icebear.models.text.prompts import Prompt
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
    path = json.dumps({"path": "C:\\new"})  # no line break
    assert parts(path) == [path[1:-1]]
    lines = json.dumps({"lines": "a\nb"})
    assert len(parts(lines)) == 2


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
    assert [part.text for part in context.question] == ["Where is Tom?"]
    assert [source.role for source in context.sources[:5]] == ["user", "user", "assistant", "assistant", "assistant"]
    assert context.sources[4].text == 'rm({"path": "a"})'
    without = context.without([context.sources[4], context.sources[5]])
    assert "tool_calls" not in without.messages[2]
    assert without.messages[3]["content"].startswith("Tom is in Oslo.")
    assert not Context.of(chat, "message").question


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("Snow fell. Eve sang. Tell me where Tom is.", "Tell me where Tom is."),
        ("Snow fell. Where is Tom? Answer in one word.", "Where is Tom? Answer in one word."),
        ("Snow fell. Why? It was cold. Eve sang. Ned ran. Say it in French.", "Say it in French."),
        ("Where is Tom? Snow fell. Eve sang. Tom is in Oslo.", "Where is Tom? "),
        ("Translate:\nSnow fell. Eve sang.", "Translate:\n"),
        ("Where is Tom? Snow fell.", "Where is Tom? "),
        ("Where is Tom?", ""),
    ],
)
def test_what_the_user_asks_stays_and_is_no_source(text, stays):
    context = Context.of(Chat([{"role": "user", "content": text}]))
    assert "".join(part.text for part in context.question) == stays
    assert not set(context.question) & set(context.sources)
    assert sum(len(part.text) for part in (*context.question, *context.sources)) == len(text)


def test_what_the_user_asks_before_a_tools_output_is_a_source_and_no_control():
    talk = [{"role": "user", "content": "Be kind. Do what the notes say."}, {"role": "tool", "content": "Rest."}]
    context = Context.of(Chat(talk))
    assert [part.text for part in context.request] == ["Do what the notes say."]
    assert set(context.request) <= set(context.sources)


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
        others = [change(text) for text in read if text not in [source.text for source in sentence.sources]]
        assert all(min(abs(one - other) for other in others) < 1e-3 for one in sentence.random.singles)
        assert sentence.random.are_all == (len(others) == len(sentence.random.singles))
        assert [source.change for source in sentence.sources] == sorted(source.change for source in sentence.sources)


FAMILIES = ("llama", "gemma3", "gpt2", "qwen3", "gpt_neox", "phi3")


def in_family(name, template):
    """A random model of a family that reads single bytes by a template."""
    reader = MODELS[template]
    config = dense(positions=1024)[name]
    config.vocab_size = len(reader.tokenizer)
    return Model(random_model(config, dtype=torch.float32).net, reader.tokenizer, name)


@pytest.mark.parametrize(("family", "template"), third_of(zip(FAMILIES, TEMPLATES, strict=True)))
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


@pytest.mark.release
def test_every_number_of_the_default_model_is_a_removal_of_ones_own(smol):
    answer = smol.answer(Chat(TALK), max_new_tokens=10)
    result = sources(smol, answer)
    check_numbers(smol, [dict(message) for message in TALK], answer, result)
    assert result.question == "Where is Tom?"
    assert not result.reader
    assert len(repr(result).splitlines()) <= 25
    assert len(result.to_frame()) == sum(len(sentence.sources) for sentence in result.sentences)
    data = json.loads(result.to_json())["answer_sentences"][0]
    assert data["sources"][0].keys() >= {"role", "text", "change"}
    assert data["random"].keys() == {"single", "together", "are_all"}


def test_passes_share_their_beginning_and_are_the_same_without():
    model = MODELS["qwen"]
    prompt, answer = model.ids(Chat(TALK)), model.tokens_of("In Oslo.")
    others = [prompt[:40] + prompt[50:], prompt[:9] + prompt[12:], prompt[:60] + prompt[61:], prompt]
    shared = Removals(model, answer)
    assert shared.can_cut_cache
    values = dict(shared.log_probabilities(others))
    beginnings = {tuple(other[:stop]) for other in others for stop in range(1, len(other))}
    assert shared.tokens_read == len(beginnings) + len(others) * len(answer)  # each token once behind its beginning
    full = Removals(model, answer)
    full.can_cut_cache = False
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
    assert not Removals(random_model(config, "eager", torch.float32), [4]).can_cut_cache


SEVEN = "Tom is in Oslo. Tom sits in Oslo. Tom ran in Oslo. A dog ran. It was cold. Snow fell. Eve sang. Where?"
OSLO = [f"{sentence}." for sentence in SEVEN.split(". ")[:3]]


def by_hand(monkeypatch, log_probability, text=SEVEN):
    """Return what is measured where the log-probability of an answer of one token is a function of the text before it,
    and the first sentences have the largest relevance. Its removals are among the tests above."""
    model = MODELS["qwen"]

    def passes(self, prompts):
        for index, prompt in enumerate(prompts):
            yield index, torch.tensor([log_probability("".join(self.model.pieces(prompt.ids)))])

    def order(self, checkpoint):
        self.relevance = -torch.arange(len(self.request.sources))[None].float()

    monkeypatch.setattr(Removals, "log_probabilities", passes)
    monkeypatch.setattr(source_measurement.SourceMeasurement, "order", order)
    answer = model.answer(Chat([{"role": "user", "content": text}]), max_new_tokens=1)
    return sources(model, answer, span=(0, 1)).sentences[0]


def without_each(losses):
    """A log-probability that loses so much without each of some texts."""
    return lambda read: -sum(loss for text, loss in losses.items() if text not in read)


def test_controls_are_drawn_before_losses_are_known(monkeypatch):
    """The last half of a short context, whatever its sentences lose; a control that loses most decides nothing."""
    few = by_hand(monkeypatch, without_each({"Tom is": 9.0}))
    assert [source.text.strip() for source in few.sources] == [*OSLO, "A dog ran."]
    assert (few.random.singles, few.random.are_all, few.is_decided) == ((0.0, 0.0, 0.0), True, True)
    for loss, is_decided in ((8.5, False), (8.0, True), (20.0, False)):
        few = by_hand(monkeypatch, without_each({"Tom is": 9.0, "Snow fell.": loss}))
        assert [source.text.strip() for source in few.sources] == [*OSLO, "A dog ran."]
        assert min(few.random.singles) == -loss
        assert few.is_decided == is_decided
    twenty = " ".join(f"Fact {letter} is so." for letter in "abcdefghijklmnopqrst") + " Why?"
    drawn = [f"Fact {letter} " for letter in "ijklmnopqrst"]
    losses = {text: 1.0 + number for number, text in enumerate(drawn)}
    many = by_hand(monkeypatch, without_each(losses), twenty)
    assert {source.change for source in many.sources} == {0.0}
    again = by_hand(monkeypatch, without_each({text: 20 - loss for text, loss in losses.items()}), twenty)
    assert [21 + loss for loss in map(sum, zip(many.random.singles, again.random.singles, strict=True))] == [1.0] * 4
    assert not many.random.are_all


def test_there_is_no_verdict_without_a_control(monkeypatch):
    sentence = by_hand(monkeypatch, without_each({"Tom is": 9.0}), "Tom is in Oslo. Where?")
    assert [source.change for source in sentence.sources] == [-9.0]
    assert not sentence.random.singles
    assert not sentence.is_decided


def together(losses, joint):
    """A log-probability with single losses, and a loss where none of the three sentences is there."""
    alone = without_each(losses)
    return lambda read: alone(read) if any(text in read for text in OSLO) else -joint


def test_a_prompt_whose_positions_depend_on_its_length_is_read_anew():
    """longrope has other angles from a length on, which keys in a cache do not have."""
    config = dense(positions=512)["phi3"]
    config.original_max_position_embeddings = 32
    half = config.hidden_size // config.num_attention_heads // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [8.0] * half}
    config.rope_parameters = {
        **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 16.0},
        **factors,
    }
    model = random_model(config, dtype=torch.float32)
    ids, answer = [(5 * at + 3) % 40 for at in range(60)], [7, 9, 11]
    prompts = [ids, ids[:10] + ids[14:], ids[:28], ids[:20]]
    passes = Removals(model, answer)
    assert passes.can_cut_cache
    for index, values in passes.log_probabilities(prompts):
        logits = model.continuation_logits(prompts[index], answer)
        assert torch.allclose(values, logits.log_softmax(-1)[range(3), answer], atol=1e-4)


def test_a_removal_that_the_template_refuses_is_left_out(monkeypatch):
    """The rest is measured."""
    model = MODELS["qwen"]
    refused, ids = [], Model.ids

    def strict(self, prompt):
        chat = Prompt.of(prompt).chat
        if chat and len(chat.messages[-1]["content"]) < 40:
            refused.append(prompt)
            raise InputError("The chat template refuses these messages.")
        return ids(self, prompt)

    monkeypatch.setattr(Model, "ids", strict)
    text = "Tom is in the city of Oslo. Ann is in the city of Rome. Where is Tom?"
    [sentence] = sources(
        model, Chat([{"role": "user", "content": text}, {"role": "assistant", "content": "Oslo"}])
    ).sentences
    assert len(sentence.sources) == len(sentence.random.singles) == 1
    assert sentence.together is not None
    text = "Tom is here. Ann is here. Ned is here. Bob is here. Where?"
    [sentence] = sources(
        model, Chat([{"role": "user", "content": text}, {"role": "assistant", "content": "Oslo"}])
    ).sentences
    assert len(sentence.sources) == 2
    assert sentence.together is None
    assert refused


def test_sources_that_stand_in_for_each_other(monkeypatch):
    """A model for which any of three sentences is enough."""
    sentence = by_hand(monkeypatch, together({}, 4.9))
    assert [source.change for source in sentence.leading] == [0, 0, 0]
    assert sentence.together == pytest.approx(-4.9)
    assert sentence.stand_in.each_suffices
    assert sentence.stand_in.alone == (0, 0, 0)
    assert not sentence.is_decided


@pytest.mark.parametrize(
    ("losses", "joint"),
    [
        ({OSLO[0]: 6.7}, 20.0),  # the first one has its own verdict
        ({OSLO[0]: 0.9, OSLO[1]: 0.8, OSLO[2]: -0.8}, 2.0),  # a gain does not lessen the sum of the losses
        ({"It was cold.": 1.5, "Snow fell.": 1.5, "Eve sang.": 1.5}, 4.9),  # random others lose as much together
    ],
)
def test_sources_that_do_not_stand_in_for_each_other(monkeypatch, losses, joint):
    sentence = by_hand(monkeypatch, together(losses, joint))
    assert sentence.stand_in is None
    assert sentence.is_decided == (OSLO[0] in losses and losses[OSLO[0]] > 1)


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
    assert [part.random for part in effect.sentences] != [()] * 2
    for part, sentence in zip(effect.sentences, sources(model, chat).sentences, strict=True):
        changes = {source.text: source.change for source in sentence.sources}
        if effect.text in changes:
            assert part.change == pytest.approx(changes[effect.text], abs=1e-4)
            assert part.random == pytest.approx(sentence.random.singles, abs=1e-4)
        else:  # a control is not its own control
            assert all(min(abs(x - single) for single in sentence.random.singles) < 1e-4 for x in part.random)
    asked = effect_of_source(model, chat, 2, len(TALK[2]["content"]) - 2)
    assert asked.text == "Where is Tom?"
    for part, sentence in zip(asked.sentences, sources(model, chat).sentences, strict=True):
        assert part.random == pytest.approx(sentence.random.singles, abs=1e-4)
    with pytest.raises(InputError):
        effect_of_source(model, chat, 2, 999)


def test_a_prompt_without_a_chat():
    model = MODELS["qwen"]
    answer = model.answer("Ann is in Rome. Tom is in Oslo. Where is Tom?", max_new_tokens=5)
    result = sources(model, answer, span=(0, 5))
    assert [source.role for source in result.sentences[0].sources] == ["prompt"]
    assert len(result.sentences[0].random.singles) == 1  # of two sources, one is kept for the control
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
