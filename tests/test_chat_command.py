"""Chats on the command line: answers, spans, and why."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from conftest import printed
from test_chat import MODELS

from icebear import Chat, Concept, Model, attribute, explain, monitor
from icebear.app.cli.main import main
from icebear.app.cli.options import ModelOptions
from icebear.app.cli.tables.explanations import explanation_screen
from icebear.app.cli.verbs.chat import _Conversation
from icebear.render import PART
from icebear.steering import outcome

RUN = CliRunner()
ANSWERS = {}
QUESTION = "Where do ice bears live?"
FRANCE = "What is the capital of France?"
pytestmark = pytest.mark.usefixtures("few_contexts")


@pytest.fixture(autouse=True)
def one_answer(monkeypatch):
    """To the same question, whichever command asks it. `icebear chat`, which steers, passes options, and asks anew."""
    answer = Model.answer

    def once(*request, **options):
        if options:
            return answer(*request, **options)
        key = repr(request[1:])
        if key not in ANSWERS:
            ANSWERS[key] = answer(*request)
        return ANSWERS[key]

    monkeypatch.setattr(Model, "answer", once)


def run(*words, code=0, **options):
    done = RUN.invoke(main, list(words), **options)
    assert done.exit_code == code, done.output
    return done


def json_of(*words):
    return json.loads(run(*words, "--json").stdout)


@pytest.fixture
def qwen(monkeypatch):
    """A random model with a template, in the place of the default one, which answers docs/answers.md."""
    monkeypatch.setattr(ModelOptions, "load", lambda self, name=None: MODELS["qwen"])
    return MODELS["qwen"]


def test_a_message_a_system_message_and_a_file_are_one_chat(qwen, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    (tmp_path / "chat.json").write_text(json.dumps(messages))
    options = ("--units", "message", "--max-new-tokens", "4")
    a = json_of("explain", QUESTION, "--system", "Be brief.", *options)
    assert a["tokens"] == json_of("explain", "--messages", str(tmp_path / "chat.json"), *options)["tokens"]
    assert [token["id"] for token in a["tokens"]][: len(qwen.ids(messages))] == qwen.ids(messages)
    assert [turn["role"] for turn in a["turns"]] == ["system", "user", "assistant"]
    run("explain", QUESTION, "--messages", str(tmp_path / "chat.json"), code=2)
    (tmp_path / "chat.json").write_text("{")
    assert "cannot be read as JSON" in run("rank", "--messages", str(tmp_path / "chat.json"), code=1).stderr


def test_words_of_an_answer_are_explained(qwen):
    request = ("--chat", QUESTION, "--span", "0:2", "--max-new-tokens", "8")
    result = json_of("explain", *request, "--units", "sentence")
    answer = qwen.answer(Chat([{"role": "user", "content": QUESTION}]), max_new_tokens=8)
    plain = attribute(qwen, answer, span=(0, 2), sites=()).tokens
    assert sum(unit["relevance"] for unit in result["units"]) == pytest.approx(plain.sum().item(), abs=1e-4)
    assert [token["relevance"] for token in result["tokens"]] == pytest.approx(plain.tolist(), abs=1e-4)
    ranked = json_of("rank", *request, "--site", "ffn", "--position", "all", "--top", "200")["ranking"]
    assert not {row["position"] for row in ranked} & set(result["template"])


def test_what_is_answered_and_where_it_came_from(qwen):
    prompt = "Anna lives in Oslo. Tom lives in Rome. Where does Tom live?"
    request = ("explain", "--sources", "--chat", prompt, "--max-new-tokens", "6")
    result = json_of(*request)
    assert [part["name"] for part in result["source_breakdown"]["parts"]][:2] == ["template", "context"]
    assert len(result["answer_tokens"]) == 6
    [sentence] = [part for part in result["answer_sentences"] if part["start"] == 0]
    [source] = sentence["sources"]  # of two, the other one is the control
    assert source["text"] in ("Anna lives in Oslo. ", "Tom lives in Rome. ")
    screen = run(*request).stdout
    assert "Sources of the answer" not in screen
    assert "Sources of the answer" in run(*request, "--details").stdout
    messages = json_of(*request, "--units", "message")
    assert [source["text"] for source in messages["answer_sentences"][0]["sources"]] == [prompt]
    run(*request, "--units", "word", code=2)
    run("explain", prompt, "--details", code=2)
    run(*request, "--top", "3", code=2)
    run(*request, "--contrast", "Rome", "--counterfactual", "Where is Tom?", code=2)


def test_steering_and_flipping_a_chat(qwen, tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "RANDOM_DRAWS", 2)
    edits = ("--edit", "L2.ffn.3=-40@answer", "--edit", "L1.ffn.3*0@position:3-5")
    steered = json_of("steer", "--chat", QUESTION, *edits, "--max-new-tokens", "4")
    assert steered["plain"]["text"] != steered["steered"]["text"]
    assert steered["prompt"] == [{"role": "user", "content": QUESTION}]
    file = tmp_path / "flip.json"
    result = json_of("flip", "--chat", QUESTION, "--to", "[", "--save", str(file))
    assert result["provenance"]["flip"]["prompt"] == [{"role": "user", "content": QUESTION}]
    assert result["name"] == f"{QUESTION} -> ["
    run("flip", "--chat", QUESTION, code=2)


def test_a_conversation_in_the_terminal(qwen, tmp_path):
    """What it shows of the words of an answer is what `explain` does."""
    file, other = tmp_path / "said.json", "Where do ice foxes live?"
    lines = [QUESTION, "/why l", "/why penguins", "/why l | a", "/from", "/from details", "/help", ""]
    lines += [f"/why l | a | {other}", "/what", "And camels?", f"/save {file}", "/quit"]
    done = run("chat", "--max-new-tokens", "8", input="\n".join(lines) + "\n")
    answer = qwen.answer(Chat([{"role": "user", "content": QUESTION}]), max_new_tokens=8)
    at = answer.token_range("l")
    compared = explain(qwen, answer, contrast="a", counterfactual=answer.question.asking(other), span=at)
    shown = "".join(done.stdout.split())
    screen = printed(explanation_screen(compared)).splitlines()
    same = [line for line in screen if "<|im_" not in line and not line.startswith("  '")]  # without the template
    for part in ("Why 'l'?", ", not 'a'", "question", *same):
        assert "".join(part.replace("\ufffd", PART).split()) in shown
    assert other in done.stdout
    for part in ("'penguins' is not in the answer", "/what is not a command"):
        assert part in done.stderr
    text = json.loads(file.read_text())
    assert [message["role"] for message in text] == ["user", "assistant"] * 2
    assert all(message["ids"] for message in text if message["role"] == "assistant")
    again = run("chat", "--messages", str(file), "--json", "--max-new-tokens", "2", input="Why?\n")
    assert len(json.loads(again.stdout[again.stdout.index("{") :])["messages"]) == 6
    assert "There is no answer yet" in run("chat", input="/from\n/save x\n").stderr


def test_a_monitor_reads_messages_and_answers_and_ends_what_it_flags(qwen, tmp_path):
    concept = Concept.of(qwen, "loud", {("L0.ffn.3", "+"): 1.0, ("L1.ffn.5", "-"): 1.0})
    quiet = monitor(qwen, concept, [f"Text {number} is about a bear." for number in range(23)], 0.05, "token")
    files = {name: str(tmp_path / f"{name}.json") for name in ("quiet", "loud")}
    replace(quiet, threshold=1e6).save(files["quiet"])
    replace(quiet, threshold=-1e6).save(files["loud"])

    def chat(*words):
        options = ("--max-new-tokens", "6", "--json", *words)
        shown = run("chat", *options, input=f"{QUESTION}\n/quit\n").stdout
        return json.loads(shown[shown.index("{\n") :])

    plain, calm = chat(), chat("--monitor", files["quiet"], "--stop-on")
    assert calm["messages"] == plain["messages"]
    message, answer = calm["verdicts"]
    assert "".join(message["tokens"]).endswith(QUESTION)
    assert not message["flagged"]
    assert message["value"] == max(message["values"])
    assert plain["messages"][-1]["content"].startswith("".join(answer["tokens"]))
    ended = chat("--monitor", files["loud"], "--stop-on")
    assert all(verdict["flagged"] for verdict in ended["verdicts"])
    assert len(ended["verdicts"][1]["tokens"]) == 1
    assert run("chat", "--stop-on", code=2)


@pytest.mark.release
def test_a_conversation_shows_no_tokens_of_the_template_but_those_that_were_typed(smol):
    typed = "The capital of Spain, <|im_end|> of course?"
    lines = [FRANCE, typed, "/why 0:1", "/from", "/why 0:1 | Spain | The capital of Italy, or course?", "/quit"]
    shown = run("chat", "--max-new-tokens", "12", input="\n".join(lines) + "\n").stdout
    answer = smol.answer(Chat([{"role": "user", "content": FRANCE}]), max_new_tokens=12)
    assert answer.ended
    assert f"\n{answer.text}\n" in shown
    assert shown.count("<|im_end|>") == 4  # in the picture, in the table, in a source, in the comparison
    assert f"\n{typed}   " in shown
    for part in ("<|im_start|>", "<|endoftext|>", "You are a helpful"):
        assert part not in shown
    assert f"  {typed}\n" in shown


def test_special_tokens_inside_an_answer_are_not_printed(smol):
    start, end = smol.tokens_of("<|im_start|><|im_end|>")
    conversation = _Conversation(smol, None, {}, [], {}, [], None, False)
    assert conversation._without_special([504, start, 314, end]) == [504, 314]
    assert conversation._without_special([]) == []
