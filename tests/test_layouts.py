"""Laws of every family's entry, on the small models of docs/families.py: what W_out rows, norms and logits are."""

import importlib.util
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from icebear import attribute, steer
from icebear.concepts.passes.sites import hooks
from icebear.concepts.vocabulary.weight_rows import unembedding, w_in_rows, w_out_rows
from icebear.models.parts.families import FAMILIES, SCANS
from icebear.models.parts.linear import norm_divisor, through_norm

spec = importlib.util.spec_from_file_location("families_page", Path(__file__).parents[1] / "docs" / "families.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)

KINDS = sorted(set(FAMILIES) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
IDS = page.IDS
OTHER = [*IDS[:3], 33, *IDS[4:]]
WRITING = [(kind, "ffn") for kind in KINDS if FAMILIES[kind].ffn_out]
WRITING += [(kind, "mixer") for kind in KINDS if FAMILIES[kind].mixer]


@cache
def make(kind):
    model = page.small_model(kind)
    assert not isinstance(model, str), model
    return model


def heard(module, run):
    """The inputs and outputs of a module in a run."""
    calls = []
    hook = module.register_forward_hook(lambda module, args, output: calls.append((args, output)))
    with torch.no_grad():
        run()
    hook.remove()
    return calls


def forward(model):
    model.net(torch.tensor([IDS]), use_cache=False)


@pytest.mark.parametrize(("kind", "site"), WRITING)
def test_a_neuron_writes_its_row_through_its_norm(kind, site):
    """The stream after the last layer moves by the row of W_out, up to the router's weight or the norm after it."""
    model = make(kind)
    layer = model.layers_with(site)[-1]
    seen = {}
    with torch.no_grad(), hooks(model, [(site, layer)], lambda site, layer, x: seen.update(x=x[0])):
        forward(model)
    index = int((seen["x"] != 0).float().sum(0).argmax())
    row = w_out_rows(model, site, layer)[index]
    if site == "ffn":
        assert w_in_rows(model, site, layer).shape == w_out_rows(model, site, layer).shape
    norms = model.norms_after(layer, site)
    norm = norms[0] if len(norms) > bool(model.family.final_norm) else ""
    module = model.net.get_submodule(norm) if norm else model.layer_modules[layer]
    streams = []
    later = ("ffn", "shared") if site == "mixer" else ()
    silent = [(other, layer) for other in later if other in model.sites and layer in model.layers_with(other)]
    for edit in (f"L{layer}.{site}.{index}*1", f"L{layer}.{site}.{index}+1"):
        with steer(model, [edit]), hooks(model, silent, lambda site, layer, x: 0 * x):
            args, output = heard(module, lambda: forward(model))[-1]
        streams.append(args[0] if norm else output[0] if isinstance(output, tuple) else output)
    moved = (streams[1] - streams[0]).reshape(len(IDS), -1)
    active = moved[seen["x"][:, index] != 0]
    weights = active @ row / (row @ row)
    assert torch.allclose(active, weights[:, None] * row, atol=1e-4 * row.abs().max().item())
    assert weights.abs().min() > 1e-4
    if site == "mixer" or not model.family.experts:
        expected = 1.0 if norm else model.residual_scale(site)
        assert torch.allclose(weights, torch.full_like(weights, expected), rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_on_the_path_are_linear_at_their_divisor(kind):
    model = make(kind)
    for path in {
        path
        for site in ("ffn", "attn", "mixer")
        if site in model.sites
        for path in model.norms_after(model.layers_with(site)[-1], site)
    }:
        norm = model.net.get_submodule(path)
        with torch.no_grad():
            for weight in norm.parameters():
                weight.uniform_(0.5, 1.5)
        args, output = heard(norm, lambda: forward(model))[-1]
        bias = getattr(norm, "bias", None)
        linear = through_norm(norm, args[0].float(), model.family.norm_offset, norm_divisor(norm, args[0]))
        assert torch.allclose(linear + (0 if bias is None else bias), output, rtol=1e-3, atol=1e-4), path


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_unembedded_final_stream(kind):
    model = make(kind)
    if model.family.transforms or not model.family.final_norm:
        pytest.skip("projected rows of this kind are no logits")
    ((_, stream),) = heard(model.net.get_submodule(model.family.final_norm), lambda: forward(model))[-1:]
    output = model.net.get_output_embeddings()
    with torch.no_grad():
        logits = model.net(torch.tensor([IDS]), use_cache=False).logits[0]
        plain = stream[0] @ unembedding(model).T + (0 if output.bias is None else output.bias * model.logit_scale)
    cap = getattr(model.config, "final_logit_softcapping", None) or (15 if kind == "nanochat" else None)
    expected = plain if cap is None else cap * torch.tanh(plain / cap)
    assert torch.allclose(expected, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_without_values_attention_writes_nothing(kind):
    model = make(kind)
    if "v" not in model.sites:
        pytest.skip("its values are made of compressed ones")
    layer = model.layers_with("v")[-1]
    seen = {}

    def silence(site, layer, x):
        if site == "attn":
            seen["x"] = x
            return None
        return torch.zeros_like(x)

    with torch.no_grad(), hooks(model, [("v", layer), ("attn", layer)], silence):
        forward(model)
    assert seen["x"].abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_map_writes_its_neurons_and_bias_got(kind):
    """Eq. 8 at the last layer that has the site, of a difference where the model has a scan; experts are in
    tests/test_families.py."""
    model = make(kind)
    sites = [site for site in ("ffn", "attn", "shared", "mixer") if site in model.sites]
    pair = {"counterfactual": OTHER} if any(SCANS.search(type(part).__name__) for part in model.net.modules()) else {}
    written, undo = {}, []

    def keep(site, module, args, output):
        bias = getattr(module, "bias", None)
        own = output.detach() - (0 if bias is None else bias)
        own = own.chunk(2)[0] - own.chunk(2)[1] if pair else own
        output.register_hook(lambda g: written.update({site: (own * g[: len(own)]).sum(-1).flatten()}))
        return output * 1  # what is changed in place later is not the output

    for site in sites:
        if site != "ffn" or not model.family.experts:
            module = model.site_module(site, model.layers_with(site)[-1])
            undo.append(module.register_forward_hook(partial(keep, site)))
    result = attribute(model, IDS, 11, 12, sites=sites, **pair)
    for hook in undo:
        hook.remove()
    for site in sites:
        layer = model.layers_with(site)[-1]
        routed = site == "ffn" and model.family.experts  # in one layer, both prompts may have no expert in common
        assert result.of(site)[... if routed else layer].abs().sum() > 0, site
        if site in written:
            close = {"rtol": 1e-3, "atol": 1e-4 * written[site].abs().max().item()}
            assert torch.allclose(result.of(site)[layer].sum(-1), written[site], **close), site
