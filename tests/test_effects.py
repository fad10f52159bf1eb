"""Effects of nodes against hooks made by hand: one whole forward pass a node, without batches or a prefix."""

import copy
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import test_tasks
import torch
from configurations import DIFFERENT, dense, mixtures
from conftest import IDS, Letters, random_model
from few import few_of, third_of
from torch.testing import assert_close

from icebear import Edit, Model, Neuron, attribute, steer
from icebear.app.cli.tables.nodes import nodes_table
from icebear.concepts.nodes.random_controls import RANDOM_DRAWS, effects_on_answer, random_effects
from icebear.concepts.passes.inputs import Stream
from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.passes.sites import is_hooked
from icebear.concepts.results import effects
from icebear.concepts.results.effect_words import effect_words
from icebear.concepts.results.effects import LIKELY, NodeEffects
from icebear.concepts.results.ranking import Ranking
from icebear.concepts.vocabulary import calibration
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.explanation.explanation import Explanation
from icebear.explanation.sentences import effect_lines
from icebear.records import Ranked
from icebear.steering import side_effects

CAUSAL = ["llama", "gpt2", "gemma3", "mixtral"]
OTHERS = ["bert", "t5", "vit", "dinov2, registers", "llama, sequence", "bert, sequence"]
OTHER_IDS = [9, 3, 31, 44, 5, 17, 21, 8]
SLIDING = ["mistral", "olmo3", "cohere2", "exaone4", "gemma2", "gemma3", "gpt_oss"]
"""Whose windows are shorter than the test's rows."""
NETS = {**dense(layers=4), **mixtures(layers=4)}


pytestmark = pytest.mark.usefixtures("few_texts")


@cache
def made(name):
    """Twice as deep as usual; in float64, except experts, which torch has no float64 for."""
    if name in test_tasks.CONFIGS:
        return test_tasks.make(name, "sdpa")
    kind = "eager" if name in {"gptj", "bloom", "gemma2", "gpt_oss"} else "sdpa"
    model = random_model(NETS[name], kind)
    model.net.set_experts_implementation("eager")
    return Model(model.net, Letters(), name)


def prompts(model):
    """A prompt and a counterfactual of as many tokens."""
    if model.task.name == "causal":
        return IDS, OTHER_IDS
    if model.task.name == "masked":
        return [*IDS[:2], test_tasks.MASK, *IDS[2:]], [*OTHER_IDS[:2], test_tasks.MASK, *OTHER_IDS[2:]]
    if model.task.name == "image":
        return test_tasks.prompt(model), test_tasks.prompt(model, seed=1)
    return IDS, OTHER_IDS


def slow_experts(mixture, chosen, x, index, weights):
    """A mixture of experts token by token. chosen: (neuron, token) -> value. Returns also all neurons (T, E * I), and
    whether their experts run."""
    width, out = mixture.down_proj.shape[2], torch.zeros_like(x)
    neurons = torch.zeros(len(x), len(mixture.down_proj) * width, dtype=x.dtype)
    run = torch.zeros(neurons.shape, dtype=torch.bool)
    for token in range(len(x)):
        for expert in range(len(mixture.down_proj)):
            columns = slice(expert * width, (expert + 1) * width)
            gate, up = (mixture.gate_up_proj[expert] @ x[token]).chunk(2)
            neurons[token, columns] = mixture.act_fn(gate) * up
        for (neuron, place), value in chosen.items():
            if place == token:
                neurons[token, neuron] = value
        for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
            columns = slice(expert * width, (expert + 1) * width)
            run[token, columns] = True
            out[token] += weight * (mixture.down_proj[expert] @ neurons[token, columns])
    return out, neurons, run


def slow_pass(model, batch, nodes=()):
    """Logits (T, V), or (1, labels), and the inputs of all W_out, of one row. nodes: (neuron, position, value) each."""
    seen, undo = {}, ExitStack()
    read = batch.lengths[0] if batch.decoder else 0

    def set_nodes(site, layer, x):
        x = x.clone()
        before = read if model.stack_of(layer) else 0
        for neuron, position, value in nodes:
            if (neuron.layer, "attn" if neuron.site == "head" else neuron.site) == (layer, site):
                width = len(value)
                x[0, position - before, neuron.index * width : (neuron.index + 1) * width] = value
        seen[site, layer] = x[0]
        return x

    def hook(site, layer):
        def before(module, args):
            x = args[0] if args[0].dim() == 3 else args[0][None]
            x = set_nodes(site, layer, x)
            return (x if args[0].dim() == 3 else x[0], *args[1:])

        return before

    def experts(layer, mixture):
        def forward(x, index, weights):
            own = {(n.index, place): v for n, place, v in nodes if (n.layer, n.site) == (layer, "ffn")}
            out, neurons, run = slow_experts(mixture, own, x, index, weights)
            seen["ffn", layer] = neurons * run
            return out

        return forward

    with undo, torch.no_grad():
        for site in [site for site in ("ffn", "attn", "cross") if site in model.sites]:
            for layer in model.layers_with(site):
                if site == "ffn" and model.family.experts:
                    mixture = model.experts(layer)
                    mixture.forward = experts(layer, mixture)
                    undo.callback(delattr, mixture, "forward")
                else:
                    module = model.site_module(site, layer)
                    undo.callback(module.register_forward_pre_hook(hook(site, layer)).remove)
        logits = model.net(**model.inputs(batch)).logits[0]
    return logits if logits.dim() == 2 else logits[None], seen


def value_of(model, seen, neuron, position, read):
    """The activation of a node, or (head width,) of a head."""
    width = model.head_dim if neuron.site == "head" else 1
    x = seen["attn" if neuron.site == "head" else neuron.site, neuron.layer]
    place = position - (read if model.stack_of(neuron.layer) else 0)
    return x[place, neuron.index * width : (neuron.index + 1) * width]


@cache
def slow_means(model):
    """(layer, site) -> mean activation over all tokens of the calibration texts but sinks, token by token."""
    sums = {}
    for batch in calibration._batches(model):
        for row in range(len(batch.ids)):
            one = batch.rows([row])
            stream = Stream(model, one)
            with model.lock, torch.no_grad(), stream.reading(model):
                model.final_stream(one)
            sinks, read = stream.sinks(0), one.lengths[0]
            one = model.read([list(one.row_ids(0)[:read])]) if one.pixels is None else one
            for (site, layer), x in slow_pass(model, one)[1].items():
                before = read if model.stack_of(layer) and one.decoder else 0
                own = [x[place] for place in range(len(x)) if place + before not in sinks]
                total, count = sums.get((site, layer), (0, 0))
                sums[site, layer] = total + sum(own), count + len(own)
    return {place: total / count for place, (total, count) in sums.items()}


def candidates(model, relevance, generator, count=12):
    """Random neurons and heads at the last and at earlier positions, and those with the largest relevance."""
    sites = {"ffn": model.width("ffn"), "attn": model.width("attn"), "head": model.heads}
    sites |= {"cross": model.width("cross")} if "cross" in model.sites else {}
    total, read, nodes = len(relevance.prompt.ids), relevance.prompt.encoder_length, []
    for number in range(count):
        site = sorted(sites)[number % len(sites)]
        layer = generator.choice(model.layers_with("attn" if site == "head" else site))
        start = read if model.stack_of(layer) and total > read else 0
        end = read if not start else total
        position = end - 1 if number % 3 == 0 else generator.randrange(start, end)
        nodes.append(Ranked(Neuron(layer, site, generator.randrange(sites[site])), position, None, 0.0))
    return nodes + relevance.top(6, position="all")


class Slow:
    """Effects by hand."""

    def __init__(self, model, relevance, counterfactual=None, there_at=None):
        """there_at: where the counterfactual is predicted, if elsewhere."""
        self.model, self.relevance, self.batch = model, relevance, relevance.explained().batch
        self.read = relevance.prompt.encoder_length
        self.positions = relevance.explained().positions[0]
        self.logits, _ = slow_pass(model, self.batch)
        means = slow_means.__wrapped__ if is_hooked(model) else slow_means
        self.means = None if counterfactual is not None else means(model)
        likely = [self.logits[self.place(0)]]
        if counterfactual is not None:
            there, self.seen = slow_pass(model, counterfactual)
            likely.append(there[self.place(0) if there_at is None else there_at])
        best = [row.argsort(descending=True, stable=True)[:LIKELY].tolist() for row in likely]
        explained = [answer.id for answer in (relevance.target, relevance.contrast) if answer]
        self.tokens = list(dict.fromkeys([*(id for row in best for id in row), *explained]))

    def place(self, number):
        return self.positions[number] if len(self.logits) > 1 else 0

    def value(self, row):
        if self.means is None:
            return value_of(self.model, self.seen, row.neuron, row.position, self.read)
        width = self.model.head_dim if row.neuron.site == "head" else 1
        means = self.means["attn" if row.neuron.site == "head" else row.neuron.site, row.neuron.layer]
        return means[row.neuron.index * width : (row.neuron.index + 1) * width]

    def effect(self, rows):
        """Effects (W,) of setting these nodes, not centred, and that on the log-probability of the phrase."""
        without, _ = slow_pass(self.model, self.batch, [(row.neuron, row.position, self.value(row)) for row in rows])
        targets = self.relevance.explained().targets[0]
        numbers = [
            sum(x.log_softmax(-1)[self.place(p)][id] for p, id in enumerate(targets)) for x in (self.logits, without)
        ]
        return (self.logits - without)[self.place(0)][self.tokens].float(), float(numbers[0] - numbers[1])


def check(model, relevance, slow, nodes, atol=1e-5):
    """Nodes in one call, alone and together equal the slow way; returns the effects."""
    result = relevance.effects(nodes)
    patched, few = NodeEffects(model, relevance), list(nodes[:4])
    joint, joint_mean, joint_answer = patched.effects([few, nodes[4:6]])
    alone = [patched.effects([[node]]) for node in few]
    expected = [slow.effect([row]) for row in nodes]
    assert set(result.token_ids) == set(slow.tokens)
    assert result.token_ids == tuple(patched.token_ids)
    order = [slow.tokens.index(id) for id in result.token_ids]
    close = {"rtol": 1e-5, "atol": atol}
    whole = torch.stack([x for x, _ in expected])[:, order]
    assert_close(result.matrix + result.means[:, None], whole, **close)
    assert_close(result.means, whole.mean(1) if whole.shape[1] > 1 else torch.zeros(len(whole)), **close)
    for row, (matrix, means, _) in enumerate(alone):
        assert_close(matrix[0] + means[0], whole[row], **close)
    for row, some in enumerate((few, nodes[4:6])):
        effect, answer = slow.effect(some)
        assert_close(joint[row] + joint_mean[row], effect[order], **close)
        assert joint_answer[row].item() == pytest.approx(answer, rel=1e-4, abs=1e-4)
    assert result.log_probability.tolist() == pytest.approx([answer for _, answer in expected], rel=1e-4, abs=1e-4)
    assert result.phrase is None or result.phrase.equal(result.log_probability)
    assert whole.abs().max() > 1e-3
    return result


def explained(model, compared, sites=None):
    prompt, other = prompts(model)
    options = {"sites": sites or [site for site in ("ffn", "attn", "cross") if site in model.sites]}
    if not compared:
        return attribute(model, prompt, method="attnlrp", **options), None  # an image is not compared with its blur
    answer = model.predict(prompt, 1)[0].id
    relevance = attribute(model, prompt, answer, (answer + 1) % 3, counterfactual=other, **options)
    return relevance, relevance.counterfactual.pairs[0].rows([1]).batch


@pytest.mark.parametrize("compared", [True, False], ids=["counterfactual", "average"])
@pytest.mark.parametrize("name", third_of([*CAUSAL, *OTHERS]))
def test_effects_equal_a_hook_made_by_hand(name, compared, generator):
    model = made(name)
    relevance, other = explained(model, compared)
    nodes = candidates(model, relevance, generator)
    result = check(model, relevance, Slow(model, relevance, other), nodes)
    assert result.nodes == tuple(nodes)
    assert result.phrase is None
    assert result.relative_to == ("counterfactual" if compared else "average")
    assert len(result.to_frame()) == result.matrix.numel()
    assert result.to_dict()["matrix"] == result.matrix.tolist()


@pytest.mark.parametrize("name", third_of([*CAUSAL, *OTHERS]))
def test_means_are_over_all_tokens_but_sinks(name):
    model = made(name)
    means, slow = calibrate(model).means, slow_means(model)
    assert set(means) == {site for site, _ in slow}
    for (site, layer), x in slow.items():
        assert_close(means[site][layer], x.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "compared", "where"),
    [
        ("llama", True, "all"),
        ("llama", False, "last"),
        ("gpt2", False, "all"),
        ("mixtral", True, "last"),
        ("bert", True, "all"),
        ("bert", False, "last"),
    ],
)
def test_effects_under_edits(name, compared, where, generator):
    """Compared with a counterfactual, or with the average under the edits."""
    model = made(name)
    plain = NodeEffects(model, explained(model, compared)[0])
    first = "L0.attn.3" if name == "mixtral" else "L0.ffn.3"  # the slow experts know no edits
    edits = [Edit(first, "set", 4.0, where=where), Edit("L1.head.1", "scale", -2.0, where=where)]
    with steer(model, edits):
        relevance, other = explained(model, compared)
        nodes = candidates(model, relevance, generator)
        slow = Slow(model, relevance, other)
        check(model, relevance, slow, nodes)
        edited = NodeEffects(model, relevance).effects([[node] for node in nodes])[0]
    with_own = plain.effects([[node] for node in nodes])[0]
    assert edited.shape != with_own.shape or (edited - with_own).abs().max() > 1e-3


@pytest.mark.parametrize("name", few_of(["llama", "gpt2", "gemma3", "t5"], "llama", "t5"))
@pytest.mark.parametrize("compared", [True, False], ids=["counterfactual", "average"])
def test_a_phrase_has_effects_at_its_first_word_and_on_its_probability(name, compared, generator):
    model = made(name)
    options = {"counterfactual": OTHER_IDS} if compared else {}
    sites = [site for site in ("ffn", "attn", "cross") if site in model.sites]
    relevance = attribute(model, IDS, target_text="the", sites=sites, **options)
    other = relevance.counterfactual.pairs[0].rows([1]).batch if compared else None
    nodes = candidates(model, relevance, generator)
    result = check(model, relevance, Slow(model, relevance, other), nodes)
    assert result.phrase.shape == (len(nodes),)
    assert result.phrase.abs().max() > 1e-2
    first = relevance.prompt.target_positions[0]
    later = [row for row, node in enumerate(nodes) if node.position > first and not model.task.stacks > 1]
    assert not result.matrix[later].any()  # of the first word
    assert not later or result.phrase[later].any()


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_passes_of_any_size_give_the_same(name, generator, monkeypatch):
    model = made(name)
    relevance, _ = explained(model, True)
    sets = [[node] for node in candidates(model, relevance, generator)]
    whole, *_ = NodeEffects(model, relevance).effects(sets)
    limits = (
        {"PASS": 0},
        {"PASS": 3},
        {"PASS": 10**6},
        {"ROWS_PER_PASS": 4, "PASS": 0},
        {"TOKENS_PER_PASS": 17},
        {"LOGITS": 1},
    )
    for changed in limits:
        with monkeypatch.context() as patch:
            for limit, value in changed.items():
                patch.setattr(f"icebear.concepts.results.effects.{limit}", value)
            patched = NodeEffects(model, relevance)
            assert_close(patched.effects(sets)[0], whole, rtol=1e-5, atol=1e-5)
            assert_close(patched.effects(sets[::-1])[0].flip(0), whole, rtol=1e-5, atol=1e-5)
            assert patched.effects([])[0].shape == (0, len(patched.token_ids))


def test_a_span_of_an_answer(model, generator):
    answer = model.answer("The ice bear", max_new_tokens=6)
    relevance = attribute(model, answer, span=(2, 5))
    nodes = candidates(model, relevance, generator)
    result = check(model, relevance, Slow(model, relevance), nodes)
    assert max(node.position for node in nodes) > relevance.prompt.target_positions[0] - 1
    assert result.phrase.abs().max() > 1e-3
    one = attribute(model, answer, span=(3, 4))
    assert one.effects(3).phrase is None


def test_two_counterfactuals_are_averaged(model):
    texts = ["The wild camel", "The tame horse"]
    relevance = attribute(model, "The dark whale", 5, 6, counterfactual=texts)
    node = relevance.top(1, "attn", position="all")[0]
    value = NodeEffects(model, relevance).node(node).value
    place = node.neuron.layer, node.position, node.neuron.index
    one = [attribute(model, "The dark whale", 5, 6, counterfactual=text) for text in texts]
    mean = sum(x.neurons.counterfactual["attn"][place] for x in one) / 2
    assert value.item() == pytest.approx(mean.item())
    assert len(NodeEffects(model, relevance).token_ids) == 50


def test_a_counterfactual_of_another_length(generator):
    model = made("llama")
    relevance = attribute(model, IDS, 5, 6, counterfactual=OTHER_IDS[:6])
    nodes = [node for node in candidates(model, relevance, generator) if node.neuron.site != "head"]
    weights = relevance.counterfactual.alignments[0]
    other = relevance.counterfactual.pairs[0].rows([1]).batch
    slow = Slow(model, relevance, other, 5)
    slow.seen = {place: weights.to(x) @ x for place, x in slow.seen.items()}
    check(model, relevance, slow, nodes)


def test_a_relevance_in_bfloat16_or_with_only_the_largest_nodes(model):
    for dtype in (torch.bfloat16, torch.float16):
        half = Model(copy.deepcopy(model.net).to(dtype), Letters(), "half")
        for options in ({}, {"counterfactual": "The wild camel"}):
            result = half_precision = attribute(half, "The dark whale", 5, 6, **options).effects(4)
            assert half_precision.matrix.isfinite().all()
            assert result.matrix.dtype == torch.float32
    whole = attribute(model, "The dark whale", 5, 6, counterfactual="The wild camel")
    few = attribute(model, "The dark whale", 5, 6, counterfactual="The wild camel", record="last", keep="top")
    assert_close(few.effects(5).matrix, whole.effects(5).matrix)
    unrecorded = [Ranked(Neuron(0, "ffn", 0), 1, None, 0.0), Ranked(Neuron(1, "head", 2), 1, None, 0.0)]
    assert_close(few.effects(unrecorded).matrix, whole.effects(unrecorded).matrix)


def test_words_are_read_once_and_have_letters():
    texts = [" the", "The", " a", " 7", ".", " bear", " ice", "é"]
    raised, lowered = effect_words(texts, torch.tensor([3.0, 2.0, 9.0, 8.0, 7.0, 1.0, -1.0, 0.5]), 3)
    assert (raised, lowered) == (["the", "bear", "é"], ["ice"])


# --- passes after a prefix ---


ROWS = [IDS[:5], OTHER_IDS, [3, 12, 40]]


@pytest.mark.parametrize("name", third_of(DIFFERENT))
def test_passes_after_any_beginning_equal_whole_passes(name):
    model, rows = made(name), ROWS
    prefix = Prefix.of(model, rows)
    if prefix is None:
        rows = [row[:3] for row in rows]  # shorter than the window
        prefix = Prefix.of(model, rows)
    places = [(row, start) for row, ids in enumerate(rows) for start in range(len(ids), 0, -2)]
    for length in (1, 3):
        new = [[(7 * row + 5 * start + 11 * place) % 50 for place in range(length)] for row, start in places]
        after = list(range(length))
        wholes = []
        for (row, start), ids in zip(places, new, strict=True):
            with torch.no_grad():
                wholes.append(model.net(torch.tensor([[*rows[row][:start], *ids]]), use_cache=False).logits[0, start:])
                alone = prefix.logits(torch.tensor([ids]), [row], [start], after)[0]
            assert_close(alone, wholes[-1], rtol=1e-5, atol=1e-5)
        each = zip(*places, strict=True)
        if length + max(map(len, rows)) > prefix.window:
            with pytest.raises(AssertionError):
                prefix.logits(torch.tensor(new), *each, after)
        else:
            together = prefix.logits(torch.tensor(new), *each, after)
            assert_close(together, torch.stack(wholes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", third_of(NETS))
def test_a_prefix_is_as_long_as_the_window(name):
    """Most families have none that is shorter than the test's rows."""
    model = random_model(NETS[name], "eager", torch.float32)
    model.net.set_experts_implementation("eager")
    assert (Prefix.of(model, ROWS) is None) == (name in SLIDING)
    assert Prefix.of(model, [row[:3] for row in ROWS])


@pytest.mark.parametrize("name", few_of(["llama", "gpt2", "bloom", "mixtral"], "llama", "mixtral"))
def test_all_ways_of_reading_held_out_contexts_give_the_same(name):
    model = made(name)
    texts = ["The bear.", "Ice.", "A longer line."]
    plain = [model.next_logits(ids).log_softmax(-1) for ids in side_effects.HeldOutContexts(model, texts).contexts]
    for where, ways in (("last", ("_last_tokens",)), ("all", ("_whole_texts",)), ("prompt", ("_whole_texts",))):
        edits = [Edit("L0.ffn.3", "set", 3.0, where=where), Edit("L1.head.2", "scale", -1.0, where=where)]
        kls = []
        for way in (*ways, "_ends"):
            contexts = side_effects.HeldOutContexts(model, texts)
            assert contexts._reader(edits).__name__ in ways
            contexts._reader = lambda _, way=way, contexts=contexts: getattr(contexts, way)
            kls.append(contexts.off_target_kl(edits))
        slow = []
        for ids, logs in zip(contexts.contexts, plain, strict=True):
            with steer(model, edits):
                slow.append((logs.exp() * (logs - model.next_logits(ids).log_softmax(-1))).sum().item())
        assert kls == pytest.approx([sum(slow) / len(slow)] * 2, rel=1e-4)
        assert kls[0] > 1e-3


# --- a real model ---


def test_effects_of_the_default_model(smol):
    relevance = attribute(smol, "The ice bear lives in the", counterfactual="The wild camel lives in the")
    nodes = [*relevance.top(5, position="all"), *relevance.top(2, "head", position="all")]
    result = relevance.effects(nodes)
    row = [str(node.neuron) for node in nodes].index("L29.ffn.490")
    slow = Slow(smol, relevance, relevance.counterfactual.pairs[0].rows([1]).batch)
    expected = slow.effect([nodes[row]])[0][[slow.tokens.index(id) for id in result.token_ids]]
    assert_close(result.matrix[row] + result.means[row], expected, rtol=1e-5, atol=5e-5)  # logits in float32
    raised, lowered = result.words(row)
    assert {"Arabian", "Sahara"} <= set(lowered)
    assert len(raised) == 4


def test_with_a_contrast_effects_on_the_answer_are_on_the_difference(model, monkeypatch):
    """Also where the contrast is not likely, and those of random nodes."""
    monkeypatch.setattr(effects, "LIKELY", 3)
    logits = model.next_logits("the cold bears")
    target, contrast = int(logits.argmax()), int(logits.argmin())
    relevance = attribute(model, "the cold bears", target, contrast, sites=["ffn"])
    patched, slow, rows = NodeEffects(model, relevance), Slow(model, relevance), relevance.top(2)
    slow.tokens = [target, contrast]

    def effect(row):
        change = slow.effect([row])[0]
        return float(change[0] - change[1])

    measured = effects_on_answer(patched.measure(rows), relevance)
    assert measured == pytest.approx([effect(row) for row in rows], abs=1e-5)
    drawn = effects_on_answer(random_effects(patched, rows), relevance)
    layers = {row.neuron.layer for row in rows}
    every = [replace(rows[0], neuron=Neuron(x, "ffn", i)) for x in layers for i in range(model.width("ffn"))]
    known = torch.tensor([effect(row) for row in every])
    assert len(drawn) == RANDOM_DRAWS
    assert all((known - value).abs().min() < 1e-5 for value in drawn)
    explanation = Explanation.of(model, relevance)
    title = next(line.text for line in effect_lines(replace(explanation, random_effects=(0.0,))) if line.text)
    assert [repr(model.text(token)) in title for token in (target, contrast)] == [True, True]


@pytest.mark.parametrize("compared", [False, True])
def test_a_ranking_has_the_change_of_the_answers_log_probability_beside_random_nodes(model, compared):
    """That of steering: the node is set to its mean, or to its counterfactual value."""
    prompt, other = "the cold bears", "the warm bears"
    relevance = attribute(model, prompt, sites=["ffn"], **({"counterfactual": other} if compared else {}))
    explanation = Explanation.of(model, relevance, Ranking(4, "ffn", position="last"))
    target = relevance.target.id

    def change(neuron, position):
        with torch.no_grad():
            values = attribute(model, other, sites=["ffn"]).activation("ffn")
            means = calibrate(model).means["ffn"]
        value = float(values[neuron.layer, position, neuron.index] if compared else means[neuron.layer, neuron.index])
        with steer(model, Edit(neuron, "set", value, where=f"position:{position}")):
            edited = model.next_logits(prompt)
        return float((model.next_logits(prompt).log_softmax(-1) - edited.log_softmax(-1))[target])

    last = len(relevance.tokens) - 1
    expected = [change(node.ranked.neuron, last) for node in explanation.nodes]
    assert [node.log_probability for node in explanation.nodes] == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 1e-4
    ranked = {node.ranked.neuron for node in explanation.nodes}
    layers = {neuron.layer for neuron in ranked}
    every = {Neuron(x, "ffn", i) for x in layers for i in range(model.width("ffn"))} - ranked
    known = torch.tensor([change(neuron, last) for neuron in sorted(every)])
    assert len(explanation.random_log_probabilities) == RANDOM_DRAWS
    assert all((known - value).abs().min() < 1e-5 for value in explanation.random_log_probabilities)
    rows = explanation.to_dict()
    assert [row["log_probability"] for row in rows["ranking"]] == [node.log_probability for node in explanation.nodes]
    assert rows["random_log_probabilities"] == list(explanation.random_log_probabilities)
    header = nodes_table(explanation).columns
    assert "log p" in [column.header for column in header]


def test_a_long_counterfactual_is_not_read_for_a_control(model, monkeypatch):
    relevance = attribute(model, "the cold bears", counterfactual="the warm bears", keep="top")
    ranking = Ranking(4, "ffn", position="all")
    assert len(Explanation.of(model, relevance, ranking).random_log_probabilities) == RANDOM_DRAWS
    monkeypatch.setattr(effects, "VALUES", 100)
    assert Explanation.of(model, relevance, ranking).random_log_probabilities == ()


def test_a_number_without_alternatives_has_no_log_probability():
    model = test_tasks.labelled(problem_type="regression")
    explanation = Explanation.of(model, attribute(model, IDS, sites=["ffn"]))
    assert {node.log_probability for node in explanation.nodes} == {None}
    assert explanation.random_log_probabilities == ()
    assert "log p" not in [column.header for column in nodes_table(explanation).columns]
