"""TransformerLens' names of neurons, heads and arrays."""

import numpy as np
import pytest
from conftest import IDS
from hypothesis import given
from hypothesis import strategies as st

from icebear import Edit, Neuron, attribute
from icebear.errors import InputError
from icebear.records import SITES


@given(st.integers(0, 99), st.sampled_from(["ffn", "head"]), st.integers(0, 10**6))
def test_a_name_of_transformer_lens_is_the_neuron_s(layer, site, index):
    neuron = Neuron(layer, site, index)
    assert Neuron.parse(neuron.to_transformer_lens()) == neuron == Neuron.parse(str(neuron))


def test_names_are_those_of_transformer_lens():
    assert Neuron.parse("blocks.29.mlp.hook_post[860]") == Neuron(29, "ffn", 860)
    assert Neuron(4, "head", 3).to_transformer_lens() == "blocks.4.attn.hook_z[3]"
    assert Edit("blocks.1.mlp.hook_post[3]", "scale", 0.0) == Edit.parse("L1.ffn.3*0")


@pytest.mark.parametrize(
    "text",
    ["blocks.1.mlp.hook_pre[3]", "blocks.1.mlp.hook_post", "blocks.-1.mlp.hook_post[3]", "blocks.1.mlp.hook_post[3]x"],
)
def test_other_names_are_refused(text):
    with pytest.raises(InputError):
        Neuron.parse(text)


@pytest.mark.parametrize("site", sorted({*SITES} - {"ffn"}))
def test_neurons_without_one_index_have_no_such_name(site):
    with pytest.raises(InputError, match=rf"L1\.{site}\.3"):
        Neuron(1, site, 3).to_transformer_lens()


def test_arrays_are_the_relevance_by_name(llama):
    relevance = attribute(llama, IDS, sites=("ffn", "attn", "q", "k", "v"))
    ours, theirs = relevance.to_arrays(), relevance.to_arrays("transformer_lens")
    assert np.array_equal(theirs["hook_embed"], relevance.tokens.numpy())
    for layer in range(llama.layers):
        assert np.array_equal(theirs[f"blocks.{layer}.mlp.hook_post"], relevance.ffn[layer].numpy())
        z = theirs[f"blocks.{layer}.attn.hook_z"]
        assert z.shape == (len(IDS), llama.heads, llama.head_dim)
        assert np.allclose(z.sum(-1), relevance.heads()[layer].numpy(), atol=1e-6)
        assert theirs[f"blocks.{layer}.attn.hook_q"].shape == (len(IDS), 4, 6)
        assert theirs[f"blocks.{layer}.attn.hook_k"].shape == (len(IDS), 2, 6)
        assert np.array_equal(theirs[f"blocks.{layer}.attn.hook_v"].reshape(len(IDS), -1), ours["v"][layer])
    assert len(theirs) == 1 + 5 * llama.layers
    with pytest.raises(InputError):
        relevance.to_arrays("nnsight")
