"""Images: pixels, patches, and the picture of both."""

import json
import sys
from pathlib import Path

import pytest
import test_tasks
import torch
from click.testing import CliRunner
from conftest import Double
from few import third_of
from PIL import Image, ImageDraw
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from icebear import ATTNLRP, CP_LRP, PA_LRP, VIT, AlphaBeta, AttnLRP, Model, ZPlus, attribute, explain, load_model
from icebear.app.cli.main import main
from icebear.concepts.methods.gradients import IntegratedGradients
from icebear.concepts.selftest import selftest
from icebear.errors import InputError, ModelError
from icebear.evaluation.baselines import AttentionRollout, Occlusion

RUN = CliRunner()
KINDS = [name for name, (auto, _) in test_tasks.CONFIGS.items() if "ImageClassification" in auto]


SIDE, PATCH = 32, 8


def small_vit():
    """A ViT of random weights with two labels, which reads images of SIDE pixels in patches of PATCH."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        id2label={0: "ice", 1: "bear"},
        label2id={"ice": 0, "bear": 1},
    )
    net = ViTForImageClassification(config)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.3)
    return net


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random ViT with its image processor, and a picture."""
    from transformers import ViTImageProcessorPil

    place = tmp_path_factory.mktemp("vit")
    net = small_vit()
    net.save_pretrained(place)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(place)
    picture = Image.new("RGB", (80, 60), "white")
    ImageDraw.Draw(picture).ellipse((20, 10, 60, 50), fill="saddlebrown")
    picture.save(place / "bear.png")
    Image.new("RGB", (80, 60), "gray").save(place / "gray.png")
    (place / "notes.txt").write_text("not an image")
    return place


@pytest.fixture(scope="module")
def vit(folder):
    return load_model(str(folder), dtype="float32", device="cpu")


def test_pixels_patches_tokens_and_neurons_of_a_path_an_image_and_pixels(folder, vit):
    model = vit
    result = attribute(model, str(folder / "bear.png"), method=VIT)
    assert type(model.processor).__name__ == "ViTImageProcessorPil"  # not torchvision's, whose pixels are others
    assert result.image.pixels.shape == (32, 32)
    assert result.image.patches.shape == (4, 4)
    assert result.image.patches[1, 2].item() == pytest.approx(result.image.pixels[8:16, 16:24].sum().item(), abs=1e-6)
    assert result.tokens[1:].tolist() == pytest.approx(result.image.patches.flatten().tolist())
    assert result.prompt.strings[:3] == ("[CLS]", "0,0", "0,1")
    assert result.ffn.shape == (2, 17, 20)
    assert result.top(1)[0].position == 0  # [CLS] is classified
    assert 0 not in result.prompt.sinks
    same = attribute(model, [Image.open(folder / "bear.png")], method=VIT)[0]
    assert torch.equal(same.tokens, result.tokens)
    pixels = model.processor(images=Image.open(folder / "bear.png"), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(attribute(model, pixels, method=VIT).tokens, result.tokens)
    assert torch.equal(attribute(model, pixels.numpy(), method=VIT).tokens, result.tokens)


OWN = {
    "vit": ("[CLS]",),
    "deit": ("[CLS]", "[DIST]"),
    "dinov2": ("[CLS]",),
    "dinov2, swiglu": ("[CLS]",),
    "dinov2, registers": ("[CLS]", "[REG]", "[REG]", "[REG]"),
    "clip": ("[CLS]",),
    "siglip": (),
}


@pytest.mark.parametrize("name", KINDS)
def test_names_are_the_models_own_tokens_and_the_patches_of_the_image(name):
    """Also where positions are fitted to the image: DINOv2's table is of 2 x 2 patches, and the image has 2 x 3."""
    model = test_tasks.make(name)
    pixels = test_tasks.prompt(model)
    result = attribute(model, pixels, sites=())
    rows, columns = pixels.shape[1] // 8, pixels.shape[2] // 8
    patches = tuple(f"{row},{column}" for row in range(rows) for column in range(columns))
    assert result.prompt.strings == (*OWN[name], *patches)
    assert set(result.prompt.sinks) == set(range(1, len(OWN[name])))  # the first position is where labels are read
    assert result.image.patches.shape == (rows, columns)


def test_a_patch_whose_residual_stream_is_huge_is_a_sink():
    """Its nodes are not ranked; its pixels keep their relevance."""
    model = test_tasks.make("vit")
    with torch.no_grad():
        model.net.vit.embeddings.position_embeddings[0, 3] *= 300
    result = attribute(model, test_tasks.prompt(model))
    assert result.prompt.sinks == (3,)
    assert all(row.position != 3 for row in result.top(20, position="all"))
    assert result.tokens[3] != 0


@pytest.mark.parametrize("name", third_of(KINDS))
@pytest.mark.parametrize(
    "method", [ATTNLRP, CP_LRP, PA_LRP, VIT, AttnLRP(linear=ZPlus()), AttnLRP(linear=AlphaBeta(2))], ids=str
)
def test_constant_images_give_no_nan_and_conserve(name, method):
    model = test_tasks.make(name)
    zero = torch.zeros_like(test_tasks.prompt(model))
    partly = zero.clone()
    partly[:, :8] = 1
    for pixels in (zero, zero + 1, partly):
        with Double():
            result = attribute(model, pixels, method=method, number="logit", sites=())
        assert torch.isfinite(result.image.pixels).all()
        assert abs(result.conservation().remainder) < 1e-8 * max(1, abs(result.conservation().target))
        assert (result.image.pixels[pixels[0] == 0] == 0).all()


def test_the_relevance_of_a_difference_between_two_images_is_exact(folder, vit):
    """Between a path and an image, too; on the patches where they do not differ it is 0."""
    one = Image.open(folder / "bear.png")
    result = attribute(vit, str(folder / "bear.png"), "ice", contrast="bear", counterfactual=Image.new("RGB", one.size))
    assert result.image.patches.sum().item() == pytest.approx(result.conservation().target, rel=1e-4)
    other = torch.randn(3, 32, 32)
    changed = other.clone()
    changed[:, 8:16, 8:16] += 1
    result = attribute(vit, changed, "ice", contrast="bear", counterfactual=other)
    where = result.image.patches.nonzero().tolist()
    assert where == [[1, 1]]
    assert "another image" in result.comparison_text()
    with pytest.raises(InputError, match="itself"):
        attribute(vit, other, "ice", contrast="bear", counterfactual=other)


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 32, 24), (3, 64, 64)])
def test_an_image_of_another_shape_is_refused(vit, shape):
    with pytest.raises(InputError, match="32 x 32"):
        attribute(vit, torch.zeros(shape))


def test_dinov2_reads_images_of_any_size_but_no_smaller_than_a_patch():
    model = test_tasks.make("dinov2")
    assert attribute(model, torch.randn(3, 40, 17), sites=()).image.patches.shape == (5, 2)
    with pytest.raises(InputError, match="8 x 8"):
        attribute(model, torch.randn(3, 40, 7))
    with pytest.raises(InputError, match="sizes"):
        attribute(model, [torch.randn(3, 40, 16), torch.randn(3, 16, 16)], method="attnlrp")


def test_a_photograph_is_turned_as_its_file_says(folder, vit):
    turned = Image.open(folder / "bear.png").transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise, when shown
    turned.save(folder / "turned.png", exif=exif)
    images = [attribute(vit, str(folder / name), sites=()).tokens for name in ("bear.png", "turned.png")]
    assert torch.equal(*images)


def test_the_self_test_needs_no_prompt(vit):
    assert selftest(vit).verdict == "fine"
    assert {law.name for law in selftest(vit).laws} == {
        "batch",
        "activations",
        "counterfactual",
        "compared activations",
        "edits",
    }


def test_an_explanation_says_patches(folder, vit):
    explanation = explain(vit, str(folder / "bear.png"))
    assert explanation.ranking.position == "all"
    assert "(row,column)" in repr(explanation)
    page = explanation.to_html()
    assert "patches" in page
    assert "0,00,1" not in page  # the names of patches are no prompt


def test_the_overlay_is_red_where_it_speaks_for_the_label(folder, vit):
    image = attribute(vit, str(folder / "bear.png")).image
    for by in ("patches", "pixels"):
        picture = image.overlay(by, 64)
        assert picture.size == (64, 64)
        values = image.patches if by == "patches" else image.pixels
        row, column = divmod(int(values.abs().argmax()), values.shape[1])
        step = 64 // values.shape[1]
        red, _, blue = picture.getpixel((column * step, row * step))
        assert (red > blue) == (values[row, column].item() > 0)


def test_the_command_writes_a_picture_a_page_and_json(folder, tmp_path):
    options = ["--model", str(folder), "--method", "vit"]
    files = ["--png", str(tmp_path / "a.png"), "--html", str(tmp_path / "a.html")]
    result = RUN.invoke(main, ["explain", "--image", str(folder / "bear.png"), *options, *files, "--json"])
    assert result.exit_code == 0, result.stderr
    results = json.loads(result.stdout)
    assert results["target"]["text"] in ("ice", "bear")
    assert len(results["patches"]) == 4
    assert Image.open(tmp_path / "a.png").size == (448, 448)
    assert "data:image/png;base64," in (tmp_path / "a.html").read_text()
    shown = RUN.invoke(main, ["explain", "--image", str(folder / "bear.png"), *options[:2]]).stdout
    assert "+9" in shown or "-9" in shown  # the map, also where there are no colors


@pytest.mark.parametrize(
    "words",
    [
        "flip a --to ice",
        "circuit a --counterfactual b",
        "index --corpus a.txt --encoder none",
    ],
)
def test_verbs_of_texts_say_that_the_model_reads_images(folder, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("The bear.\n")
    result = RUN.invoke(main, [*words.split(), "--model", str(folder)])
    assert result.exit_code == 1, result.stderr
    assert isinstance(result.exception, SystemExit)
    assert "image" in result.stderr


def test_other_image_classifiers_are_refused_by_name():
    """With those that icebear explains."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=2)
    with pytest.raises(ModelError, match=r"ResNetForImageClassification.*dinov2"):
        Model(ResNetForImageClassification(config))


@pytest.mark.parametrize("verb", ["explain", "rank"])
def test_without_the_extra_a_sentence_names_it(folder, verb, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = RUN.invoke(main, [verb, "--image", str(folder / "bear.png"), "--model", str(folder)])
    assert result.exit_code == 1
    assert "pillow" in result.stderr
    assert ".[images]" in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_without_an_image_processor_a_sentence_says_so(folder, tmp_path, vit):
    vit.net.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32", device="cpu")
    assert attribute(model, torch.zeros(3, 32, 32), sites=()).tokens.shape == (17,)
    with pytest.raises(InputError, match="image processor"):
        attribute(model, str(folder / "bear.png"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--image", "none.png"], 1, "image"),
        (["--image", "{folder}/notes.txt"], 1, "image"),
        (["a bear"], 2, "--image"),
        ([], 2, "--messages"),
        (["a bear", "--png", "x.png"], 2, "--image"),
        (["--image", "{folder}/bear.png", "--target", "beer"], 1, "'bear'"),
        (["--image", "{folder}/bear.png", "--chat"], 2, "--chat"),
        (["--image", "{folder}/bear.png", "--span", "all"], 1, "images"),
        (["--image", "{folder}/bear.png", "--counterfactual", "none.png"], 2, "--counterfactual-image"),
        (["--image", "{folder}/bear.png", "--counterfactual-image", "none.png"], 1, "none.png"),
        (["--image", "{folder}/bear.png", "--counterfactual-image", "mask:none.png"], 1, "none.png"),
        (["--image", "{folder}/bear.png", "--counterfactual-image", "{folder}/notes.txt"], 1, "image"),
    ],
)
def test_mistakes(folder, arguments, code, message):
    inputs = [argument.format(folder=folder) for argument in arguments]
    result = RUN.invoke(main, ["explain", *inputs, "--model", str(folder)])
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr


def test_methods_that_score_tokens_of_texts_are_refused(vit):
    for method in (IntegratedGradients(), Occlusion(), AttentionRollout()):
        with pytest.raises(InputError, match="gxi"):
            attribute(vit, torch.randn(3, 32, 32), method=method)
