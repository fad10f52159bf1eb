"""Dispatched models: weights that come from the CPU or the disk when they are used give what a model in memory does."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from click.testing import CliRunner
from configurations import different
from conftest import IDS, LLAMA, random_model
from few import third_of
from transformers import LlamaConfig

from icebear import Edit, Model, Neuron, attribute, circuit, project, steer
from icebear.app.cli.main import main
from icebear.errors import InputError
from icebear.models.loading.loading import load_model

CONFIGS = {**different(), "llama, tied": LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})}
PARTS = ("model.embed_tokens", *(f"model.layers.{n}" for n in range(3)), "model.norm", "model.rotary_emb", "lm_head")
MIXED = {part: "disk" if part == "model.layers.1" else "cpu" for part in PARTS}
OTHER = [3, 9, 12, 40, 5, 3, 21, 9]


def pair(name):
    """The same model in memory, and with all its weights elsewhere."""
    plain = random_model(CONFIGS[name], "eager", torch.float32)
    suppressed = cpu_offload(copy.deepcopy(plain.net), torch.device("cpu"))
    return plain, Model(suppressed, name=plain.name)


@pytest.mark.parametrize("name", third_of(CONFIGS, "llama, tied"))
def test_an_offloaded_model_is_the_model(name):
    """Logits to the bit, relevance and edits to rounding, its fingerprint, and nothing is left in it."""
    plain, suppressed = pair(name)
    assert suppressed.offloaded
    assert not plain.offloaded
    assert suppressed.fingerprint == plain.fingerprint
    assert torch.equal(suppressed.next_logits(IDS), plain.next_logits(IDS))
    before = [(path, set(m.__dict__), len(m._forward_hooks)) for path, m in suppressed.net.named_modules()]
    one, other = (attribute(model, IDS, sites=plain.sites) for model in (plain, suppressed))
    assert torch.allclose(one.tokens, other.tokens, rtol=1e-4, atol=1e-6)
    assert other.conservation().to_dict() == pytest.approx(one.conservation().to_dict(), rel=1e-4, abs=1e-5)
    for site in plain.sites:
        assert torch.allclose(one.of(site), other.of(site), rtol=1e-3, atol=1e-6), site
    edits = [Edit(Neuron(1, "ffn", 3), "add", 3.0), Edit(Neuron(0, "attn", 2), "scale", 0.0)]
    with steer(plain, edits), steer(suppressed, edits):
        assert torch.equal(suppressed.next_logits(IDS), plain.next_logits(IDS))
    assert before == [(path, set(m.__dict__), len(m._forward_hooks)) for path, m in suppressed.net.named_modules()]
    assert all(parameter.is_meta for parameter in suppressed.net.parameters())


def test_what_reads_weights_finds_them():
    plain, suppressed = pair("llama")
    for neuron in (Neuron(1, "ffn", 3), Neuron(1, "attn", 5)):
        assert project(suppressed, neuron) == project(plain, neuron)
    one, other = (attribute(model, IDS, counterfactual=OTHER) for model in (plain, suppressed))
    assert torch.allclose(one.of("ffn"), other.of("ffn"), rtol=1e-3, atol=1e-6)
    graphs = [circuit(model, IDS, counterfactual=OTHER, nodes=8) for model in (plain, suppressed)]
    assert [str(node.neuron) for node in graphs[0].nodes] == [str(node.neuron) for node in graphs[1].nodes]


def test_the_graph_of_an_offloaded_model_keeps_no_layers_weights():
    """Autograd would keep each weight that was loaded; recomputing lets go of those of layers."""
    selected = {}
    for name, model in zip(("plain", "away"), pair("llama"), strict=True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            attribute(model, IDS, sites=())
        shapes = {tuple(p.shape) for p in model.layer_modules[0].parameters() if p.dim() == 2}
        selected[name] = sum(tuple(x.shape) in shapes or tuple(x.T.shape) in shapes for x in saved if x.dim() == 2)
    assert selected["plain"] > 0 == selected["away"]


@pytest.mark.parametrize("device_map", ["disk", "auto", MIXED])
def test_a_model_is_loaded_by_a_device_map(device_map, tiny_folder):
    plain, suppressed = load_model(tiny_folder, device="cpu"), load_model(tiny_folder, device_map=device_map)
    assert suppressed.offloaded is (device_map != "auto")
    assert torch.equal(suppressed.next_logits("Paris"), plain.next_logits("Paris"))
    results_agree(plain, suppressed)


@pytest.mark.devices
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_over_two_devices_is_the_model(tiny_folder):
    two = {part: int(part.endswith((".1", ".2", "norm", "lm_head"))) for part in PARTS}
    where = ({"device": "cuda:0"}, {"device_map": two})
    plain, split = (load_model(tiny_folder, dtype="float32", **options) for options in where)
    assert {parameter.device.index for parameter in split.net.parameters()} == {0, 1}
    assert torch.allclose(split.next_logits("Paris").cpu(), plain.next_logits("Paris").cpu(), rtol=1e-4, atol=1e-6)
    results_agree(plain, split)


def results_agree(plain, other):
    """The laws of a model whose weights lie elsewhere: relevance, comparisons, edits and generation are the same."""
    for options in ({}, {"counterfactual": "Oslo is"}, {"keep": "top", "k": 5}):
        ours, theirs = (attribute(model, "Rome is", 40, **options) for model in (plain, other))
        assert torch.allclose(ours.tokens, theirs.tokens, rtol=1e-4, atol=1e-6)
        assert torch.allclose(ours.layers("ffn"), theirs.layers("ffn"), rtol=1e-4, atol=1e-5)
        if "keep" not in options:
            assert torch.allclose(ours.of("ffn"), theirs.of("ffn"), rtol=1e-3, atol=1e-6)
        rows, others = (result.top(5, "ffn", position="all") for result in (ours, theirs))
        assert [(row.neuron, row.position) for row in rows] == [(row.neuron, row.position) for row in others]
        assert [row.relevance for row in rows] == pytest.approx([row.relevance for row in others], rel=1e-3, abs=1e-6)
    edits = [Edit(Neuron(1, "ffn", 3), "add", 3.0), Edit(Neuron(0, "attn", 2), "scale", 0.0)]
    for chosen in ([], edits):
        with steer(plain, chosen), steer(other, chosen):
            assert other.generate("Rome", max_new_tokens=5) == plain.generate("Rome", max_new_tokens=5)


def test_bad_device_maps_are_told(tiny_folder, tmp_path):
    with pytest.raises(InputError):
        load_model(tiny_folder, device="cpu", device_map="auto")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="LoRA"):
        load_model(str(tmp_path), device_map="auto")
    output = CliRunner().invoke(main, ["explain", "Rome", "--model", tiny_folder, "--device-map", "nowhere"])
    assert output.exit_code == 1
    assert "nowhere" in output.output
