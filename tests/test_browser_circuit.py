"""How is it computed? in real Chromium."""

import re

import pytest
from serving import open_view, settled

from icebear import circuit

PAIR = "prompt=The+ice+bear+lives+in+the&counterfactual=The+wild+camel+lives+in+the"


@pytest.mark.release
def test_a_circuit_answers_to_pointing(chromium, address):
    """The panel beside the picture stays in view, and leads to the card and to steering; the link keeps the node."""
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    open_view(page, address, f"circuit?nodes=20&neurons=true&{PAIR}")
    assert page.locator(".circuit .node[data-id*=ffn]").count() == 20
    picture = page.locator(".circuit .picture")
    assert picture.evaluate("box => box.scrollWidth <= box.clientWidth")
    for name, wider in (("Larger", True), ("Smaller", False)):
        page.get_by_role("button", name=name).click()
        assert picture.evaluate("box => box.scrollWidth > box.clientWidth") is wider
    page.get_by_role("button", name="Full screen").click()
    page.wait_for_function("document.fullscreenElement")
    page.evaluate("document.exitFullscreen()")
    shown = page.locator(".circuit .edge:not(.gone)").count()
    assert f"{shown} strongest" in page.locator(".circuit .count").inner_text()
    low = page.locator(".circuit .node[data-id^=token]").first
    low.click()
    page.locator(".circuit .node[data-id^='L24.ffn.299']").first.click()
    panel = settled(page).locator(".circuit .panel")
    assert panel.locator("h3").inner_text() == "L24.ffn.299"
    assert page.locator(".circuit .dim").count()
    low.scroll_into_view_if_needed()
    box = panel.bounding_box()
    assert 0 < box["y"] < box["y"] + box["height"] <= 800
    assert "node=L24.ffn.299" in page.url
    other = open_view(chromium.new_page(), address, page.url.removeprefix(f"{address}/"))
    assert other.locator(".circuit .panel h3").inner_text() == "L24.ffn.299"
    other.close()
    panel.get_by_role("button", name="Steer").click()
    assert settled(page).url.startswith(f"{address}/steer")
    assert "L24.ffn.299" in page.url
    page.get_by_role("link", name="How is it computed?").click()
    settled(page).locator(".circuit .panel").get_by_role("button", name="Open its card").click()
    settled(page).get_by_role("heading", name="L24.ffn.299").wait_for()
    assert "/neurons" in page.url
    page.close()


@pytest.mark.release
def test_a_circuit_is_legible_on_a_phone_and_at_night(chromium, address):
    page = chromium.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    open_view(page, address, f"circuit?nodes=20&neurons=true&{PAIR}")
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= 390
    page.locator(".circuit .node[data-id^='L24.ffn.299']").first.click()
    box = settled(page).locator(".circuit .panel").bounding_box()
    assert box["y"] + box["height"] <= 844
    assert box["x"] + box["width"] <= 390
    color = page.locator(".circuit .edge").first.evaluate("edge => getComputedStyle(edge).stroke")
    assert max(map(float, re.findall(r"[0-9.]+", color)[:3])) > 0.7  # lighter than on white
    page.close()


@pytest.mark.release
def test_a_circuit_s_page_asks_for_nothing(chromium, model, tmp_path):
    graph = circuit(model, "ice bear", contrast="z", counterfactual="big cats")
    (tmp_path / "circuit.html").write_text(graph.to_html(), encoding="utf-8")
    alone = chromium.new_context(viewport={"width": 390, "height": 900}, offline=True).new_page()
    requests, wrong = [], []
    alone.on("request", lambda request: requests.append(request.url))
    alone.on("pageerror", lambda error: wrong.append(str(error)))
    alone.goto((tmp_path / "circuit.html").as_uri())
    assert alone.evaluate("document.documentElement.scrollWidth") <= 390  # the picture scrolls in its frame
    assert alone.evaluate("document.querySelector('.picture').scrollWidth") > 390
    alone.locator(".node").nth(3).focus()
    alone.keyboard.press("Enter")
    assert alone.locator(".panel li").count() > 1
    assert alone.locator(".panel .actions button").count() == 0
    alone.keyboard.press("Enter")
    assert alone.locator(".edge:not(.gone)").count() == 60
    alone.locator("input[name=edges]").fill("50")
    assert alone.locator(".edge:not(.gone)").count() == 50
    assert len(requests) == 1
    assert not wrong
    alone.context.close()
