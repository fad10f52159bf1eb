"""The numbers of an evaluation's figures, against means and standard errors by the standard library."""

import importlib.util
from statistics import mean, stdev

import pytest

from icebear.errors import InputError
from icebear.evaluation import figures, runner
from icebear.evaluation.faithfulness import METRICS, SHARES, Faithfulness
from icebear.evaluation.results import Results

METHODS = {"attnlrp": "", "AttnLRP(linear=Gamma(gamma=0.25))": "", "unable": ""}
SAMPLES = [
    {
        "methods": {
            name: {
                **dict.fromkeys(METRICS, shift + row * row),
                "curve_most": [shift + row - step for step in SHARES],
                "curve_least": [shift + row * step for step in SHARES],
            }
            for name, shift in (("attnlrp", 3.0), ("AttnLRP(linear=Gamma(gamma=0.25))", -1.0))
        }
    }
    for row in range(4)
]
SETTINGS = {"evaluation": "faithfulness", "methods": METHODS, "steps": list(SHARES), "axes": ["removed", "logit"]}
RESULTS = Results(SETTINGS, METRICS, [], {"unable": "it cannot"}, SAMPLES)


def spread(values):
    error = stdev(values) / len(values) ** 0.5
    return pytest.approx([mean(values), mean(values) - error, mean(values) + error])


def test_bars_are_means_and_standard_errors_of_methods_that_ran():
    frame = figures.method_frame(RESULTS)
    assert list(frame["method"]) == list(METHODS)[:2]
    for name, *values in frame.itertuples(index=False):
        assert values == spread([sample["methods"][name]["delta_a"] for sample in SAMPLES])


def test_bars_of_medians_have_quartiles():
    results = Results(SETTINGS, {"delta_a": "median of it"}, [], {}, SAMPLES)
    assert figures.method_frame(results).iloc[0].tolist() == ["attnlrp", 5.5, 3.75, 8.25]  # of 3, 4, 7, 12


def test_curves_are_means_and_standard_errors_at_each_step():
    frame = figures.curve_frame(RESULTS)
    assert len(frame) == 2 * 3 * len(SHARES)
    for name, panel, step, *values in frame.itertuples(index=False):
        at = SHARES.index(step)
        most, least = (
            [sample["methods"][name][kind][at] for sample in SAMPLES] for kind in ("curve_most", "curve_least")
        )
        between = [x - y for x, y in zip(least, most, strict=True)]
        expected = {"most relevant first": most, "least relevant first": least, figures.BETWEEN: between}[panel]
        assert values == spread(expected)


def test_one_sample_has_no_error_and_no_curves_make_no_figure():
    (value, low, high), *_ = figures.curve_frame(Results(SETTINGS, METRICS, [], {}, SAMPLES[:1]))[
        ["mean", "low", "high"]
    ].to_numpy()
    assert value == low == high
    plain = [{"methods": {"a": {"x": 1.0}}}, {"methods": {"a": {"x": 2.0}}}]
    assert list(figures.charts(Results({"methods": {"a": ""}}, {"x": ""}, [], {}, plain))) == ["methods"]
    assert figures.charts(Results({"methods": {"a": ""}}, {"x": ""}, [], {"a": "why"}, [])) == {}


def test_a_file_is_the_same_each_time_and_has_its_names(tmp_path):
    results = Results(
        {**SETTINGS, "methods": {"<script>": ""}}, {"x": "<b>&"}, [], {}, [{"methods": {"<script>": {"x": 1.0}}}]
    )
    ((name, svg),) = figures.write(tmp_path, results).items()
    path = tmp_path / f"{name}.svg"
    assert path.read_text() == svg
    assert "<script>" not in svg
    assert "&lt;script&gt;" in svg
    assert figures.write(tmp_path, results) == {name: svg}
    assert path.read_text() == svg
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_without_the_packages_nothing_is_measured(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr("icebear.errors.find_spec", lambda name: None if name == "altair" else found(name))
    with pytest.raises(InputError, match="altair"):
        next(runner.run(Faithfulness(), None, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
