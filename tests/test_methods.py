"""Every method against a slow version, or a library's, on a small model; names; a new method."""

from dataclasses import dataclass

import pytest
import torch
from configurations import dense
from conftest import IDS, LLAMA, random_model
from test_differences import OTHER
from test_tasks import make

from benchmarks import ablation, task_pairs
from benchmarks.baselines import (
    OTHERS,
    Alti,
    AltiLogit,
    AtMan,
    GradCAM,
    Gradient,
    GradientRollout,
    SmoothGrad,
    with_controls,
)
from benchmarks.truth.judge.rounds import Rounds, gains
from icebear import attribute
from icebear.concepts.methods.attnlrp import CP_LRP, PA_LRP, AttnLRP
from icebear.concepts.methods.difference_rules import Difference
from icebear.concepts.methods.gradients import GradientTimesInput, IntegratedGradients
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import METHODS, method_of, name_of
from icebear.concepts.nodes.controls import nodes_of
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neuron_recorders import Values
from icebear.concepts.passes.run import Logits, forward, new_accounting
from icebear.errors import InputError, UnknownName
from icebear.evaluation import faithfulness
from icebear.evaluation.baselines import (
    BASELINES,
    AttentionRollout,
    Occlusion,
    Positions,
    Random,
    methods_of,
)
from icebear.lrp.context import relevance_rules
from icebear.models.objective import objective_of

MASK = 49


@pytest.fixture(params=["llama", "gpt2", "bert"])
def model(request):
    if request.param == "bert":
        return make("bert")
    return random_model(LLAMA if request.param == "llama" else dense()["gpt2"])


def prompt(model):
    return [*IDS[:4], MASK, *IDS[4:]] if model.task.name == "masked" else IDS


def scored(model, embeddings, target=11):
    """The logit of the target from given embeddings (B, T, D)."""
    logits = model.net(inputs_embeds=embeddings).logits
    return logits[:, prompt(model).index(MASK) if model.task.name == "masked" else -1, target]


def embedded(model):
    return model.net.get_input_embeddings()(torch.tensor([prompt(model)])).detach()


def result_of(model, method):
    return attribute(model, prompt(model), 11, method=method, number="logit").tokens.double()


def close(a, b, tolerance=1e-5):
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def test_gradients(model):
    x = embedded(model).requires_grad_()
    (g,) = torch.autograd.grad(scored(model, x).sum(), x)
    assert close(result_of(model, Gradient(1)), g[0].abs().sum(-1))
    assert close(result_of(model, Gradient(2)), g[0].pow(2).sum(-1).sqrt())
    assert close(result_of(model, GradientTimesInput()), (x * g)[0].sum(-1))


def test_integrated_gradients_is_captums_and_complete(model):
    from captum.attr import IntegratedGradients as Captum

    x = embedded(model)
    theirs = Captum(lambda e: scored(model, e)).attribute(x, n_steps=20, method="riemann_middle")[0].sum(-1)
    assert close(result_of(model, IntegratedGradients(20)), theirs, 1e-4)
    if model.net.config.model_type == "llama":
        return  # RMSNorm is too steep at zero for a sum over steps to be complete
    whole = scored(model, x) - scored(model, torch.zeros_like(x))
    many = result_of(model, IntegratedGradients(400)).sum().item()
    assert many == pytest.approx(whole.item(), rel=0.05, abs=0.05)


def test_occlusion_is_captums(model):
    from captum.attr import FeatureAblation

    x = embedded(model)
    mask = torch.arange(x.shape[1])[None, :, None].expand_as(x)
    theirs = FeatureAblation(lambda e: scored(model, e)).attribute(x, feature_mask=mask)[0, :, 0]
    assert close(result_of(model, Occlusion()), theirs)


def test_smoothgrad(model):
    x = embedded(model)
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros_like(x)
    for _ in range(4):
        noise = torch.randn(x.shape, generator=generator).to(x.dtype)
        noisy = (x + 0.2 * x.std() * noise).requires_grad_()
        total += torch.autograd.grad(scored(model, noisy).sum(), noisy)[0] / 4
    assert close(result_of(model, SmoothGrad(0.2, 4, 3)), (x * total)[0].sum(-1), 1e-4)


def maps(model):
    """Attention (H, T, T) of each layer, and its gradient, from the eager model."""
    model.net.set_attn_implementation("eager")
    x = embedded(model).requires_grad_()
    output = model.net(inputs_embeds=x, output_attentions=True)
    at = prompt(model).index(MASK) if model.task.name == "masked" else len(IDS) - 1
    gradients = torch.autograd.grad(output.logits[0, at, 11], output.attentions)
    return [a[0].detach() for a in output.attentions], [g[0] for g in gradients], at


def test_attention_rollouts_and_gradcam(model):
    attentions, gradients, at = maps(model)
    T = attentions[0].shape[-1]
    rolled = torch.eye(T).double()
    weighed = torch.eye(T).double()
    for a, g in zip(attentions, gradients, strict=True):
        one = sum(a) / len(a)
        rolled = torch.stack([(0.5 * (one[i] + torch.eye(T)[i])) @ rolled for i in range(T)])
        best = sum((a[h] * g[h]).clamp(min=0) for h in range(len(a))) / len(a)
        weighed = weighed + best.double() @ weighed
    assert close(result_of(model, AttentionRollout()), rolled[at], 1e-4)
    assert result_of(model, AttentionRollout()).sum().item() == pytest.approx(1, abs=1e-5)
    assert close(result_of(model, GradientRollout()), (weighed - torch.eye(T))[at], 1e-4)
    last = sum(attentions[-1][h] * gradients[-1][h].mean() for h in range(len(attentions[-1]))) / len(attentions[-1])
    assert close(result_of(model, GradCAM()), last[at].clamp(min=0), 1e-4)


def test_atman_scales_a_column_of_scores(model):
    """With the softmax patched: scores of the column times 1 - p, before the mask."""
    model.net.set_attn_implementation("eager")
    softmax = torch.nn.functional.softmax
    ids = torch.tensor([prompt(model)])
    at = prompt(model).index(MASK) if model.task.name == "masked" else -1

    def log_probability(column, p):
        def patched(x, *args, **kwargs):
            x = x.clone()
            masked = x[..., column] < -1e30
            x[..., column] = torch.where(masked, x[..., column], x[..., column] * (1 - p))
            return softmax(x, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            if column is not None:
                patch.setattr(torch.nn.functional, "softmax", patched)
            return softmax(model.net(ids).logits[0, at], -1)[11].log()

    expected = torch.stack([log_probability(None, 0) - log_probability(i, 0.7) for i in range(ids.shape[1])])
    assert close(result_of(model, AtMan(0.7)), expected, 1e-4)


def position_entries(model):
    """For each layer (of embeddings: for the input) what each entry of a token's position got (T, D), by hand:
    positions are leaves, and relevance is value x gradient under the rules."""
    leaves = []

    def leaf(x):
        leaves.append(x.detach().clone().requires_grad_())
        return leaves[-1]

    def rotary(module, args, kwargs):
        return args, {**kwargs, "position_embeddings": tuple(map(leaf, kwargs["position_embeddings"]))}

    if model.family.position_embedding:
        table = model.net.get_submodule(model.family.position_embedding)
        hooks = [table.register_forward_hook(lambda module, args, output: leaf(output))]
    else:
        hooks = [layer.register_forward_pre_hook(rotary, with_kwargs=True) for layer in model.layer_modules]
    place = prompt(model).index(MASK) if model.task.name == "masked" else -1
    rules = relevance_rules(model.net, PA_LRP, accounting=new_accounting(model, 1))
    with torch.enable_grad(), rules, Inputs().reading(model):
        logit = model.net(torch.tensor([prompt(model)])).logits[0, place, 11]
        gradients = torch.autograd.grad(logit, leaves)
    for hook in hooks:
        hook.remove()
    entries = [(x.detach() * g)[0] for x, g in zip(leaves, gradients, strict=True)]
    return (
        entries if len(entries) == 1 else [torch.cat(pair, 1) for pair in zip(entries[::2], entries[1::2], strict=True)]
    )


@pytest.mark.parametrize("name", ["pa-lrp", "pa-lrp-signed"])
def test_readings_of_pa_lrp_s_sum(model, name):
    expected = attribute(model, prompt(model), 11, method=PA_LRP, number="logit").tokens.double()
    tokens = expected.clone()
    for layer in position_entries(model):
        for place, entries in enumerate(layer.tolist()):
            whole = sum(entries)
            expected[place] += {"pa-lrp": max(whole, 0), "pa-lrp-signed": whole}[name]
    (scores,) = method_of(name, ALL).scores(model, objective_of(model, [prompt(model)], 11))
    assert close(scores, expected)
    if name == "pa-lrp":
        assert close(result_of(model, Positions()), expected - tokens)
    else:
        assert close(result_of(model, method_of(name, ALL)), expected)


def test_random_depends_on_the_seed_and_the_tokens_alone(model):
    assert torch.equal(result_of(model, Random(1)), result_of(model, Random(1)))
    assert not torch.equal(result_of(model, Random(1)), result_of(model, Random(2)))


def slow_alti(model, layers_of):
    """Contributions with loops; `layers_of` gives for each layer (x, parts (T, T, D))."""
    shares = []
    for parts in layers_of:
        T = len(parts)
        share = torch.zeros(T, T).double()
        for i in range(T):
            whole = sum(parts[i, j] for j in range(T))
            for j in range(T):
                share[i, j] = max(0.0, (whole.abs().sum() - (whole - parts[i, j]).abs().sum()).item())
            share[i] /= share[i].sum()
        shares.append(share)
    return shares


def test_alti_logit_of_llama_by_loops():
    model = random_model(LLAMA, "eager")
    net, H, KV, d = model.net, 4, 2, 6
    ids = torch.tensor([IDS])
    with torch.no_grad():
        output = net(ids, output_attentions=True, output_hidden_states=True)
        streams = [*output.hidden_states[:-1]]
        last = None

        def keep(module, args):
            nonlocal last
            last = args[0][0]

        hook = net.model.norm.register_forward_pre_hook(keep)
        net(ids)
        hook.remove()
        reading = net.lm_head.weight[11] * net.model.norm.weight / (last[-1].pow(2).mean() + 1e-6).sqrt()
        parts, updates = [], []
        for layer, x, A in zip(net.model.layers, streams, output.attentions, strict=True):
            n = layer.input_layernorm(x)[0]
            v = layer.self_attn.v_proj(n).view(len(IDS), KV, d)
            T = len(IDS)
            part = torch.zeros(T, T, 24).double()
            for i in range(T):
                for j in range(T):
                    for h in range(H):
                        o = layer.self_attn.o_proj.weight[:, h * d : (h + 1) * d]
                        part[i, j] += A[0, h, i, j] * (o @ v[j, h // (H // KV)])
            updates.append(part[-1] @ reading)
            for i in range(T):
                part[i, i] += x[0, i]
            parts.append(part)
        shares = slow_alti(model, parts)
        down, expected = torch.eye(len(IDS)).double(), torch.zeros(len(IDS)).double()
        for update, share in zip(updates, shares, strict=True):
            expected += update @ down
            down = share @ down
        expected[-1] += streams[0][0, -1] @ reading
    assert close(result_of(model, AltiLogit()), expected, 1e-4)


def test_alti_of_bert_by_loops():
    model = make("bert")
    net = model.net
    ids = torch.tensor([prompt(model)])
    T, H, d = ids.shape[1], 4, 6
    with torch.no_grad():
        output = net(ids, output_attentions=True, output_hidden_states=True)
        all_parts = []
        for layer, x, A in zip(net.bert.encoder.layer, output.hidden_states, output.attentions, strict=False):
            v = layer.attention.self.value(x)[0].view(T, H, d)
            out = layer.attention.output
            part = torch.zeros(T, T, 24).double()
            for i in range(T):
                for j in range(T):
                    for h in range(H):
                        part[i, j] += A[0, h, i, j] * (out.dense.weight[:, h * d : (h + 1) * d] @ v[j, h])
                part[i, i] += x[0, i]
                centred = part[i] - part[i].mean(-1, keepdim=True)
                part[i] = centred / centred.sum(0).std(correction=0) * out.LayerNorm.weight
            all_parts.append(part)
        down = torch.eye(T).double()
        for share in slow_alti(model, all_parts):
            down = share @ down
    assert close(result_of(model, Alti()), down[prompt(model).index(MASK)], 1e-4)
    assert result_of(model, Alti()).sum().item() == pytest.approx(1, abs=1e-5)


ALL = BASELINES | OTHERS | METHODS


@pytest.mark.parametrize("name", [n for n, one in ALL.items() if n != "alti" and not one.needs_counterfactual])
def test_a_batch_is_one_by_one(name):
    model = random_model(LLAMA)
    prompts = [IDS, IDS[:4], IDS[2:]]
    for row, one in zip(attribute(model, prompts, method=ALL[name]), prompts, strict=True):
        alone = attribute(model, one, method=ALL[name])
        assert row.prompt.ids == alone.prompt.ids
        assert close(row.tokens, alone.tokens, 1e-4)


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("bert", AltiLogit(), "ALTI"),
        ("t5", AttentionRollout(), "encoder-decoder"),
        ("t5", AtMan(), "AtMan"),
        ("t5", Alti(), "ALTI"),
    ],
)
def test_what_cannot_run_says_why(name, method, message):
    model = make(name)
    with pytest.raises(InputError, match=message):
        attribute(model, [*IDS, MASK], 11, method=method)


def test_a_method_by_name_is_its_value():
    model = random_model(LLAMA)
    for name, method in (("gxi", GradientTimesInput()), ("pa-lrp", PA_LRP)):
        assert torch.equal(attribute(model, IDS, method=name).tokens, attribute(model, IDS, method=method).tokens)
    with pytest.raises(UnknownName, match="'attnlrp'"):
        attribute(model, IDS, method="attnlpr")


def test_methods_that_cannot_run_on_some_causal_models():
    with pytest.raises(InputError):
        attribute(random_model(dense()["qwen3"]), IDS, method=AtMan())
    with pytest.raises(InputError, match="Random"):
        attribute(random_model(LLAMA), IDS, method=Random(), sites=("ffn",))


def test_gradients_and_occlusion_of_encoder_decoders_and_classifiers():
    for name in ("t5", "bert, sequence", "bert, token"):
        model = make(name)
        for method in (GradientTimesInput(), IntegratedGradients(3), Occlusion()):
            options = {"prefix": "ab"} if name == "t5" else {}
            tokens = attribute(model, IDS, method=method, **options).tokens
            assert len(tokens) == len(IDS) + (3 if name == "t5" else 0)
            assert tokens.abs().sum() > 0


@pytest.mark.parametrize("name", ["gxi", "attnlrp", "cp-lrp"])
def test_a_method_scores_the_neurons_that_attribute_shows(name):
    model = random_model(LLAMA)
    relevance = attribute(model, IDS, 11, method=name, sites=("ffn", "attn"), number="logit")
    for site in ("ffn", "attn"):
        scores = METHODS[name].neuron_scores(model, objective_of(model, [IDS], 11), site)
        assert close(scores, relevance.of(site))
        assert scores.abs().sum() > 0
    with pytest.raises(InputError, match="Occlusion"):
        BASELINES["occlusion"].neuron_scores(model, objective_of(model, [IDS], 11), "ffn")


# --- names ---


PLACED = [f"{name}@{place}" for name in ("attnlrp", "cp-lrp", "gxi") for place in ("prompt", "midpoint")]


@pytest.mark.parametrize("name", [*METHODS, *PLACED, "ig@path"])
def test_a_name_is_a_value_and_a_value_is_written(name):
    method = method_of(name)
    assert name_of(method) == name
    assert method_of(repr(method)) == method
    assert method.needs_counterfactual is ("@" in name or isinstance(method, Difference))
    assert (method.at or "") == name.partition("@")[2]


@pytest.mark.parametrize(
    ("text", "error", "part"),
    [
        ("attnlpr", UnknownName, "'attnlrp'"),
        ("cp-lrp@midpoin", UnknownName, "'midpoint'"),
        ("cp-lrp@path", UnknownName, "'path'"),
        ("cp-lrp@", UnknownName, "''"),
        ("difference@prompt", InputError, "'@prompt'"),
        ("Gamma(1)", InputError, "Gamma"),
        (3, UnknownName, "'3'"),
    ],
)
def test_a_wrong_name_is_refused(text, error, part):
    with pytest.raises(error, match=part):
        method_of(text)


def test_a_list_of_names_is_split_at_the_commas_outside_brackets():
    written = "AttnLRP(softmax='zplus', linear=Gamma(0.1), conv=Gamma(0.2))"
    assert list(methods_of(f"random, {written},cp-lrp@prompt")) == ["random", written, "cp-lrp@prompt"]
    assert with_controls("change,gxi", [], ["change"]) == {"change": "change", "gxi": METHODS["gxi"]}
    assert not any(method.needs_counterfactual for method in methods_of("all").values())
    assert list(with_controls("all", ["gxi", "random"], [])) == ["gxi", "random"]


def test_methods_by_relevance_are_as_they_are_written():
    assert repr(AttnLRP("constant", at="midpoint")) == "AttnLRP(at='midpoint', softmax='constant')"
    assert CP_LRP.for_comparison() == AttnLRP("constant", at="midpoint")
    assert IntegratedGradients(3).for_comparison().points() == pytest.approx([1 / 6, 1 / 2, 5 / 6])


# --- a new method is one class and one entry ---


@dataclass(frozen=True, repr=False)
class Length(Method):
    """A dummy: each token's score is its position, each neuron's its activation there."""

    factor: float = 1.0
    scores_neurons = True

    def scores(self, model, plan):
        return [self.factor * torch.arange(n, dtype=torch.float32) for n in plan.batch.lengths]

    def neuron_scores(self, model, plan, site):
        values = Values(model, plan.batch, (site,))
        forward(model, Logits(plan), [values])
        return self.factor * values.values(0, values.activation[site]).cpu()


def test_a_new_method_explains_and_is_evaluated(monkeypatch):
    monkeypatch.setitem(METHODS, "length", Length())
    model = random_model(LLAMA)
    relevance = attribute(model, IDS, 11, method="length")
    assert relevance.tokens.tolist() == list(range(len(IDS)))
    assert torch.equal(relevance.ffn, relevance.activation("ffn"))
    (largest,) = attribute(model, IDS, 11, method="length", keep="top", k=1).top(1, "ffn", position="all")
    assert largest == relevance.top(1, "ffn", position="all")[0]
    assert method_of("Length(factor=2)") == Length(2)
    methods = methods_of("length,Length(factor=-1)")
    line = faithfulness.sample(model, IDS, methods)["methods"]
    assert line["length"]["curve_most"] == line["Length(factor=-1)"]["curve_least"]
    pair = task_pairs.Pair(IDS, OTHER, "", "")
    monkeypatch.setattr(ablation, "answers", lambda *_: (11, 12))
    curves = ablation.ablate(model, pair, methods)["methods"]
    assert curves["length"] == curves["Length(factor=-1)"]  # nodes are ranked by size
    assert curves["length"]["curve_sufficiency"][-1] == pytest.approx(1, abs=1e-4)
    with pytest.raises(InputError, match="Length"):
        attribute(model, IDS, 11, 12, counterfactual=OTHER, method="length")


# --- rounds ---


@pytest.mark.parametrize("site", ["ffn", "attn"])
def test_a_round_chooses_the_largest_gain_and_attributes_what_is_left(site):
    model = random_model(LLAMA)
    options = {"counterfactual": OTHER, "sites": (site,)}
    plain = attribute(model, IDS, 11, 12, **options)
    relevance = attribute(model, IDS, 11, 12, method=Rounds(1), **options)
    assert torch.equal(relevance.tokens, plain.tokens)
    nodes = nodes_of(model, plain, "head" if site == "attn" else site)
    chosen = torch.zeros(nodes.shape, dtype=torch.bool)
    before, left = gains(nodes, chosen)
    numbers = nodes.numbers([~chosen, chosen])
    assert left == pytest.approx(numbers[0] - numbers[1], abs=1e-4)
    (name,) = nodes.sites
    by_node = nodes.side_by_side(before, lambda x: x.sum(-1)).abs()
    chosen.view(-1)[by_node.argmax()] = True
    after, _ = gains(nodes, chosen)
    width = after[name].shape[-1] // chosen.shape[-1]
    expected = torch.where(chosen.repeat_interleave(width, -1), before[name], after[name])
    assert torch.allclose(relevance.of(site), expected)
    last = attribute(model, IDS, 11, 12, method=Rounds(1), record="last", **options)
    assert torch.allclose(last.of(site)[:, 0], expected[:, -1])


def test_rounds_need_one_stack():
    with pytest.raises(InputError):
        attribute(make("t5"), IDS, 11, 12, counterfactual=OTHER, method=Rounds())


def test_integrated_gradients_from_zero_say_that_they_miss_the_number(llama):
    """Near zero, norms divide by almost nothing."""
    far = attribute(llama, IDS, 7, method=IntegratedGradients(3))
    sums = far.conservation()
    assert (abs(sums.remainder) > 0.1 * abs(sums.target)) is (
        "compare with a counterfactual" in far.conservation_text()
    )
    assert "compare with" not in attribute(llama, IDS, 7, method="cp-lrp").conservation_text()
    assert "compare with a counterfactual" in far.conservation_text()
