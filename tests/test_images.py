"""Images: pixels, patches, and the picture of both."""

import json

import pytest
import torch
from click.testing import CliRunner
from PIL import Image, ImageDraw
from transformers import ViTConfig, ViTForImageClassification

from icebear import VIT, attribute, load_model
from icebear.app.cli.main import main

RUN = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random ViT with its image processor, and a picture."""
    from transformers import ViTImageProcessorPil

    place = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        id2label={0: "ice", 1: "bear"},
        label2id={"ice": 0, "bear": 1},
    )
    net = ViTForImageClassification(config)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.3)
    net.save_pretrained(place)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(place)
    picture = Image.new("RGB", (80, 60), "white")
    ImageDraw.Draw(picture).ellipse((20, 10, 60, 50), fill="saddlebrown")
    picture.save(place / "bear.png")
    (place / "notes.txt").write_text("not an image")
    return place


def test_pixels_patches_tokens_and_neurons_of_a_path_an_image_and_pixels(folder):
    model = load_model(str(folder), dtype="float32", device="cpu")
    result = attribute(model, str(folder / "bear.png"), method=VIT)
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


def test_the_overlay_is_red_where_it_speaks_for_the_label(folder):
    model = load_model(str(folder), dtype="float32", device="cpu")
    image = attribute(model, str(folder / "bear.png")).image
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


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--image", "none.png"], 1, "image"),
        (["--image", "{folder}/notes.txt"], 1, "image"),
        (["a bear"], 2, "--image"),
        ([], 2, "--messages"),
        (["a bear", "--png", "x.png"], 2, "--image"),
        (["--image", "{folder}/bear.png", "--target", "beer"], 1, "'bear'"),
    ],
)
def test_mistakes(folder, arguments, code, message):
    inputs = [argument.format(folder=folder) for argument in arguments]
    result = RUN.invoke(main, ["explain", *inputs, "--model", str(folder)])
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr
