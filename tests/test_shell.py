"""`icebear shell`: one model for all commands, and the end of a command is not that of the shell."""

import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
from contextlib import suppress

import pytest
from click.testing import CliRunner

import icebear
from icebear.app.cli.main import main

RUN = CliRunner()
WAIT = 100.0
"""Seconds without any output after which the shell hangs."""
RANK = 'rank "A is" --site ffn --top 3 --json'


def shell(*lines, model):
    return RUN.invoke(main, ["shell", "--model", model], input="\n".join(lines))


def documents(text):
    decoder, at = json.JSONDecoder(), 0
    while at < len(text.rstrip()):
        document, at = decoder.raw_decode(text, at)
        at += len(text[at:]) - len(text[at:].lstrip())
        yield document


def test_all_commands_have_one_model_and_give_what_they_give_alone(tiny_folder, monkeypatch):
    loaded, load = [], icebear.load_model
    monkeypatch.setattr(icebear, "load_model", lambda name, **how: loaded.append(how["dtype"]) or load(name, **how))
    alone = RUN.invoke(main, ["rank", "A is", "--site", "ffn", "--top", "3", "--json", "--model", tiny_folder])
    del loaded[:]
    ran = shell(
        RANK, f"icebear {RANK}", "", "# nothing", f"python -m icebear {RANK} --dtype bfloat16", model=tiny_folder
    )
    assert ran.exit_code == 0
    results = list(documents(ran.stdout))
    assert results[0] == json.loads(alone.stdout)
    assert results[2] != results[0]
    ways, sums = zip(*((result.pop("proved"), result.pop("conservation")) for result in results[:2]), strict=True)
    assert ways[0] != ways[1]  # the second one takes rules at modules
    assert sums[1] == pytest.approx(sums[0], abs=1e-6)
    assert results[1] == results[0]
    assert loaded == [None, "bfloat16"]


def test_a_long_line_is_refused_before_it_is_split(tiny_folder, monkeypatch):
    """Splitting takes the square of its length."""
    lengths, split = [], shlex.split
    monkeypatch.setattr(shlex, "split", lambda line, **how: lengths.append(len(line)) or split(line, **how))
    ran = shell(f'rank "{"a " * 500_000}"', "rank " + "'" * 200_001, RANK, model=tiny_folder)
    assert ran.exit_code == 1
    assert len(list(documents(ran.stdout))) == 1
    assert "1,000,007 characters" in ran.stderr
    assert max(lengths) < 100_000
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("line", ["rank 'A is", "rank", "unheard", "neuron L9.ffn.0"])
def test_a_command_that_fails_ends_no_other(line, tiny_folder):
    ran = shell(line, RANK, model=tiny_folder)
    assert ran.exit_code == 1
    assert len(list(documents(ran.stdout))) == 1
    assert "Traceback" not in ran.stderr


@pytest.mark.release
def test_ctrl_c_ends_the_command_and_not_the_shell(tiny_folder, tmp_path):
    (tmp_path / "many.txt").write_text("".join(f"The king sees {number} cats.\n" for number in range(20_000)))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "ICEBEAR_CACHE": str(tmp_path), "TERM": "dumb"}
    command = [sys.executable, "-m", "icebear", "shell", "--model", tiny_folder]
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **terminal)
    os.close(theirs)
    shown = ""

    def until(pattern):
        nonlocal shown
        while not (match := re.search(pattern, shown)):
            assert select.select([ours], [], [], WAIT)[0], shown
            shown += os.read(ours, 4096).decode(errors="replace")
        shown = shown[match.end() :]

    def type_line(line):
        os.write(ours, line.encode() + b"\r")

    until("icebear>")
    type_line("index --corpus many.txt --store s.db --encoder none")
    until("Calibrating")  # before the scan, whose progress a dumb terminal gets at its end
    process.send_signal(2)
    until("Aborted")
    until("icebear>")  # what is typed before the prompt may be lost
    type_line(RANK)
    until('"ranking"')
    until("icebear>")
    type_line("exit")
    with suppress(OSError):  # the end of a terminal; what nobody reads would stop the process
        while os.read(ours, 4096):
            pass
    assert process.wait(60) == 0
