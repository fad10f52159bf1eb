"""Chat in real Chromium."""

import json
from urllib.parse import quote

import numpy
import pictured
import pytest
from PIL import Image
from serving import open_view, serving, settled


def view(page, name):
    page.get_by_role("link", name=name, exact=True).click()
    return settled(page)


def write(page, message):
    """Until it is answered."""
    answers = page.locator(".words").count()
    box = page.get_by_test_id("stChatInputTextArea")
    box.fill(message)
    box.press("Enter")
    page.locator(".words").nth(answers).wait_for(timeout=120_000)
    return settled(page)


def pressed(page):
    return page.locator(".words button[aria-pressed=true]").all_text_contents()


@pytest.mark.release
def test_a_conversation(chromium, address):
    """Write, answer, click a word, contrast, steer, share the URL; what stands in a message does nothing."""
    page = open_view(chromium.new_page(viewport={"width": 1280, "height": 900}), address, "chat?length=8")
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    write(page, "<img src=x onerror=alert(1)> **Hi** <script>alert(2)</script>").get_by_text("<img src=x").wait_for()
    write(page, "What is the capital of France, not of Spain? One sentence.")

    page.get_by_role("button", name="Paris").click()
    settled(page).get_by_role("heading", name="Why Paris?").wait_for()
    assert pressed(page) == ["Paris"]
    assert page.locator(".bars span.positive").count()
    word, account = (page.locator(where).bounding_box() for where in ("[aria-pressed=true]", ".bars"))
    assert account["x"] > word["x"] + word["width"]  # beside the conversation
    assert account["y"] + account["height"] < 900
    page.get_by_text("alternative", exact=True).click()
    settled(page).get_by_role("button", name="Spain").click()
    settled(page).get_by_role("heading", name="Why Paris rather than Spain?").wait_for()

    other = open_view(chromium.new_page(), address, page.url.removeprefix(f"{address}/"))
    assert pressed(other) == ["Paris"]
    other.get_by_role("heading", name="Why Paris rather than Spain?").wait_for()
    other.close()

    page.get_by_role("button", name="capital").last.click()
    settled(page).get_by_role("button", name="France").last.click(modifiers=["Shift"])
    assert pressed(settled(page)) == ["capital", "of", "France"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert pressed(settled(page)) == ["is"]
    page.go_back()
    assert pressed(settled(page)) == ["capital", "of", "France"]

    page.get_by_text("Details:").click()
    settled(page).get_by_role("button", name="Switch off").click()
    settled(page).get_by_role("button", name="Generate").click()
    page.get_by_text("assistant:").first.wait_for(timeout=120_000)
    assert pressed(view(page, "Chat")) == ["capital", "of", "France"]
    assert not dialogs
    assert page.locator("[data-testid=stMain] img, [data-testid=stMain] script").count() == 0
    page.close()


@pytest.mark.release
def test_an_answer_can_be_ended_and_what_was_said_stays(chromium, address):
    page = open_view(chromium.new_page(viewport={"width": 390, "height": 900}), address, "chat")
    box = page.get_by_test_id("stChatInputTextArea")
    box.fill("Write a long story of an ice bear.")
    box.press("Enter")
    words = "document.querySelectorAll('[data-testid=stChatMessage]')[1]?.innerText.split(' ').length"
    page.wait_for_function(f"{words} > 5")
    page.get_by_role("button", name="Stop").click()
    text = settled(page).locator(".words").last.text_content()
    assert 5 < len(text.split()) < 200
    page.locator(".words button").first.click()
    page.get_by_text("Select", exact=True).wait_for()  # while it is explained
    assert page.get_by_test_id("stChatMessage").count() == 2
    settled(page)
    page.close()


@pytest.mark.release
def test_a_click_takes_a_whole_word(chromium, address):
    """Alt-click takes a piece of it."""
    word = "supercalifragilistic"
    talk = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": f"{word} it is."}]
    page = open_view(chromium.new_page(), address, f"chat?chat={quote(json.dumps(talk))}")
    pieces = page.locator(".words button")
    pieces.nth(1).click()
    second = page.locator(".words button[aria-pressed=true]").nth(1)
    second.wait_for()
    assert "".join(pressed(settled(page))) == word
    pieces.nth(1).click(modifiers=["Alt"])
    second.wait_for(state="detached")
    assert pressed(settled(page)) == [pieces.nth(1).inner_text()]
    page.close()


@pytest.mark.release
def test_a_click_on_the_picture_shows_the_words_that_it_raised(chromium, tmp_path):
    """Of a message with an image; the model answers "bear" because of row 1, column 2. A click on a word shows its
    region."""
    noise = numpy.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(tmp_path / "bear.png")
    with Image.open(tmp_path / "bear.png") as picture:
        folder = pictured.save_planted(tmp_path / "llava", "what is this", picture, 5, 8)
    options = ("--model", str(folder), "--dtype", "float32", "--device", "cpu")
    with serving(tmp_path / "no.db", *options, few=True) as address:
        page = open_view(chromium.new_page(viewport={"width": 1280, "height": 900}), address, "chat?length=3")
        page.get_by_test_id("stChatInput").locator("input[type=file]").set_input_files(tmp_path / "bear.png")
        page.get_by_text("bear.png").wait_for()  # it is there
        write(page, "what is this")
        assert page.get_by_test_id("stChatMessage").first.locator("img").count() == 1
        page.get_by_role("button", name="bear").nth(1).click(modifiers=["Alt"])
        settled(page).get_by_role("heading", name="Why bear?").wait_for()
        region = page.locator(".regions [data-pick='1,2']")
        assert not page.get_by_role("heading", name="The words that").count()
        region.click()
        settled(page).get_by_role("heading", name="The words that row 1, column 2 raised").wait_for()
        assert region.get_attribute("aria-pressed") == "true"
        assert "bear" in page.locator(".bars").first.inner_text()
        page.close()
