"""A search for neurons, a card, and the way back, in real Chromium."""

from urllib.parse import parse_qs, urlsplit

import pytest
from serving import open_view, settled


def words(page):
    return page.get_by_role("textbox", name="Words", exact=True).input_value()


def open_result(page, place):
    """Click the neuron of a result. Return its name and sign."""
    button = page.locator("[class*=st-key-open]").nth(place).get_by_role("button")
    name, _, side = button.inner_text().partition(" ")
    button.click()
    settled(page).get_by_role("heading", name=name, exact=True).wait_for()
    return name, "-" if "(-)" in side else "+"


@pytest.mark.release
def test_from_a_search_to_a_card_and_back_and_its_link_elsewhere(chromium, address):
    """Back and the button restore the words; the card begins at its top, and opens on the side that was found."""
    page = open_view(chromium.new_page(viewport={"width": 1280, "height": 800}), address, "neurons")
    page.get_by_role("textbox", name="Words", exact=True).fill("ice")
    page.keyboard.press("Enter")
    settled(page)
    for back in (page.go_back, page.get_by_role("button", name="Search: ice").click):
        name, sign = open_result(page, 5)
        assert page.get_by_role("heading", name=name, exact=True).bounding_box()["y"] > 0
        assert parse_qs(urlsplit(page.url).query).get("neuron") == [name]
        link, heading = page.url, page.get_by_role("heading", name="Strongest").first.inner_text()
        assert heading == f"Strongest {'positive' if sign == '+' else 'negative'} sentences"
        back()
        assert words(settled(page)) == "ice"
    fresh = open_view(chromium.new_context().new_page(), address, link.removeprefix(f"{address}/"))
    fresh.get_by_role("heading", name=name, exact=True).wait_for()
    assert fresh.get_by_role("heading", name="Strongest").first.inner_text() == heading
    fresh.get_by_label("Go to a neuron").fill("L99.ffn.1")
    fresh.keyboard.press("Enter")
    settled(fresh).get_by_text("There is no L99.ffn.1").wait_for()
    fresh.get_by_label("Go to a neuron").fill("L3.ffn.4")
    fresh.keyboard.press("Enter")
    settled(fresh).get_by_role("heading", name="L3.ffn.4", exact=True).wait_for()
    assert fresh.locator("[data-testid=stAlert]").count() == 0
