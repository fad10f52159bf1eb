"""Rules at modules: equal to the bit where they are proved, and never taken where they are not."""

import pytest
import torch
from configurations import dense, mixtures
from conftest import IDS, LLAMA, Double, random_model
from few import few_of, third_of
from torch import nn
from transformers.models.llama import modeling_llama

from icebear import ATTNLRP, CP_LRP, PA_LRP, Neuron, attribute
from icebear.actmax.index.annotation import attribute_neurons
from icebear.models.modules import modules_of, parameters_of

CONFIGS, EXPERTS = dense(), mixtures()
OTHER_FORMS = {
    "olmo",
    "cohere",
    "cohere2",
    "nemotron",
    "gemma2",
    "bloom",
    "falcon, alibi",
}  # other norms, a tanh, ALiBi
LONGER = [*IDS, *IDS, *IDS]


def make(name, attention="sdpa"):
    return random_model({**CONFIGS, **EXPERTS}[name], attention, torch.float32 if name in EXPERTS else torch.float64)


def thrice(model, prompt=IDS, **options):
    with Double():
        return [attribute(model, prompt, **options) for _ in range(3)]


def equal(a, b):
    assert torch.equal(a.tokens, b.tokens)
    for site in a.neurons.relevance:
        assert torch.equal(a.of(site), b.of(site)), site
        assert torch.equal(a.activation(site), b.activation(site)), site
    for name, value in vars(a.sums).items():
        assert value == pytest.approx(getattr(b.sums, name), rel=1e-9, abs=1e-12), name
    return True


@pytest.mark.parametrize("method", few_of([ATTNLRP, CP_LRP], ATTNLRP))
@pytest.mark.parametrize("name", third_of(sorted(set(CONFIGS) - OTHER_FORMS)))
def test_the_third_pass_is_equal_to_the_first(name, method):
    for attention in ("eager",) if name == "gptj" else ("eager", "sdpa"):
        model = make(name, attention)
        sites = [site for site in ("ffn", "attn", "q", "k", "v") if site in model.sites]
        looked_up, second, third = thrice(model, method=method, sites=sites)
        assert (looked_up.at_modules, second.at_modules, third.at_modules) == (False, True, True)
        assert equal(looked_up, second)
        assert equal(looked_up, third)
        assert looked_up.proved != third.proved


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_padded_prompts_together(name):
    for first, _, third in zip(*thrice(make(name), [IDS, IDS[:3], LONGER], sites=("ffn", "attn", "k")), strict=True):
        assert third.at_modules
        assert equal(first, third)


@pytest.mark.parametrize("name", third_of(sorted((OTHER_FORMS - {"falcon, alibi"}) | set(EXPERTS))))
def test_other_forms_are_looked_up(name):
    eager = {"gemma2", "bloom", "gpt_oss"}
    assert not any(r.at_modules for r in thrice(make(name, "eager" if name in eager else "sdpa"), sites=()))


def test_other_methods_and_checkpointed_passes_are_looked_up():
    model = make("llama")
    for options in ({"method": PA_LRP}, {"method": "gxi"}, {"checkpoint": True}):
        assert not any(r.at_modules for r in thrice(model, sites=(), **options))


def test_a_kind_is_proved_by_itself_and_never_for_one_pass():
    model = make("llama")
    assert not attribute(model, IDS).at_modules
    assert list(model.proofs.values()) == [None]
    assert attribute(model, [*IDS, 4]).at_modules  # as many tokens, up to a factor of two
    assert not attribute(model, LONGER).at_modules
    assert not attribute(model, [IDS, IDS])[0].at_modules
    assert attribute(model, LONGER).at_modules


class Product(modeling_llama.LlamaMLP):
    """A product whose effect is nothing."""

    def forward(self, x):
        return super().forward(x) + 0 * (x * x)


class Squashed(modeling_llama.LlamaMLP):
    """A function of an activation whose effect is small."""

    def forward(self, x):
        return super().forward(x) + 1e-12 * torch.tanh(x)


@pytest.mark.parametrize("kind", [Product, Squashed])
def test_an_operation_with_little_effect_is_seen(kind):
    model = random_model(LLAMA)
    assert thrice(model)[2].at_modules
    other = random_model(LLAMA)
    other.net.model.layers[1].mlp.__class__ = kind
    assert not any(r.at_modules for r in thrice(other))


def _hooked(model):
    model.net.model.layers[0].register_forward_hook(lambda module, args, output: output * torch.tanh(output))


def _replaced(model):
    mlp = model.net.model.layers[0].mlp
    new = Squashed(model.net.config).double().requires_grad_(False)
    new.load_state_dict(mlp.state_dict())
    model.net.model.layers[0].mlp = new


def _patched(model):
    mlp = model.net.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x * x)


def test_a_method_of_its_class_is_seen(monkeypatch):
    model = random_model(LLAMA)
    assert thrice(model)[2].at_modules
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    changed = thrice(model)[2]
    assert not changed.at_modules
    assert equal(changed, thrice(random_model(LLAMA))[0])


@pytest.mark.parametrize("change", [_hooked, _replaced, _patched])
def test_what_is_put_into_a_model_after_its_proof_is_looked_up(change):
    model, fresh = random_model(LLAMA), random_model(LLAMA)
    assert thrice(model)[2].at_modules
    change(model)
    change(fresh)
    changed = thrice(model)[2]
    assert not changed.at_modules
    assert equal(changed, thrice(fresh)[0])


def test_another_release_of_transformers_falls_back(monkeypatch):
    """Its functions have other names, and attention another product."""
    rotate = modeling_llama.apply_rotary_pos_emb

    def renamed(q, k, *args, **options):
        q, k = rotate(q, k, *args, **options)
        return q * q.tanh(), k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", renamed)
    results = thrice(random_model(LLAMA))
    assert not any(r.at_modules for r in results)
    assert equal(results[0], results[2])


def test_it_says_why_operations_are_looked_up(monkeypatch, capsys):
    monkeypatch.setenv("ICEBEAR_DEBUG", "1")
    thrice(make("gemma2", "eager"), sites=())
    assert "looked up" in capsys.readouterr().err


def test_relevance_of_sentences_for_neurons():
    model = make("gpt2")
    neurons, prompts = [Neuron(1, "ffn", 3), Neuron(1, "ffn", 5)], [IDS, LONGER]
    first, _, third = (attribute_neurons(model, prompts, neurons, [3, 9]) for _ in range(3))
    assert any(not isinstance(proof, str) and proof for proof in model.proofs.values())
    for (tokens, sums), (others, other_sums) in zip(first, third, strict=True):
        assert torch.equal(tokens, others)
        assert other_sums.remainder == pytest.approx(sums.remainder, abs=1e-9)


def test_a_network_is_walked_through_as_torch_does():
    """Also one with a part that is missing, two that are shared, and one that is reached again from below."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    net = nn.ModuleDict({"a": inner, "b": nn.Sequential(inner, nn.Linear(2, 2, bias=False)), "c": inner[0]})
    net.register_module("missing", None)
    net["b"][1].weight = inner[0].weight
    net["b"].back = net
    assert modules_of(net) == list(net.modules())
    assert [*map(id, parameters_of(net))] == [*map(id, net.parameters())]
