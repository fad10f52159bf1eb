"""The ledger of `icebear mcp`, whose calls are made again by `icebear check`; the skill for coding agents."""

import json
import re
from pathlib import Path

import anyio
import pytest
import yaml
from click.testing import CliRunner
from mcp import Client
from test_cli import run

from icebear.app.cli.main import main
from icebear.app.mcp.ledger import MEASURED, note, read_ledger
from icebear.app.mcp.server import server
from icebear.app.mcp.session import Session
from icebear.app.mcp.tools import Tools
from icebear.errors import InputError

CALLS = [
    ("predict", {"prompt": "Rome is", "k": 3, "max_new_tokens": 2}),
    ("rank", {"prompt": "Rome is", "k": 2}),
    ("steer", {"prompt": "Rome is", "edits": ["L1.ffn.3*0"], "max_new_tokens": 2}),
    ("flip", {"prompt": "Rome is", "to": "e"}),
    ("more", {"handle": "neurons-1", "part": "neurons", "count": 2}),
    ("rank", {"prompt": "Rome is", "k": 0}),
    ("nothing", {"prompt": "Rome is"}),
]


@pytest.fixture
def ledger(tiny_folder, tmp_path, few_all):
    path = tmp_path / "ledger.jsonl"
    session = Session(tiny_folder, {"dtype": "float32"}, str(tmp_path / "none.db"), ledger=path)

    async def talk():
        async with Client(server(session)) as client:
            return [await client.call_tool(name, arguments) for name, arguments in CALLS]

    return path, anyio.run(talk)


def check(path):
    done = CliRunner().invoke(main, ["check", str(path), "--json", "--dtype", "float32"])
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout) if done.stdout else done.stderr


def test_a_ledger_has_each_call_and_its_answer(ledger):
    path, answers = ledger
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["tool"], row["arguments"]) for row in rows] == CALLS
    for row, answer in zip(rows, answers, strict=True):
        assert row.get("answer") == (None if answer.is_error else answer.structured_content)
        assert row.get("error") == (answer.content[0].text if answer.is_error else None)
    assert [call.answer is None for call in read_ledger(path)] == [False] * 5 + [True] * 2


def test_check_makes_its_calls_again_and_finds_a_changed_number(ledger):
    path, _ = ledger
    code, document = check(path)
    assert (code, document["passed"]) == (0, True)
    assert [(row["tool"], row["verdict"]) for row in document["calls"]] == [
        (name, "passed") for name in ("predict", "rank", "steer", "flip")
    ]
    assert all(row["numbers"] > 3 for row in document["calls"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for change, verdict in ((1.00001, "passed"), (1.01, "broken")):
        changed = json.loads(json.dumps(rows))
        changed[1]["answer"]["neurons"][1]["relevance"] *= change
        path.write_text("".join(f"{json.dumps(row)}\n" for row in changed))
        code, document = check(path)
        assert code == (verdict == "broken")
        assert [row["verdict"] for row in document["calls"]] == ["passed", verdict, "passed", "passed"]
    assert "neurons.1.relevance" in document["calls"][1]["why"]
    changed = json.loads(json.dumps(rows))
    changed[1]["answer"]["neurons"][1]["neuron"] = "L9.ffn.9"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in changed))
    assert check(path)[1]["calls"][1]["verdict"] == "broken"


def test_calls_that_cannot_be_made_here_are_no_pass(ledger):
    path, _ = ledger
    row = json.loads(path.read_text().splitlines()[1])
    for changes in ({"arguments": {**row["arguments"], "k": 0}}, {"answer": {}}):
        path.write_text(json.dumps(row | changes))
        code, document = check(path)
        assert (code, document["passed"]) == (1, False)
        assert document["calls"][0]["verdict"] == "cannot be measured here"


@pytest.mark.parametrize(
    "change",
    [{"tool": 3}, {"arguments": "x"}, {"answer": [1]}, {"icebear_ledger": 2}, {"model": None}, {"tool": "save"}],
)
def test_a_ledger_that_is_none_is_refused(change, tmp_path):
    row = {"icebear_ledger": 1, "model": "m", "store": "s", "tool": "rank", "arguments": {}, "answer": {}}
    (tmp_path / "l").write_text(json.dumps(row | change))
    done = CliRunner().invoke(main, ["check", str(tmp_path / "l")])
    assert done.exit_code == 1
    assert done.stderr.startswith("icebear: ")
    assert done.stderr.count("\n") == 1


def test_a_ledger_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(InputError):
        note(tmp_path / "none" / "l", Session("m"), "rank", {}, answer={})


def test_what_is_measured_are_tools():
    assert set(MEASURED) <= set(vars(Tools))


def test_a_skill_is_a_folder_that_agents_read(tmp_path):
    run("export", "skill", "--out", str(tmp_path / "skills" / "icebear"))
    (file,) = (tmp_path / "skills" / "icebear").iterdir()
    assert file.name == "SKILL.md"
    _, head, guide = file.read_text().split("---\n", 2)
    fields = yaml.safe_load(head)
    assert set(fields) <= {"name", "description", "license"}
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert fields["name"] == file.parent.name
    assert 50 < len(fields["description"]) <= 1024
    other = tmp_path / "other"
    other.mkdir()
    (other / "SKILL.md").write_text("mine")
    assert CliRunner().invoke(main, ["export", "skill", "--out", str(other)]).exit_code == 1
    assert (other / "SKILL.md").read_text() == "mine"
    assert guide.strip() == (Path(__file__).parent.parent / "icebear" / "AGENTS.md").read_text().strip()
