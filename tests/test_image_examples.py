"""A model of images without labels, asked by examples; its weights from an ONNX graph."""

import json

import onnx
import pytest
import test_tasks
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper
from PIL import Image, ImageDraw
from test_images import folder, vit  # noqa: F401  fixtures
from transformers import (
    BitImageProcessorPil,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTModel,
)

from icebear import attribute, by_examples, load_model, project
from icebear.app.cli.main import main
from icebear.concepts.nodes.image_heads import image_heads
from icebear.concepts.nodes.patch_controls import patch_controls
from icebear.concepts.selftest import selftest
from icebear.errors import InputError
from icebear.models.image_examples import image_features, with_direction
from icebear.models.loading.onnx_files import onnx_weights
from icebear.models.text.counterfactual_images import counterfactual_image

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
KINDS = {
    "dinov2": lambda: Dinov2Model(Dinov2Config(**SIZES)),
    "registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZES)),
    "vit": lambda: ViTModel(ViTConfig(**SIZES, intermediate_size=20), add_pooling_layer=False),
}


def saved(kind, where):
    torch.manual_seed(0)
    net = KINDS[kind]()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.3)
    net.save_pretrained(where)
    sizes = {"height": 32, "width": 32}
    BitImageProcessorPil(size={"shortest_edge": 32}, crop_size=sizes).save_pretrained(where)
    return net


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """A small random DINOv2 without labels; ice and bears in folders, and one bear apart."""
    place = tmp_path_factory.mktemp("dinov2")
    saved("dinov2", place)
    for name, color in (("bears", "saddlebrown"), ("ice", "lightblue")):
        (place / name).mkdir()
        for number in range(3):
            picture = Image.new("RGB", (60, 50), "white")
            ImageDraw.Draw(picture).ellipse((10 * number, 5, 30 + 10 * number, 40), fill=color)
            picture.save(place / name / f"{number}.png")
        (place / name / "notes.txt").write_text("no image")
    picture.rotate(90).save(place / "bear.png")
    (place / "empty").mkdir()
    return place


@pytest.fixture(scope="module")
def bare(animals):
    return load_model(str(animals), dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_saved_without_labels_gives_the_features_of_its_encoder(kind, tmp_path):
    net = saved(kind, tmp_path).eval()
    model = load_model(str(tmp_path), dtype="float32", device="cpu")
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = net(pixels).last_hidden_state
    begins = tokens.shape[1] - 16
    expected = [tokens[:, 0]] if kind == "vit" else [tokens[:, 0], tokens[:, begins:].mean(1)]
    assert image_features(model, list(pixels)) == pytest.approx(torch.cat(expected, 1), abs=1e-5)
    assert model.labels == {}


def test_the_number_is_one_at_the_mean_of_the_examples_and_zero_at_that_of_the_others(animals, bare):
    model = by_examples(bare, animals / "bears", animals / "ice")
    bears, ice = ([str(animals / name / f"{n}.png") for n in range(3)] for name in ("bears", "ice"))
    number = lambda images: image_features(model, images)[:, 0].mean().item()  # noqa: E731
    assert number(bears) == pytest.approx(1, abs=1e-4)
    assert number(ice) == pytest.approx(0, abs=1e-4)
    a, b, x = (image_features(bare, images).double() for images in (bears, ice, [str(animals / "bear.png")]))
    a, b, x = a.mean(0), b.mean(0), x[0]
    projected = (x - b) @ (a - b) / (a - b).norm() ** 2
    result = attribute(model, str(animals / "bear.png"))
    assert result.target.logit == pytest.approx(projected.item(), abs=1e-4)
    assert result.target.text == "bears, not ice"
    assert result.target.probability is None
    assert result.conservation().remainder == pytest.approx(0, abs=1e-4)
    assert len(patch_controls(model, result)) == 4


def test_the_asked_model_shares_weights_and_leaves_the_other_alone(animals, bare):
    model = by_examples(bare, [torch.randn(3, 32, 32)], [torch.zeros(3, 32, 32), torch.ones(3, 32, 32)])
    weights = [net.dinov2.layernorm.weight.data_ptr() for net in (model.net, bare.net)]
    assert weights[0] == weights[1]
    assert (bare.labels, len(model.labels)) == ({}, 1)
    assert bare.fingerprint != model.fingerprint
    with model.lock:
        assert image_features(bare, [torch.zeros(3, 32, 32)]).shape == (1, 48)


def test_without_labels_a_sentence_names_the_examples(animals, bare):
    picture = str(animals / "bear.png")
    for call in (
        lambda: attribute(bare, picture),
        lambda: attribute(bare, picture, "ice"),
        lambda: attribute(bare, picture, contrast=0),
        lambda: bare.predict(picture),
    ):
        with pytest.raises(InputError, match="--examples"):
            call()
    with pytest.raises(InputError):
        project(bare, "L1.ffn.0")
    assert selftest(bare).verdict == "fine"


def test_mistakes_with_examples(animals, bare, vit, model):  # noqa: F811
    bears = animals / "bears"
    for arguments in (
        (vit, bears, bears),  # has labels
        (model, bears, bears),  # reads text
        (bare, bears, bears),  # the same
        (bare, bears, animals / "empty"),
        (bare, bears, animals / "bear.png"),
        (bare, bears, []),
        (bare, [str(bears / "notes.txt")], bears),
        (bare, bears, animals / "nowhere"),
    ):
        with pytest.raises(InputError):
            by_examples(*arguments)
    with pytest.raises(InputError):
        with_direction(bare, torch.ones(48), torch.ones(48), "nothing")


def test_the_command_asks_by_two_folders(animals):
    picture = ["explain", "--image", str(animals / "bear.png"), "--model", str(animals)]
    words = [*picture, "--examples", str(animals / "bears"), "--others", str(animals / "ice")]
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert output["target"]["text"] == "bears, not ice"
    assert len(output["patch_controls"]) == 4
    assert CliRunner().invoke(main, [*words, "--counterfactual-image", "grey"]).exit_code == 0
    assert CliRunner().invoke(main, picture).exit_code == 1
    assert CliRunner().invoke(main, words[:-2]).exit_code == 2


def test_weights_of_a_graph_are_named_and_turned(tmp_path):
    matrix, gain = torch.randn(3, 4), torch.randn(4)
    initializers = [
        helper.make_tensor("onnx::MatMul_1", TensorProto.FLOAT, (3, 4), matrix.flatten().tolist()),
        helper.make_tensor("norm.weight", TensorProto.FLOAT, (4,), gain.tolist()),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_1"], ["y"], name="/layer/fc1/MatMul"),
        helper.make_node("Mul", ["y", "norm.weight"], ["z"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xz"]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], initializers)), tmp_path / "g.onnx")
    weights = onnx_weights(tmp_path / "g.onnx")
    assert {name: tuple(x.shape) for name, x in weights.items()} == {"layer.fc1.weight": (4, 3), "norm.weight": (4,)}
    assert torch.equal(weights["layer.fc1.weight"], matrix.T)
    assert torch.equal(weights["norm.weight"], gain)


def number_with_a_head_of(model, image, other, head):
    """The number of an image when one head has, at [CLS], what it computes in another image; by hooks of torch."""
    module = model.site_module("attn", head.layer)
    columns = slice(head.index * model.head_dim, (head.index + 1) * model.head_dim)
    seen = []
    hook = module.register_forward_pre_hook(lambda m, args: seen.append(args[0][0, 0, columns]))
    with torch.no_grad():
        model.net(other[None])
    hook.remove()

    def swap(module, args):
        x = args[0].clone()
        x[0, 0, columns] = seen[0]
        return (x, *args[1:])

    hook = module.register_forward_pre_hook(swap)
    with torch.no_grad():
        logits = model.net(image[None]).logits[0]
    hook.remove()
    return logits


@pytest.mark.parametrize("kind", ["labels", "examples"])
def test_heads_of_an_image_their_effects_and_what_they_read(kind, animals, bare, vit):  # noqa: F811
    model = vit if kind == "labels" else by_examples(bare, animals / "bears", animals / "ice")
    answers = ("ice", "bear") if kind == "labels" else (None, None)
    picture = str(animals / "bear.png")
    result = attribute(model, picture, *answers, counterfactual_image="grey", sites=("attn",))
    heads = image_heads(model, result)
    assert heads.heads
    assert len(heads.random_effects) == 8 - len(heads.heads)
    image, other = (counterfactual_image(model, picture, kind) for kind in (picture, "grey"))
    for head in heads.heads:
        assert sum(head.reads) == pytest.approx(head.relevance, abs=1e-5)
        assert head.relevance == pytest.approx(result.of_neuron(head.head))
        with torch.no_grad():
            change = model.net(image[None]).logits[0] - number_with_a_head_of(model, image, other, head.head)
        number = change[0] - change[1] if kind == "labels" else change[0]
        assert head.effect == pytest.approx(number.item(), abs=1e-5)
    first = heads.heads[0]
    assert heads.patches(first)[0] == heads.strings[1 + max(range(16), key=lambda patch: first.reads[1 + patch])]
    assert image_heads(model, attribute(model, picture, method="cp-lrp")) is None


def test_a_model_without_a_cls_token_has_no_heads_that_move_to_it():
    model = test_tasks.make("siglip")
    image = test_tasks.prompt(model)
    assert image_heads(model, attribute(model, image, counterfactual=torch.zeros_like(image), sites=("attn",))) is None
