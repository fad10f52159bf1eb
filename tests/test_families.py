"""One table of families: small random models from their configurations, in every attention they have."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from configurations import DIFFERENT, dense, different, mixtures
from conftest import IDS, Double, Letters, random_model
from few import third_of
from pages import script
from transformers import CONFIG_MAPPING, Gemma3Config, LlamaConfig, LlamaForCausalLM

from icebear import (
    ATTNLRP,
    CP_LRP,
    PA_LRP,
    Model,
    Neuron,
    attribute,
    build_index,
    open_store,
    project,
    read_corpus,
    steer,
)
from icebear.actmax.index.neuron_vectors import gated
from icebear.concepts.methods.gradients import GradientTimesInput
from icebear.concepts.passes.sites import hooks
from icebear.concepts.selftest import selftest
from icebear.concepts.vocabulary.weight_rows import unembedding, w_out_rows
from icebear.errors import InputError, MissingRule, ModelError
from icebear.models.parts.families import FAMILIES

CONFIGS, EXPERTS = dense(), mixtures()  # torch has no float64 for grouped matrix products
NO_SDPA = {"gptj", "bloom", "gemma2", "gpt_oss"}
SITES = ("ffn", "attn", "q", "k", "v")


def attention(name):
    return "sdpa" if name in EXPERTS and name not in NO_SDPA else "eager"


def make(name, kind="eager", biases=True):
    dtype = torch.float32 if name in EXPERTS else torch.float64
    model = random_model({**CONFIGS, **EXPERTS}[name], kind, dtype)
    if not biases:
        with torch.no_grad():
            for path, parameter in model.net.named_parameters():
                if path.endswith("bias"):
                    parameter.zero_()
    return model


@pytest.mark.parametrize("name", third_of([*CONFIGS, *EXPERTS]))
def test_the_forward_pass_is_the_models_own_and_cp_lrp_conserves(name):
    model = make(name, "eager" if name in NO_SDPA else "sdpa", biases=False)
    with Double(), torch.no_grad():
        logits = model.net(torch.tensor([IDS]), use_cache=False).logits[0, -1]
    with Double():
        result = attribute(model, IDS, method=CP_LRP, sites=model.sites)
    assert result.target.logit == pytest.approx(logits.max().item(), rel=1e-6)
    conserved = result.conservation()
    tolerance = 1e-6 if name in EXPERTS else 1e-9
    assert abs(conserved.remainder) < tolerance * max(1, abs(conserved.target))
    if name != "gpt_oss":  # which has sinks, and adds 1
        assert conserved.biases == pytest.approx(0, abs=tolerance)
    assert conserved.softmax == 0
    assert (abs(conserved.positions) > 1e-3) == (name.startswith(("gpt2", "opt")))  # the learned ones


# transformers' Falcon with ALiBi gives other logits in eager (it adds the slopes twice) than in SDPA.
@pytest.mark.parametrize("name", third_of(sorted(set(CONFIGS) - NO_SDPA - {"falcon, alibi"})))
def test_eager_equals_sdpa(name):
    with Double():
        one, other = (attribute(make(name, kind), IDS, sites=SITES) for kind in ("eager", "sdpa"))
    assert one.tokens.tolist() == pytest.approx(other.tokens.tolist(), rel=1e-8, abs=1e-10)
    for site in SITES:
        assert torch.allclose(one.of(site), other.of(site), rtol=1e-7, atol=1e-9), site
        assert torch.allclose(one.activation(site), other.activation(site), rtol=1e-7, atol=1e-9), site


@pytest.mark.parametrize("name", third_of(DIFFERENT))
def test_batch_equals_single_and_everything_is_undone(name):
    """In every family the self-test compares a batch with single prompts too."""
    model = make(name, attention(name))
    before = [
        (path, set(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks))
        for path, m in model.net.named_modules()
    ]
    prompts = [IDS, IDS[:3], [4, 5, 6, 7, 8, 9]]
    with Double():
        together = attribute(model, prompts, method=PA_LRP, sites=model.sites)
        for prompt, result in zip(prompts, together, strict=True):
            alone = attribute(model, prompt, method=PA_LRP, sites=model.sites)
            close = {"rtol": 1e-3, "atol": 1e-4} if name in EXPERTS else {"rtol": 1e-6, "atol": 1e-8}
            assert torch.allclose(alone.tokens, result.tokens, **close)
            assert torch.allclose(alone.positions, result.positions, **close)
            biases = [one.conservation().biases for one in (alone, result)]
            assert biases[0] == pytest.approx(biases[1], rel=1e-3, abs=1e-5)
            assert abs(result.conservation().remainder) < (1e-5 if name in EXPERTS else 1e-9)
            for site in model.sites:
                assert torch.allclose(alone.of(site), result.of(site), **close), site
    assert before == [
        (path, set(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks))
        for path, m in model.net.named_modules()
    ]


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "falcon, alibi"])
def test_q_k_and_v_are_what_attention_is_made_of(name):
    """Written out for families without rotation: softmax(q k / sqrt(d) + mask) v is the site `attn`."""
    model = make(name, "eager" if name in NO_SDPA else "sdpa")
    seen = {}
    with (
        Double(),
        torch.no_grad(),
        hooks(model, [(s, 1) for s in ("q", "k", "v", "attn")], lambda site, layer, x: seen.update({site: x[0]})),
    ):
        model.net(torch.tensor([IDS]), use_cache=False)
    q, k, v = (seen[site].unflatten(-1, (4, -1)).transpose(0, 1) for site in "qkv")  # (H, T, d)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if name in ("bloom", "falcon, alibi"):
        slopes = torch.tensor([2.0 ** (-2 * (head + 1)) for head in range(4)], dtype=torch.float64)
        bias = slopes[:, None, None] * torch.arange(len(IDS))
        scores = scores + (bias if name == "bloom" else bias.bfloat16().double() / q.shape[-1] ** 0.5)
    scores = scores.masked_fill(torch.ones(len(IDS), len(IDS)).triu(1).bool(), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    assert torch.allclose(
        out, seen["attn"], rtol=1e-2 if "alibi" in name else 1e-6, atol=1e-3 if "alibi" in name else 1e-8
    )


def test_which_ffns_are_gated():
    single = {"gpt2", "gptj", "phi", "gpt_neox", "gpt_neox, serial", "opt", "opt, norms behind", "bloom"}
    single |= {"falcon", "falcon, grouped", "falcon, alibi", "arcee", "nemotron", "apertus", "starcoder2"}
    assert {name for name in [*CONFIGS, *EXPERTS] if not gated(make(name))} == single


def test_the_unembedding_includes_the_map_before_it():
    """OPT-350m's embeddings are narrower than its residual stream."""
    model = make("opt, norms behind")
    streams = []
    hook = model.layer_modules[-1].register_forward_hook(lambda module, args, out: streams.append(out[0]))
    with Double(), torch.no_grad():
        logits = model.net(torch.tensor([IDS]), use_cache=False).logits[0]
    hook.remove()
    assert torch.allclose(streams[0] @ unembedding(model).double().T, logits, rtol=1e-4, atol=1e-4)


def test_the_text_half_of_a_model_of_images_and_text_is_explained_like_that_text_model():
    """Gemma 3 from 4B on, whose configuration and layers of text are one level down."""
    text = make("gemma3")
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    config = Gemma3Config(
        text_config=CONFIGS["gemma3"].to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=48,
        boi_token_index=46,
        eoi_token_index=47,
    )
    both = random_model(config, "eager")
    both.net.model.language_model.load_state_dict(text.net.model.state_dict())
    both.net.lm_head.load_state_dict(text.net.lm_head.state_dict())
    assert (both.output_size, both.heads, both.context_length) == (text.output_size, text.heads, text.context_length)
    assert both.fingerprint != text.fingerprint
    with Double():
        one, other = (attribute(model, [IDS, IDS[:3]], method=PA_LRP, sites=SITES)[1] for model in (text, both))
        with pytest.raises(InputError, match="49"):
            attribute(both, [50])
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.positions, other.positions)
    assert [(r.neuron, r.relevance) for r in one.top(9)] == [(r.neuron, r.relevance) for r in other.top(9)]
    assert project(both, Neuron(1, "ffn", 3), 3).promoted == project(text, Neuron(1, "ffn", 3), 3).promoted


@pytest.mark.usefixtures("few_draws", "few_texts")
@pytest.mark.parametrize("name", third_of(DIFFERENT))
def test_ranking_steering_and_the_scan(name, tmp_path):
    model = Model(random_model(different()[name], dtype=torch.float32, attention="eager").net, Letters(), name)
    best = attribute(model, "the ice bear", sites=[site for site in SITES if site in model.sites]).top(3)
    assert best[0].relevance >= best[1].relevance
    (tmp_path / "c.txt").write_text("The ice bear.\nA camel eats.\nWarm sand.\nNorth of it.")
    of_text = cache(partial(attribute, model, sites=model.sites))
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "c.txt")), store, k=2, sites=model.sites)
        for site in model.sites:
            neuron = Neuron(1, site, 3)
            for example in store.examples(neuron, "+"):
                alone = of_text(example.sentence.text).activation(site)[1, :, 3]
                assert alone[example.token].item() == pytest.approx(example.activation, rel=1e-3, abs=1e-5)
                assert alone[1:].max().item() == pytest.approx(example.activation, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", [*CONFIGS, *EXPERTS])
def test_the_self_test_finds_nothing_wrong(name, monkeypatch):
    """What it costs is measured in tests/test_tasks.py: nothing of it is of a family."""
    monkeypatch.setattr("icebear.concepts.selftest.seconds", lambda work, device: 1.0)
    model = make(name)
    with Double():
        result = selftest(model, IDS)
    assert result.verdict == "fine"
    assert result.sites["ffn"] == model.width("ffn")
    if model.dtype == torch.float64:  # with `Double` all is computed in it
        found = [law.finding for law in result.laws if law.holds and law.finding.startswith("differs by ")]
        assert found
        assert all(float(text.removeprefix("differs by ")) < 1e-9 for text in found)


SCANS = {
    "mamba": ({"state_size": 4}, r"backbone\.layers\.0\.mixer \(MambaMixer\)"),
    "qwen3_next": (
        {"head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2},
        r"model\.layers\.0\.linear_attn \(Qwen3NextGatedDeltaNet\)",
    ),
    "recurrent_gemma": ({"lru_width": 24}, r"model\.layers\.0\.temporal_block\.rg_lru \(RecurrentGemmaRglru\)"),
}


@pytest.mark.parametrize("name", SCANS)
def test_scans_over_tokens_are_refused_by_name(name):
    sizes, place = SCANS[name]
    small = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 20, **sizes}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if name != "mamba" else {}
    model = random_model(CONFIG_MAPPING[name](**small, **heads), "eager", torch.float32)
    with pytest.raises(MissingRule, match=f"scan over tokens in {place}"):
        attribute(model, IDS, sites=())
    with pytest.warns(UserWarning, match="tokens"):
        result = attribute(model, IDS, sites=(), strict=False)
    assert result.missing_rules[0].startswith("scan over tokens in")


PAIRED_SCANS = "qwen3_5_text qwen3_next qwen3_5_moe_text olmo_hybrid mamba mamba2 falcon_mamba falcon_h1".split()
PAIRED_SCANS += "bamba jamba zamba2 rwkv xlstm".split()


@pytest.mark.parametrize("kind", third_of(PAIRED_SCANS))
def test_scans_over_tokens_are_explained_beside_a_counterfactual(kind):
    """Difference rules are exact for products, so that the tokens sum to the difference."""
    net = script("families").small_model(kind).net.double()
    ids = [5, 9, 23, 42, 7, 31, 12, 50]
    with Double():
        result = attribute(Model(net, name=kind), ids, 11, 12, sites=(), counterfactual=[*ids[:3], 33, *ids[4:]])
    sums = result.conservation()
    assert abs(sums.target) > 1e-3
    assert sums.tokens == pytest.approx(sums.target, rel=1e-6)
    assert result.missing_rules == ()


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("recurrent_gemma", "SqrtBoundDerivative"),
        ("jetmoe", "chosen rows"),
        ("longcat_flash", "chosen rows"),
        ("phimoe", "gather"),
    ],
)
def test_what_has_no_difference_rule_is_refused(kind, operation):
    """A custom function; what sorts or chooses rows, so that they lose their partners. No other method takes its place
    unasked."""
    model, ids = script("families").small_model(kind), [5, 9, 23, 42, 7, 31, 12, 50]
    options = {"sites": (), "counterfactual": [*ids[:3], 33, *ids[4:]]}
    with pytest.raises(MissingRule, match=operation):
        attribute(model, ids, 11, 12, **options)
    assert attribute(model, ids, 11, 12, **options, method=GradientTimesInput()).counterfactual.at == "midpoint"


def test_the_self_test_names_what_is_wrong():
    model = make("llama")
    model.net.model.layers[1].mlp.forward = torch.sinc
    result = selftest(model, IDS)
    assert any("sinc" in entry for entry in result.missing)
    assert "No rule for" in result.verdict


def test_one_entry_adds_a_family(monkeypatch):
    """A made architecture: Llama with another name for its model and its FFN."""

    class MadeConfig(LlamaConfig):
        model_type = "made"

    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    net = LlamaForCausalLM(MadeConfig(vocab_size=50, num_hidden_layers=2, **sizes)).eval()
    for layer in net.model.layers:
        layer.mlp.second = layer.mlp.down_proj
    model = Model(net)
    assert not model.has_family
    entry = replace(FAMILIES["llama"], ffn_out="mlp.second")
    monkeypatch.setitem(FAMILIES, "made", entry)
    seen = []
    hook = net.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    relevance = attribute(model, IDS, 11, method=CP_LRP, number="logit")
    hook.remove()
    assert torch.equal(relevance.activation("ffn")[1], seen[0].detach())
    assert relevance.ffn.shape == (2, len(IDS), 20)
    assert relevance.ffn.abs().sum() > 0


def test_an_unknown_family_still_has_token_relevance(monkeypatch):
    model = make("mixtral", "sdpa")
    monkeypatch.delitem(FAMILIES, "mixtral")
    assert not model.has_family
    assert len(attribute(model, IDS).tokens) == len(IDS)
    with pytest.raises(ModelError, match="'mixtral'"):
        attribute(model, IDS, sites=("ffn",))
    assert "Only tokens" in selftest(model, IDS).verdict


@pytest.mark.parametrize("name", [name for name in EXPERTS if name != "gpt_oss"])  # whose loop has no linear maps
def test_experts_neurons_are_those_of_transformers_own_loop(name):
    """Read off its eager loop, expert by expert; the rows in between are silent."""
    model = make(name)
    experts = model.experts(1)
    seen, calls = {}, []
    linear = torch.nn.functional.linear

    def listen(x, weight, bias=None):
        for expert in range(4):
            if weight.shape == experts.down_proj[0].shape and torch.equal(weight, experts.down_proj[expert]):
                calls.append((expert, x))
        return linear(x, weight, bias)

    with torch.no_grad(), hooks(model, [("ffn", 1)], lambda site, layer, x: seen.update(x=x[0])):
        through = model.net(torch.tensor([IDS]), use_cache=False).logits
    model.net.set_experts_implementation("eager")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "linear", listen)
        own = model.net(torch.tensor([IDS]), use_cache=False).logits
    assert torch.allclose(through, own, atol=1e-4)
    width = experts.down_proj.shape[2]
    result = seen["x"].unflatten(-1, (4, width))  # (T, E, I)
    assert len(calls) > 1
    for expert, neurons in calls:
        active = result[:, expert][(result[:, expert] != 0).any(-1)]
        in_order = [rows[rows[:, 0].argsort()] for rows in (active, neurons)]  # its rows go by the router's rank
        assert torch.allclose(*in_order, atol=1e-5)
    assert int((result != 0).any(-1).sum()) == 2 * len(IDS)  # two experts a token


@pytest.mark.parametrize("name", EXPERTS)
def test_an_experts_w2_row_is_what_its_neuron_writes(name):
    """Times the router's weight, wherever its expert is chosen; a silent neuron's row is not written."""
    model = make(name)
    streams, seen = [], {}
    hook = model.layer_modules[1].register_forward_hook(
        lambda module, args, out: streams.append((out[0] if isinstance(out, tuple) else out)[0])
    )
    with torch.no_grad(), hooks(model, [("ffn", 1)], lambda site, layer, x: seen.update(x=x[0])):
        model.net(torch.tensor([IDS]), use_cache=False)
    neuron = int((seen["x"] != 0).float().sum(0).argmax())
    with torch.no_grad(), steer(model, [f"L1.ffn.{neuron}+1"]):
        model.net(torch.tensor([IDS]), use_cache=False)
    hook.remove()
    row = w_out_rows(model, "ffn", 1)[neuron]
    moved = streams[1] - streams[0]
    for place in range(len(IDS)):
        if seen["x"][place, neuron] == 0:
            assert moved[place].abs().max() < 1e-5
        else:
            weight = (moved[place] @ row) / (row @ row)
            assert 0 < weight <= getattr(model.config, "routed_scaling_factor", 1)
            assert torch.allclose(moved[place], weight * row, atol=1e-4)


def test_attnlrp_of_an_own_activation_is_the_identity_rule():
    """Bloom's GELU is its own class: the model with torch's GELU in its place has the same relevance."""
    model, plain = make("bloom"), make("bloom")
    for block in plain.net.transformer.h:
        block.mlp.gelu_impl = torch.nn.GELU(approximate="tanh")
    with Double():
        one, other = (attribute(m, IDS, method=ATTNLRP) for m in (model, plain))
    assert one.tokens.tolist() == pytest.approx(other.tokens.tolist(), rel=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_mixtures_in_float64_run_expert_by_expert(name):
    """torch has no grouped products of experts in float64."""
    model = random_model(EXPERTS[name], "sdpa", torch.float64)
    single = random_model(EXPERTS[name], "sdpa", torch.float32)
    single.net.load_state_dict(model.net.state_dict())
    assert torch.allclose(model.next_logits(IDS), single.next_logits(IDS), atol=1e-4)
    with Double():
        result = attribute(model, IDS, 7, method=CP_LRP, number="logit")
    assert abs(result.conservation().remainder) < 1e-5


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral", "olmo3", "cohere2", "exaone4"])
def test_windows_in_float64_know_no_padding_that_sees_nothing(name):
    """transformers' eager mask is the smallest float64, which is infinite in the float32 of its softmax."""
    model = random_model(CONFIGS[name], "eager", torch.float64)
    rows = [IDS[:3], IDS * 3]
    for together, ids in zip(attribute(model, rows), rows, strict=True):
        assert torch.allclose(together.tokens, attribute(model, ids).tokens, rtol=1e-4, atol=1e-6)
