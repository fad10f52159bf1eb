"""Chat in the app."""

import json
import re
import shutil
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from appview import fine, set_up, shown, text, visit
from streamlit.runtime.scriptrunner_utils.exceptions import StopException

from icebear import Chat, Monitor, Neuron, attribute, circuit, load_model, source_breakdown, sources, steer, watching
from icebear.app.web import chat_breakdown, chat_sources
from icebear.app.web import circuit as circuits
from icebear.app.web.shared import words
from icebear.concepts.answers.source_records import MeasuredSource, RandomRemovals, SourcedSentence
from icebear.concepts.answers.sources import Sources, effect_of_source
from icebear.explanation.node_meanings import NodeMeaning
from icebear.models.text.answer import answer_of
from icebear.records import AutomaticLabel, Ranked
from icebear.render import heatmap
from icebear.steering.concept.detectors import ConceptNeuron
from icebear.steering.monitor.watching import read_message

FEW_NODES = {"nodes": 5, "heads": False}


def conversation(page):
    return Chat.from_json(page.session_state["chat"])


def output_of(*contents, roles=("user", "assistant")):
    return Chat({"role": roles[at % 2], "content": content} for at, content in enumerate(contents)).to_json(None)


def bars_of(page):
    """Name -> number of each bar."""
    (html,) = (str(part.proto.body) for part in page.html if 'class="bars"' in str(part.proto.body))
    names = re.findall(r'<span class="\w+">([^<]*)</span>', html)
    return {unescape(name): float(number) for name, number in zip(names[::2], names[1::2], strict=True)}


def test_a_word_has_the_labels_of_its_strongest_nodes(environment, monkeypatch):
    label = AutomaticLabel(Neuron(23, "head", 4), "+", "topic", "cities *of* <b>", "sentence", 0.9, 0.01, True, {})
    node = NodeMeaning(Ranked(label.neuron, 5, None, 1.5), 0.25, label)
    written = output_of("What is the capital of France?", "The capital of France is Paris.")
    page = visit("chat", chat=written, turn="1", span="0-1")
    assert "None of the 20 strongest neurons and heads" in text(fine(page)), "the index has no labels"
    monkeypatch.setattr(chat_breakdown, "node_meanings", lambda relevance, store: [node])
    fine(page.run())
    line = next(part.value for part in page.markdown if part.value.startswith("- 25"))
    assert "<b>" not in line
    assert line.replace("\\", "").startswith("- 25% L23.head.4: cities *of*")
    assert "1 of the 20 strongest" in text(page)
    assert page.get_by_key("meanings").options == ["L23.head.4 +"]


def test_a_word_that_is_less_likely_than_not_has_no_shares(environment):
    page = fine(visit("chat", chat=output_of("What is the capital of France?", "Paris"), turn="1", span="0-1"))
    assert "But the model prefers" in text(page)
    assert "strongest neurons and heads" not in text(page), "what their labels are is not looked up"


def test_a_conversation_and_the_account_of_a_word(environment, smol):
    page = fine(visit("chat", length="12"))
    page.get_by_key("example_0").click().run()
    _, answer = conversation(fine(page)).messages
    assert answer["content"] == "The capital of France is Paris."
    assert page.query_params["chat"] == conversation(page).to_json(None)
    assert "Click a word" in text(page)
    page.query_params["turn"], page.query_params["span"] = "1", "5-6"
    assert "## Why Paris?" in text(fine(page.run()))
    answered = answer_of(smol, conversation(page), 1)
    own = source_breakdown(smol, answered, (5, 6), number="log-odds")
    assert list(bars_of(page).values()) == pytest.approx(totals(own), abs=0.006)
    assert "The strongest word in it is **France**" in text(page)
    colors = dict(re.findall(r'<span title="([^"]+)" style="[^"]+"> (\w+)</span>', text(page))[::-1])
    relevance = own.relevance.tokens[own.relevance.prompt.strings.index(" France")]
    assert colors[f"{relevance:+.2f}"] == "France"  # on the conversation itself
    page.get_by_key("rather").set_value("London").run()
    assert "Why Paris rather than London?" in text(fine(page))
    against = source_breakdown(smol, answered, (5, 6), contrast="London")
    assert list(bars_of(page).values()) == pytest.approx(totals(against), abs=0.006)
    assert sum(bars_of(page).values()) == pytest.approx(against.target, abs=0.05)
    assert not page.dataframe  # one account a screen


@pytest.mark.release
def test_an_account_has_details_and_leads_to_steering(environment, smol):
    page = fine(visit("chat", length="12"))
    page.get_by_key("example_0").click().run()
    [request, _] = conversation(fine(page)).messages
    page.query_params["turn"], page.query_params["span"] = "1", "5-6"
    fine(page.run()).get_by_key("rather").set_value("London").run()
    answered = answer_of(smol, conversation(fine(page)), 1)
    page.session_state["details"] = True
    page = fine(page.run())
    assert "(template)" in text(page)  # greyed in the heatmap
    (neurons,) = (frame.value for frame in page.dataframe)
    relevance = attribute(smol, answered, contrast="London", span=(5, 6))
    assert list(neurons["neuron"]) == [str(row.neuron) for row in relevance.top(10)]
    page.get_by_key("account_steer").click().run()
    assert fine(page).get_by_key("edits").value.endswith("*0")
    assert Chat.from_json(page.get_by_key("prompt").value) == Chat([request])
    page.get_by_key("tokens").set_value(2).run()
    page.get_by_key("generate").click().run()
    assert "The capital" in text(fine(page))
    assert "Why Paris rather than London?" in text(fine(shown(page, "chat")))
    page.get_by_key("forget").click().run()
    assert fine(page).get_by_key("example_0")
    assert "chat" not in page.query_params


def totals(sources):
    """What was written first, then the template; the largest first."""
    rows = [(part.name in ("template", "sinks"), -part.total) for part in sources.parts]
    return [-value for _, value in sorted(rows)]


@pytest.mark.release
def test_an_answer_is_written_with_the_edits_of_another_view(environment, smol):
    """As under `steer`; without the switch it is the model's own."""
    edits = "L29.ffn.860=900"
    written = []
    for edited in (False, True):
        page = fine(visit("steer", section="edits", edits=edits, prompt="a"))
        page.query_params["chat"], page.query_params["length"] = output_of("What is the capital of France?"), "6"
        page = fine(shown(page, "chat"))
        page.get_by_key("edited").set_value(edited).run()
        page.get_by_key("ask").click().run()
        request, answer = conversation(fine(page)).messages
        written.append(answer["content"])
    expected = [smol.answer(Chat([request]), 6).text]
    with steer(smol, [edits]):
        expected.append(smol.answer(Chat([request]), 6).text)
    assert written == expected
    assert written[0] != written[1]


def test_an_answer_that_somebody_ended_is_kept(environment, smol):
    ids = smol.tokens_of("The capital of France")
    page = visit("chat", chat=output_of("What is the capital of France?"))
    page.session_state["writing"] = [*ids, smol.tokenizer.eos_token_id]  # any click ends the run that writes
    page.run()
    message = conversation(fine(page)).messages[1]
    assert message == {"role": "assistant", "content": "The capital of France", "ids": ids}
    page.session_state["writing"] = []  # before the first word
    assert len(conversation(page.run()).messages) == 2


def test_a_conversation_without_an_answer_waits_for_a_click(environment):
    page = fine(visit("chat", chat=output_of("Say yes."), length="2"))
    assert "no answer yet" in text(page)
    page.get_by_key("ask").click().run()
    assert len(conversation(fine(page)).messages[1]["ids"]) == 2


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ("[{", "JSON"),
        ("[" * 5000, "JSON"),
        ('{"a": 1}', "JSON"),
        ('[{"role": "user"}]', "content"),
        ('[{"role":"user","content":"a"},{"role":"assistant","content":"b","ids":[999999999]}]', "a token id"),
        ('[{"role":"user","content":"a"},{"role":"assistant","content":"b","ids":[5]}]', "text"),
    ],
)
def test_broken_links(environment, chat, reason):
    page = visit("chat", chat=chat, turn="1", span="0-1", length="2")
    assert not page.exception
    assert reason in page.error[0].value.replace("\\", "")
    page.chat_input[0].set_value("Hi").run()
    assert not page.exception


@pytest.mark.parametrize(("turn", "span"), [("1", "3-99"), ("0", "0-1"), ("9", "0-1"), ("x", "0-1"), ("1", "x")])
def test_marks_that_are_not_there(environment, turn, span):
    page = visit("chat", chat=output_of("Say yes.", "Yes, of course."), turn=turn, span=span)
    assert len(page.error) == 1
    assert not page.exception


def test_a_long_conversation_has_pages_and_no_link(environment):
    chat = output_of(*("ice bear " * 70, "Yes.") * 12)
    page = visit("chat")
    page.session_state["chat"] = chat
    page = fine(shown(page, "chat"))
    assert "too long for a link" in text(page)
    assert "chat" not in page.query_params
    before = len(page.chat_message)
    page.get_by_key("show_earlier").click().run()
    assert len(fine(page).chat_message) == 2 * before
    assert Chat.from_json(chat) == conversation(page)


def test_a_model_without_a_template_says_so(first_visit):
    assert "has no chat template" in text(fine(visit("chat"))).replace("\\", "")
    page = fine(visit("chat"))
    assert not page.chat_input


@pytest.mark.release
def test_views_take_a_conversation(environment, smol, no_stages):
    chat = output_of("What is the capital of France? Answer in one word.")
    page = fine(visit("why", prompt=chat, target="Paris"))
    assert "'France' accounts for" in text(page).replace("\\", "")
    page = fine(visit("steer", section="edits", prompt=chat, edits="L29.ffn.860*0", tokens="3"))
    page.get_by_key("generate").click().run()
    assert "user: What is the capital" in text(fine(page))
    printed = []
    python = page.code[0].value.replace("load_model('smollm2-135m')", "MODEL")
    exec(python, {"MODEL": smol, "print": printed.append})
    assert printed == [page.session_state["edits result"][1].steered.text]
    both = (output_of(f"What is the capital of {name}?", f"The capital of {name} is") for name in ("France", "Spain"))
    pair = {"prompt": next(both), "counterfactual": next(both)}
    assert "Groups" in text(fine(visit("circuit", **pair, nodes="5", neurons="true")))
    assert "cannot be read" in visit("steer", section="edits", prompt=chat[:-1]).error[0].value


@pytest.mark.release
def test_a_conversation_s_circuit(environment, monkeypatch):
    """Of few nodes."""
    monkeypatch.setattr(circuits, "circuit", lambda *pair, **options: circuit(*pair, **options | FEW_NODES))
    page = visit(
        "chat",
        chat=output_of("What is the capital of France?", "The capital of France is Paris."),
        turn="1",
        span="5-6",
    )
    page.session_state["details"] = True
    (field,) = (
        field for field in fine(page.run()).text_input if field.label.startswith("Compared with another message")
    )
    field.set_value("What is the capital of Spain?").run()
    assert page.get_by_key("open_why").disabled is False
    page.get_by_key("open_circuit").click().run()
    assert page.get_by_key("target").value == " Paris"
    assert (
        Chat.from_json(page.get_by_key("counterfactual").value).messages[0]["content"]
        == "What is the capital of Spain?"
    )
    assert Chat.from_json(page.get_by_key("prompt").value).messages[1]["content"] == "The capital of France is"


def test_words_to_click_on():
    assert words.words_of(("Hi", " ", "", "", "🐻", "!")) == [
        ("Hi", 0, 1), (" ", 1, 2), ("🐻", 2, 5), ("!", 5, 6),
    ]  # fmt: skip
    assert words.split(" Is it <b>'s, or not?\n") == [" Is", " it", " <", "b", ">'", "s", ",", " or", " not", "?", "\n"]
    for nasty in ("", " ", "a\n\n b", "it's well-known", "<i>", "\u202e\u05d0 x", "你好。"):
        assert "".join(words.split(nasty)) == nasty


def test_a_template_is_grey_and_does_not_count():
    html = heatmap(["<s>", "a", "<b>"], [100.0, 1.0, -2.0], (0,), (0,))
    assert html.count("#888") == 2  # its ink, and the dots of a sink
    assert "rgba(33,102,172,1.00)" in html
    assert "100.0000 (template)" in html
    assert "&lt;b&gt;" in html


# --- monitors -------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


@pytest.fixture
def chatty(first_visit, tiny_folder, tmp_path, monkeypatch):
    """The small model, with a template."""
    folder = shutil.copytree(tiny_folder, tmp_path / "chatty")
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    set_up(monkeypatch, model=str(folder))
    return load_model(str(folder))


def monitor_of(model, name, threshold, unit="token"):
    """Of two neurons, by hand."""
    parts = tuple(
        ConceptNeuron(Neuron(layer, "ffn", 3), sign, 1.0, 0.0, 0.01, 1.0) for layer, sign in ((0, "+"), (1, "-"))
    )
    return Monitor(name, unit, threshold, 0.05, 23, 0, parts, None, model.name, model.fingerprint)


def upload(page, text):
    page.file_uploader[0].set_value(("m.json", text.encode(), "application/json")).run()
    return page


def strips(page):
    """The heatmaps of the page, as lists of tokens with their values."""
    heats = [str(part.proto.body) for part in page.html if 'class="heat"' in str(part.proto.body)]
    return [list(map(float, re.findall(r'title="\d+: ([-+.\d]+)', heat))) for heat in heats]


def test_what_a_monitor_says_stands_below_each_message(chatty):
    """As in Python, also with edits; it stays when the next message comes, and what is in a message is text."""
    monitor, edits = monitor_of(chatty, "<b>loud</b>", 0.001), "L0.ffn.3=4"
    page = fine(visit("steer", section="edits", edits=edits, prompt="a"))
    page.query_params["length"] = "5"
    page = upload(fine(shown(page, "chat")), monitor.to_json())
    asked = ("<i>ice</i> **bear**", "Rome")
    page.chat_input[0].set_value(asked[0]).run()
    page.get_by_key("edited").set_value(True).run()
    page.chat_input[0].set_value(asked[1]).run()
    messages = conversation(fine(page)).messages
    read = [read_message(chatty, [monitor], message)[0] for message in asked]
    with watching(chatty, monitor) as plain:
        chatty.answer(Chat(messages[:1]), 5)
    with steer(chatty, [edits]), watching(chatty, monitor) as edited:
        assert chatty.answer(Chat(messages[:3]), 5).text == messages[3]["content"]
    written = [log.texts[0]["<b>loud</b>"] for log in (plain, edited)]
    values = [list(verdict.values) for pair in zip(read, written, strict=True) for verdict in pair]
    assert len(strips(page)) == 4
    for on_page, expected in zip(strips(page), values, strict=True):
        assert on_page == pytest.approx(expected, abs=1e-3)
    said = text(page)
    assert "&lt;i&gt;" in said
    assert r"**Flagged by \<b\>loud\<\/b\>**" in said
    assert "<i>ice" not in said
    flagged = next(row for row in page.get("button_group") if row.label.startswith("Neurons"))
    assert {option.content for option in flagged.proto.options} <= {"L0.ffn.3 +", "L1.ffn.3 -"}
    page.get_by_key("chosen_monitors").set_value([]).run()
    assert not strips(fine(page))


def test_an_answer_ends_when_it_is_flagged(chatty):
    page = fine(visit("chat", chat=output_of("Say yes."), length="6"))
    upload(page, monitor_of(chatty, "loud", -1e6).to_json())
    page.get_by_key("stop_when_flagged").set_value(True).run()
    page.get_by_key("ask").click().run()
    assert len(conversation(fine(page)).messages[1]["ids"]) == 2  # by the pass that reads the one before
    assert list(map(len, strips(page)[1:])) == [1]


def test_an_answer_that_somebody_ended_keeps_what_was_read(chatty, monkeypatch):
    page = fine(visit("chat", chat=output_of("Say yes."), length="6"))
    upload(page, monitor_of(chatty, "loud", 0.0).to_json())

    def ended(model, chat, on_token, **options):
        """As Streamlit ends a run."""

        def stop(ids):
            on_token(ids)
            if len(ids) == 3:
                raise StopException

        return answer(model, chat, on_token=stop, **options)

    answer = type(chatty).answer
    with monkeypatch.context() as stopping:
        stopping.setattr(type(chatty), "answer", ended)
        page.get_by_key("ask").click().run()
    assert len(conversation(fine(page.run())).messages[1]["ids"]) == 3
    assert len(strips(page)[1]) == 2  # the last token was not read


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_fingerprint": "0" * 8}, "was made in"),
        ({"neurons": [{"neuron": "L99.ffn.3"}]}, "L99"),
        ({"threshold": "high"}, "not a float"),
    ],
)
def test_a_foreign_monitor_is_refused_in_a_sentence(chatty, change, reason):
    data = monitor_of(chatty, "loud", 0.0).to_dict()
    data["neurons"] = [data["neurons"][0] | row for row in change.pop("neurons", [{}])]
    page = upload(fine(visit("chat")), json.dumps(data | change))
    assert not page.exception
    assert reason in page.error[0].value.replace("\\", "")
    assert "monitors" not in page.session_state
    upload(page, "[1, 2")
    assert "JSON" in page.error[0].value
    upload(page, monitor_of(chatty, "loud", 0.0).to_json())
    assert list(fine(page).session_state["monitors"]) == ["loud"]


TOLD = "Anna lives in Oslo. Snow fell. Tom lives in Rome. Where does Anna live?"


@pytest.mark.release
def test_a_sentence_lights_its_sources_and_a_source_its_sentences(environment, smol):
    chat = output_of(TOLD, "Anna lives in Oslo. She is in Oslo.")
    page = fine(visit("chat", chat=chat, turn="1", span="2-3", clicks="sentence"))
    [sentence] = sources(smol, answer_of(smol, conversation(page), 1), span=(0, 5)).sentences
    assert "Where does \u201cAnna lives in Oslo.\u201d come from?" in text(page).replace("\\", "")
    wanted = [round(source.change, 1) for source in sentence.leading]
    assert list(bars_of(page).values())[: len(wanted)] == wanted
    assert "hangs most on" in text(page)
    page.query_params["turn"], page.query_params["span"] = "0", "2-3"
    page = fine(page.run())
    at = TOLD.index("lives")
    effect = effect_of_source(smol, answer_of(smol, conversation(page), 1), 0, at)
    assert "What did \u201cAnna lives in Oslo.\u201d do to the answer?" in text(page).replace("\\", "")
    names = {part.text.strip(): round(part.change, 1) for part in effect.sentences}
    shown = {name.strip("\u201c\u201d"): number for name, number in bars_of(page).items()}
    assert {name: shown[name] for name in names} == names
    assert "hangs on it" in text(page)


def test_a_click_after_an_empty_line_measures_that_sentence(environment):
    chat = output_of("First one here.\n\nSecond one here. Where is it?", "It is here.")
    page = fine(visit("chat", chat=chat, turn="0", span="4-5", clicks="sentence"))
    assert "What did \u201cSecond one here.\u201d do to the answer?" in text(page).replace("\\", "")


def test_the_second_of_two_equal_sources_is_lit_and_a_call_is_not(monkeypatch):
    """A call of a tool is in no text."""
    chat = Chat([{"role": "user", "content": "It is. It was. It is."}, {"role": "assistant", "content": "Yes."}])
    rows = [
        MeasuredSource("user", "It is.", -2.0, 0.0, 0, 5, 7, (15, 21)),
        MeasuredSource("user", "It", -3, 0, 0, 5, 7, None),
    ]
    sentence = SourcedSentence("Yes.", 0, 2, -1.0, tuple(rows), None, None, RandomRemovals())
    result = Sources((sentence,), "sentence", 3, "", (), "", True, {})
    monkeypatch.setattr(chat_sources, "_job", lambda *_: SimpleNamespace(result=result))
    monkeypatch.setattr(chat_sources, "_pieces", lambda chat, turn: words.split(chat.messages[turn]["content"]))
    colored, answer = chat_sources.colors(chat, 1, (0, 1))
    lit = [value for _, value in colored]
    assert "".join(piece for piece, value in colored if value == 2.0).strip() == "It is."
    assert sum(lit[: len(lit) // 2]) == 0.0
    assert not answer


def test_a_sentence_before_any_answer_says_so(environment):
    page = visit("chat", chat=output_of("Hi there."), turn="0", span="0-1", clicks="sentence")
    assert not page.exception
    assert any("no answer yet" in error.value for error in page.error)
