"""Relevance by the operation table equals the paper's equations written out (tests/twin.py)."""

import pytest
import torch
import twin
from conftest import CONFIGS, IDS, Double, random_model

from concepts import ATTNLRP, CP_LRP, attribute

SITES = ("ffn", "attn", "q", "k", "v")


def close(a, b, tolerance=1e-8):
    return (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("method", [ATTNLRP, CP_LRP], ids=lambda m: m.name)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_sites_and_shares_equal_the_twin(name, method, attention):
    model = random_model(CONFIGS[name], attention)
    with Double():
        found = attribute(model, IDS, target=11, method=method, sites=SITES)
        tokens, sites, kept, logits = twin.relevance(model, IDS, 11, method.softmax)
    assert abs(found.target.logit - logits[11]) < 1e-5  # TokenScore comes from float32
    assert close(found.tokens, tokens)
    for site in SITES:
        if sites[site].any():
            assert close(found.of(site), sites[site]), site
        else:  # q and k in CP-LRP
            assert not found.of(site).any()
    conserved = found.conservation()
    assert conserved.softmax == pytest.approx(kept["softmax"], rel=1e-8, abs=1e-8)
    assert conserved.biases == pytest.approx(kept["biases"], rel=1e-8, abs=1e-8)
    assert conserved.target == pytest.approx(logits[11].item(), rel=1e-10)
    assert abs(conserved.rest) < 1e-8 * max(1, abs(conserved.target))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cp_lrp_conserves(name):
    model = random_model(CONFIGS[name])
    with Double():
        found = attribute(model, IDS, method=CP_LRP)
    assert found.tokens.sum().item() == pytest.approx(found.conservation().target, rel=1e-6)


def test_the_twin_is_not_plain_gradient_times_input():
    """The comparison can fail: without the rules the numbers are others."""
    model = random_model(CONFIGS["llama"])
    embedded = model.net.model.embed_tokens(torch.tensor([IDS])).detach().requires_grad_()
    with Double():
        model.net(inputs_embeds=embedded).logits[0, -1, 11].backward()
        tokens, *_ = twin.relevance(model, IDS, 11)
    assert not close((embedded.grad * embedded)[0].sum(-1), tokens, 1e-2)
