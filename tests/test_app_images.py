"""Why this word, about an image: the picture with the region of a word, and the words of a region."""

import io
import re
from hashlib import sha256

import numpy
import pictured
import pytest
import torch
from appview import end_jobs, fine, set_up, text, visit
from appview import shown as to_view
from PIL import Image
from test_app_chat import monitor_of, strips

from icebear import Chat, attribute, load_model, sources
from icebear.app.web.shared import uploads
from icebear.app.web.why.about_image import ImageRequest
from icebear.concepts.answers.image_words import MOST_REGIONS, WordMap, numbered, raised_words, regions
from icebear.concepts.nodes.image_shares import image_shares
from icebear.models.text.answer import answer_of
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
    return pictured.save_planted(tmp_path_factory.mktemp("llava"), WHAT, picture(), PLANTED, BEAR)


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


# --- Chat ----------------------------------------------------------------------------------------------------------


def asked(text=WHAT, content=None, **parameters):
    """Chat with a message and an image, answered."""
    page = fine(visit("chat", length="3", **parameters))
    name, own, kind = file()
    page.chat_input[0].upload(name, own if content is None else content, kind)
    page.chat_input[0].set_value(text).run()
    return page


def conversation(page):
    return Chat.from_json(page.session_state["chat"])


def select(page, turn, span):
    page.query_params["turn"], page.query_params["span"] = str(turn), f"{span[0]}-{span[1]}"
    return fine(page.run())


def answered(model, chat, turn):
    """The message of a conversation about the picture, as an answer."""
    return answer_of(model, chat, turn, Prompt(chat=chat.of(chat.messages[:turn]), image=picture()))


def test_a_message_has_an_image_and_a_word_of_the_answer_its_region(llava):
    page = fine(asked())
    request, answer = conversation(page).messages
    assert request == {"role": "user", "content": WHAT, "image": sha256(file()[1]).hexdigest()}
    own = llava.answer(Prompt(chat=Chat([{"role": "user", "content": WHAT}]), image=picture()), 3)
    assert answer["ids"] == list(own.ids)
    assert len(page.image) == 1
    page = select(page, 1, (1, 2))
    result = attribute(llava, own, span=(1, 2), sites=())
    values = shown(page)
    assert largest(values) == "1,2"
    for name, number in values.items():
        row, column = map(int, name.split(","))
        assert number == pytest.approx(result.image.patches[row, column].item(), abs=1e-3)
    assert str(result.text_heatmap()) in text(page)
    shares = image_shares(llava, result)
    assert f"{shares.shares['image']:.0%} ({shares.sums['image']:+.2f})" in text(page)
    assert "without an image" in text(page)  # what is not shown
    assert not page.expander


def test_a_region_of_a_conversation_shows_its_words_and_an_alternative_is_a_contrast(llava):
    page = select(fine(asked()), 1, (1, 2))
    before = conversation(page).to_json(None)
    page.session_state["image_region"] = ((before, 1), "1,2")
    own = answered(llava, conversation(page), 1)
    patches = attribute(llava, own, sites=()).image.patches
    assert f"{(patches.sum() - patches[1, 2]).item() / 8:+.3f}" in text(fine(page.run()))
    page.get_by_key("rather").set_value("a").run()
    against = attribute(llava, own, span=(1, 2), contrast="a", sites=()).image.patches
    assert shown(fine(page))["1,2"] == pytest.approx(against[1, 2].item(), abs=1e-3)


def test_a_conversation_goes_on_about_its_image(llava, monkeypatch):
    page = fine(asked())
    assert page.chat_input[0].proto.accept_file == 0  # one image a conversation
    page.chat_input[0].set_value("Describe it").run()
    chat = conversation(fine(page))
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    own = llava.answer(Prompt(chat=chat.of(chat.messages[:3]), image=picture()), 3)
    assert chat.messages[3]["ids"] == list(own.ids)
    result = attribute(llava, answered(llava, chat, 3), span=(0, 1), sites=())
    assert shown(select(page, 3, (0, 1)))["1,2"] == pytest.approx(result.image.patches[1, 2].item(), abs=1e-3)
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "_kept", lambda: page.session_state["pictures"])
        assert Chat.from_json(uploads.saved(chat)).image == "bear.png"  # as --messages reads it
    page.get_by_key("forget").click().run()
    assert not fine(page).session_state["pictures"]


def test_a_sentence_hangs_on_the_image(llava):
    page = fine(asked("this is a bear . what is this ?", clicks="sentence"))
    page = select(page, 1, (0, 1))
    own = answered(llava, conversation(page), 1)
    [sentence] = sources(llava, own, span=(0, 3)).sentences
    change = next(source.change for source in sentence.sources if source.is_image)
    assert "The image (blurred)" in text(page)
    assert f"{change:+.1f}" in text(page)


def test_an_answer_about_an_image_is_written_with_edits(llava):
    """As by weights without that neuron."""
    edit = "L1.ffn.3*0"
    page = visit("steer", section="edits", edits=edit, prompt="a")
    page.query_params["length"], page.query_params["edited"] = "3", "true"
    page = fine(to_view(page, "chat"))
    page.chat_input[0].upload(*file())
    page.chat_input[0].set_value(WHAT).run()
    prompt = Prompt(chat=Chat([{"role": "user", "content": WHAT}]), image=picture())
    layer = llava.layer_modules[1].mlp.down_proj
    with torch.no_grad():
        layer.weight[:, 3] = 0
    without = llava.answer(prompt, 3)
    assert conversation(fine(page)).messages[1]["ids"] == list(without.ids)


@pytest.mark.parametrize("image", ["bear.png", sha256(file()[1]).hexdigest()])
def test_an_image_that_was_not_uploaded_here_is_refused_and_no_path_is_opened(llava, image, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture().save("bear.png")
    asked()  # by somebody else
    messages = [{"role": "user", "content": WHAT, "image": image}, {"role": "assistant", "content": "bear"}]
    for view, field in (("chat", "chat"), ("why", "prompt")):
        page = visit(view, **{field: Chat(messages).to_json(None), "turn": "1", "span": "0-1"})
        assert not page.exception
        assert len(page.error) == 1
        assert shown(page) == {}
        assert not page.image


def test_a_message_with_a_file_that_is_no_image_is_not_sent(llava):
    page = asked(content=b"no image")
    assert not page.exception
    assert len(page.error) == 1
    assert "chat" not in page.session_state or not page.session_state["chat"]


def test_a_monitor_reads_an_answer_about_an_image_and_says_that_it_reads_no_image(llava):
    monitor = monitor_of(llava, "loud", 0.0)
    page = fine(visit("chat", length="3"))
    page.file_uploader[0].set_value(("m.json", monitor.to_json().encode(), "application/json")).run()
    page.chat_input[0].upload(*file())
    page.chat_input[0].set_value(WHAT).run()
    own = answered(llava, conversation(fine(page)), 1)
    activation = attribute(llava, own, sites=("ffn",)).activation("ffn")[:, len(own.prompt_ids) :, 3]
    assert strips(page)[-1][1:] == pytest.approx(((activation[0] - activation[1]) / 0.01).tolist()[1:], abs=1e-2)
    assert "not its image" in text(page)


# --- Why, compared -------------------------------------------------------------------------------------------------


def own_answer(model):
    return model.answer(Prompt(chat=Chat([{"role": "user", "content": WHAT}]), image=picture()), 3)


@pytest.mark.parametrize(("choice", "image"), [("blurred", "blur"), ("gray", "grey"), ("another image", picture(1))])
def test_an_answer_is_compared_with_another_image(llava, choice, image):
    page = uploaded(*file())
    fine(page).get_by_key("compared").set_value(choice).run()
    if choice == "another image":
        assert shown(fine(page)) == {}  # until it is there
        page.get_by_key("other_image").set_value(file(1)).run()
    result = attribute(llava, own_answer(llava), counterfactual_image=image, sites=())
    values = shown(fine(page))
    for name, number in values.items():
        row, column = map(int, name.split(","))
        assert number == pytest.approx(result.image.patches[row, column].item(), abs=1e-3)
    assert sum(values.values()) == pytest.approx(result.sums.target, abs=1e-2)
    request = ImageRequest(sha256(file()[1]).hexdigest(), WHAT, True)
    digest = sha256(file(1)[1]).hexdigest() if choice == "another image" else ""
    page.session_state["image_region"] = ((request, (choice, "", digest)), "1,2")
    total = result.image.patches[1, 2].item()
    raised = "mean of other regions" in text(fine(page.run()))
    assert raised == (total > 0)


def test_an_answer_is_compared_with_another_prompt_about_the_image(llava):
    """In the same form: as a message. The map is empty then, so there is none."""
    page = uploaded(*file())
    fine(page).get_by_key("compared").set_value("another prompt").run()
    assert "Method check" not in text(fine(page))  # until it is written
    page.get_by_key("about_other").set_value("what is that").run()
    other = Chat([{"role": "user", "content": "what is that"}])
    result = attribute(llava, own_answer(llava), counterfactual=other, sites=())
    assert not result.image.patches.any()
    assert str(result.text_heatmap()) in text(fine(page))
    assert shown(page) == {}
    page.get_by_key("rather_than").set_value("a").run()
    against = attribute(llava, own_answer(llava), counterfactual=other, contrast="a", sites=())
    assert str(against.text_heatmap()) in text(fine(page))


def test_a_counterfactual_image_of_another_kind_of_file_is_refused(llava):
    page = uploaded(*file())
    fine(page).get_by_key("compared").set_value("another image").run()
    page.get_by_key("other_image").set_value(("other.png", b"no image", "image/png")).run()
    assert not page.exception
    assert len(page.error) == 1
