"""An evaluation is one file and a line of the registry."""

import json
import subprocess
import sys
from pkgutil import resolve_name

import dummy_evaluation
import pytest
from click.testing import CliRunner

from icebear.app.cli.main import main
from icebear.evaluation import report
from icebear.evaluation.evaluations import EVALUATIONS


@pytest.fixture
def lengths(tiny_folder, tmp_path, monkeypatch):
    """`icebear evaluate lengths ...` on the tiny model."""
    monkeypatch.setitem(EVALUATIONS, "lengths", ("dummy_evaluation:WordLengths", "Lengths of words."))
    monkeypatch.chdir(tmp_path)
    dummy_evaluation.MEASURED.clear()
    return lambda *words: CliRunner().invoke(
        main, ["evaluate", "lengths", *words, "--model", tiny_folder, "--device", "cpu", "--out", "out"]
    )


def test_a_registered_evaluation_is_a_command_that_resumes(lengths):
    assert "Lengths of words." in CliRunner().invoke(main, ["evaluate", "-h"]).stdout
    assert lengths("--json").exit_code == 1  # interrupted at the second sample
    done = lengths("--json")
    assert done.exit_code == 0, done.output
    assert dummy_evaluation.MEASURED == ["s", "ss", "ss", "sss"]  # the first is not measured again
    document = json.loads(done.stdout)
    (part,) = document["parts"]
    assert (document["evaluation"], part["settings"]["count"], part["settings"]["words"]) == ("lengths", 3, "short")
    (table,) = part["tables"]
    assert {row["method"]: row["off mean"] for row in table["rows"]} == {"three": 1, "zero": 2}
    assert table["rows"][0]["off error"] == pytest.approx(3**-0.5)
    assert len(report.load("out").samples) == 3
    shown = lengths()
    assert "1.000" in shown.stdout
    assert "off: distance" in shown.stdout


def test_options_are_checked_and_decide_whether_a_folder_fits(lengths):
    assert lengths("--count", "0").exit_code == 2
    assert lengths("--words", "tall").exit_code == 2
    assert lengths("--count", "1").exit_code == 0
    assert lengths("--count", "1", "--squared").exit_code == 0  # of which no number depends
    for other in (["--count", "2"], ["--count", "1", "--words", "long"], ["--count", "1", "--seed", "3"]):
        refused = lengths(*other)
        assert (refused.exit_code, "out" in refused.stderr) == (1, True)


def test_every_registered_evaluation_has_its_name_and_needs_no_torch_to_be_listed():
    for name, (place, _) in EVALUATIONS.items():
        assert resolve_name(place).name == name
    code = "import runpy, sys\nsys.argv = ['icebear', 'evaluate', '-h']\n"
    code += "try: runpy.run_module('icebear', run_name='__main__')\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "faithfulness" in done.stdout
