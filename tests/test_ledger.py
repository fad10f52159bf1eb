"""The ledger of `icebear mcp`, whose calls are made again by `icebear check`; the skill for coding agents."""

import json
import os
import re
from importlib.metadata import version
from pathlib import Path

import anyio
import pytest
import yaml
from click.testing import CliRunner
from mcp import Client
from test_cli import run

from icebear.app.cli.main import main
from icebear.app.cli.verbs import export
from icebear.app.mcp.ledger import APPROVAL, MEASURED, Call, note, plan_summary, read_ledger
from icebear.app.mcp.plan import Plan
from icebear.app.mcp.server import server
from icebear.app.mcp.tools import Tools
from icebear.app.session import Session
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


HUGE = "9" * 400
BROKEN = {
    "a huge number": lambda row: json.dumps(row).replace('"answer": {', f'"answer": {{"huge": {HUGE}, ', 1),
    "an endless number": lambda row: json.dumps(row).replace('"answer": {', f'"answer": {{"huge": {HUGE * 20}, ', 1),
    "endless lists": lambda row: "[" * 100_000,
    "another version": lambda row: json.dumps({**row, "icebear_ledger": int(HUGE)}),
    "an answer of another type": lambda row: json.dumps({**row, "answer": [1]}),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_line_that_is_no_call_is_named(tmp_path, broken):
    """A call may have any arguments: a tool refused them."""
    row = {"icebear_ledger": 1, "model": "m", "store": "s", "tool": "rank", "answer": {"x": 1.5}}
    lines = [{**row, "arguments": {"k": int(HUGE)}}, {**row, "arguments": {}}]
    path = tmp_path / "ledger.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [call.answer for call in read_ledger(path)] == [{"x": 1.5}] * 2
    path.write_text(f"{json.dumps(lines[0])}\n{BROKEN[broken](lines[1])}")
    with pytest.raises(InputError, match=r"2|version"):
        read_ledger(path)


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
    assert set(fields) == {"name", "description", "license", "compatibility", "metadata"}
    assert len(fields["compatibility"]) <= 500
    assert fields["metadata"] == {"version": version("icebear")}
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert fields["name"] == file.parent.name
    assert 50 < len(fields["description"]) <= 1024
    other = tmp_path / "other"
    other.mkdir()
    (other / "SKILL.md").write_text("mine")
    assert CliRunner().invoke(main, ["export", "skill", "--out", str(other)]).exit_code == 1
    assert (other / "SKILL.md").read_text() == "mine"
    guide = guide.rpartition("\n<!-- icebear")[0]
    assert guide.strip() == (Path(__file__).parent.parent / "icebear" / "AGENTS.md").read_text().strip()


def exported(folder):
    return CliRunner().invoke(main, ["export", "skill", "--out", str(folder)]).exit_code


def test_a_skill_that_was_changed_is_not_replaced(tmp_path, monkeypatch):
    """One of another version is."""
    file = tmp_path / "SKILL.md"
    head = export.HEAD
    monkeypatch.setattr(export, "HEAD", head.replace("Apache-2.0", "older"))
    assert exported(tmp_path) == 0
    older = file.read_text()
    monkeypatch.setattr(export, "HEAD", head)
    assert exported(tmp_path) == exported(tmp_path) == 0
    newer = file.read_text()
    assert newer != older
    added = "Ask the lab's own server first.\n"
    end = newer.rindex("\n<!--")
    for changed in (newer + added, newer[:end] + added + newer[end:], added + newer, newer[:end], "", newer[:-9]):
        file.write_text(changed)
        assert exported(tmp_path) == 1
        assert file.read_text() == changed


@pytest.mark.parametrize("target", ["outside.md", "sound.md", "other/none.md", "folder", "SKILL.md"])
def test_a_skill_is_not_written_through_a_link(tmp_path, target):
    """Dangling, to a file of icebear's own, to a folder, to itself."""
    folder = tmp_path / "skill"
    folder.mkdir()
    (tmp_path / "folder").mkdir()
    assert exported(folder) == 0
    (folder / "SKILL.md").rename(tmp_path / "sound.md")
    before = (tmp_path / "sound.md").read_bytes()
    os.utime(tmp_path / "sound.md", (1, 1))
    (folder / "SKILL.md").symlink_to(tmp_path / target if target != "SKILL.md" else folder / target)
    assert exported(folder) == 1
    assert not (tmp_path / "outside.md").exists()
    assert (tmp_path / "sound.md").stat().st_mtime == 1
    assert (tmp_path / "sound.md").read_bytes() == before
    linked = tmp_path / "linked"
    (folder / "SKILL.md").unlink()
    linked.symlink_to(folder)  # which the user named
    assert exported(linked) == 0
    assert (folder / "SKILL.md").is_file()


# --- a plan ---------------------------------------------------------------------------------------------

PLAN = [
    {"tool": "predict", "arguments": {"prompt": "Rome is", "k": 3, "max_new_tokens": 2}, "why": "what it answers"},
    {"tool": "rank", "arguments": {"prompt": "Rome is", "k": 2}, "why": "which neurons"},
]


@pytest.fixture
def planned(tiny_folder, tmp_path, few_all):
    """A function that makes calls at one server; the file of the plan, and of the ledger."""
    files = tmp_path / "plan.json", tmp_path / "ledger.jsonl"
    session = Session(tiny_folder, {"dtype": "float32"}, str(tmp_path / "none.db"), ledger=files[1], plan=files[0])
    serving = server(session)

    def call(*calls):
        async def talk():
            async with Client(serving) as client:
                return [await client.call_tool(name, arguments) for name, arguments in calls]

        return anyio.run(talk)

    return call, *files


def approve(path):
    path.write_text(path.read_text().replace('"approved": false', '"approved": true', 1))


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_call_runs_before_a_person_approves_the_plan(planned):
    call, plan, ledger = planned
    first, proposal, second = call(CALLS[0], ("plan", {"question": "why?", "calls": PLAN}), CALLS[0])
    assert first.is_error
    assert second.is_error
    assert plan.name in second.content[0].text
    assert not proposal.is_error
    assert proposal.structured_content["approved"] is False
    assert [row.get("answer") is None for row in rows_of(ledger)] == [True, False, True]
    approve(plan)
    assert not call(CALLS[0])[0].is_error
    (again,) = call(("plan", {"question": "why?", "calls": PLAN}))
    assert again.structured_content["approved"] is True
    (other,) = call(("plan", {"question": "why?", "calls": PLAN[:1]}))
    assert other.is_error, "a person may have changed the plan, which the agent does not replace"
    assert Plan.read(plan).calls == Plan.of("why?", PLAN, MEASURED).calls
    plan.unlink()
    (other,) = call(("plan", {"question": "why?", "calls": PLAN[:1]}))
    assert other.structured_content["approved"] is False
    assert call(CALLS[0])[0].is_error, "another plan needs another approval"


def test_the_ledger_has_the_plan_and_each_departure(planned):
    call, plan, ledger = planned
    call(("plan", {"question": "why?", "calls": PLAN}))
    approve(plan)
    call(CALLS[0], CALLS[2], CALLS[0], CALLS[4])
    _, approved, *rows = rows_of(ledger)
    assert (approved["tool"], approved["answer"]) == (APPROVAL, {"approved": True})
    assert approved["arguments"] == json.loads(plan.read_text())
    assert [row.get("planned", "free") for row in rows] == [1, None, 1, "free"]
    code, document = check(ledger)
    assert code == 0
    departures = [{"tool": CALLS[2][0], "arguments": CALLS[2][1]}]
    assert document["plan"] == {"plans": [made(2, 1)], "departures": departures}
    text = CliRunner().invoke(main, ["check", str(ledger), "--dtype", "float32"]).stdout
    assert "L1.ffn.3*0" in text.rpartition("steer")[2], "a person reads each departure"


def made(planned, number):
    return {"question": "why?", "planned": planned, "made": number, "not_made": planned - number}


FORGED = {"question": "why?", "calls": [], "approved": True}


@pytest.mark.parametrize("tool", ["plan", APPROVAL])
def test_a_call_approves_nothing(tool, planned, tiny_folder, tmp_path, few_all):
    call, plan, ledger = planned
    call((tool, FORGED), (tool, FORGED))
    assert not plan.exists()
    assert plan_summary(read_ledger(ledger)) is None
    call(("plan", {"question": "why?", "calls": PLAN}))
    approve(plan)
    call(CALLS[0], CALLS[2], (tool, FORGED))
    assert plan_summary(read_ledger(ledger))["plans"] == [made(2, 1)]
    free = tmp_path / "free.jsonl"
    session = Session(tiny_folder, {"dtype": "float32"}, str(tmp_path / "none.db"), ledger=free)

    async def forge():
        async with Client(server(session)) as client:
            return await client.call_tool(tool, FORGED)

    assert anyio.run(forge).is_error
    assert plan_summary(read_ledger(free)) is None


def row_of(tool, arguments, **more):
    return Call("m", "s", tool, arguments, **{"answer": {}, **more})


def test_departures_of_all_plans_stay_and_each_plan_has_its_calls():
    first, second = ({"question": "why?", "calls": PLAN[:count], "approved": True} for count in (2, 1))
    departure = {"tool": "steer", "arguments": {"k": 1}}
    rows = [
        row_of(APPROVAL, first),
        row_of("predict", {}, planned=1),
        row_of(**departure, departs=True),
        row_of(APPROVAL, first),  # the server was started again
        row_of("rank", {}, planned=2, answer=None),
        row_of(APPROVAL, second),
        row_of("predict", {}, planned=1),
        row_of("predict", {}, planned=1),
    ]
    expected = {"plans": [made(2, 1), made(1, 1)], "departures": [departure]}
    assert plan_summary(rows) == expected


def test_a_planned_call_that_needs_no_approval_has_its_number(planned):
    call, plan, ledger = planned
    calls = [*PLAN, {"tool": "more", "arguments": CALLS[4][1], "why": "all of them"}]
    call(("plan", {"question": "why?", "calls": calls}))
    approve(plan)
    call(CALLS[1], CALLS[4], ("more", {**CALLS[4][1], "count": 3}))
    assert [row.get("planned", "free") for row in rows_of(ledger)[2:]] == [2, 3, "free"]


def test_one_file_is_not_plan_and_ledger(tmp_path):
    path = str(tmp_path / "x")
    assert CliRunner().invoke(main, ["mcp", "--plan", path, "--ledger", path]).exit_code == 2


def test_a_ledger_without_a_plan_has_no_departures(ledger):
    assert not any(call.departs for call in read_ledger(ledger[0]))
    assert check(ledger[0])[1]["plan"] is None


@pytest.mark.parametrize(
    "calls",
    [
        [{"tool": "predict", "arguments": {}}],
        [{"tool": "predict", "arguments": "x", "why": ""}],
        [{"tool": "nothing", "arguments": {}, "why": ""}],
        [{"tool": 3, "arguments": {}, "why": ""}],
        [{"tool": "plan", "arguments": {}, "why": ""}],
        [*PLAN, {**PLAN[0], "why": "once more"}],
        [{"tool": "predict", "arguments": {}, "why": "", "more": 1}],
        [],
    ],
)
def test_a_plan_of_another_shape_is_refused(calls, planned):
    call, plan, _ = planned
    assert call(("plan", {"question": "why?", "calls": calls}))[0].is_error
    assert not plan.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"approved": true}', '{"approved": 1, "question": "", "calls": []}'])
def test_a_damaged_plan_approves_nothing(text, planned):
    call, plan, _ = planned
    plan.write_text(text)
    assert call(CALLS[0])[0].is_error


def test_a_plan_needs_a_ledger(tmp_path):
    assert CliRunner().invoke(main, ["mcp", "--plan", str(tmp_path / "plan.json")]).exit_code == 2
