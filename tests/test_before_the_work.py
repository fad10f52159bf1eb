"""Mistakes that are found before a model is loaded, and what is said about them."""

import json
import shlex
import shutil

import pytest
from click.testing import CliRunner

from icebear import Chat
from icebear.app.cli.main import main
from icebear.app.cli.options import ModelOptions
from icebear.edits import parse_edits
from icebear.models.text.chat import rendered

LINES = {
    'rank "a b" --site mlp': "'ffn'",
    'explain "a b" --site heads': "'head'",
    "neuron L1.mlp.3": "'ffn'",
    "neuron L1.self_attn.3": "'attn'",
    "neuron L1.ffn.3 --store none.db": "icebear index --store none.db",
    "search water --store none.db": "icebear index --store none.db",
    'rank "a b" --store none.db': "icebear index --store none.db",
    "concept show music": "icebear concept find music",
    "concept measure music text --store none.db": "icebear concept find music",
    'steer "a b" --edit "L1.mlp.3=2"': "'ffn'",
    'explain "a b" --html none/page.html': "no folder",
    'explain "a b" --html folder': "is a directory",
    'circuit "a b" --counterfactual "c b" --png none/c.png': "no folder",
    'circuit "a b"': "--counterfactual",
    'rank "a b" --claim none/claims.yaml': "no folder",
    'flip "a b" --to c --save none/r.json': "no folder",
    "concept export music none/music.json": "no folder",
    'rank "a b" --position middle': "last, all or a number",
    'rank "a b" --words efects': "'effects'",
    'rank "a b" --contrst b': "--contrast",
    "explain a b c": "in quotes",
    "explian a": "'explain'",
    "evaluate faithfullness --out o": "'faithfulness'",
    "concept find x --with t --without t --site mlp": "'ffn'",
    "evaluate groundtruth --tsk sva": "--task",
    'explain "a b" --file cases.jsonl': "leave out PROMPT",
    "explain --file cases.jsonl --base-model x": "the other options",
    "explain --file cases.jsonl --top 3": "the other options",
    "explain --file cases.jsonl": "Line 1 of cases.jsonl",
    "atlas --prompts t": "Line 1 of t",
    "atlas --prompts cases.jsonl --against cases.jsonl": "at least 4",
    "atlas --prompts four.txt --store none.db": "icebear index --store none.db",
    "atlas --against cases.jsonl": "--prompts",
}


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_is_found_before_a_model_is_loaded(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "t").write_text("one text\n")
    (tmp_path / "cases.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "four.txt").write_text("a text\n" * 4)
    monkeypatch.setattr(ModelOptions, "load", lambda *_: pytest.fail("loads a model"))
    result = CliRunner().invoke(main, shlex.split(line))
    assert result.exit_code in (1, 2), repr(result.exception)
    assert LINES[line] in result.stderr
    assert "Traceback" not in result.stderr


def test_an_empty_name_of_a_base_model_is_refused(tiny_folder):
    result = CliRunner().invoke(main, ["rank", "abc", "--model", tiny_folder, "--base-model", ""])
    assert result.exit_code == 1
    assert "is not a path" in result.stderr


def test_files_that_can_be_written_are(tmp_path, monkeypatch, tiny_folder):
    """A new file, one that is there, a link, and a pipe such as /dev/stdout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to("new.html")
    for path in ("old.html", "link.html", "/dev/null", "~/page.html"):
        monkeypatch.setenv("HOME", str(tmp_path))
        words = ["explain", "abc", "--html", path, "--model", tiny_folder]
        assert CliRunner().invoke(main, words).exit_code == 0
    assert "old" != (tmp_path / "old.html").read_text() == (tmp_path / "new.html").read_text()
    assert (tmp_path / "page.html").exists()


def test_an_edit_may_have_spaces():
    assert parse_edits("L1.ffn.3 = -20@last") == parse_edits("L1.ffn.3=-20@last")
    assert parse_edits(" L1.ffn.3 + 2.5 ") == parse_edits("L1.ffn.3+2.5")


NEWLINES = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}{% endfor %}"
"""A template in which nothing but a line break closes a message, as in Tulu 3, OLMo 2 and Falcon 3."""


def test_a_template_whose_messages_end_in_a_line_break(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(NEWLINES)
    for words in (["explain", "abc"], ["rank", "--chat", "A bear", "--system", "Be brief"]):
        result = CliRunner().invoke(main, [*words, "--model", str(folder), "--json"])
        assert result.exit_code == 0, result.output
    tokens = json.loads(result.stdout)["tokens"]
    assert "".join(token["text"] for token in tokens) == "<|system|>\nBe brief\n<|user|>\nA bear\n"


def test_a_message_may_have_any_characters(smol):
    """Also those that mark, in a template, where a known answer stands."""
    private = "".join(map(chr, range(0xE000, 0xF900)))
    answer = smol.tokens_of("An answer")
    chat = [
        {"role": "user", "content": private},
        {"role": "assistant", "content": "An answer", "ids": answer},
        {"role": "user", "content": "And?"},
    ]
    ids = rendered(smol, Chat(chat))
    assert any(ids[place : place + len(answer)] == answer for place in range(len(ids)))


def test_a_chat_in_the_terminal_lives_through_stray_bytes_and_its_end(tiny_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_folder, tmp_path / "[/red]")
    (folder / "chat_template.jinja").write_text(NEWLINES)
    monkeypatch.chdir(tmp_path)
    words = ["chat", "--model", "./[/red]", "--max-new-tokens", "1"]
    for typed in (b"", b"\xff\n", b"a\xff\nhello\n"):
        result = CliRunner(charset="latin-1" if typed else "utf-8").invoke(main, words, input=typed)
        assert result.exit_code == 0, repr(result.exception)


def test_a_label_of_stray_bytes_is_refused_and_a_saved_one_is_shown(folder, tmp_path, monkeypatch):
    for path in folder.glob("wiki.db*"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["label", "L1.ffn.3", "--store", "wiki.db"]
    assert CliRunner().invoke(main, [*words, "a\udcff"]).exit_code == 1
    assert "'the far north'" in CliRunner().invoke(main, [*words, " the far north"]).stdout
    assert "no label" in CliRunner().invoke(main, [*words, " "]).stdout
