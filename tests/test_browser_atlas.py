"""The map of neurons in real Chromium: what is pointed at, clicked, lit up and surrounded is what lies there."""

import json
import math
from base64 import b64decode
from itertools import pairwise

import numpy as np
import pytest
from serving import open_view, serving, settled
from test_browser import AXE, CUT_OFF, WCAG

from icebear import build_index, load_model, open_store, read_corpus
from icebear.actmax.atlas.saved_map import saved_drawing
from icebear.actmax.searching import search

SENTENCES = [f"The {a} {b} a {c}." for a in ("king", "cat", "band") for b in ("sees", "has") for c in "ABCDEFGH"]
QUESTION = "prompt=B+are&counterfactual=A+are&contrast=Rome"
PIXEL = "(canvas, [x, y]) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data.slice(0, 3)]"


@pytest.fixture(scope="module")
def small(chromium, tiny_folder, tmp_path_factory):
    """The path of a small index, and the address of an app with it, in which a click has drawn the map."""
    path = tmp_path_factory.mktemp("atlas") / "c.db"
    path.with_suffix(".txt").write_text("\n".join(SENTENCES))
    with open_store(path, create=True) as store:
        build_index(load_model(tiny_folder), read_corpus(str(path.with_suffix(".txt"))), store, k=4)
        store.labels.set_manual("L1.ffn.3", "<i>mine</i>")
    with serving(path, "--model", tiny_folder, few=True) as address:
        page = open_view(chromium.new_page(), address, "atlas")
        page.get_by_role("button", name="Draw the map").click()
        shown_map(page).close()
        yield path, address


def shown_map(page):
    page.locator(".map canvas").wait_for(timeout=60_000)
    return settled(page)


def points_of(path, page):
    """The sides of the map with their places on the canvas, of which all is in view."""
    with open_store(path) as store:
        data = json.loads(saved_drawing(store))
    x, y, layer, index, minus = (
        np.frombuffer(b64decode(text), f"<{kind}").tolist()
        for kind, text in (data["arrays"][name] for name in ("x", "y", "layer", "index", "minus"))
    )
    box = page.locator(".map canvas").evaluate("canvas => [canvas.width, canvas.height]")
    scale = min(box) * 0.96 / 65535
    sides = [f"L{row[0]}.ffn.{row[1]} {'+-'[row[2]]}" for row in zip(layer, index, minus, strict=True)]
    places = [
        ((a - 65535 / 2) * scale + box[0] / 2, (b - 65535 / 2) * scale + box[1] / 2) for a, b in zip(x, y, strict=True)
    ]
    return dict(zip(sides, places, strict=True))


def alone(points):
    """The side that is farthest from all others."""
    far = {
        side: min(math.dist(at, other) for name, other in points.items() if name != side) for side, at in points.items()
    }
    return max(far, key=far.get)


@pytest.mark.release
def test_a_map_is_drawn_once_and_its_points_lead_to_cards_lists_and_concepts(chromium, small):
    path, address = small
    page = open_view(chromium.new_page(viewport={"width": 1280, "height": 900}), address, "atlas")
    shown_map(page)
    canvas, points = page.locator(".map canvas"), points_of(path, page)
    side, corner = alone(points), canvas.bounding_box()

    def at(x, y):
        return corner["x"] + 1 + x, corner["y"] + 1 + y  # beside the border

    page.mouse.move(*at(*points["L1.ffn.3 +"]))
    page.locator(".hint").get_by_text("<i>mine</i>", exact=True).wait_for()
    page.mouse.move(*at(*points[side]))
    page.locator(".hint").get_by_text(side, exact=True).wait_for()
    page.mouse.click(*at(*points[side]))
    settled(page).get_by_role("heading", name=side.split()[0], exact=True).wait_for()
    page.get_by_role("button", name="Atlas", exact=True).click()
    shown_map(page)
    ends = sorted(x for x, _ in points.values())[:90]  # a longer list shows only the clearest
    middle = max(pairwise(ends), key=lambda pair: pair[1] - pair[0])[0] + 4
    inside = [side for side, (x, _) in points.items() if x < middle]
    page.get_by_role("button", name="Circle points").click()
    page.mouse.move(*at(1, 1))
    page.mouse.down()
    for x, y in ((middle, 1), (middle, corner["height"] - 2), (1, corner["height"] - 2)):
        page.mouse.move(*at(x, y), steps=3)
    page.mouse.up()
    settled(page).get_by_role("heading", name=f"{len(inside)} points", exact=True).wait_for()
    page.get_by_role("button", name="Make a concept").click()
    settled(page).get_by_role("heading", name=f"{len({name.split()[0] for name in inside})} neurons").wait_for()
    page.close()


@pytest.mark.release
def test_hits_and_the_neurons_of_a_prompt_are_lit_up_and_the_map_has_keys(chromium, small):
    """The keys: the point nearest to the middle is shown, and then its card; all points of the view become a list."""
    path, address = small
    page = open_view(chromium.new_page(viewport={"width": 1280, "height": 900}), address, "atlas?find=king")
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    canvas, points = page.locator(".map canvas"), points_of(path, shown_map(page))
    with open_store(path) as store:
        hits = {str(hit) for hit in search(store, "king", 200) if hit.by == "sentences"} & {*points}
    page.get_by_text(f"{len(hits)} of {len(points)} points are lit", exact=True).wait_for()
    open_view(page, address, f"atlas?lit=neurons+of+this+prompt&{QUESTION}")
    shown_map(page).get_by_text(f"of {len(points)} points").wait_for()
    page.get_by_text("words", exact=True).click()
    shown_map(page)
    page.get_by_label("Color").select_option("label")
    page.get_by_text(f"2 of {len(points)} points have a label.").wait_for()
    page.get_by_role("button", name="List what is in view").press("Enter")
    settled(page).get_by_role("heading", name=f"The clearest 100 of {len(points)} points").wait_for()
    canvas.focus()
    for key in ("+", "+", "ArrowLeft", "ArrowRight", "-", "0", "Enter"):
        page.keyboard.press(key)
    size = canvas.evaluate("canvas => [canvas.width / 2, canvas.height / 2]")
    nearest = min(points, key=lambda side: math.dist(points[side], size))
    page.locator(".hint").get_by_text(nearest, exact=True).wait_for()
    page.keyboard.press("Enter")
    settled(page).get_by_role("heading", name=nearest.split()[0], exact=True).wait_for()
    page.close()


@pytest.mark.release
def test_the_map_fits_a_phone_and_the_night(chromium, small):
    path, address = small
    page, sums = chromium.new_page(), []
    for width, scheme in ((390, "light"), (1280, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        if scheme == "light":
            shown_map(open_view(page, address, "atlas")).get_by_label("Color").select_option("layer")
        settled(page)
        points = points_of(path, page)
        x, y = points[alone(points)]
        page.locator(".map canvas").scroll_into_view_if_needed()
        page.wait_for_timeout(300)
        sums.append(sum(page.locator(".map canvas").evaluate(PIXEL, [round(x), round(y)])))
        assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= width
        assert page.evaluate(CUT_OFF) == []
        page.evaluate(AXE)
        assert page.evaluate(WCAG) == [], scheme
    assert sums[1] > sums[0] > 0
    page.close()
