"""Images that are compared with themselves, blurred or gray, and the controls of their patches."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from scipy.ndimage import gaussian_filter1d
from test_images import folder, vit  # noqa: F401  fixtures

from icebear import ATTNLRP, DIFFERENCE, attribute
from icebear.app.cli.main import main
from icebear.concepts.nodes.patch_controls import patch_controls
from icebear.errors import InputError
from icebear.models.text.counterfactual_images import BLUR, about, blurred, counterfactual_image


@pytest.fixture(scope="module")
def bear(folder):  # noqa: F811
    return str(folder / "bear.png")


def test_the_blur_is_a_gaussian_that_is_mirrored_at_the_edges():
    pixels = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    expected = pixels.double().numpy()
    for axis in (1, 2):
        expected = gaussian_filter1d(expected, BLUR * 24, axis, mode="mirror", radius=7)
    assert blurred(pixels).double().numpy() == pytest.approx(expected, abs=1e-6)
    assert blurred(torch.ones(3, 5, 200)) == pytest.approx(torch.ones(3, 5, 200))


def test_gray_is_the_gray_of_the_processor(bear, vit):  # noqa: F811
    gray = counterfactual_image(vit, bear, "grey")
    assert gray == pytest.approx(torch.full_like(gray, 128 / 255 * 2 - 1), abs=1e-6)  # mean and deviation 1/2


def test_a_mask_is_resized_as_the_image_is(bear, vit, tmp_path):  # noqa: F811
    mask = np.zeros((60, 80), dtype=np.uint8)
    mask[:, 40:] = 255
    Image.fromarray(mask).save(tmp_path / "half.png")
    plain, masked, soft = (
        counterfactual_image(vit, bear, kind) for kind in (bear, f"mask:{tmp_path / 'half.png'}", "blur")
    )
    assert torch.equal(masked[..., :16], plain[..., :16])
    assert torch.equal(masked[..., 16:], soft[..., 16:])
    Image.fromarray(np.zeros((60, 80), dtype=np.uint8)).save(tmp_path / "none.png")
    assert torch.equal(counterfactual_image(vit, bear, f"mask:{tmp_path / 'none.png'}"), plain)
    Image.fromarray(mask[:30]).save(tmp_path / "small.png")
    with pytest.raises(InputError):
        counterfactual_image(vit, bear, f"mask:{tmp_path / 'small.png'}")
    with pytest.raises(InputError):
        counterfactual_image(vit, plain, f"mask:{tmp_path / 'half.png'}")


def test_an_image_is_compared_with_itself_blurred(bear, vit):  # noqa: F811
    result = attribute(vit, bear)
    assert result.method == DIFFERENCE
    assert result.counterfactual.texts == [about("blur")]
    assert result.conservation().remainder == pytest.approx(0, abs=1e-4)
    named = attribute(vit, bear, counterfactual_image="blur")
    other = attribute(vit, bear, counterfactual=blurred(counterfactual_image(vit, bear, bear)))
    assert torch.equal(result.tokens, named.tokens)
    assert torch.equal(result.tokens, other.tokens)
    both = attribute(vit, [bear, bear], counterfactual_image="grey")
    assert torch.equal(both[0].tokens, both[1].tokens)
    assert not torch.equal(both[0].tokens, result.tokens)


def test_with_a_method_nothing_is_compared_unless_it_is_named(bear, vit):  # noqa: F811
    assert attribute(vit, bear, method="cp-lrp").counterfactual is None
    assert attribute(vit, bear, method="cp-lrp", counterfactual_image="grey").counterfactual.texts == [about("grey")]
    white = torch.ones(3, 32, 32)
    assert attribute(vit, white).method == ATTNLRP  # nothing to blur
    with pytest.raises(InputError):
        attribute(vit, bear, counterfactual=white, counterfactual_image="grey")


def test_a_text_has_no_counterfactual_image(model):
    with pytest.raises(InputError):
        attribute(model, "abc", counterfactual_image="blur")


def test_controls_of_patches(bear, vit):  # noqa: F811
    """Against pixels that are exchanged by hand; the numbers before are those of both images."""
    result = attribute(vit, bear, "ice", contrast="bear", counterfactual_image="grey")
    deleted, _, inserted, _ = controls = patch_controls(vit, result)
    image, gray = (counterfactual_image(vit, bear, kind) for kind in (bear, "grey"))

    def number(pixels):
        with torch.no_grad():
            ice, bear_logit = vit.net(pixels[None]).logits[0].tolist()
        return ice - bear_logit

    first = result.image.patches.flatten().topk(2).indices.tolist()  # a tenth of sixteen
    changed, filled = image.clone(), gray.clone()
    for patch in first:
        row, column = 8 * (patch // 4), 8 * (patch % 4)
        where = (slice(None), slice(row, row + 8), slice(column, column + 8))
        changed[where], filled[where] = gray[where], image[where]
    assert (deleted.before, deleted.after) == pytest.approx((number(image), number(changed)), abs=1e-5)
    assert (inserted.before, inserted.after) == pytest.approx((number(gray), number(filled)), abs=1e-5)
    assert [len(control.drawn) for control in controls] == [20, 15, 20, 15]
    assert patch_controls(vit, attribute(vit, bear, method="cp-lrp")) == ()


def test_the_command_compares_with_a_blur(bear, folder, tmp_path):  # noqa: F811
    words = ["explain", "--image", bear, "--model", str(folder), "--target", "ice"]
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["counterfactual"]["image"] == about("blur")
    assert len(json.loads(result.stdout)["patch_controls"]) == 4
    assert "inserted" in CliRunner().invoke(main, [*words, "--counterfactual-image", "grey"]).stdout
    page = CliRunner().invoke(main, [*words, "--html", str(tmp_path / "page.html")])
    assert page.exit_code == 0, page.output
    assert "deleted" in (tmp_path / "page.html").read_text()
