"""Monitors under conditions: counts are plain counts, and thresholds that rot are seen where they rot."""

import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from test_concepts import planted, texts

from icebear import Model, Monitor, find_concept, monitor
from icebear.app.cli.main import main
from icebear.app.cli.options import ModelOptions
from icebear.claims.checked_monitor import CheckedMonitor, FlaggedTexts
from icebear.claims.conditions import TEMPLATES, conditions_of
from icebear.claims.monitor_conditions import bag_of_words, check_monitor, monitor_under
from icebear.errors import InputError
from icebear.steering.monitor.monitor import HELD_OUT
from icebear.steering.monitor.text_values import interval, text_values, threshold_of


@pytest.fixture(scope="module")
def model():
    return planted()


@pytest.fixture(scope="module")
def concept(model):
    return find_concept(model, texts(80, True), texts(80, False), "song", sites=("ffn",))


@pytest.fixture(scope="module")
def made(model, concept):
    return monitor(model, concept, texts(130, False, 1), 0.01)


@pytest.fixture(scope="module")
def vector(model, concept):
    return monitor(model, concept, texts(130, False, 1), 0.01, detector="means")


def rescaled(model, neurons, factor):
    """The same function with other activations: what these neurons read is scaled up, what they write down."""
    net = deepcopy(model.net)
    with torch.no_grad():
        for neuron in neurons:
            block = net.transformer.h[neuron.layer].mlp
            block.c_fc.weight[:, neuron.index] *= factor
            block.c_fc.bias[neuron.index] *= factor
            block.c_proj.weight[neuron.index] /= factor
    return Model(net, model.tokenizer, "rescaled")


def test_the_plain_run_is_the_rate_that_was_measured_on_held_out_texts(model, made):
    run = check_monitor(model, made).runs[0]
    held = made.rate(HELD_OUT)
    assert run.flagged.true_positives / run.flagged.positives == pytest.approx(held.true_positive_rate)
    assert run.flagged.false_positives / run.flagged.negatives == pytest.approx(held.false_positive_rate)
    assert run.flagged.auroc == pytest.approx(held.auroc)
    assert Monitor.from_json(made.to_json()).held_out == made.held_out


def test_counts_are_those_of_a_plain_loop(model, made):
    examples, others = texts(30, True, 5), texts(40, False, 6)
    flagged = check_monitor(model, made, examples, others).runs[0].flagged
    for rows, count, limits in (
        (examples, flagged.true_positives, flagged.true_interval),
        (others, flagged.false_positives, flagged.false_interval),
    ):
        rows = list(dict.fromkeys(rows))
        assert count == sum(made.measure(model, text).flagged for text in rows)
        assert limits == interval(count, len(rows))
    values = text_values(model, [made.detector], list(dict.fromkeys(others)), made.unit)[0]
    assert flagged.keeping == threshold_of(values, made.fpr)[0]


def test_a_threshold_that_rots_is_seen_where_it_rots_although_the_order_stays(model, made):
    """The planted failure: a model that computes the same, with smaller activations of the monitor's neurons."""
    smaller = rescaled(model, [part.neuron for part in made.neurons], 0.1)
    load = lambda name: {"smaller": smaller, "same": planted()}[name]  # noqa: E731
    result = monitor_under(
        model, load, made, made.held_out, conditions_of(["model=same", "model=smaller", "threads=1"])
    )
    plain, equal, rotten, threaded = result.runs
    assert not plain.failed
    assert (equal.flagged, threaded.flagged) == (plain.flagged, plain.flagged)
    assert rotten.failed
    assert rotten.flagged.true_positives < plain.flagged.true_positives / 2
    assert rotten.flagged.auroc > 0.95
    assert rotten.flagged.true_positives_keeping >= plain.flagged.true_positives - 1
    assert [run.condition for run in result.runs if run.failed] == ["model=smaller"]
    assert result.passed
    assert not result.passed_everywhere


def test_too_many_flags_without_the_concept_fail_too(model, made):
    lower = replace(made, threshold=made.threshold - 100)
    run = check_monitor(model, lower).runs[0]
    assert run.failed
    assert run.flagged.false_positives == run.flagged.negatives


def test_templates_have_a_run_each_of_reworded_texts(model, made):
    result = check_monitor(model, made, under=["paraphrases=auto"])
    assert [run.condition for run in result.runs[1:]] == [f"paraphrases=auto ({name})" for name in TEMPLATES]
    for run, template in zip(result.runs[1:], TEMPLATES.values(), strict=True):
        worded = [[template.replace("{}", text) for text in part] for part in made.held_out]
        assert run.flagged == check_monitor(model, made, *worded).runs[0].flagged


def test_a_file_of_paraphrases_measures_the_texts_that_it_has(model, made, tmp_path):
    with_it, without = made.held_out
    pairs = [(with_it[0], with_it[1]), (without[0], without[1]), (without[0], without[2]), ("another", "text")]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": a, "paraphrase": b}) for a, b in pairs))
    run = check_monitor(model, made, under=[f"paraphrases={tmp_path / 'p.jsonl'}"]).runs[1]
    assert (run.flagged.positives, run.flagged.negatives) == (1, 2)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "another", "paraphrase": "text"}))
    assert check_monitor(model, made, under=[f"paraphrases={tmp_path / 'p.jsonl'}"]).runs[1].flagged is None


def test_what_a_condition_cannot_change_or_read_says_why(model, made):
    result = check_monitor(model, made, under=["seed=1", "url=http://localhost:1/v1", "model=no/such-folder"])
    assert [run.flagged for run in result.runs[1:]] == [None] * 3
    assert all(run.why for run in result.runs[1:])
    assert not any(run.failed for run in result.runs)
    assert result.passed_everywhere


def test_in_another_shape_neurons_are_refused_and_a_vector_is_fitted_again(model, made, vector):
    deeper = deepcopy(model.net)
    deeper.transformer.h.append(deepcopy(deeper.transformer.h[-1]))
    deeper.config.n_layer += 1
    other = Model(deeper, model.tokenizer, "deeper")
    load = lambda name: other  # noqa: E731
    examples = (tuple(texts(80, True, 3)), tuple(texts(80, False, 4)))
    refused, fitted = (
        monitor_under(model, load, each, examples, conditions_of(["model=other"])).runs[1] for each in (made, vector)
    )
    assert refused.flagged is None
    assert model.name in refused.why
    assert fitted.flagged.positives < 80
    assert fitted.flagged.auroc > 0.9


def test_the_bag_of_words_judges_texts_that_it_has_not_learned():
    draw = np.random.default_rng(0)
    noise = [" ".join(draw.choice(list("abcdefghijklmnop"), 6)) + f" x{number}" for number in range(80)]
    chance = bag_of_words((tuple(noise[:40]), tuple(noise[40:])), 0.05)
    assert 0.3 < chance.auroc < 0.7
    songs = tuple(f"{text} sing song" for text in noise[:40])
    assert bag_of_words((songs, tuple(noise[40:])), 0.05).auroc > 0.95
    assert bag_of_words((songs[:1], songs[1:]), 0.05) is None


def test_texts_are_needed_on_both_sides(model, made):
    with pytest.raises(InputError, match="held-out"):
        check_monitor(model, replace(made, held_out=None))
    with pytest.raises(InputError):
        check_monitor(model, made, ["a b"])
    with pytest.raises(InputError):
        check_monitor(model, made, ["a b"], ["a b", "c"])


def test_rates_of_values_by_hand():
    values = np.array([3.0, 1.0, 2.0, 0.0, 2.5, -1.0])
    flagged = FlaggedTexts.of(values, 3, 1.5, 0.25)
    assert (flagged.true_positives, flagged.positives, flagged.false_positives, flagged.negatives) == (2, 3, 1, 3)
    assert flagged.auroc == pytest.approx(7 / 9)
    assert (flagged.keeping, flagged.true_positives_keeping) == (2.5, 1)


def test_the_verb_measures_a_monitor_and_writes_the_table(model, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ModelOptions, "load", lambda self, name=None: model)
    replace(made, name="<i>song</i>").save("song.monitor.json")
    words = ["check", "song.monitor.json", "--under", "threads=1", "--under", "seed=1"]
    done = CliRunner().invoke(main, [*words, "--json", "--html", "t.html", "--markdown", "t.md", "--strict"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [run["condition"] for run in document["conditions"]] == ["plain run", "threads=1", "seed=1"]
    assert document["conditions"][0]["true_positives"] == document["conditions"][1]["true_positives"]
    assert document["bag_of_words"]["positives"] == len(made.held_out[0])
    assert "<i>" not in (tmp_path / "t.html").read_text()
    assert len([line for line in (tmp_path / "t.md").read_text().splitlines() if line[:1] == "|"]) == 6
    for part, name in zip(made.held_out, ("with.txt", "without.txt"), strict=True):
        (tmp_path / name).write_text("\n".join(part))
    named = CliRunner().invoke(main, [*words[:2], "--with", "with.txt", "--without", "without.txt", "--json"])
    assert json.loads(named.stdout)["conditions"][0] == document["conditions"][0]
    replace(made, threshold=made.threshold - 100).save("low.monitor.json")
    assert CliRunner().invoke(main, ["check", "low.monitor.json"]).exit_code == 1
    assert CliRunner().invoke(main, [*words[:2], "--with", "with.txt"]).exit_code == 1


def test_a_checked_monitor_is_saved_and_read(model, made, tmp_path):
    result = check_monitor(model, made, under=["seed=1"])
    result.save(tmp_path / "r.safetensors")
    assert CheckedMonitor.load(tmp_path / "r.safetensors") == result
