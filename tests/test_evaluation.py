"""Evaluations: metrics by hand, laws, folders that go on, ground truth by construction."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import IDS, LLAMA, Letters, random_model
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines import OTHERS
from icebear import Model
from icebear.app.cli.main import main
from icebear.concepts import statistics as metrics
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.statistics import paired_p, table
from icebear.errors import InputError, NumericalError
from icebear.evaluation import faithfulness, groundtruth, report, runner
from icebear.evaluation.baselines import methods_of
from icebear.evaluation.protocol import Part

RUN = CliRunner()


@pytest.fixture
def model():
    return Model(random_model(LLAMA, dtype=torch.float32).net, Letters(), "letters")


# --- metrics ---


def test_metrics_by_hand():
    assert metrics.area([1, 0]) == 0.5
    assert metrics.area([4, 2, 0]) == 2
    assert metrics.area([4, 2, 0], (0, 0.5, 1)) == 2
    assert metrics.area([1, 0, 0], (0, 0.1, 1)) == pytest.approx(0.05)
    most, least = [(4, 0.9), (1, 0.5), (0, 0.1), (0, 0)], [(4, 0.9), (3, 0.8), (3, 0.7), (0, 0)]
    assert metrics.removal_metrics(most, least) == pytest.approx(
        {
            "delta_a": 8 / 3 - 1,
            "delta_p": (1.95 - 1.05) / 3,
            "auac": 1.95 / 3,
            "au_mse": (0.5 + 1 + 8.5) / 3,
            "compr": 0.6,
            "suff": 0.15,
        }
    )
    assert metrics.localization_metrics([3, 1, 2], [1])["mrr"] == pytest.approx(1 / 3)
    tied = metrics.localization_metrics([2, 2, 1], [1])
    assert (tied["mrr"], tied["mrr_worst"], tied["pointing"]) == (1, 0.5, 0.5)
    assert metrics.localization_metrics([3, -5, 1], [0])["mass"] == 0.75
    two = metrics.localization_metrics([3, 2, 1], [0, 2])
    assert (two["accuracy"], two["iou"]) == (0.5, pytest.approx(1 / 3))


scores = st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=3, max_size=12, unique=True)


@given(scores, st.randoms())
def test_a_perfect_explainer_gets_1_and_ties_only_cost(values, generator):
    evidence = generator.sample(range(len(values)), 2)
    perfect = [1.0 if place in evidence else 0.0 for place in range(len(values))]
    assert set(metrics.localization_metrics(perfect, evidence).values()) == {1}
    assert all(0 <= number <= 1 for number in metrics.localization_metrics(values, evidence).values())
    rounded = metrics.localization_metrics([round(value) for value in values], evidence)
    assert rounded["mrr_worst"] <= rounded["mrr"]


def test_random_scores_get_their_expectation():
    generator = np.random.default_rng(0)
    rows = generator.random((20_000, 5))
    two = [metrics.localization_metrics(row, [0, 1]) for row in rows]
    one = [metrics.localization_metrics(row, [0])["mrr"] for row in rows]
    result = [np.mean([row["pointing"] for row in two]), np.mean([row["accuracy"] for row in two]), np.mean(one)]
    expected = (2 / 5, 2 / 5, sum(1 / rank for rank in range(1, 6)) / 5)
    assert result == pytest.approx(expected, abs=0.01)


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=11), st.lists(st.floats(-5, 5), min_size=3, max_size=11))
def test_insertion_is_flipping_read_backwards(most, least):
    """Delta A^I = area(insert most first) - area(insert least first) = Delta A^F, as the paper says."""
    insertion = metrics.area(least[::-1]) - metrics.area(most[::-1])
    curves = ([(value, value) for value in curve] for curve in (most, least))
    assert insertion == pytest.approx(metrics.removal_metrics(*curves)["delta_a"])


def test_removals_are_in_order_of_relevance():
    most, least = faithfulness.removals(torch.tensor([0.1, 3.0, -2.0, 1.0, 0.5]))
    assert [row.nonzero().flatten().tolist() for row in most] == [[], [1], [1, 3], [1, 3, 4], [0, 1, 3, 4], [*range(5)]]
    assert least[1].nonzero().flatten().tolist() == [2]
    assert least[-1].all()


def test_a_curve_is_what_the_model_says_with_embeddings_set_to_zero(model):
    """Against passing embeddings by hand."""
    result = faithfulness.sample(model, IDS, {"attnlrp": METHODS["attnlrp"]})["methods"]["attnlrp"]
    target = int(model.net(torch.tensor([IDS])).logits[0, -1].argmax())
    probabilities = {"most": [], "least": []}
    for key, index in (("most", 0), ("least", 1)):
        for step, gone in enumerate(faithfulness.removals(torch.tensor(result["scores"]))[index]):
            embedded = model.net.model.embed_tokens(torch.tensor([IDS])).clone()
            embedded[0, gone] = 0
            logits = model.net(inputs_embeds=embedded).logits[0, -1]
            assert result[f"curve_{key}"][step] == pytest.approx(logits[target].item(), abs=1e-4)
            probabilities[key].append(logits.softmax(-1)[target].item())
    assert result["auac"] == pytest.approx(metrics.area(probabilities["least"]), abs=1e-5)
    assert result["compr"] == pytest.approx(probabilities["most"][0] - np.mean(probabilities["most"][1:-1]), abs=1e-5)


# --- reports ---


def test_the_best_of_a_column():
    generator = np.random.default_rng(1)
    samples = [
        {"methods": {"good": {"x": 1 + value, "y": 1.0}, "bad": {"x": float(value), "y": 2.0}}}
        for value in generator.normal(size=50)
    ]
    result = table(samples, {"x": "higher is better", "y": "so, lower is better"}, ["good", "bad", "unable"])
    assert result["good"]["x"].p is None
    assert result["good"]["y"].p is None
    assert result["bad"]["x"].p < 0.01
    assert result["unable"]["x"] is None
    assert result["good"]["x"].error == pytest.approx(
        np.std([s["methods"]["good"]["x"] for s in samples], ddof=1) / 50**0.5
    )
    settings = {"methods": {"good": "", "unable": ""}}
    assert report.Results(settings, {"x": ""}, [], {}, samples).texts()["unable"] == ["—"]
    # A difference that is noise is no difference.
    noise, nothing = paired_p(np.stack((generator.normal(size=200), np.zeros(200))))
    assert noise > 0.05
    assert nothing == 1


def test_an_interrupted_evaluation_goes_on_to_the_same_table(model, tmp_path):
    methods = methods_of("random,gxi,attnlrp,occlusion")
    generator = random.Random(0)
    prompts = [generator.choices(range(50), k=8) for _ in range(4)]
    facts = {
        "evaluation": "faithfulness",
        "model": {"name": "m"},
        "methods": {name: repr(method) for name, method in methods.items()},
        "steps": faithfulness.SHARES,
        "axes": ["x", "y"],
    }

    def resumed(folder, measure, settings=facts):
        return runner.resume(tmp_path / folder, settings, Part(faithfulness.METRICS, prompts, measure))

    measured = []

    def measure(prompt):
        measured.append(prompt)
        return faithfulness.sample(model, prompt, methods)

    whole = resumed("a", measure)

    def breaks(prompt):
        if prompt == prompts[2]:
            raise KeyboardInterrupt
        return measure(prompt)

    with pytest.raises(KeyboardInterrupt):
        resumed("b", breaks)
    with (tmp_path / "b" / "samples.jsonl").open("a") as file:
        file.write('{"tokens": [1, 2')  # killed while it wrote
    measured.clear()
    again = resumed("b", measure)
    assert measured == prompts[2:]
    tables = []
    for folder, lines in (("a", whole), ("b", again)):
        report.write(
            tmp_path / folder, report.Results(facts, faithfulness.METRICS, [], {"alti": "it <b>cannot</b>"}, lines)
        )
        tables.append((tmp_path / folder / "table.csv").read_text())
    assert tables[0] == tables[1]
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names >= {"results.json", "table.csv", "index.html", "methods.svg", "methods.png", "curves.svg"}
    assert (tmp_path / "a" / "curves.png").read_bytes() == (tmp_path / "b" / "curves.png").read_bytes()
    page = (tmp_path / "b" / "index.html").read_text()
    assert "<b>cannot" not in page
    assert page.count("data:image/svg+xml;base64,") == 2
    assert len(json.loads((tmp_path / "b" / "results.json").read_text())["samples"]) == 4
    with pytest.raises(InputError):
        resumed("b", measure, {**facts, "seed": 1})
    with pytest.raises(NumericalError):
        resumed("c", lambda prompt: {"x": float("nan")})


def test_groups_go_on_where_they_stopped(tmp_path):
    seen = []

    def measure(group):
        seen.append(list(group))
        if 4 in group and len(seen) == 3:
            raise KeyboardInterrupt
        return [{"x": item} for item in group]

    part = Part({}, range(5), measure, batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        runner.resume(tmp_path, {}, part)
    assert [line["x"] for line in runner.resume(tmp_path, {}, part)] == [0, 1, 2, 3, 4]
    assert seen == [[0, 1], [2, 3], [4], [4]]


# --- what is asked ---


def test_beginnings_of_texts(smol):
    texts = ["Too short.", *(f"{number} sheep " * 40 for number in range(9))]
    result = faithfulness.beginnings(smol, texts, 5, seed=1, longest=32)
    assert result == faithfulness.beginnings(smol, texts, 5, seed=1, longest=32)
    assert len(result) == 5
    assert all(16 <= len(prompt) <= 32 for prompt in result)
    with pytest.raises(InputError, match="16"):
        faithfulness.beginnings(smol, ["Too short."], 5)


# --- ground truth ---


@pytest.mark.parametrize("task", groundtruth.TASKS)
def test_the_evidence_is_where_the_templates_put_it(smol, task):
    items = groundtruth.TASKS[task](30, seed=3)
    assert items == groundtruth.TASKS[task](30, seed=3)
    for item in items:
        start, end = item.evidence
        word = item.prompt[start:end]
        places = groundtruth.tokens_between(smol, item.prompt, start, end)
        ids = smol.token_ids(item.prompt)
        assert "".join(smol.pieces(ids)[place] for place in places).strip() == word
        if task == "qa":
            assert item.target == f" {word}"
            assert f"lives in {word}." in item.prompt
        else:
            plural = item.target in (" are", " themselves")
            assert plural == (word not in {**groundtruth.LEXICON["things"], **groundtruth.LEXICON["persons"]})
            assert item.contrast != item.target
    assert len({item.evidence for item in items}) > 5  # no place wins


def test_blimp_and_squad_files(smol, tmp_path):
    rows = [
        {"one_prefix_prefix": "A niece of most senators", "one_prefix_word_good": "has", "one_prefix_word_bad": "have"},
        {"one_prefix_prefix": "Susan revealed", "one_prefix_word_good": "herself", "one_prefix_word_bad": "themselves"},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = {item.prompt[slice(*item.evidence)] for item in groundtruth.read_items(str(tmp_path / "b.jsonl"), 5)}
    assert result == {"niece", "Susan"}
    request = {"question": "Who?", "answers": [{"text": "Ann", "answer_start": 4}]}
    squad = {"data": [{"paragraphs": [{"context": "Was Ann there?", "qas": [request]}]}]}
    (tmp_path / "s.json").write_text(json.dumps(squad))
    (item,) = groundtruth.read_items(str(tmp_path / "s.json"), 5)
    assert item.prompt[slice(*item.evidence)] == "Ann"
    (tmp_path / "x.jsonl").write_text("nothing")
    for name, message in (("x.jsonl", "BLiMP"), ("none", "none")):
        with pytest.raises(InputError, match=message):
            groundtruth.read_items(str(tmp_path / name), 5)


def test_only_what_the_model_predicts_counts(smol):
    item = groundtruth.Question("The keys near the house", " are", " is", (4, 8))
    lines = groundtruth.score_items(smol, [item], methods_of("attnlrp,random"))
    (result,) = groundtruth.counted(lines)
    assert result["counts"]
    assert result["evidence"] == [1]
    wrong = groundtruth.Question(item.prompt, " is", " are", item.evidence)
    assert groundtruth.counted(groundtruth.score_items(smol, [wrong], methods_of("random"))) == [
        {"counts": False, "correct": False}
    ]
    (bare,) = groundtruth.counted(lines, "inner")
    assert bare["evidence"] == [0]  # without the first token
    assert bare["methods"]["attnlrp"]["scores"] == result["methods"]["attnlrp"]["scores"][1:]
    with pytest.raises(InputError, match="context"):
        groundtruth.counted(lines, "context")


def test_of_a_question_the_text_alone_may_count(smol):
    lines = groundtruth.score_items(smol, groundtruth.facts(8), methods_of("random"))
    result = [line for line in groundtruth.counted(lines, "context") if line["counts"]]
    assert result
    for line in result:
        ids, selected = smol.token_ids(line["prompt"]), line["parts"]["context"]
        assert smol.tokenizer.decode([ids[place] for place in selected]) == line["prompt"].split("\n")[0]
        assert len(line["methods"]["random"]["scores"]) == len(selected)


def test_items_together_are_items_one_by_one(model, monkeypatch):
    """Of other lengths, without a contrast, and one that the model does not predict."""
    monkeypatch.setattr(groundtruth, "tokens_between", lambda *place: [*range(*place[2:])])  # a token has one letter
    methods = methods_of("attnlrp,pa-lrp,rollout,gxi,random") | {"grad-rollout": OTHERS["grad-rollout"]}
    answers = {
        prompt: [token.text for token in model.predict(prompt, 2)] for prompt in ("The keys", "ice", "A camel is")
    }
    items = [groundtruth.Question(prompt, *best, (0, 2)) for prompt, best in answers.items()]
    items += [replace(items[0], contrast=""), replace(items[1], target=items[1].contrast, contrast=items[1].target)]
    lines = groundtruth.score_items(model, items, methods)
    assert [line["correct"] for line in lines] == [True] * 4 + [False]
    for item, result in zip(items, lines, strict=True):
        (alone,) = groundtruth.score_items(model, [item], methods)
        scores = result.pop("methods", {}), alone.pop("methods", {})
        assert result == alone
        for name, one in scores[0].items():
            assert one["scores"] == pytest.approx(scores[1][name]["scores"], rel=1e-3, abs=1e-4), name


# --- the command ---


@pytest.mark.usefixtures("smol")
def test_the_commands_and_their_mistakes(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--samples", "2", "--methods", "random,gxi,difference", "--out", "g"]
    result = RUN.invoke(main, ["evaluate", "groundtruth", *options, "--json"])
    assert result.exit_code == 0, result.stderr
    (results,) = json.loads(result.stdout)["parts"]
    assert [row["method"] for row in results["tables"][0]["rows"]] == ["random", "gxi", "difference"]
    assert "counterfactual" in results["unable"]["difference"]
    shown = RUN.invoke(main, ["evaluate", "groundtruth", *options])
    assert "—" in shown.stdout
    assert "accuracy of the model: 2 of 2" in shown.stdout
    other = RUN.invoke(main, ["evaluate", "groundtruth", *options, "--seed", "3"])
    assert (other.exit_code, "other settings" in other.stderr) == (1, True)
    wrong = RUN.invoke(main, ["evaluate", "faithfulness", "--methods", "attnlpr", "--out", "f"])
    assert (wrong.exit_code, "Did you mean 'attnlrp'" in wrong.stderr) == (1, True)
