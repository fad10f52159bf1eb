"""Relevance through scans over tokens equals a slow loop over tokens (tests/reference/scans.py)."""

import pytest
import torch
from conftest import Double, random_model
from reference import differences as pair_reference
from reference import scans
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.scan_order import recurrent
from icebear import attribute

IDS, OTHER = [5, 9, 23, 42, 7, 31], [8, 9, 11, 40, 3, 31]
BASE = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "tie_word_embeddings": False, "pad_token_id": 0}
QWEN = {
    **{"intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 3, "linear_value_head_dim": 4},
    "layer_types": ["linear_attention"] * 2,
}
MAMBA = {"intermediate_size": 6, "state_size": 3, "time_step_rank": 2}


def explained(model, sites):
    with Double():
        return attribute(model, IDS, 11, 12, counterfactual=OTHER, sites=sites)


@pytest.fixture
def qwen():
    return random_model(CONFIG_MAPPING["qwen3_5_text"](**BASE, **QWEN), "eager", torch.float64)


def test_a_gated_delta_net_token_by_token_is_the_reference(qwen, monkeypatch):
    tokens, tape = pair_reference.explain(scans.qwen, qwen.net, IDS, OTHER, 11, 12)
    chunked = explained(qwen, ())
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", recurrent)
    ours = explained(qwen, ("ffn", "mixer"))
    assert tokens.abs().max() > 1e-3
    assert torch.allclose(ours.tokens, tokens, atol=1e-10)
    for site in ("ffn", "mixer"):
        assert torch.allclose(ours.of(site), tape.site(site, 2, len(IDS)), atol=1e-10)
    # Chunks give the factors of products other shares, with the same sum.
    assert chunked.tokens.sum().item() == pytest.approx(tokens.sum().item(), abs=1e-10)
    assert not torch.allclose(chunked.tokens, tokens, atol=1e-6)


def test_mamba_is_the_reference():
    model = random_model(CONFIG_MAPPING["mamba"](**BASE, **MAMBA), "eager", torch.float64)
    tokens, tape = pair_reference.explain(scans.mamba, model.net, IDS, OTHER, 11, 12)
    ours = explained(model, ("mixer",))
    assert tokens.abs().max() > 1e-3
    assert torch.allclose(ours.tokens, tokens, atol=1e-10)
    assert torch.allclose(ours.of("mixer"), tape.site("mixer", 2, len(IDS)), atol=1e-10)
