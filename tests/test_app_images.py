"""Why this word, about an image: the picture with the region of a word, and the words of a region."""

import io
import re
from hashlib import sha256

import numpy
import pictured
import pytest
import torch
from appview import end_jobs, fine, set_up, text, visit
from conftest import Double
from PIL import Image

from icebear import Chat, attribute, load_model
from icebear.app.web.why.about_image import ImageRequest
from icebear.concepts.answers.image_words import MOST_REGIONS, WordMap, numbered, raised_words, regions
from icebear.concepts.nodes.image_shares import image_shares
from icebear.models.text.prompt_images import with_image
from icebear.models.text.prompts import Prompt

WHAT = "what is this"
BEAR, PLANTED = 8, 5
"""The answer, and the token of the image that decides it: row 1, column 2 of 3 x 3."""


def picture(shift=0):
    """Noise in squares of a patch, moved to the right by so many patches."""
    pixels = numpy.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=numpy.uint8)
    return Image.fromarray(numpy.roll(pixels, 8 * shift, axis=1))


def file(shift=0):
    content = io.BytesIO()
    picture(shift).save(content, "PNG")
    return "bear.png", content.getvalue(), "image/png"


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The folder of a LLaVA that answers "bear" because of one patch, whatever the words are."""
    folder = pictured.save("llava", tmp_path_factory.mktemp("llava"))
    model = load_model(str(folder), dtype="float64", device="cpu")
    with Double(), torch.no_grad():
        pictured.mix_once(model)
        outputs = model.net.get_output_embeddings().weight
        model.embeddings[0].weight.zero_()
        outputs.zero_()
        prompt = Prompt(chat=Chat([{"role": "user", "content": WHAT}]), image=picture())
        pictured.plant(model, with_image(model, prompt), PLANTED, BEAR)
    model.net.float().save_pretrained(folder)
    return folder


@pytest.fixture
def llava(planted, monkeypatch, tmp_path):
    set_up(monkeypatch, model=str(planted), store=str(tmp_path / "no.db"), dtype="float32", device="cpu")
    monkeypatch.setattr("icebear.app.web.why.about_image.MOST_TOKENS", 3)
    yield load_model(str(planted), dtype="float32", device="cpu")
    end_jobs()


def uploaded(*file):
    page = fine(visit(prompt=WHAT))
    page.file_uploader[0].set_value(file).run()
    return page


def shown(page):
    """Region -> its relevance, as it is printed."""
    parts = re.findall(r'data-pick="(\d+,\d+)".*?aria-label="[^":]*: ([-+.\d]+)"', text(page))
    return {name: float(number) for name, number in parts}


def largest(values):
    return max(values, key=values.get)


@pytest.mark.parametrize(("shift", "name"), [(0, "1,2"), (1, "1,0"), (2, "1,1")])
def test_the_region_of_a_word_is_the_planted_patch(llava, shift, name):
    """Also where the patches of the picture stand elsewhere."""
    values = shown(fine(uploaded(*file(shift))))
    assert len(values) == 9
    assert largest(values) == name


def test_the_page_shows_the_map_the_shares_and_the_tokens_of_the_word(llava):
    page = fine(uploaded(*file()))
    answer = llava.answer(Prompt(chat=Chat([{"role": "user", "content": WHAT}]), image=picture()), 3)
    result = attribute(llava, answer, sites=())
    assert result.target_text == "bearbearbear"  # this tokenizer writes no spaces, so it is a single word
    for name, number in shown(page).items():
        row, column = map(int, name.split(","))
        assert number == pytest.approx(result.image.patches[row, column].item(), abs=1e-3)
    assert str(result.text_heatmap()) in text(page)
    shares = image_shares(llava, result)
    for part in ("image", "text", "template"):
        for share, total in ((shares.shares, shares.sums), (shares.blurred_shares, shares.blurred_sums)):
            assert f"{share[part]:.0%} ({total[part]:+.2f})" in text(page)
    page.get_by_key("as_message").set_value(False).run()
    plain = attribute(llava, llava.answer(Prompt(text=WHAT, image=picture()), 3), sites=())
    assert str(plain.text_heatmap()) in text(fine(page))


def test_a_word_has_its_region_and_a_region_its_words(llava):
    page = fine(uploaded(*file()))
    request = ImageRequest(sha256(file()[1]).hexdigest(), WHAT, True)
    answer = llava.answer(Prompt(chat=Chat([{"role": "user", "content": WHAT}]), image=picture()), 3)
    page.session_state["image_word"] = (request, (1, 2))
    page.session_state["image_region"] = (request, "1,2")
    page.run()
    second = attribute(llava, answer, span=(1, 2), sites=()).image.patches
    assert shown(fine(page))["1,2"] == pytest.approx(second[1, 2].item(), abs=1e-3)
    patches = attribute(llava, answer, sites=()).image.patches  # of the word
    total, others = patches[1, 2].item(), (patches.sum() - patches[1, 2]).item() / 8
    assert f"{total:+.3f}" in text(page)
    assert f"{others:+.3f}" in text(page)
    page.get_by_key("prompt").set_value("this is").run()
    assert "mean of other regions" not in text(fine(page))  # it was of another answer


@pytest.mark.parametrize("content", [b"", b"<svg onload=alert(1)>", file()[1][:60]])
def test_a_file_that_is_no_image_is_refused(llava, content):
    page = uploaded("bear.png", content, "image/png")
    assert not page.exception
    assert len(page.error) == 1
    assert shown(page) == {}


def test_a_model_of_texts_has_no_field_for_an_image(environment, no_stages):
    page = fine(visit(prompt="The ice bear lives in the"))
    assert not page.file_uploader


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (8, 8), (9, 17), (64, 48), (2, 30)])
def test_regions_are_few_and_have_each_patch_once(shape):
    patches = torch.randn(shape, dtype=torch.float64)
    areas = regions(patches)
    counted = torch.zeros(shape, dtype=torch.int64)
    for area in areas:
        counted[area.top : area.bottom, area.left : area.right] += 1
    assert (counted == 1).all()
    assert len({area.top for area in areas}) <= MOST_REGIONS
    assert len({area.left for area in areas}) <= MOST_REGIONS
    assert sum(area.total(patches) for area in areas) == pytest.approx(patches.sum().item())


def test_a_region_names_the_words_with_positive_relevance_there_and_their_controls():
    values = {"a": [[1.0, 2.0], [3.0, 6.0]], "bear": [[5.0, 0.0], [0.0, 1.0]], "no": [[-1.0, 9.0], [9.0, 9.0]]}
    maps = [WordMap(word, torch.tensor(patches)) for word, patches in values.items()]
    corner = regions(maps[0].patches)[0]
    assert raised_words(maps, corner) == [("bear", 5.0, pytest.approx(1 / 3)), ("a", 1.0, pytest.approx(11 / 3))]


def test_a_word_that_occurs_again_has_its_number():
    assert numbered(["a", "bear", "on", "a"]) == ["a (1 of 2)", "bear", "on", "a (2 of 2)"]
