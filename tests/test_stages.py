"""Stages: heads and neurons of the last token, whole parts, and the shares of the difference that they give."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from configurations import DIFFERENT, dense, mixtures, others
from conftest import random_model
from few import third_of
from hypothesis import given
from hypothesis import strategies as st
from reference.stages import Reference
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from icebear import Edit, Neuron, stages, steer
from icebear.app.web.shared import gallery
from icebear.concepts.stages.patched_pair import CachedPasses, CompletePasses, PatchedPair, State
from icebear.concepts.stages.stage_measurements import ENOUGH, OVERSHOOT, RANDOM_DRAWS, StageMeasurement
from icebear.concepts.stages.stage_parts import ExplainedTokenNodes, Recomputed, Shares
from icebear.concepts.stages.stage_sentences import keep_text, percent, stage_sentences, warnings, whole_texts
from icebear.concepts.stages.stages import swap_changes
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.records import Ranked

CAUSAL = {**dense(), **mixtures()}
PROMPT, OTHER = [5, 9, 3, 7, 11, 2], [5, 9, 4, 7, 12, 2]
TARGET, CONTRAST = 8, 6
FRANCE = {"target": " Paris", "contrast": " Tokyo", "counterfactual": "The capital of Japan is"}


def made(name):
    """A random model in float64; of experts in float32, as torch multiplies groups in no other type."""
    if name in CAUSAL:
        return random_model(CAUSAL[name], "eager", torch.float32 if name in mixtures() else torch.float64)
    _auto, config = others()[name]
    net = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}[name].from_config(config).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, 0, 0.4)
    return Model(
        net, SimpleNamespace(mask_token_id=2, all_special_ids=[], decode=str) if name == "bert" else None, name=name
    )


def pair_of(model, prompt=PROMPT, other=OTHER):
    return PatchedPair(model, objective_of(model, [prompt, other], TARGET, CONTRAST))


def some_nodes(token_nodes, seed=0):
    """Two heads, and two FFN neurons a layer."""
    generator = torch.Generator().manual_seed(seed)
    heads = token_nodes.heads()
    chosen = [heads[index] for index in torch.randperm(len(heads), generator=generator)[:2]]
    sites = [site for site in ("ffn", "shared") if site in token_nodes.layers]
    return [
        *chosen,
        *(Neuron(layer, site, index) for site in sites for layer in token_nodes.layers[site] for index in (1, 6)),
    ]


def token_nodes_of(pair):
    return ExplainedTokenNodes(pair.model, pair.passes.stack_of(pair.position))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "bert", "t5"])
def test_states_are_hooks_by_hand(name):
    """*Alone*, *without* and a swap: logits to 1e-5, and no hook stays."""
    model = made(name)
    pair = pair_of(model)
    token_nodes, inputs = token_nodes_of(pair), [{"input_ids": torch.tensor([ids])} for ids in (PROMPT, OTHER)]
    start = {"decoder_input_ids": torch.tensor([[0]])} if name == "t5" else {}
    reference = Reference(model.net, *({**part, **start} for part in inputs), output=5 if name == "bert" else -1)
    nodes = some_nodes(token_nodes)
    masks, head = token_nodes.masks(nodes), nodes[0]

    def alone(kind, layer, T, N):
        free = torch.zeros(T, N, dtype=torch.bool)
        is_whole = kind in ("ffn", "router")
        if is_whole and T > 1:
            free[[2, 4]] = True
        if T == 1 or name != "t5":
            free[-1] = chosen(masks, kind, layer, N)
        return free if name in ("bert", "t5") else free | (torch.arange(T) < 2)[:, None]

    def all_but(left):
        def free(kind, layer, T, N):
            mask = torch.ones(T, N, dtype=torch.bool)
            if T == 1 or name != "t5":
                mask[-1] = ~chosen(token_nodes.masks(left), kind, layer, N)
            return mask

        return free

    whole = frozenset({("ffn", "differing")})
    states = [Recomputed(whole, masks), token_nodes.without(nodes), token_nodes.without([head])]
    logits = pair.logits([part.state(pair) for part in states])
    for row, free in zip(logits, (alone, all_but(nodes), all_but([head])), strict=True):
        assert (row - reference.logits(free)).abs().max() < 1e-5
    assert (pair.prompt.logits - reference.prompt).abs().max() < 1e-5
    assert not any(module._forward_pre_hooks for module in model.net.modules())


def chosen(masks, kind, layer, width):
    """Return (N,) which values of a layer are of chosen nodes."""
    if kind not in masks:
        return torch.zeros(width, dtype=torch.bool)
    mask = masks[kind][layer]
    return mask.repeat_interleave(width // len(mask))


@pytest.mark.parametrize("name", third_of([*DIFFERENT, "mistral"], "mistral"))
def test_cached_passes_are_complete_ones(name):
    """States of every kind, and the causal trace; a model without an exact cache reads all tokens."""
    model = made(name)
    pair, complete = pair_of(model), pair_of(model)
    complete.passes = CompletePasses(complete)
    complete.prompt, complete.counterfactual = complete.passes.read()
    token_nodes = token_nodes_of(pair)
    nodes = token_nodes.masks(some_nodes(token_nodes))
    wholes = [{("ffn", "differing")}, {("attn", "differing"), ("ffn", "between")}, {("attn", "last"), ("ffn", "last")}]
    wholes = [frozenset(whole) for whole in wholes]
    states = [Recomputed(whole, nodes).state(pair) for whole in wholes]
    states += [
        token_nodes.without(some_nodes(token_nodes)).state(pair),
        State(frozenset({2}), frozenset({2}), nodes, frozenset({2, 5})),
    ]
    late = [node for node in some_nodes(token_nodes) if node.layer == model.layers - 1]
    states += [Recomputed(wholes[0], token_nodes.masks(late)).state(pair), token_nodes.without(late).state(pair)]
    close = {"rtol": 1e-4, "atol": 1e-4 if name in mixtures() else 1e-9}
    assert torch.allclose(pair.logits(states), complete.logits(states), **close)
    assert torch.allclose(pair.trace([2, 4, 5], [0, 1]), complete.trace([2, 4, 5], [0, 1]), **close)
    everything = pair.all_tokens
    plain = pair.logits([State(everything, everything), State(everything, everything, read=frozenset())])
    assert torch.allclose(plain, torch.stack([pair.prompt.logits, pair.counterfactual.logits]), **close)
    last = pair.trace([pair.position], [model.layers - 1])[0, 0]
    assert torch.allclose(last, pair.prompt.logits, **close)


def test_some_models_have_caches_and_some_have_none():
    assert isinstance(pair_of(made("llama")).passes, CachedPasses)
    assert isinstance(pair_of(made("bert")).passes, CompletePasses)
    assert isinstance(pair_of(made("mistral")).passes, CompletePasses)  # its window is shorter than the prompt


def test_a_common_beginning_changes_no_share():
    """Whatever precedes both prompts is read once."""
    model = made("llama")
    pair = pair_of(model, [5, 9, 3, 2], [5, 9, 4, 2])
    assert pair.first_difference == 2
    assert pair.prompt.activation["ffn"].shape[1] == 2
    assert pair.between == frozenset()
    alike = PatchedPair(model, objective_of(model, [[3, 2], [4, 2]], TARGET, CONTRAST))
    assert alike.first_difference == 0
    assert alike.prompt.logits.shape == pair.prompt.logits.shape


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 6))
def test_random_sets_are_as_large_and_none_of_the_nodes(seed, k, n):
    token_nodes = ExplainedTokenNodes(made("llama"), 0)
    nodes = [*token_nodes.heads()[:k], *(Neuron(index % 2, "ffn", index) for index in range(n))]
    drawn = token_nodes.random(nodes, torch.Generator().manual_seed(seed))
    assert not {*drawn} & {*nodes}
    assert len({*drawn}) == len(nodes)
    by_layer = lambda rows: sorted(node.layer for node in rows if node.site == "ffn")  # noqa: E731
    assert by_layer(drawn) == by_layer(nodes)
    assert [node.site for node in drawn[:k]] == ["head"] * k


def test_falls_of_the_target_are_those_of_swaps_by_hand():
    """Of a head, and of all other heads where there are few."""
    model = made("llama")
    pair = pair_of(model)
    token_nodes = token_nodes_of(pair)
    reference = Reference(model.net, *({"input_ids": torch.tensor([ids])} for ids in (PROMPT, OTHER)))
    before = reference.prompt.softmax(-1)[TARGET].item()

    def fall(head):
        def free(kind, layer, T, N):
            mask = torch.ones(T, N, dtype=torch.bool)
            mask[-1] = ~chosen(token_nodes.masks([head]), kind, layer, N)
            return mask

        return before - reference.logits(free).softmax(-1)[TARGET].item()

    head, *others_ = token_nodes.heads()
    result, random = swap_changes(model, pair, head)
    assert result == pytest.approx(fall(head), abs=1e-6)
    assert len(random) == len(others_) <= RANDOM_DRAWS
    assert sorted(random) == pytest.approx(sorted(map(fall, others_)), abs=1e-6)


@pytest.mark.parametrize(
    ("share", "reached"),
    [
        (ENOUGH, True),
        (OVERSHOOT, True),
        (math.nextafter(ENOUGH, 0), False),
        (math.nextafter(OVERSHOOT, math.inf), False),
    ],
)
def test_a_set_reaches_the_range_of_shares_with_its_ends(share, reached):
    pair = pair_of(made("llama"))
    measured = StageMeasurement(pair.model, [pair])
    measured.shares = SimpleNamespace(of=lambda sets: [share] * len(sets))
    heads = [Ranked(head, pair.position, None, 1.0) for head in measured.nodes.heads()]
    assert measured.smallest_set(frozenset(), heads, []) == ((heads[0],), (), reached)


@pytest.fixture(scope="module")
def france(smol):
    return stages(smol, "The capital of France is", **FRANCE)


def test_stages_are_those_of_the_judge(smol, france):
    """`shared/stages/judge.py`, a program apart: shares to 1e-4."""
    assert france.reached
    assert [str(node.neuron) for node in france.heads] == ["L23.head.4", "L29.head.1", "L29.head.2"]
    ids = [
        {"input_ids": torch.tensor([smol.ids(text)])} for text in ("The capital of France is", FRANCE["counterfactual"])
    ]
    reference = Reference(smol.net, *ids)
    masks = ExplainedTokenNodes(smol, 0).masks([node.neuron for node in (*france.heads, *france.neurons)])

    def alone(kind, layer, T, N):
        free = torch.zeros(T, N, dtype=torch.bool)
        free[:3] = True
        free[3] = kind == "ffn"
        free[4] = chosen(masks, kind, layer, N)
        return free

    def without(kind, layer, T, N):
        free = torch.ones(T, N, dtype=torch.bool)
        free[4] = ~chosen(masks, kind, layer, N)
        return free

    number = lambda logits: (logits[france.target.id] - logits[france.contrast.id]).item()  # noqa: E731
    ends = number(reference.prompt), number(reference.counterfactual)
    share = lambda free: (number(reference.logits(free)) - ends[1]) / (ends[0] - ends[1])  # noqa: E731
    assert france.alone == pytest.approx(share(alone), abs=1e-4)
    assert france.without == pytest.approx(1 - share(without), abs=1e-4)
    assert france.prompt.number == pytest.approx(ends[0], abs=1e-4)


def test_one_head_says_the_other_word(france):
    swap = next(swap for swap in france.swaps if str(swap.neuron) == "L23.head.4")
    assert swap.before[0] > 0.7 > swap.before[1]
    assert swap.after[0] < 0.01 < 0.7 < swap.after[1]
    assert france.random == pytest.approx(0, abs=0.03)
    assert france.without > 0.8
    assert france.trace.shares[0][0] == pytest.approx(1, abs=0.02)
    assert france.trace.shares[1][-1] == pytest.approx(1, abs=0.02)
    assert {word.token_id for word in france.words} >= {france.target.id, france.contrast.id}
    assert len(france.random_sets.sets) == RANDOM_DRAWS


@pytest.mark.release
def test_parts_are_swapped_together(smol, france):
    """One head gives its swap, as `steer` does, the whole set what is lost without it, and nothing the prompt."""
    for swap in france.swaps:
        assert france.swapped([swap.neuron]) == pytest.approx(swap.after, rel=1e-4)
        with steer(smol, Edit.from_prompt(swap.neuron, FRANCE["counterfactual"])):
            steered = [
                smol.probability("The capital of France is", FRANCE[answer]) for answer in ("target", "contrast")
            ]
        assert steered == pytest.approx(swap.after, rel=1e-3)
    target, contrast = france.swapped([str(node.neuron) for node in (*france.heads, *france.neurons)])
    lost = (france.prompt.number - math.log(target / contrast)) / france.difference
    assert lost == pytest.approx(france.without, abs=1e-4)
    assert france.swapped([]) == pytest.approx((france.prompt.target, france.prompt.contrast), rel=1e-4)
    with pytest.raises(InputError):
        france.swapped(["L99.head.0"])


def test_a_transfer_to_the_same_prompts_is_the_same(france):
    again = france.transfer("The capital of France is", FRANCE["counterfactual"])
    for name in ("alone", "without", "random"):
        assert getattr(again, name) == pytest.approx(getattr(france, name), abs=1e-5)
    assert again.whole == france.whole
    assert [node.neuron for node in again.heads] == [node.neuron for node in france.heads]


def test_a_transfer_moves_the_parts_to_the_last_token(france):
    moved = france.transfer("In France, the capital is", "In Japan, the capital is")
    assert {node.position for node in (*moved.heads, *moved.neurons)} == {5}
    assert moved.whole[0].positions == (1,)
    assert moved.random == pytest.approx(0, abs=0.05)
    with pytest.raises(InputError):
        france.transfer("In France, the capital is", "In this land, the capital is")


def test_json_has_every_number(france):
    read = json.loads(france.to_json())
    assert read["alone"] == france.alone
    assert read["trace"]["shares"][0] == list(france.trace.shares[0])
    assert read["heads"][0]["neuron"] == "L23.head.4"
    assert read["random_sets"]["sets"][0][0].startswith("L")
    assert list(france.to_frame()["stage"]) == ["moved"] * 3 + ["written"] * len(france.neurons)


def test_prompts_of_other_lengths_are_cut(smol):
    """Only the heads of the last token are exchanged: as a hook on the last column does."""
    result = stages(smol, "The capital of France is", " Paris", " Tokyo", "In Japan, the capital is")
    assert (result.kind, result.whole, result.neurons) == ("cut", (), ())
    assert 0.8 <= result.alone <= 1.25
    assert result.random == pytest.approx(0, abs=0.1)


def test_other_last_tokens_have_one_token(smol):
    result = stages(smol, "Yesterday the old farmers", counterfactual="Yesterday the old farmer")
    assert (result.kind, result.heads, result.neurons, result.whole) == ("last token", (), (), ())
    assert (result.alone, result.without, result.random, result.reached) == (None, None, None, False)
    assert result.trace.shares[-1][-1] == pytest.approx(1, abs=1e-3)


def test_other_lengths_and_other_last_tokens_have_no_trace(smol):
    result = stages(smol, "The ice bear", counterfactual="A wild camel lives")
    assert (result.kind, result.heads, result.trace.positions) == ("last token", (), ())


def test_shares_of_several_counterfactuals_are_means():
    model, others_ = made("llama"), [OTHER, [5, 9, 10, 7, 1, 2]]
    result = stages(model, PROMPT, TARGET, CONTRAST, others_)
    nodes = [node.neuron for node in (*result.heads, *result.neurons)]
    pairs = [pair_of(model, other=other) for other in others_]
    each = [Shares([pair]).of([ExplainedTokenNodes(model, 0).without(nodes)])[0] for pair in pairs]
    assert abs(each[0] - each[1]) > 0.01
    assert result.without == pytest.approx(1 - sum(each) / 2, abs=1e-5)


def test_the_line_of_what_is_read_names_the_whole_parts_and_begins_with_a_capital():
    result = stages(made("llama"), PROMPT, TARGET, CONTRAST, OTHER)
    parts = "; ".join(whole_texts(result.prompt.tokens, result.whole))
    assert parts
    (name, (line,)), *_ = stage_sentences(result)
    assert name == "Read"
    assert line.startswith(parts[0].upper() + parts[1:])


def test_the_last_line_is_of_all_heads_and_neurons():
    found = gallery.example("geography").explanation.stages
    last, (line,) = stage_sentences(found)[-1]
    assert last == ""
    assert f"recomputed: {percent(found.everything)}" in line
    little = replace(found, counterfactual=found.prompt)
    assert stage_sentences(little)[-1][0] == "Written"


def test_what_fails_is_said():
    found = gallery.example("geography").explanation.stages
    assert not warnings(replace(found, reached=True, without=1.0, left_out=()))
    short, spread = warnings(replace(found, reached=False, alone=0.5, without=0.0, left_out=()))
    assert "falls short" in short
    assert "take over" in spread
    assert "overshoots" in warnings(replace(found, reached=False, alone=OVERSHOOT + 1))[0]
    assert "and nothing else" in keep_text(replace(found, kind="cut"))


def test_what_has_no_stages_is_refused(smol):
    with pytest.raises(InputError):
        stages(smol, "The capital of France is")
    with pytest.raises(InputError):
        stages(smol, "The capital of France is", counterfactual="The capital of France is")


def test_prompts_without_a_difference_have_no_stages():
    model = made("llama")
    with torch.no_grad():
        head = model.net.get_output_embeddings().weight
        head[CONTRAST] = head[TARGET]
    with pytest.raises(InputError):
        stages(model, PROMPT, TARGET, CONTRAST, OTHER)


def test_a_claim_of_stages_is_measured_again(smol, france, tmp_path):
    """Its value and control are those of the stages; in another model of the same shape it fails."""
    from icebear import check
    from icebear.claims.claim import Claim
    from icebear.claims.claims_files import write_claims
    from icebear.claims.kinds.predictions import StagesClaim

    about = {"prompt": "The capital of France is", **FRANCE}
    ((claim, measured),) = StagesClaim.of(france, about)
    again = claim.measured(smol)
    assert (again.value, again.control) == pytest.approx((measured.value, measured.control), abs=1e-5)
    write_claims(tmp_path / "c.yaml", [Claim.of(smol, claim, measured=measured)])
    assert check(smol, tmp_path / "c.yaml").passed
    with pytest.raises(InputError):
        StagesClaim(**about, nodes=claim.nodes, parts=("ffn:last",)).measured(smol)


def test_a_claim_of_a_swap_is_measured_again(smol, france, tmp_path):
    """Its value is the fall that the stages show; in a model whose head is silent it breaks."""
    from icebear import check
    from icebear.claims.claim import Claim
    from icebear.claims.claims_files import write_claims
    from icebear.claims.kinds.predictions import SwapClaim

    about = {"prompt": "The capital of France is", **FRANCE}
    ((claim, _),) = SwapClaim.of(france, about)
    shown = next(swap for swap in france.swaps if swap.neuron == claim.head)
    measured = claim.measured(smol)
    assert measured.value == pytest.approx(shown.before[0] - shown.after[0], abs=1e-5)
    assert measured.control < measured.value
    write_claims(tmp_path / "c.yaml", [Claim.of(smol, claim)])
    assert check(smol, tmp_path / "c.yaml").passed
    other = france.random_swaps[0]
    fall = SwapClaim(**about, head=other.neuron).measured(smol).value
    assert fall == pytest.approx(shown.before[0] - other.after[0], abs=1e-5)
    with pytest.raises(InputError):
        SwapClaim(**{**about, "counterfactual": None}, head=claim.head).measured(smol)


def test_hostile_words_stay_text_in_the_picture(france):
    hostile = "\"'</title></svg><script>alert(1)</script>\x00\ud800"
    words = tuple(replace(word, text=hostile) for word in france.words)
    prompt = replace(france.prompt, tokens=(hostile,) * len(france.prompt.tokens))
    page = replace(france, words=words, prompt=prompt).to_html()
    assert "<script>alert" not in page
    ElementTree.fromstring(re.search("<svg.*?</svg>", page, re.DOTALL)[0])


def test_a_prompt_in_place_of_the_target_is_named(smol):
    pair = "The capital of France is", "The capital of Japan is"
    with pytest.raises(InputError) as error:
        stages(smol, *pair)
    assert [word in str(error.value) for word in (repr(pair[1]), "target", "counterfactual=")] == [True] * 3
    with pytest.raises(InputError) as error:
        stages(smol, pair[0], " Paris")
    assert "Paris" not in str(error.value)
