"""One forward and one backward pass: starts and stops are symmetric, and what is recorded is what there is."""

import pytest
import torch
import transformers
from configurations import mixtures, others
from conftest import IDS, LLAMA, Letters, random_model

from icebear import CP_LRP, Model, Neuron, attribute
from icebear.concepts.attribution import attribute as attribution
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neuron_recorders import AllNeurons, LargestNeurons
from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.passes.run import Activations, Logits, forward_backward, new_accounting
from icebear.errors import InputError
from icebear.models.objective import objective_of

SITES = ("ffn", "attn")


class DirectNeurons(AllNeurons):
    stop = True


def made(name):
    if name != "t5":
        return random_model({**mixtures(), "llama": LLAMA}[name], dtype=torch.float32)
    auto, config = others()[name]
    torch.manual_seed(0)
    return Model(getattr(transformers, auto).from_config(config), name=name)


def prompts(count):
    return [IDS[: len(IDS) - row] for row in range(count)]


def test_what_is_stopped_and_what_passes_is_all_there_is(llama):
    """Tokens and stopped neurons together have the target's relevance (CP-LRP keeps everything); without stops the
    tokens alone have it."""
    query = objective_of(llama, prompts(3))
    for stop in (False, True):
        inputs = Inputs()
        neurons = (DirectNeurons if stop else AllNeurons)(llama, query.batch, SITES)
        accounting = new_accounting(llama, 3)
        numbers, _ = forward_backward(llama, Logits(query), [inputs, neurons], CP_LRP, accounting=accounting)
        for row in range(3):
            result = inputs.relevance()[0][row].sum()
            if stop:
                result += sum(neurons.relevance[site][row].sum() for site in SITES)
            torch.testing.assert_close(result, numbers[row], rtol=1e-4, atol=1e-5)


def test_a_pass_may_start_at_neurons_and_stop_at_those_below(llama):
    """The direct relevance of tokens and of the neurons of lower layers adds up to a neuron's activation; of its own
    layer and above there is none."""
    nodes = [(Neuron(1, "ffn", 3), 2), (Neuron(1, "ffn", 5), 4)]
    batch = llama.read([IDS, IDS])
    inputs, neurons = Inputs(), DirectNeurons(llama, batch, ("ffn",))
    numbers, _ = forward_backward(llama, Activations(batch, nodes), [inputs, neurons], CP_LRP)
    for row, (neuron, position) in enumerate(nodes):
        result = neurons.relevance["ffn"][row]
        torch.testing.assert_close(inputs.relevance()[0][row].sum() + result.sum(), numbers[row], rtol=1e-4, atol=1e-6)
        assert result[0, : position + 1].abs().sum() > 0
        assert not result[neuron.layer :].any()
        assert not result[:, position + 1 :].any()


@pytest.mark.parametrize("name", ["llama", "t5", "qwen3_moe"])
@pytest.mark.parametrize("record", ["last", [0, -2]])
def test_what_is_recorded_is_a_part_of_all(name, record):
    model = made(name)
    whole, part = (attribute(model, prompts(2), record=which) for which in ("all", record))
    for every, some in zip(whole, part, strict=True):
        wanted = list(every.prompt.target_positions) if record == "last" else [0, len(every.tokens) - 2]
        assert list(some.neurons.recorded) == wanted
        for site in every.sites:
            torch.testing.assert_close(some.of(site), every.of(site)[:, wanted])
            torch.testing.assert_close(some.activation(site), every.activation(site)[:, wanted])
        ranks = [[(r.neuron, r.position) for r in result.top(5, position=wanted[0])] for result in (every, some)]
        assert ranks[0] == ranks[1]
        with pytest.raises(InputError, match="'all'"):
            some.top(5, position="all")


def test_continuations_of_different_lengths_are_recorded_apart(llama):
    model = Model(llama.net, Letters())
    whole, part = (attribute(model, ["a cab", "bed"], target_text=["be", "a"], record=r) for r in ("all", "last"))
    for every, some in zip(whole, part, strict=True):
        torch.testing.assert_close(some.ffn, every.ffn[:, list(every.prompt.target_positions)])


def test_one_result_of_a_batch_does_not_keep_the_others_alive(llama):
    for result in attribute(llama, prompts(3)):
        assert result.ffn.untyped_storage().nbytes() == result.ffn.nbytes


@pytest.mark.parametrize("name", ["llama", "t5", "qwen3_moe"])
def test_the_largest_and_the_sums_are_those_of_all(name):
    """Of rows of different lengths; positions that are set apart are not ranked, but count in sums."""
    model = made(name)
    query, apart = objective_of(model, prompts(2)), [(0,), (1, 2)]
    every = AllNeurons(model, query.batch, SITES)
    largest = LargestNeurons(model, query.batch, SITES, 7, apart.__getitem__)
    for recorder in (every, largest):
        forward_backward(model, Logits(query), [Inputs(), recorder], CP_LRP)
    for row in range(2):
        result = largest.row(row)
        for site in SITES:
            values, activations = (part[site] for part in every.row(row))
            torch.testing.assert_close(result.layers[site], values.sum(-1))
            ranked = values.clone()
            ranked[:, list(apart[row])] = torch.nan
            flat = ranked[~ranked.isnan()]
            recorded = result.top(7, site)
            for top, order in ((recorded[:7], flat.sort(descending=True)), (recorded[7:], flat.sort())):
                torch.testing.assert_close(torch.tensor([r.relevance for r in top]), order.values[:7])
                for r in top:
                    place = r.neuron.layer, r.position, r.neuron.index
                    assert r.position not in apart[row]
                    assert values[place] == pytest.approx(r.relevance)
                    assert activations[place] == pytest.approx(r.activation)
        heads = every.row(row)[0]["attn"].unflatten(-1, (model.heads, -1)).sum(-1)
        torch.testing.assert_close(result.heads, heads)


OTHER = [*IDS[:2], 9, *IDS[3:]]
"""Another prompt of as many tokens."""
KEPT = {
    "alone": {},
    "one other": {"counterfactual": OTHER},
    "one other, attention constant": {"counterfactual": OTHER, "method": "difference-constant"},
    "two others": {"counterfactual": [OTHER, [*OTHER[:-1], 4]]},
    "a shorter one": {"counterfactual": OTHER[:-2]},
    "a phrase": {"target_text": "ab", "contrast": "be"},
    "recorded too": {"record": [1, -1]},
}


@pytest.mark.parametrize("query", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_keeping_the_top_changes_nothing_that_is_told(llama, query, checkpoint):
    model = Model(llama.net, Letters())
    query = {"contrast": 5, "checkpoint": checkpoint, **query}
    top = attribute(model, IDS, **query, keep="top", k=9)
    every = attribute(model, IDS, **{**query, "record": "all"})
    torch.testing.assert_close(top.tokens, every.tokens)
    at = list(top.neurons.recorded)
    assert at == ([1, len(IDS) - 1] if "record" in query else list(every.prompt.target_positions))
    for site in every.sites:
        torch.testing.assert_close(top.layers(site), every.layers(site))
        torch.testing.assert_close(top.of(site), every.of(site)[:, at])
        torch.testing.assert_close(top.activation(site), every.activation(site)[:, at])
    for site in (*every.sites, "head", None):
        for position, by in (("all", "positive"), ("all", "negative"), ("all", "absolute"), ("last", "positive")):
            some, all_ = (one.top(9, site, position=position, by=by) for one in (top, every))
            assert [(r.neuron, r.position) for r in some] == [(r.neuron, r.position) for r in all_]
            for a, b in zip(some, all_, strict=True):
                output = [
                    [r.relevance, *([] if r.neuron.site == "head" else [r.activation, r.counterfactual or 0])]
                    for r in (a, b)
                ]
                assert output[0] == pytest.approx(output[1], rel=1e-4, abs=1e-7)


def test_what_was_not_kept_is_refused(llama):
    result = attribute(llama, IDS, keep="top", k=3)
    with pytest.raises(InputError, match="k=4"):
        result.top(4, position="all")
    for choice in ({"polarity": "+"}, {"include_sinks": True}, {"layers": range(1)}):
        with pytest.raises(InputError, match="'all'"):
            result.top(3, position="all", **choice)
    for wrong, value in (({"keep": "some"}, "'some'"), ({"keep": "top", "k": 0}, "not 0")):
        with pytest.raises(InputError, match=value):
            attribute(llama, IDS, **wrong)


def test_many_prompts_go_through_in_parts(llama, monkeypatch):
    """And each keeps its own target and contrast."""
    many, targets, contrasts = prompts(4) * 2, [1, 2, 3, 4] * 2, [None, 5, 6, None] * 2
    whole = attribute(llama, many, targets, contrasts)
    monkeypatch.setattr(attribution, "BATCH_SIZE", 3)
    for one, part in zip(whole, attribute(llama, many, targets, contrasts), strict=True):
        assert (one.target_text, one.prompt.ids) == (part.target_text, part.prompt.ids)
        assert (one.contrast and one.contrast.id) == (part.contrast and part.contrast.id)
        torch.testing.assert_close(one.tokens, part.tokens, rtol=1e-3, atol=1e-5)


def test_a_repr_fits_a_line(llama):
    result = attribute(llama, IDS * 4, 3, 5)
    assert repr(result) == (
        "<Relevance of 32 tokens for '<3>' against '<5>', AttnLRP(); ffn (3, 32, 20), attn (3, 32, 24)>"
    )


SHARED = {
    **{"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 6},
    **{"num_key_value_heads": 2, "vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    **{"sliding_window": 32, "max_position_embeddings": 64, "num_kv_shared_layers": 3},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
@pytest.mark.parametrize("rows", [[0, 0, 0], [1, 0, 1]])
def test_rows_after_a_prefix_are_whole_passes_and_leave_it_as_it_is(kind, rows):
    """Also where layers share the keys and values of others."""
    config = LLAMA if kind == "llama" else transformers.AutoConfig.for_model(kind, **SHARED)
    model, before, after = random_model(config), [[7, 3, 12, 44], [5, 3, 21, 9]], [[2, 8], [11, 30], [4, 4]]
    prefix = Prefix.read(model, before)
    for _ in range(2):
        logits = prefix.logits(torch.tensor(after), rows, [4] * 3, [1])[:, 0]
        for row, ids, each in zip(rows, after, logits, strict=True):
            with torch.no_grad():
                whole = model.net(torch.tensor([before[row] + ids]), use_cache=False).logits[0, -1]
            assert torch.allclose(each, whole, atol=1e-5)
