"""A behaviour: one prompt is a ranking, many are its mean, in whatever order and batches they come."""

import json
import random
from itertools import product

import pytest
import torch
from click.testing import CliRunner
from conftest import LLAMA, random_model

from icebear import CP_LRP, attribute
from icebear.app.cli.main import main
from icebear.concepts.answers import behaviour as module
from icebear.concepts.answers.behaviour import Case, behaviour, read_cases
from icebear.errors import InputError

CASES = [
    Case([7, 3, 12, 44, 5], 4, 9),
    Case([3, 21, 9]),
    Case([12, 44, 5, 3, 21, 9, 2], 4),
    Case([30, 31], None, 9),
    Case([8, 8, 1, 40], 17, 4),
]


@pytest.mark.parametrize(("site", "polarity"), [*product((None, "ffn", "attn"), (None, "+", "-")), ("head", None)])
def test_one_prompt_is_a_ranking(llama, site, polarity):
    case = CASES[0]
    sites = {None: ("ffn", "attn"), "head": ("attn",)}.get(site, (site,))
    expected = attribute(llama, case.prompt, case.target, case.contrast, sites=sites).top(12, site, polarity)
    result = behaviour(llama, [case], 12, site, polarity)
    assert [row.neuron for row in result] == [row.neuron for row in expected]
    assert [row.relevance for row in result] == pytest.approx([row.relevance for row in expected], abs=1e-6)
    assert {(row.low == row.high == row.relevance, row.among_top) for row in result} == {(True, 1)}
    if site != "head":
        assert [row.activation for row in result] == pytest.approx([row.activation for row in expected], abs=1e-6)


def test_many_are_the_mean_of_each(llama):
    """Against the definition, prompt by prompt."""
    singles = [attribute(llama, case.prompt, case.target, case.contrast, sites=("ffn",)) for case in CASES]
    means = torch.stack([single.ffn[:, -1] for single in singles]).mean(0)
    acts = torch.stack([single.activation("ffn")[:, -1] for single in singles]).mean(0)
    tops = [{row.neuron for row in single.top(7, "ffn")} for single in singles]
    result = behaviour(llama, CASES, 7, "ffn")
    assert [row.relevance for row in result] == pytest.approx(means.flatten().sort(descending=True).values[:7].tolist())
    for row in result:
        place = row.neuron.layer, row.neuron.index
        assert (row.relevance, row.activation) == pytest.approx((means[place].item(), acts[place].item()), abs=1e-5)
        assert row.among_top == sum(row.neuron in top for top in tops)
        assert row.low <= row.relevance <= row.high


def test_cases_compared_with_another_prompt_are_means_beside_the_others(llama):
    pair = Case(CASES[0].prompt, 4, 9, counterfactual=[7, 3, 13, 44, 5])
    singles = [
        attribute(llama, case.prompt, case.target, case.contrast, counterfactual=case.counterfactual, sites=("ffn",))
        for case in (pair, CASES[2])
    ]
    means = torch.stack([single.ffn[:, -1] for single in singles]).mean(0)
    result = behaviour(llama, [pair, CASES[2]], 7, "ffn")
    assert [row.relevance for row in result] == pytest.approx(means.flatten().sort(descending=True).values[:7].tolist())


def test_the_order_of_prompts_does_not_matter(llama, monkeypatch):
    monkeypatch.setattr(module, "ROWS_PER_BATCH", 2)
    result = behaviour(llama, CASES, 9)
    for seed in range(3):
        assert behaviour(llama, random.Random(seed).sample(CASES, len(CASES)), 9) == result


def test_neither_duplicates_nor_batches_change_the_mean(llama, monkeypatch):
    result = behaviour(llama, CASES, 9, method=CP_LRP)
    twice = behaviour(llama, CASES * 2, 9, method=CP_LRP)
    monkeypatch.setattr(module, "ROWS_PER_BATCH", 1)
    alone = behaviour(llama, CASES, 9, method=CP_LRP)
    for other in (twice, alone):
        assert [row.neuron for row in other] == [row.neuron for row in result]
        assert [row.relevance for row in other] == pytest.approx([row.relevance for row in result], abs=1e-5)
    assert [row.among_top for row in twice] == [2 * row.among_top for row in result]
    assert all(second.high - second.low < first.high - first.low for first, second in zip(result, twice, strict=True))


def test_the_interval_is_that_of_a_bootstrap():
    """Of the mean of 200 normal numbers: 1.96 standard errors to either side."""
    values = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = module.bootstrap_interval(values, 0)
    error = 1.96 * values.std(0) / 200**0.5
    assert torch.allclose(low, values.mean(0) - error, atol=0.15 * error.max().item())
    assert torch.allclose(high, values.mean(0) + error, atol=0.15 * error.max().item())


def test_never_one_batch_of_any_size(llama, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        module,
        "attribute",
        lambda model, prompts, *rest, **more: sizes.append(len(prompts)) or attribute(model, prompts, *rest, **more),
    )
    behaviour(random_model(LLAMA, dtype=torch.float32), [[n, 3] for n in range(19)], 3, "ffn")
    assert sizes == [8, 8, 3]


def test_a_file_of_prompts(tmp_path, tiny_folder):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Rome is", "target": " A"}\n\n{"prompt": "Paris is", "contrast": " are"}\n')
    assert read_cases(path) == [Case("Rome is", " A"), Case("Paris is", None, " are")]
    words = ["rank", "--file", str(path), "--top", "3", "--model", tiny_folder]
    done = CliRunner().invoke(main, [*words, "--target", " B", "--site", "ffn", "--json"])
    assert done.exit_code == 0, done.output
    output = json.loads(done.stdout)
    assert (output["prompts"], len(output["ranking"])) == (2, 3)
    assert {"neuron", "relevance", "low", "high", "activation", "polarity", "among_top", "promotes"} == set(
        output["ranking"][0]
    )
    shown = CliRunner().invoke(main, words)
    assert "means over 2 prompts" in shown.stdout
    for more in (["--position", "all"], ["--target-text", " A B"], ["a prompt"]):
        assert CliRunner().invoke(main, [*words, *more]).exit_code == 2
    for content, message in (
        ("", "prompt"),
        ('{"prompt": "a"}\n{"text": "b"}', "Line 2"),
        ("[", "Line 1"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            read_cases(path)
    with pytest.raises(InputError):
        read_cases(tmp_path / "none.jsonl")
    with pytest.raises(InputError):
        behaviour(None, [])
