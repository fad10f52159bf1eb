"""Concepts & steering in real Chromium: what is found is steered, and each link shows its result in another browser."""

from urllib.parse import quote

import pytest
from serving import open_view, settled

from icebear import Recipe
from icebear.app.recipes import EXAMPLE_RECIPE

SCRIPT = "<script>window.hacked=1</script>"


def main(page):
    return page.locator("[data-testid=stMain]").inner_text()


def reopened(page, chromium, address):
    """The same link in a fresh browser, once it shows a continuation."""
    other = open_view(chromium.new_context().new_page(), address, page.url.removeprefix(f"{address}/"))
    other.locator("mark").first.wait_for(timeout=120_000)
    return settled(other)


@pytest.mark.release
def test_the_ice_bear_moves_to_the_desert(chromium, address):
    page = open_view(chromium.new_page(), address, "steer?section=edits&tokens=8")
    page.get_by_role("button", name="Recipes").click()
    page.get_by_role("button", name="Make the ice bear live in the desert").click()
    page.locator("mark").first.wait_for(timeout=120_000)
    assert "The ice bear lives in the desert" in main(settled(page))
    edits = list(map(str, Recipe.load(EXAMPLE_RECIPE)))
    field = page.get_by_role("textbox", name="Edits, one a line")
    assert field.input_value().splitlines() == edits
    other = reopened(page, chromium, address)
    assert other.locator("mark").all_inner_texts() == page.locator("mark").all_inner_texts()
    other.context.close()
    name = edits[0].partition("=")[0]
    page.get_by_text("raises").first.wait_for()
    strength = page.get_by_role("slider", name=f"Strength of {name}")
    before = page.locator(".bars").first.inner_text()
    strength.press("Home")
    page.wait_for_function("text => document.querySelector('.bars')?.innerText != text", arg=before)
    assert settled(page).get_by_role("textbox", name="Edits, one a line").input_value().splitlines()[0].endswith("^0.0")
    page.get_by_text("Side effects are").wait_for(timeout=120_000)
    page.get_by_role("button", name=name, exact=True).click()
    settled(page)
    assert f"/neurons?neuron={edits[0].partition('=')[0]}" in page.url
    page.close()


@pytest.mark.release
def test_an_answer_changes(chromium, address):
    """Stopped, and found again; its edits can be edited."""
    query = "steer?tokens=4&prompt=The+ice+bear+lives+in+the&counterfactual=The+camel+lives+in+the"
    page = open_view(chromium.new_page(), address, query)
    page.get_by_role("button", name="Change the answer").last.click(timeout=120_000)
    page.get_by_role("button", name="Stop").click(timeout=30_000)
    page.get_by_test_id("stAlert").wait_for(timeout=30_000)
    settled(page).get_by_role("button", name="Change the answer").last.click()
    page.locator("mark").first.wait_for(timeout=180_000)
    other = reopened(page, chromium, address)
    assert other.locator("mark").all_inner_texts() == settled(page).locator("mark").all_inner_texts()
    other.context.close()
    page.get_by_role("button", name="Edit these").click()
    assert settled(page).get_by_role("textbox", name="Edits, one a line").input_value().startswith("L")
    assert "edits=L" in page.url
    page.close()


@pytest.mark.release
def test_a_concept_is_found_steered_and_watched(chromium, address):
    page = open_view(chromium.new_page(), address, "steer?section=concepts")
    page.get_by_role("button", name="Try an example: music").click()
    page.get_by_text("AUROC").first.wait_for(timeout=120_000)
    settled(page).get_by_role("button", name="Generate").click()
    page.locator("mark").first.wait_for(timeout=180_000)
    other = reopened(page, chromium, address)
    assert "music: 1 neuron" in main(other)
    assert other.locator("mark").all_inner_texts() == settled(page).locator("mark").all_inner_texts()
    other.context.close()
    page.get_by_role("button", name="Try an example: everyday sentences").click()
    settled(page).get_by_role("button", name="Set the threshold").click()
    page.get_by_role("button", name="Use it in the chat").click(timeout=120_000)
    box = page.get_by_test_id("stChatInputTextArea")
    box.fill("Tell me about a guitar.")
    box.press("Enter")
    page.get_by_text("Flagged by music").first.wait_for(timeout=60_000)
    page.close()


@pytest.mark.release
def test_text_stays_text(chromium, address):
    page = chromium.new_page()
    text = quote(SCRIPT)
    for query in (
        f"steer?run=flip&prompt={text}&contrast={text}&most=1",
        f"steer?section=edits&run=edits&prompt={text}&tokens=2&edits=L29.ffn.860*0",
        f"steer?section=edits&edits={text}",
        f"steer?section=concepts&concept={text}",
    ):
        open_view(page, address, query)
        settled(page)
        page.get_by_text("<script>").or_(page.locator("textarea")).first.wait_for(timeout=60_000)  # after a search
        assert not page.evaluate("window.hacked"), query
        assert page.locator("[data-testid=stMain] script, [data-testid=stException]").count() == 0, query
    page.close()
