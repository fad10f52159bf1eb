"""The map of neurons in real Chromium."""

import json

import pytest
from serving import open_view, serving, settled
from test_browser import AXE, CUT_OFF, WCAG

from icebear import build_index, load_model, open_store, read_corpus

SENTENCES = [f"The {a} {b} a {c}." for a in ("king", "cat", "band") for b in ("sees", "has") for c in "ABCDEFGH"]


@pytest.fixture(scope="module")
def small(tiny_folder, tmp_path_factory):
    """The address of the app with a small index, which has no map yet."""
    folder = tmp_path_factory.mktemp("atlas")
    (folder / "c.txt").write_text("\n".join(SENTENCES))
    with open_store(folder / "c.db", create=True) as store:
        build_index(load_model(tiny_folder), read_corpus(str(folder / "c.txt")), store, k=4)
    with serving(folder / "c.db", "--model", tiny_folder, few=True) as address:
        yield address


def test_look(chromium, small):
    page = open_view(chromium.new_page(viewport={"width": 1280, "height": 900}), small, "atlas")
    page.on("console", lambda m: print("CONSOLE", m.text))
    page.on("response", lambda r: print("CONSOLE", r.status, r.url) if r.status > 399 else 0)
    page.get_by_role("button", name="Draw the map").click()
    page.screenshot(path="/tmp/a0.png")
    page.locator(".map canvas").wait_for(timeout=15_000)
    page.wait_for_timeout(1500)
    page.screenshot(path="/tmp/a1.png")
    box = page.locator(".map canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(300)
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 300, box["y"] + 60)
    page.mouse.down()
    for x, y in ((600, 60), (600, 400), (300, 400)):
        page.mouse.move(box["x"] + x, box["y"] + y, steps=5)
    page.screenshot(path="/tmp/a2.png")
    page.mouse.up()
    page.keyboard.up("Shift")
    settled(page)
    page.screenshot(path="/tmp/a3.png")
    page.get_by_role("textbox", name="Search by words or meaning").fill("king")
    page.keyboard.press("Enter")
    settled(page)
    page.wait_for_timeout(500)
    page.screenshot(path="/tmp/a4.png")
    page.locator(".map canvas").focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    page.screenshot(path="/tmp/a5.png")
    page.keyboard.press("Enter")
    settled(page)
    page.screenshot(path="/tmp/a6.png")
    page.get_by_role("button", name="Atlas").click()
    settled(page)
    page.screenshot(path="/tmp/a6b.png")
    open_view(page, small, "atlas?lit=neurons+of+this+prompt&prompt=B+are&counterfactual=A+are&contrast=Rome")
    page.locator(".map canvas").wait_for(timeout=15_000)
    page.wait_for_timeout(1000)
    page.get_by_role("button", name="List what is in view").click()
    page.wait_for_timeout(1000)
    settled(page)
    page.screenshot(path="/tmp/a7.png")
    page.get_by_role("button", name="Make a concept").click()
    page.wait_for_timeout(2000)
    settled(page)
    page.screenshot(path="/tmp/a8.png")
