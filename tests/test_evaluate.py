"""`icebear evaluate` as it is used: methods by name, strict JSON, killed and gone on, honest p and times."""

import json
import random
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import started_alone

from benchmarks.baselines import OTHERS
from icebear.app.cli.main import main
from icebear.concepts import selftest
from icebear.concepts.statistics import table
from icebear.errors import InputError
from icebear.evaluation import report, runner
from icebear.evaluation.baselines import BASELINES
from icebear.evaluation.protocol import Part

ROOT = Path(__file__).parent.parent


def strict(text):
    """JSON as a parser that follows the standard reads it."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def rows_of(document):
    """Of its only table."""
    (part,) = document["parts"]
    (only,) = part["tables"]
    return only["rows"]


@pytest.fixture
def evaluate(tiny_folder, tmp_path, monkeypatch):
    """`icebear evaluate ...` of the tiny model, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(BASELINES, "alti", OTHERS["alti"])  # cannot run on this model
    texts = [f"The {word} lives near the cold river and eats what it finds there." for word in ("bear", "fox", "owl")]
    Path("texts.txt").write_text("\n".join(texts))
    Path("pairs.json").write_text(json.dumps([{"prompt": "The ice bear lives in", "to": " Rome"}]))

    def run(*words):
        result = CliRunner().invoke(main, ["evaluate", *words, "--model", tiny_folder, "--device", "cpu"])
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


# --- methods by name ---


def test_methods_written_out_are_told_apart_at_the_commas_outside_their_brackets(evaluate):
    written = "AttnLRP(softmax='zplus', linear=Gamma(0.1))"
    methods = f"random, {written},vit"
    wanted = ["random", written, "vit"]
    options = ("--methods", methods, "--samples", "2", "--out", "found", "--json")
    result = strict(evaluate("groundtruth", *options))
    assert [row["method"] for row in rows_of(result)] == wanted
    assert result["parts"][0]["settings"]["methods"][written] == "AttnLRP(softmax='zplus', linear=Gamma(gamma=0.1))"


# --- strict JSON ---

SETTINGS = ("--methods", "random,gxi,alti", "--out", "found")
VERBS = {
    "faithfulness": ("--corpus", "texts.txt", "--samples", "2", *SETTINGS),
    "faithfulness of one sample": ("--corpus", "texts.txt", "--samples", "1", *SETTINGS),
    "groundtruth": ("--samples", "6", *SETTINGS),
    "flips": ("--data", "pairs.json", "--max-neurons", "3", "--out", "found"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_an_evaluation_prints_and_writes_is_strict_json(verb, evaluate):
    result = strict(evaluate(verb.split()[0], *VERBS[verb], "--json"))
    assert result
    written = {path.name: strict(path.read_text()) for path in Path().glob("found/*.json")}
    assert "results.json" in written
    for row in rows_of(result):
        values = [value for key, value in row.items() if key.endswith(" mean")]
        assert (None in values) == (row["method"] == "alti")


# --- killed, and gone on ---


def evaluated(folder, started):
    """In a process of its own."""

    def measure(number):
        time.sleep(0.0005)
        return {"number": number, "text": "a line\u2028 or two" + "x" * 8000}

    started.set()
    runner.resume(folder, {"seed": 0}, Part({}, range(500), measure))


@pytest.mark.release
def test_killed_at_any_moment_an_evaluation_keeps_every_finished_sample(tmp_path):
    """Also while it resumes; and it ends with the file of a run that nobody disturbed."""
    generator = random.Random(0)
    selected, kills = b"", 0
    lines = tmp_path / "killed" / "samples.jsonl"
    while True:
        process = started_alone(evaluated, tmp_path / "killed")
        time.sleep(generator.uniform(0, 0.06 + 0.01 * kills))  # it ends on a slow machine too
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        kills += 1
        text = lines.read_bytes() if lines.exists() else b""
        assert text.startswith(selected)
        selected = text[: text.rfind(b"\n") + 1]
    assert process.exitcode == 0
    assert kills > 3
    started_alone(evaluated, tmp_path / "whole").join()
    assert lines.read_bytes() == (tmp_path / "whole" / "samples.jsonl").read_bytes()


def test_a_damaged_folder_loses_nothing(tmp_path):
    settings = {"seed": 0}
    measure = lambda number: {"number": number}  # noqa: E731
    part = Part({}, range(3), measure)
    runner.resume(tmp_path, settings, part)
    lines = tmp_path / "samples.jsonl"
    damaged = lines.read_text().replace('"number": 1}', '"number"')
    lines.write_text(damaged)
    with pytest.raises(InputError, match=r"samples\.jsonl"):
        runner.resume(tmp_path, settings, part)
    assert lines.read_text() == damaged


# --- statistics ---


def slow_p(differences):
    """Every change of signs, one after the other."""
    sums = [abs(np.dot(signs, differences)) for signs in product((-1, 1), repeat=len(differences))]
    return np.mean([value >= abs(differences.sum()) - 1e-12 for value in sums])


def test_p_is_that_of_every_change_of_signs_and_never_0():
    generator = np.random.default_rng(0)
    for differences in (np.ones(5), *generator.normal(0.5, 1, (4, 8))):
        samples = [{"methods": {"best": {"x": 9.0}, "other": {"x": 9 - value}}} for value in differences]
        result = table(samples, {"x": ""}, ["best", "other"])
        other = result["other" if differences.sum() > 0 else "best"]["x"]
        assert other.p == pytest.approx(slow_p(differences), abs=0.02)
    samples = [{"methods": {"best": {"x": 9.0 + number}, "other": {"x": number}}} for number in range(60)]
    assert table(samples, {"x": ""}, ["best", "other"])["other"]["x"].p > 0


def test_p_is_corrected_for_the_methods_of_its_column_and_the_legend_says_so():
    """Holm: of n methods that are worse, the smallest p counts n times, the next n - 1 times, and none is below it."""
    generator = np.random.default_rng(0)
    worse = {f"m{number}": generator.normal(0.05 * number, 1, 40) for number in range(8)}
    samples = [
        {"methods": {"best": {"x": 3.0}, **{name: {"x": 3 - values[row]} for name, values in worse.items()}}}
        for row in range(40)
    ]

    def p(names):
        result = table(samples, {"x": ""}, ["best", *names])
        return {name: result[name]["x"].p for name in names}

    able = [name for name in worse if worse[name].mean() > 0]
    alone = {name: p([name])[name] for name in able}
    expected, before = {}, 0.0
    for rank, name in enumerate(sorted(able, key=alone.get)):
        expected[name] = before = max(before, min(1, alone[name] * (len(able) - rank)))
    assert p(able) == pytest.approx(expected)
    assert len(able) > 2
    text = " ".join(report.Results({}, {"x": ""}, [], {}, samples).legend())
    assert "Holm" in text
    assert "chosen on the same samples" in text


def test_the_self_test_waits_for_its_device(monkeypatch, llama):
    """Both passes of its ratio."""
    timed = []
    monkeypatch.setattr(selftest, "seconds", lambda work, *device: timed.append(device) or 1.0)
    selftest.selftest(llama, [7, 3, 12])
    assert timed == [(llama.device,)] * 6
