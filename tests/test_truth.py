"""Models whose mechanism is known: a compiled model answers as its program does."""

import itertools
import json
from pathlib import Path
from random import Random

import pytest
import torch
from click.testing import CliRunner
from few import third_of
from hooked_models import IDS, folder_of

from benchmarks.truth.judge import evaluation as truth
from benchmarks.truth.judge import judging, rounds, true_stages, truth_tables
from benchmarks.truth.judge.judged_pairs import Pair, pairs_of
from benchmarks.truth.judge.judging import (
    SITES,
    candidates_of,
    ranked,
    relevances,
    scores_of,
    sites_of,
    truth_of,
)
from benchmarks.truth.programs.compiler import FOLDER, Compiled, compiled, names, trained
from benchmarks.truth.programs.decoys import KINDS, with_decoys
from benchmarks.truth.programs.programs import PROGRAMS
from icebear import attribute, load_model
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.nodes.controls import nodes_of, recovered_shares
from icebear.steering.apply import steer
from icebear.steering.flipping.flip import flip

DYCK = [folder for parent in Path(__file__).parents for folder in parent.glob("shared/truth/dyck16")]
REFERENCE = {
    "previous": lambda p: [{"a": "b", "b": "c", "c": "d", "d": "a"}.get(word) for word in ["", *p[:-1]]],
    "histogram": lambda p: [None] + [str(sum(a == b for b in p)) for a in p[1:]],
    "sort": lambda p: [None, *sorted(p[1:])],
    "parity": lambda p: [None] + [["even", "odd"][sum(w == "1" for w in p[:n]) % 2] for n in range(2, len(p) + 1)],
    "addition": lambda p: [None] * 5 + list(ternary(number(p[1:5]) + number(p[5:]))[:4]),
    "conditional": lambda p: [None] * 5 + [p[3] if p[1] == p[2] else p[4]],
    "hops": lambda p: [None] * 7 + [next((c for b, c in pairs(p) if b == hop(p, p[7])), None)],
    "reverse": lambda p: [None, *p[1 : p.index("END")][::-1], *[None] * (len(p) - p.index("END"))],
}
"""Each program a second time, in a line."""


def number(digits):
    return sum(int(digit) * 3**place for place, digit in enumerate(digits))


def ternary(value):
    return [str(value // 3**place % 3) for place in range(5)]


def pairs(prompt):
    return list(zip(prompt[1:7:2], prompt[2:7:2], strict=True))


def hop(prompt, word):
    return next((value for key, value in pairs(prompt) if key == word), None)


def prompts_of(program, count=100, seed=0):
    random = Random(seed)
    return [program.sample(random) for _ in range(count)]


def ids_of(program, prompts):
    return [[program.words.index(word) for word in prompt] for prompt in prompts]


def judged(program, made, prompts):
    """The margins of the answers of a model, by which it is right."""
    with torch.no_grad():
        logits = made.model.net(torch.tensor(ids_of(program, prompts))).logits
    margins = []
    for row, prompt in enumerate(prompts):
        for place, answer in enumerate(program.answers(prompt)):
            if answer is not None:
                scores = logits[row, place].tolist()
                right = scores.pop(program.outputs.index(answer))
                margins.append(right - max(scores))
    return margins


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_model_is_its_program(name):
    program = PROGRAMS[name]
    prompts = prompts_of(program)
    exact = judged(program, compiled(program.circuitry(), name), prompts)
    assert min(exact) == pytest.approx(max(exact), abs=1e-3)
    assert min(exact) > 4
    normed = judged(program, compiled(program.circuitry(), name, ids_of(program, prompts[:50])), prompts)
    assert min(normed) > 0.85 * min(exact)


def test_the_bracket_model_is_right_on_every_word():
    program = PROGRAMS["brackets"]
    words = [["BOS", *word, "END"] for word in itertools.product("()", repeat=8)]
    answers = [program.answers(word)[-1] for word in words]
    assert answers.count("balanced") == 14  # the Catalan number of 4 pairs
    assert min(judged(program, compiled(program.circuitry(), "brackets"), words)) > 4


@pytest.mark.parametrize("name", REFERENCE)
def test_programs_answer_as_written_again(name):
    for prompt in prompts_of(PROGRAMS[name]):
        assert PROGRAMS[name].answers(prompt) == REFERENCE[name](prompt), prompt


@pytest.mark.parametrize("name", PROGRAMS)
def test_variables_have_a_value_at_each_token(name):
    program = PROGRAMS[name]
    for prompt in prompts_of(program, 10):
        variables = program.variables(prompt)
        assert list(variables)[-1] == "output"
        assert {len(values) for values in variables.values()} == {program.length} == {len(prompt)}


# --- decoys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", third_of(PROGRAMS))
def test_a_model_with_decoys_is_its_program(name):
    program = PROGRAMS[name]
    prompts = prompts_of(program)
    ids = ids_of(program, prompts[:50])
    exact = judged(program, compiled(program.circuitry(), name), prompts)
    for norm in ((), ids):
        made = compiled(with_decoys(program.circuitry()), name, norm)
        assert set(made.units.values()) >= {"program", *KINDS} - {"redundant", "saturated"}
        assert min(judged(program, made, prompts)) > 0.8 * min(exact)


def without(made, units):
    """The logits of all prompts without what some neurons write."""
    net = made.model.net
    undo = {layer: net.model.blocks[layer].mlp.out.weight.data.clone() for layer, _ in units}
    for layer, number in units:
        net.model.blocks[layer].mlp.out.weight.data[:, number] = 0

    def restore():
        for layer, weight in undo.items():
            net.model.blocks[layer].mlp.out.weight.data.copy_(weight)

    return restore


@pytest.mark.parametrize("name", third_of(PROGRAMS))
def test_decoys_do_what_their_kind_says(name):
    program = PROGRAMS[name]
    prompts = prompts_of(program, 60)
    made = compiled(with_decoys(program.circuitry()), name)
    of_kind = {kind: [place for place, own in made.units.items() if own == kind] for kind in KINDS}

    def margins(units):
        restore = without(made, units)
        result = torch.tensor(judged(program, made, prompts))
        restore()
        return result

    whole = margins([])
    for kind in ("idle", "cancelling", "other inputs", "saturated", "redundant"):
        assert torch.allclose(margins(of_kind[kind]), whole, atol=2e-3), kind
    for pair in zip(of_kind["cancelling"][::2], of_kind["cancelling"][1::2], strict=True):
        assert any((margins([place]) - whole).abs().max() > 0.1 for place in pair)
    for original in made.copies.values():
        assert torch.allclose(margins([original]), whole, atol=2e-3)
        assert made.units[original] == "program"
    both = [place for pair in made.copies.items() for place in pair]
    assert not both or not torch.allclose(margins(both), whole, atol=0.1)


# --- the search and the scores --------------------------------------------------------------------------


def first_pairs(name, variant, count):
    program = PROGRAMS[name]
    made = truth.VARIANTS[variant](program, 0)
    return made, list(itertools.islice(pairs_of(program), count))


@pytest.mark.parametrize("name", third_of(PROGRAMS))
def test_pairs_have_different_answers(name):
    program = PROGRAMS[name]
    made, pairs = first_pairs(name, "plain", 6)
    for number, pair in enumerate(pairs):
        prompts = [[program.words[token] for token in ids] for ids in (pair.prompt, pair.counterfactual)]
        answers = [program.answers(prompt)[pair.position] for prompt in prompts]
        assert answers == [program.outputs[pair.target], program.outputs[pair.contrast]]
        assert number % 2 or sum(a != b for a, b in zip(*prompts, strict=True)) == 1
        result = pair.relevance(made.model, DIFFERENCE)
        assert result.conservation().target >= 9.9
        assert result.tokens.sum().item() == pytest.approx(result.conservation().target, abs=1e-3)


def by_brute_force(candidates):
    """The size of the smallest sufficient set and all sufficient sets of that size, of all subsets."""
    everything = list(itertools.product((False, True), repeat=len(candidates)))
    shares = candidates.recovered(torch.tensor(everything))
    enough = [row for row, share in zip(everything, shares.tolist(), strict=True) if abs(1 - share) <= 0.1]
    size = min(sum(row) for row in enough)
    return size, [{n for n, chosen in enumerate(row) if chosen} for row in enough if sum(row) == size]


@pytest.mark.parametrize(("name", "sites"), [("previous", "neurons and heads"), ("reverse", "neurons")])
def test_the_smallest_set_is_that_of_all_subsets(name, sites):
    made, pairs = first_pairs(name, "plain", 20)
    tried = 0
    for pair in pairs:
        candidates = candidates_of(made.model, pair, SITES[sites])
        if candidates is None or len(candidates) > 12:
            continue
        tried += 1
        found = truth_of(candidates)
        size, sets = by_brute_force(candidates)
        assert found.proved
        assert len(found.smallest) == size
        assert set(found.smallest) in sets
        assert found.nodes <= set.union(*sets)
        assert sorted(found.order) == list(range(len(candidates)))
    assert tried > 2


def test_recovered_is_the_sufficiency_of_ablation():
    made, (pair, *_) = first_pairs("conditional", "decoys", 1)
    candidates = candidates_of(made.model, pair, ("ffn", "head"))
    result = pair.relevance(made.model, DIFFERENCE)
    nodes = nodes_of(made.model, result, "ffn", "head")
    chosen = torch.rand(5, len(candidates), generator=torch.Generator().manual_seed(0)) < 0.5
    masks = torch.zeros(5, *nodes.shape, dtype=torch.bool)
    masks.flatten(1)[:, candidates.entries] = chosen
    expected, _ = recovered_shares(nodes, list(masks))
    assert torch.allclose(candidates.recovered(chosen), torch.tensor(expected), atol=1e-4)


def test_ties_are_broken_at_random_and_sizes_decide():
    scores = torch.tensor([0.0, -2.0, 1.0, 1.0, 1e-9, 0.0])
    orders = {tuple(ranked(scores, torch.Generator().manual_seed(seed))) for seed in range(50)}
    assert {order[0] for order in orders} == {1}
    assert {order[1] for order in orders} == {2, 3}
    assert {order[5] for order in orders} == {0, 4, 5}


def test_difference_rules_have_the_true_nodes_of_a_program_and_random_scores_do_not():
    line = truth.measure(("conditional", "decoys"), {"difference": DIFFERENCE, "random": "random"}, 2)
    rows = truth_tables.means(line["pairs"])
    assert rows["difference"]["at_2k"] > 0.95
    assert rows["difference"]["precision"] > 0.8
    assert rows["random"]["at_2k"] < 0.5
    assert rows["random"]["area"] < 0.6


@pytest.mark.release
def test_the_evaluation_needs_no_model_resumes_and_prints_strict_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(truth, "VARIANTS", {"plain": truth.plain})
    options = ["--programs", "previous", "--samples", "2", "--methods", "difference,random", "--out", "out", "--json"]
    monkeypatch.setattr(true_stages, "PAIRS", 2)
    monkeypatch.setattr(judging, "PROOF_SETS", 100)
    monkeypatch.setattr(judging, "SEARCHED_SETS", 100)
    first = CliRunner().invoke(command(truth.KnownMechanisms), options)
    assert first.exit_code == 0, first.output
    monkeypatch.setattr(truth, "judged", lambda *_: pytest.fail("measured again"))
    again = CliRunner().invoke(command(truth.KnownMechanisms), options)
    assert again.stdout == first.stdout
    part, *others = json.loads(first.stdout, parse_constant=lambda name: pytest.fail(name))["parts"]
    assert [part["part"], *(other["part"] for other in others)] == ["compiled", "trained", "stages"]
    assert {row["method"] for table in part["tables"] for row in table["rows"]} == {"difference", "random"}
    wrong = CliRunner().invoke(command(truth.KnownMechanisms), ["--programs", "prevous", "--out", "other"])
    assert wrong.exit_code == 1
    assert "previous" in str(wrong.exception)


def test_the_gains_of_a_round_sum_to_what_is_left():
    made, pairs = first_pairs("induction", "decoys, LayerNorm", 2)
    generator = torch.Generator().manual_seed(0)
    for pair in pairs:
        candidates = candidates_of(made.model, pair, ("ffn", "head"))
        chosen = torch.rand(candidates.nodes.shape, generator=generator) < 0.3
        by_site, left = rounds.gains(candidates.nodes, chosen)
        values = candidates.nodes.side_by_side(by_site, lambda x: x.sum(-1))
        whole, mixed = candidates.nodes.numbers([torch.ones_like(chosen), chosen])
        assert left == pytest.approx(whole - mixed, abs=1e-3)
        assert values.sum().item() == pytest.approx(left, abs=1e-3)
        assert not values[chosen].any()


def test_rounds_find_what_attention_hides_because_query_and_key_change_together():
    """In both prompts the query finds the same key, so attention does not change, and difference rules see nothing."""
    made, pairs = first_pairs("induction", "plain", 2)
    candidates = candidates_of(made.model, pairs[1], ("ffn",))
    found = truth_of(candidates)
    methods = {"difference": DIFFERENCE, "difference-rounds": "difference-rounds"}
    scores = scores_of(candidates, methods, relevances(made.model, pairs[1], methods), torch.Generator())
    unseen = [n for n in found.smallest if abs(scores["difference"][n]) < 1e-6 * scores["difference"].abs().max()]
    assert unseen
    first = scores["difference-rounds"].abs().topk(len(found.smallest)).indices
    assert set(first.tolist()) == set(found.smallest)


# --- stages and flips -----------------------------------------------------------------------------------


def test_stages_name_the_true_heads_of_a_program_and_no_idle_one():
    line = truth.measure_model(("hops", "decoys"), true_stages.measured, 0)
    assert line["methods"]["stages"]["recall"] > 0.8
    assert line["methods"]["as many random heads"]["recall"] < 0.4
    (row,) = (row for row in true_stages.by_kind([line]) if row["kind"] == "idle")
    assert (row["pairs"], row["named"]) == (len(line["pairs"]), 0)
    assert row["decoys that differ"] > row["named by chance"] > 0


def test_heads_by_chance_are_the_mean_of_all_sets():
    heads, groups = [(layer, index) for layer in range(2) for index in range(3)], [{(0, 0)}, {(0, 1), (1, 2)}]
    true = set().union(*groups)
    sets = [set(chosen) for chosen in itertools.combinations(heads, 2)]
    recalls = [sum(bool(group & chosen) for group in groups) / len(groups) for chosen in sets]
    precisions = [len(true & chosen) / len(chosen) for chosen in sets]
    expected = {
        name: pytest.approx(sum(rows) / len(rows))
        for name, rows in zip(true_stages.METRICS, (recalls, precisions), strict=True)
    }
    assert true_stages.at_random(groups, true, 2, len(heads)) == expected


def test_flip_finds_an_answer_behind_flat_steps():
    """Of the third and the fourth pair, the gradient is zero after the first edit."""
    made, pairs = first_pairs("histogram", "decoys", 4)
    for pair in pairs:
        prompt = pair.prompt[: pair.position + 1]
        recipe = flip(made.model, prompt, pair.contrast)
        with steer(made.model, recipe):
            edited = made.model.next_logits(prompt, -1)
        assert edited.argmax() == pair.contrast != made.model.next_logits(prompt, -1).argmax()
        assert 1 <= len(recipe.edits) <= 2


@pytest.mark.parametrize("name", names())
def test_a_trained_model_is_its_program(name):
    program = PROGRAMS[name]
    margins = judged(program, trained(program), prompts_of(program, 200))
    assert sum(margin > 0 for margin in margins) >= 0.99 * len(margins)


def test_trained_models_are_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_500_000


def test_a_model_of_one_number_is_judged(tmp_path):
    model = load_model(folder_of("one number", tmp_path / "model"), device="cpu")
    pair = Pair(tuple(IDS), (*IDS[:5], 6, *IDS[6:]), len(IDS) - 1, 0, None)
    candidates = candidates_of(model, pair, ("ffn", "head"))
    whole, none = candidates.ends
    assert whole < none
    logits = model.net(torch.tensor([pair.prompt, pair.counterfactual])).logits[:, pair.position, 0].tolist()
    assert whole == pytest.approx(logits[0], abs=1e-3)
    assert none != pytest.approx(whole)


@pytest.mark.skipif(not DYCK, reason="The certified model is beside the repository, not in it.")
@pytest.mark.parametrize(("word", "place"), [("()()(())()()()()", 11), ("((()())()((())))", 7)])
def test_few_neurons_of_the_certified_bracket_model_recover_its_answer(word, place):
    """By difference rules; equally many random ones that differ too do not."""
    model = load_model(str(DYCK[0]), device="cpu")
    other = word[:place] + "()"[word[place] == "("] + word[place + 1 :]
    prompt, counterfactual = ((*(model.tokenizer.ids[sign] for sign in signs), 2) for signs in (word, other))
    pair = Pair(prompt, counterfactual, 16, 1, 0)
    candidates = candidates_of(model, pair, ("ffn",))
    generator, methods = torch.Generator().manual_seed(0), {"difference": DIFFERENCE, "random": "random"}
    scores = scores_of(candidates, methods, relevances(model, pair, methods), generator)
    shares = {n: candidates.recovered(candidates.prefixes(ranked(x, generator))[[39]]) for n, x in scores.items()}
    assert shares["difference"].item() > 0.85
    assert shares["random"].item() < 0.2


def test_a_model_from_outside_is_judged(tmp_path):
    model = load_model(folder_of("plain", tmp_path / "model"), device="cpu")
    pair = Pair(tuple(IDS), (*IDS[:5], 10, *IDS[6:]), position=5, target=0, contrast=1)
    methods = {"difference": DIFFERENCE, "random": "random"}
    rows = list(truth.judged(Compiled(model), pair, methods, torch.Generator().manual_seed(0)))
    assert [row["sites"] for row in rows] == sites_of(model) == ["neurons", "neurons and heads"]
    for row in rows:
        assert 0 < row["k"] <= row["differ"]
        assert row["methods"]["difference"]["area"] > row["methods"]["random"]["area"]


TRACR = Path(__file__).parent / "data" / "tracr"


def tracr_pair(model, prompt, counterfactual, position):
    """A pair with the model's answers."""
    ids, other_ids = (tuple(model.tokenizer.ids[word] for word in words) for words in (prompt, counterfactual))
    with torch.no_grad():
        logits = model.net(torch.tensor([ids, other_ids])).logits[:, position]
    target, contrast = logits.argmax(-1).tolist() if logits.shape[-1] > 1 else (0, None)
    return Pair(ids, other_ids, position, target, contrast)


@pytest.mark.parametrize("name", ["hist", "frac_prevs"])
def test_programs_that_tracr_compiled(name):
    """`benchmarks/tracr_models.py` made them: they give the program's answers, and attributions are exact."""
    model = load_model(str(TRACR / name), device="cpu", dtype="float64")  # weights of 100 lose digits in float32
    for line in (TRACR / name / "pairs.jsonl").read_text().splitlines()[:4]:
        words, pair = json.loads(line)["prompt"], tracr_pair(model, **json.loads(line))
        with torch.no_grad():
            rows = model.net(torch.tensor([pair.prompt])).logits[0]
        if name == "hist":
            labels = [model.net.config.id2label[n] for n in rows[1:].argmax(-1).tolist()]
            assert labels == [str(words.count(word)) for word in words[1:]]
        else:
            shares = [words[1 : at + 1].count("x") / at for at in range(1, len(words))]
            assert rows[1:, 0].tolist() == pytest.approx(shares, abs=1e-4)
        for position in range(len(words)):
            result = attribute(
                model, pair.prompt, pair.target, pair.contrast, counterfactual=pair.counterfactual, position=position
            )
            assert result.tokens.sum().item() == pytest.approx(result.conservation().target, abs=1e-9)
        methods = {"difference": DIFFERENCE, "random": "random"}
        rows = list(truth.judged(Compiled(model), pair, methods, torch.Generator().manual_seed(0)))
        assert all(row["methods"]["difference"]["at_2k"] > 0.9 for row in rows)
