"""A folder of somebody else: its files are not run, and what they say does not steer the terminal."""

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from streamlit import config
from streamlit.runtime.secrets import Secrets

from icebear import cache
from icebear.app.cli.main import main
from icebear.app.cli.output import show
from icebear.app.cli.streams import Filtered, filtered
from icebear.errors import DownloadError

ESCAPE = "\x1b]0;title\x07\x1b[2J\x9b1m\u202e\u2066"
CONTROLS = set(map(chr, range(32))) - set("\n\t") | set(map(chr, range(0x7F, 0xA0))) | set("\u202e\u2066")
COMMAND = [sys.executable, "-P", "-c", "from icebear.__main__ import main; main()"]


def test_pip_of_the_current_folder_is_not_run(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    for name in ("pip", "typing", "logging"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "into").mkdir()
    with pytest.raises(DownloadError, match="No matching distribution"):
        cache.extract_from_wheels(["nothing==1"], tmp_path / "into", what="nothing", size=1)
    assert not ran.exists()


def test_a_locale_without_utf8_runs_nothing_of_the_current_folder(tmp_path):
    for name in ("icebear", "click"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    plain = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [*COMMAND, "recipe", "show", "none.json"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **plain}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "none.json" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_streamlit_takes_no_settings_of_the_current_folder(tmp_path, monkeypatch):
    """config.toml can open the app to other websites; each line of secrets.toml becomes an environment variable."""
    theirs = tmp_path / ".streamlit"
    theirs.mkdir()
    (theirs / "config.toml").write_text(
        "[server]\nenableCORS = false\nbaseUrlPath = 'x'\n[theme]\nbase = 'http://[::]:9/x'"
    )
    (theirs / "secrets.toml").write_text('ICEBEAR_APP = \'{"model": "evil", "trust_remote_code": true}\'')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ICEBEAR_APP", "{}")
    monkeypatch.delenv("ICEBEAR_APP")  # and again at the end
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(config, "get_config_files", config.get_config_files)
    given = []
    monkeypatch.setattr("streamlit.web.cli.main", lambda words, prog_name: given.extend(words))
    assert CliRunner().invoke(main, ["app", "--port", "8599"]).exit_code == 0
    config.get_config_options(force_reparse=True)
    assert config.get_option("server.enableCORS")
    assert not config.get_option("server.baseUrlPath")
    asked = os.environ["ICEBEAR_APP"]
    assert not Secrets().load_if_toml_exists()
    assert os.environ["ICEBEAR_APP"] == asked
    assert {"--server.enableCORS=true", "--server.enableXsrfProtection=true"} <= set(given)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_crash(tmp_path, closed):
    """And no file that is opened later gets its number."""
    words = '"$@" --version ' + closed
    done = subprocess.run(["sh", "-c", words, "sh", *COMMAND], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_nothing_that_goes_to_a_stream_steers_the_terminal():
    raw = io.StringIO()
    stream = Filtered(raw)
    logging.StreamHandler(stream).emit(logging.makeLogRecord({"msg": f"a tensor {ESCAPE}"}))
    stream.writelines([ESCAPE, "\n"])
    print(ESCAPE, "a\r", file=stream)
    assert not CONTROLS & set(raw.getvalue())
    assert raw.getvalue().startswith("a tensor ␛]0;title␇␛[2J\ufffd1m\ufffd\ufffd\n")


def test_bars_of_tqdm_still_move():
    raw = io.StringIO()
    for text in ("\r50 %", "\n\n", "\x1b[A\x1b[A"):
        assert Filtered(raw).write(text) == len(text)
    assert raw.getvalue() == "\r50 %\n\n\x1b[A\x1b[A"


def recipe(**changes):
    known = {
        "icebear_recipe": 2,
        "name": ESCAPE,
        "model_name": ESCAPE,
        "model_fingerprint": "",
        "edits": ["L1.ffn.3=2"],
    }
    return json.dumps(known | changes)


@pytest.mark.parametrize(
    "words", ["recipe show", "recipe show --json", "steer a --recipe", "recipe combine --save s.json"]
)
@pytest.mark.parametrize("changes", [{}, {ESCAPE: 1}, {"edits": [ESCAPE]}], ids=["name", "key", "edit"])
def test_a_recipe_does_not_steer_the_terminal(tmp_path, monkeypatch, words, changes, tiny_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.json").write_text(recipe(**changes))
    model = ["--model", tiny_folder] if words.startswith("steer") else []
    result = CliRunner().invoke(main, [*words.split(), "r.json", *model])
    assert not CONTROLS & set(result.output)
    assert result.output


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", json.dumps({"model_type": ESCAPE})),
        ("config.json", json.dumps({"architectures": [ESCAPE], "model_type": "llama"})),
        ("tokenizer_config.json", json.dumps({"tokenizer_class": ESCAPE})),
        ("chat_template.jinja", "{{ raise_exception('" + ESCAPE + "') }}"),
    ],
    ids=["kind", "class", "tokenizer", "template"],
)
def test_a_model_does_not_steer_the_terminal(tmp_path, tiny_folder, file, content):

    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / file).write_text(content)
    result = CliRunner().invoke(main, ["explain", "--chat", "a", "--model", str(folder)])
    assert not CONTROLS & set(result.output)
    assert result.exit_code == 1


def test_json_keeps_what_it_cannot_show(capsys):
    with filtered():
        show(True, {"text": ESCAPE})
    output = capsys.readouterr().out
    assert not CONTROLS & set(output)
    assert json.loads(output) == {"text": ESCAPE}


def test_the_whole_error_is_shown_on_request(monkeypatch):
    words = ["recipe", "show", "none.json"]
    assert "Traceback" not in CliRunner().invoke(main, words).stderr
    monkeypatch.setenv("ICEBEAR_DEBUG", "1")
    assert "Traceback" in CliRunner().invoke(main, words).stderr
