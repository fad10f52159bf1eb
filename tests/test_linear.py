"""A linear map is read through one accessor, which converts what is asked for and no more."""

import pytest
import torch
from configurations import different
from conftest import Letters, random_model
from few import third_of
from test_tasks import make as other_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from icebear import Model, Neuron, project
from icebear.concepts.vocabulary import weight_rows
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.concepts.vocabulary.weight_rows import direct_row, direct_rows, unembed, unembedding, w_in_rows, w_out_rows
from icebear.models.parts.linear import Linear

CONFIGS = different()
PARTS = [2, -1, slice(None), slice(1, 4), slice(0), torch.tensor([4, 0, 4]), torch.tensor([], dtype=torch.long)]


class Converted(TorchDispatchMode):
    """How many values of each tensor were converted to another type."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point():
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def make(name) -> Model:
    return Model(random_model(CONFIGS[name], "eager", torch.bfloat16).net, Letters(), name)


def whole(module) -> torch.Tensor:
    """(out, in)"""
    weight = module.weight.detach().float()
    return weight.T if isinstance(module, Conv1D) else weight


@pytest.mark.parametrize("chosen", PARTS, ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: nn.Linear(7, 5), lambda: nn.Linear(5, 7, bias=False), lambda: Conv1D(5, 7)])
def test_rows_and_columns_are_those_of_the_whole_weight(make, kind, chosen):
    module = make().to(kind)
    nn.init.normal_(module.weight)
    linear, reference = Linear(module), whole(module)
    assert (*linear.shape, linear.dtype) == (*reference.shape, kind)
    assert torch.equal(linear.rows(chosen), reference[chosen])
    assert torch.equal(linear.columns(chosen), reference[:, chosen])
    assert torch.equal(linear.rows(chosen, torch.float64), reference[chosen].double())
    assert (linear.bias is None) == (module.bias is None)
    with torch.no_grad():
        outside = module(torch.eye(linear.shape[1], dtype=kind)).T  # (out, in)
    bias = 0 if linear.bias is None else linear.bias[:, None]
    assert torch.allclose(outside, linear.rows(dtype=kind) + bias, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", third_of(CONFIGS))
def test_what_neurons_read_and_write_is_read_from_16_bits_as_if_converted_whole(name):
    model = make(name)
    layer = model.layers - 1
    for site in ("ffn", "attn"):
        mixture = model.experts(layer) if site == "ffn" else None
        if mixture is None:
            reference = whole(model.site_module(site, layer)).T
        else:
            down, up = (part.detach().float() for part in (mixture.down_proj, mixture.gate_up_proj))
            steered = name == "gpt_oss"  # its weights lie the other way round, its gates and ups by turns
            reference = (down if steered else down.transpose(1, 2)).flatten(0, 1)
            gates = up[:, :, ::2].transpose(1, 2) if steered else up.unflatten(1, (2, -1))[:, 0]
            assert torch.equal(w_in_rows(model, "ffn", layer), gates.flatten(0, 1))
        assert len(reference) == model.width(site)
        for chosen in (slice(None), slice(3, 4), slice(1, len(reference) - 1), slice(len(reference) // 2 - 2, None, 3)):
            assert torch.equal(w_out_rows(model, site, layer, chosen), reference[chosen])
            assert torch.equal(direct_rows(model, site, layer, chosen), direct_rows(model, site, layer)[chosen])
        assert torch.equal(direct_row(model, Neuron(layer, site, 5)), direct_rows(model, site, layer)[5])
    if "q" not in model.sites:
        return
    joined = whole(model.site_module("q", layer))
    columns = model.columns("q")
    assert torch.equal(w_in_rows(model, "q", layer), joined if columns is None else joined[columns])


@pytest.mark.parametrize("name", third_of(CONFIGS))
def test_the_unembedding_in_blocks_is_the_unembedding(name, monkeypatch):
    model = make(name)
    config = model.config
    reference = whole(model.net.get_output_embeddings()) * getattr(config, "logit_scale", 1)
    reference = reference / getattr(config, "logits_scaling", 1)
    if model.unembedding_in:
        reference = reference @ whole(model.unembedding_in)
    x = torch.randn(3, model.config.hidden_size)
    monkeypatch.setattr(weight_rows, "BLOCK", 16)  # of 50 tokens
    assert torch.allclose(unembedding(model), reference, rtol=1e-5, atol=1e-5)
    assert torch.allclose(unembedding(model, 7), reference[7], rtol=1e-5, atol=1e-5)
    assert torch.allclose(unembed(model, x), x @ reference.T, rtol=1e-5, atol=1e-5)
    neuron = Neuron(1, "ffn", 3)
    logits = (direct_row(model, neuron) @ reference.T).sort(descending=True)
    result = project(model, neuron, 50)
    assert [word.id for word in result.promoted] == logits.indices.tolist()
    if result.typical:
        assert [word.logit for word in result.promoted] == pytest.approx(logits.values.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["t5", "t5, relu", "bert", "bert, sequence", "vit", "clip", "dinov2"])
def test_what_stands_for_the_unembedding_elsewhere(name, monkeypatch):
    """T5's tied one is scaled; a classifier of text reads its input embeddings, one of images its labels' weights: in
    DINOv2 those of [CLS], and those of the mean of the patches."""
    model = other_model(name)
    output = model.net.get_output_embeddings()
    if output is None:
        output = model.embeddings[0] if model.task.reads_text else model.net.classifier
    reference = whole(output) * (24**-0.5 if name == "t5, relu" else 1)
    if name == "dinov2":
        reference = reference[:, :24] + reference[:, 24:]
    monkeypatch.setattr(weight_rows, "BLOCK", 2)
    assert torch.equal(unembedding(model), reference)
    x = torch.randn(3, 24)
    assert torch.allclose(unembed(model, x), x @ reference.T, rtol=1e-5, atol=1e-5)


def test_a_layer_scale_multiplies_what_neurons_write():
    model = other_model("dinov2")
    scaled = model.net.dinov2.encoder.layer[1]
    written = scaled.mlp.fc2.weight[:, 3] * scaled.layer_scale2.lambda1
    gain = model.net.dinov2.layernorm.weight
    expected = ((written - written.mean()) * gain).float()
    row = direct_row(model, Neuron(1, "ffn", 3))
    assert torch.allclose(row / row.norm(), expected / expected.norm(), atol=1e-6)
    assert calibrate(model).divisors["dinov2.encoder.layer.1.layer_scale2"] == (1, 1, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shape_is_learnt_without_converting_a_weight(name):
    model = make(name)
    with Converted() as converted:
        assert model.head_dim * model.heads == model.width("attn")
        for site in model.sites:
            assert model.check(Neuron(1, site, model.width(site) - 1))
        assert not converted.sizes
        w_out_rows(model, "ffn", 1)
        assert converted.sizes


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_neurons_words_convert_its_row_and_blocks_of_the_unembedding(name, monkeypatch):
    model = make(name)
    project(model, Neuron(1, "ffn", 3))  # measures what norms divide by, once
    monkeypatch.setattr(weight_rows, "BLOCK", 16)
    with Converted() as converted:
        project(model, Neuron(1, "ffn", 3))
    assert max(converted.sizes) == 16 * model.config.hidden_size
    with Converted() as converted:
        direct_row(model, Neuron(1, "ffn", 3))
    assert max(converted.sizes) == model.config.hidden_size
