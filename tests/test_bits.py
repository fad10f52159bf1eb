"""Weights in few bits: bitsandbytes' linear maps are linear, and are read de-quantised."""

import copy

import pytest
import torch
from conftest import LLAMA_BIASES, random_model
from transformers import LlamaConfig

from icebear import CP_LRP, AttnLRP, Edit, Model, Neuron, attribute, project, steer
from icebear.errors import InputError, ModelError
from icebear.lrp.linear_rules import Gamma
from icebear.models.loading.loading import load_model
from icebear.models.parts.linear import Linear, packed

PROMPT = "Paris Rome A"


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """The tiny model with biases."""
    tokenizer = load_model(tiny_folder, device="cpu").tokenizer
    folder = tmp_path_factory.mktemp("biases")
    config = {**LLAMA_BIASES.to_dict(), "vocab_size": len(tokenizer)}
    random_model(LlamaConfig(**config), dtype=torch.float32).net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def pair(folder, bits):
    """A model in few bits, and one in memory with the same weights as floating-point numbers."""
    model, reference = load_model(folder, bits=bits), load_model(folder, device="cpu")
    with torch.no_grad():
        for path, module in model.net.named_modules():
            if packed(module):
                reference.net.get_submodule(path).weight.copy_(Linear(module).rows())
    return model, reference


@pytest.mark.parametrize("method", [AttnLRP(), CP_LRP, AttnLRP(linear=Gamma(0.2))], ids=str)
def test_in_four_bits_it_is_the_model_of_its_weights(folder, method):
    model, reference = pair(folder, 4)
    assert sum(map(packed, model.net.modules())) == 7 * model.layers
    assert model.width("ffn") == reference.width("ffn")
    assert torch.allclose(model.next_logits(PROMPT), reference.next_logits(PROMPT), rtol=1e-4, atol=1e-5)
    one, other = (attribute(each, PROMPT, method=method) for each in (model, reference))
    assert torch.allclose(one.tokens, other.tokens, rtol=1e-3, atol=1e-4)
    assert one.conservation().to_dict() == pytest.approx(other.conservation().to_dict(), rel=1e-3, abs=1e-4)
    assert one.conservation().biases != 0
    for site in ("ffn", "attn"):
        assert torch.allclose(one.of(site), other.of(site), rtol=1e-3, atol=1e-4), site


def test_in_eight_bits_what_rounding_takes_is_the_rest(folder):
    """Activations are rounded as well there, so the map is linear but for that."""
    model, reference = pair(folder, 8)
    one, other = (attribute(each, PROMPT) for each in (model, reference))
    assert 0 < abs(one.conservation().remainder) < 0.1 * abs(one.conservation().target)
    both = torch.stack((one.of("ffn").flatten(), other.of("ffn").flatten()))
    assert torch.corrcoef(both)[0, 1] > 0.99


@pytest.mark.parametrize("bits", [8, 4])
def test_it_is_steered_projected_and_undone(folder, bits):
    model, reference = pair(folder, bits)
    before = [(path, set(m.__dict__), len(m._forward_hooks)) for path, m in model.net.named_modules()]
    edit = Edit(Neuron(1, "ffn", 3), "add", 30.0)
    plain = model.next_logits(PROMPT)
    with steer(model, [edit]), steer(reference, [edit]):
        changed = [each.next_logits(PROMPT) for each in (model, reference)]
    assert torch.corrcoef(torch.stack(changed))[0, 1] > 0.99
    assert not torch.allclose(changed[0], plain)
    assert torch.equal(model.next_logits(PROMPT), plain)
    assert before == [(path, set(m.__dict__), len(m._forward_hooks)) for path, m in model.net.named_modules()]
    rows = [[token.text for token in project(each, edit.neuron, 3).promoted] for each in (model, reference)]
    assert rows[0] == rows[1]
    result = attribute(model, PROMPT, counterfactual="Rome Paris A")
    assert abs(result.conservation().remainder) < (1e-3 if bits == 4 else 0.2) * max(
        1, abs(result.conservation().target)
    )


def test_it_is_another_model(folder):
    names = {load_model(folder, bits=bits).fingerprint for bits in (None, 4, 8)}
    assert len(names) == 3


def test_what_it_cannot_do_is_told(folder, tmp_path):
    with pytest.raises(InputError, match="not 3"):
        load_model(folder, bits=3)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="LoRA"):
        load_model(str(tmp_path), bits=4)


def test_an_unknown_kind_refuses_with_its_name(llama):
    class OtherLinear(torch.nn.Linear):
        pass

    net = copy.deepcopy(llama.net).float()
    old = net.model.layers[1].mlp.down_proj
    other = OtherLinear(old.in_features, old.out_features, bias=False)
    other.weight = torch.nn.Parameter(old.weight.to(torch.float8_e4m3fn), requires_grad=False)
    net.model.layers[1].mlp.down_proj = other
    with pytest.raises(ModelError, match="OtherLinear"):
        project(Model(net, llama.tokenizer), Neuron(1, "ffn", 3))
