"""Ctrl-C and SIGTERM at any moment: the command ends within two seconds and says so."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from few import few_of

from icebear.app.cli import progress
from icebear.app.cli.main import main
from icebear.app.recipes import EXAMPLE_RECIPE
from icebear.stopping import SAID

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at /proc")
SIGNALS = [signal.SIGINT, signal.SIGTERM]
COMMAND = [sys.executable, "-m", "icebear"]


def begun(*words, **options):
    """A process whose handlers are in place: from then on it must end well."""
    process = subprocess.Popen(
        [*COMMAND, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    while process.poll() is None:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        if caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
            return process
        time.sleep(0.002)
    raise AssertionError(process.communicate())


def ends(process, sent):
    at = time.monotonic()
    process.send_signal(sent)
    code = process.wait(30)
    took = time.monotonic() - at
    text = process.stderr.read()
    assert code == 128 + sent, text
    assert text.splitlines()[-1] == SAID
    assert "Traceback" not in text
    assert took < 2 * SLACK


SLACK = 2
"""Of a machine that does other things as well; nobody's two seconds are exact."""

ENDLESS = """
import sys, threading, time
from icebear.stopping import stoppable
def command():
    {}
    print("running", flush=True)
    {}
stoppable(command)
"""


@pytest.mark.parametrize("sent", SIGNALS)
@pytest.mark.parametrize(
    ("before", "work"),
    [
        ("pass", "time.sleep(60)"),
        ("pass", "while True: pass"),
        ("import re", "re.match('(a+)+b', 'a' * 40)"),  # in C
        ("threading.Thread(target=time.sleep, args=(60,)).start()", "time.sleep(60)"),
        ("pass", "\n    while True:\n        try: time.sleep(60)\n        except BaseException: pass"),
        ("import sqlite3", "\n    try: time.sleep(60)\n    finally: time.sleep(60)"),
        ("sys.stdout.write('x' * 9)", "print('x' * 10**6)"),  # into a pipe that nobody reads
    ],
)
def test_whatever_it_does_it_ends(sent, before, work):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS.format(before, work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "running" in process.stdout.readline()
    time.sleep(0.1)
    ends(process, sent)


@pytest.mark.parametrize("sent", SIGNALS)
@pytest.mark.parametrize("seconds", few_of([0, 0.05, 0.2, 0.5, 1, 2], 0, 0.2, 1))
def test_during_imports(tiny_folder, sent, seconds):
    """Of torch, transformers and the rest; an exception there is easily swallowed. A chat waits for its first message
    afterwards, so that it cannot end by itself."""
    process = begun("chat", "--model", tiny_folder, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    time.sleep(seconds)
    ends(process, sent)


@pytest.mark.parametrize("sent", SIGNALS)
@pytest.mark.parametrize("work", ["import swallows", "import asyncio; asyncio.run(task())"])
def test_no_exception_enters_an_import_or_a_task(tmp_path, sent, work):
    """An import would swallow it, or abort inside torch's C++; a task would print its traceback."""
    swallows = f"import os; print('buffered')\ntry: os.kill(os.getpid(), {sent})\nexcept BaseException: print('raised')"
    (tmp_path / "swallows.py").write_text(swallows)
    done = subprocess.run(
        [sys.executable, "-c", f"async def task(): exec({swallows!r})\n{ENDLESS.format('pass', work)}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + sent, "running\nbuffered\n", f"{SAID}\n")


def test_what_ends_by_itself_ends_as_before():
    assert subprocess.run([*COMMAND, "--version"], capture_output=True).returncode == 0
    assert subprocess.run([*COMMAND, "no-verb"], capture_output=True).returncode == 2


@pytest.mark.parametrize(
    ("sent", "called"), few_of([(signal.SIGINT, False), (signal.SIGTERM, True)], (signal.SIGINT, False))
)
def test_a_server_behind_a_pipe(tmp_path, sent, called):
    """As an agent starts it: without the model it says how to fetch it, and fetches nothing."""
    home = {"ICEBEAR_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
    process = begun("mcp", "--model", "someone/some-model", env={**os.environ, **home})
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    if called:
        request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        output = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        call = {
            "jsonrpc": "2.0",
            "id": 2,
            "method": "tools/call",
            "params": {"name": "predict", "arguments": {"prompt": "a"}},
        }
        process.stdin.write(json.dumps(output) + "\n" + json.dumps(call) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert (answer["id"], answer["result"]["isError"]) == (2, True)
        assert "icebear doctor --model someone/some-model" in answer["result"]["content"][0]["text"]
    ends(process, sent)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".whl")]


# --- what else a terminal is not ------------------------------------------------------------------------


def run(*words, **options):
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, encoding="utf-8", **options)


def shown(columns, *words):
    """What `icebear WORDS` prints in this process, where the output is no terminal either."""
    done = CliRunner().invoke(main, words, env={"COLUMNS": columns})
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def test_columns_are_respected_in_a_pipe_and_lines_have_no_spaces_at_their_ends():
    words = "recipe", "show", str(EXAMPLE_RECIPE)
    for columns in ("60", "100"):
        lines = shown(columns, *words).splitlines()
        assert 40 < max(map(len, lines)) <= int(columns)
        assert not [line for line in lines if line != line.rstrip()]
    piped = run(*words, env={**os.environ, "COLUMNS": "60"})
    assert (piped.returncode, piped.stderr) == (0, "")
    assert piped.stdout == shown("60", *words)


@pytest.mark.parametrize("columns", ["0", "-1", "x", "\u00b2", "9" * 30])
def test_columns_that_are_no_width_are_passed_over(columns):
    words = "recipe", "show", str(EXAMPLE_RECIPE)
    assert shown(columns, *words) == shown(None, *words) != shown("60", *words)


def test_a_full_disk_behind_stdout():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*COMMAND, "recipe", "show", str(EXAMPLE_RECIPE)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 1
    assert result.stderr.startswith("icebear: The output cannot be written")
    assert len(result.stderr.splitlines()) == 1


def test_a_mistake_has_no_traceback_in_a_locale_without_utf_8():
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    result = run("neuron", "Eisbär", env=plain)
    assert result.returncode == 1
    assert result.stderr.startswith("icebear: 'Eisbär' is not a neuron id")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_progress_without_a_terminal_is_a_line_at_times(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    with progress.bar("things") as move:
        time.sleep(0.12)
        move(3, 10)
        time.sleep(0.12)
    text = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"things \(\d+ s\)", text[0])
    assert re.fullmatch(r"things: 3 of 10 \(\d+ s\)", text[-1])


@pytest.mark.parametrize("words", [["explain", "Rome is"], ["rank", "Rome is"], ["flip", "Rome is", "--to", " B"]])
def test_in_a_terminal_a_line_comes_before_torch(words, tiny_folder):
    """Importing it takes seconds."""
    code = (
        "import sys, click; from icebear.app.cli.main import main; say = click.echo\n"
        "def echo(text='', **how): say(f'{text} {\"torch\" in sys.modules}', **how)\n"
        "click.echo = echo; main(sys.argv[1:], standalone_mode=False)"
    )
    ours, theirs = os.openpty()
    with open(ours, "rb", 0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words, "--model", tiny_folder], stdout=subprocess.DEVNULL, stderr=theirs
        )
        os.close(theirs)
        first = screen.read(len(f"Loading {tiny_folder} ... False"))
        process.kill()
        process.wait()
    assert first.decode() == f"Loading {tiny_folder} ... False"
