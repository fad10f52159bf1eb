"""Difference rules: relevance compared with another prompt adds up to the difference exactly."""

import random
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from configurations import DIFFERENT, dense, mixtures, others
from conftest import IDS, LLAMA, Double, random_model
from few import third_of
from reference import differences as pair_reference
from reference import models as reference_models
from test_reference import IN_FLOAT32, NO_SDPA, ONLY_SDPA
from test_tasks import make, prompt

from benchmarks import task_pairs
from icebear import ATTNLRP, DIFFERENCE, attribute
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neuron_recorders import AllNeurons
from icebear.concepts.passes.run import Logits, forward_backward
from icebear.errors import MissingRule
from icebear.lrp import differences
from icebear.lrp import operation_table as operations
from icebear.lrp.context import relevance_rules
from icebear.lrp.paired_rows import BLOCK, partner
from icebear.models.objective import objective_of

OTHER = [7, 3, 14, 44, 8, 3, 21, 9]
FAMILIES = [
    (name, kind)
    for name in DIFFERENT
    for kind in ("eager", "sdpa")
    if not (kind == "sdpa" and name in NO_SDPA) and not (kind == "eager" and name in ONLY_SDPA)
]


def pair_of(name):
    """A prompt and another one, for a model of `others`."""
    model = make(name)
    if model.task.name == "image":
        return prompt(model), prompt(model, 1)
    ids = prompt(model)
    return ids, [*ids[:3], 33, *ids[4:]]


@pytest.mark.parametrize(("name", "kind"), third_of(FAMILIES))
def test_tokens_add_up_to_the_difference(name, kind):
    """In every other family the self-test of tests/test_families.py says so."""
    model = random_model({**dense(), **mixtures()}[name], kind)
    with Double():
        result = attribute(model, IDS, 11, 12, counterfactual=OTHER, method=DIFFERENCE, sites=model.sites)
        here, there = (attribute(model, ids, 11, 12).conservation().target for ids in (IDS, OTHER))
    assert result.conservation().target == pytest.approx(here - there, abs=1e-6 if name in IN_FLOAT32 else 1e-9)
    assert abs(result.conservation().remainder) < 1e-6
    assert result.linear_share == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("name", third_of(others()))
def test_so_do_those_of_encoders_encoder_decoders_and_images(name, kind):
    model, (one, other) = make(name, kind), pair_of(name)
    with Double():
        result = attribute(model, one, 1, 2, counterfactual=other, method=DIFFERENCE, sites=model.sites)
    assert abs(result.conservation().target) > 1e-4
    assert abs(result.conservation().remainder) < 1e-6


@pytest.mark.parametrize("name", third_of(["llama", "gpt2", "gemma3", "bloom", "mixtral", "t5", "bert"]))
def test_every_layers_cut_adds_up(name):
    """What its neurons hand on, and what goes past them, is the whole difference."""
    known = {**dense(), **mixtures()}
    model = random_model(known[name], "eager") if name in known else make(name, "eager")
    one, other = (IDS, OTHER) if name in known else pair_of(name)
    for site in model.sites:
        for layer in model.layers_with(site):
            request = objective_of(model, [one, other], 11, 12)
            inputs = Inputs()
            neurons = AllNeurons(model, request.batch, (site,), difference_of=lambda site, layer, x: x - partner(x))
            neurons.stop = True
            neurons.site_layers = [(site, layer)]
            with Double():
                numbers, _ = forward_backward(model, Logits(request), [inputs, neurons], DIFFERENCE)
            read = sum(((x - partner(x)) * g)[0].sum() for x, g in zip(inputs.values, inputs.gradients, strict=True))
            cut = read + neurons.relevance[site][0, layer].sum()
            assert cut.item() == pytest.approx((numbers[0] - numbers[1]).item(), abs=1e-6), (site, layer)


def llama(embeddings=1.0, attention=1.0, dtype=torch.float32):
    """A made model whose embeddings have a standard deviation, and whose attention scores are multiplied."""
    model = random_model(LLAMA, "eager", dtype)
    with torch.no_grad():
        model.net.model.embed_tokens.weight.mul_(embeddings / model.net.model.embed_tokens.weight.std())
        for layer in model.net.model.layers:
            layer.self_attn.q_proj.weight.mul_(attention)
    return model


def errors(model, count=8):
    """Of random pairs: how far the sums are from the differences, as a share of these (but for rounding of logits)."""
    draw, result = random.Random(0), []
    for _ in range(count):
        one = [draw.randrange(2, 48) for _ in range(8)]
        other = [*one[:3], 1 + one[3], *one[4:]]
        output = attribute(model, one, 11, 12, counterfactual=other)
        rounding = 8 * torch.finfo(model.dtype).eps * max(1, abs(output.counterfactual.numbers[0]))
        result.append(max(0, abs(output.conservation().remainder) - rounding) / abs(output.conservation().target))
    return sorted(result)


@pytest.mark.parametrize("embeddings", [1.0, 0.02, 0.01, 0.002])
def test_sums_are_exact_at_every_scale_of_activations(embeddings):
    """Where values are small, a small difference is no rounding."""
    assert errors(llama(embeddings))[-1] < 1e-5
    assert errors(llama(embeddings, dtype=torch.bfloat16))[4] < 0.1  # rounded at each operation, to 3 digits


@pytest.mark.parametrize("attention", [1, 10, 100, 1000])
def test_sums_are_exact_however_hard_attention_is(attention):
    model = llama(attention=attention)
    weights = model.net(torch.tensor([IDS]), output_attentions=True).attentions
    assert attention == 1 or max(layer[..., 1:, :].max() for layer in weights) == 1
    assert errors(model)[-1] < 1e-5


@pytest.mark.release
def test_on_real_weights_too(smol):
    """Also where attention turns from one token to another."""
    benchmark = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "differences.py"))
    for task in ("across-clause", "capitals", "indirect-object"):
        for pair in next(task_pairs.usable_by_task(smol, task_pairs.pairs_of(task), 1, 0))[1]:
            assert max(benchmark["errors"](smol, pair)) < 1e-3, pair


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "olmoe"])
def test_the_reference_finds_the_same(name):
    build = reference_models.gpt if name == "gpt2" else reference_models.llama
    model = random_model({**dense(), **mixtures()}[name])
    with Double():
        result = attribute(model, IDS, 11, 12, counterfactual=OTHER, sites=model.sites)
        tokens, tape = pair_reference.explain(build, model.net, IDS, OTHER, 11, 12)
    assert torch.allclose(result.tokens, tokens, rtol=1e-8, atol=1e-10)
    for site in model.sites:
        assert torch.allclose(result.of(site), tape.site(site, model.layers, len(IDS)), rtol=1e-8, atol=1e-10), site


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mixtral"])
def test_exchanging_the_prompts_changes_the_sign_and_nothing_else(name):
    model = random_model({**dense(), **mixtures()}[name], "eager")
    with Double():
        one = attribute(model, IDS, 11, 12, counterfactual=OTHER)
        two = attribute(model, OTHER, 11, 12, counterfactual=IDS)
    assert torch.allclose(one.tokens, -two.tokens, rtol=1e-9, atol=1e-12)
    assert torch.allclose(one.ffn, -two.ffn, rtol=1e-9, atol=1e-12)


def test_compared_with_nothing_the_rules_are_attnlrps():
    """Where the other row's values are zero: Eq. 9, 14 and 15."""
    torch.manual_seed(0)
    a, b = (torch.randn(1, 4, 3, dtype=torch.float64) for _ in range(2))
    pairs = [torch.cat((x, torch.zeros_like(x))).requires_grad_() for x in (a, b)]
    alone = [x.clone().requires_grad_() for x in (a, b)]

    class Net(torch.nn.Module):
        def forward(self, a, b):
            return torch.tanh(a) * b + torch.nn.functional.silu(a) @ b.transpose(-1, -2) @ b

    result = []
    for method, leaves in ((DIFFERENCE, pairs), (ATTNLRP, alone)):
        net = Net()
        with relevance_rules(net, method):
            y = net(*leaves)
        result.append([(x * g)[:1] for x, g in zip(leaves, torch.autograd.grad(y[:1].sum(), leaves), strict=True)])
    for paired, single in zip(*result, strict=True):
        assert torch.allclose(paired, single)


def attention_masks(count):
    allowed = torch.rand(1, 1, count, count) < 0.5
    allowed[..., 0] = True
    summand = torch.randn(2, 4, 1, count, dtype=torch.float64)
    return {"none": None, "causal": None, "boolean": allowed, "summand": summand.masked_fill(summand > 1, -torch.inf)}


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "summand"])
def test_attention_in_blocks_of_queries_is_attention_written_out(kind, heads):
    """Also where several heads of queries read the same keys, and where the last block is shorter."""
    torch.manual_seed(0)
    count = 2 * BLOCK + 5
    mask = attention_masks(count)[kind]
    leaves = [torch.randn(2, n, count, 8, dtype=torch.float64, requires_grad=True) for n in (4, heads, heads)]

    class Fused(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind == "causal", enable_gqa=True)

    class Apart(torch.nn.Module):
        def forward(self, q, k, v):
            k, v = (x.repeat_interleave(4 // heads, 1) for x in (k, v))
            scores = q @ k.transpose(-1, -2) * 8**-0.5
            if kind == "causal":
                scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
            if kind == "boolean":
                scores = scores.masked_fill(~mask, -torch.inf)
            return (scores + mask if kind == "summand" else scores).softmax(-1) @ v

    results = []
    for net in (Fused(), Apart()):
        with relevance_rules(net, DIFFERENCE):
            y = net(*leaves)
        results.append((y.detach(), *torch.autograd.grad(y[0].sin().sum(), leaves)))
    for fused, apart in zip(*results, strict=True):
        assert torch.allclose(fused, apart, rtol=1e-10, atol=1e-12)


def test_a_batch_is_one_by_one_and_checkpointing_changes_nothing():
    model = random_model(LLAMA, dtype=torch.float32)
    prompts, counterfactual = [IDS, IDS[:5]], [OTHER, OTHER[:5]]
    together = attribute(model, prompts, 11, 12, counterfactual=counterfactual)
    for result, one, other in zip(together, prompts, counterfactual, strict=True):
        alone = attribute(model, one, 11, 12, counterfactual=other, checkpoint=True)
        assert torch.allclose(result.tokens, alone.tokens, rtol=1e-4, atol=1e-6)
        assert torch.allclose(result.ffn, alone.ffn, rtol=1e-4, atol=1e-6)


class Einsum(torch.nn.Module):
    def forward(self, *factors):
        return torch.einsum(",".join(["bi"] * len(factors)) + "->b", *factors)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_product_of_several_factors_has_its_mean_derivative(count):
    """Along the straight line between both rows, by 1,000 steps; it adds up to the difference."""
    net = Einsum()
    factors = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    with relevance_rules(net, DIFFERENCE):
        y = net(*factors)
    gradients = torch.autograd.grad(y[0], factors)
    total = sum(((x[0] - x[1]) * g[0]).sum() for x, g in zip(factors, gradients, strict=True))
    assert total.item() == pytest.approx((y[0] - y[1]).item(), abs=1e-9)
    steps = ((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)[:, None]
    points = [torch.lerp(x[1], x[0], steps).detach().requires_grad_() for x in factors]
    plain = torch.autograd.grad(net(*points).mean(), points)
    for g, steps_g in zip(gradients, plain, strict=True):
        torch.testing.assert_close(g[0], steps_g.sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0, 1e-6, 1, 50])
@pytest.mark.parametrize("func", [torch.exp, torch.cos, F.softplus])
def test_the_multiplier_of_nearly_equal_values_is_the_derivative(func, value):
    """A difference that is rounding is not divided by, also near zero."""
    x = torch.tensor([[value + 1e-9], [value]], dtype=torch.float64, requires_grad=True)
    differences.secant(func, x).sum().backward()
    middle = x.detach().mean().requires_grad_()
    func(middle).backward()
    assert x.grad[0].item() == pytest.approx(middle.grad.item(), rel=1e-12, abs=1e-12)


def test_a_tensor_that_is_not_computed_needs_no_rule():
    """As torch 2.11 makes one at each checkpoint."""
    with relevance_rules(torch.nn.Linear(2, 2), DIFFERENCE) as mode, mode:
        assert torch.empty((0,), requires_grad=True).requires_grad


def test_checkpointing_computes_each_layer_twice():
    """Once forward, and once in the backward pass; multipliers of element-wise functions need no more."""
    model, calls = random_model(LLAMA, dtype=torch.float32), []
    hooks = [layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(0)) for layer in model.net.model.layers]
    attribute(model, IDS, 11, 12, counterfactual=OTHER, checkpoint=True)
    for hook in hooks:
        hook.remove()
    assert len(calls) == 2 * len(hooks)


def test_what_is_not_linear_and_has_no_rule_is_refused():
    class Net(torch.nn.Module):
        def forward(self, x):
            return x.sort(-1).values

    net = Net()
    with relevance_rules(net, DIFFERENCE), pytest.raises(MissingRule, match="sort"):
        net(torch.randn(2, 3, requires_grad=True))
    missing = set(operations.TABLE) - set(differences.TABLE)
    names = {func.__name__ for func in missing}
    assert names <= {*differences.NOT_LINEAR, *differences.KERNELS, "var_mean", "std_mean", "var", "std", "norm"}
