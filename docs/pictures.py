"""The pictures of the README and of docs/, from the real app: make pictures.

python docs/pictures.py STORE      an index, such as that of 1,000 summaries
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))

from serving import browser, open_view, serving, settled  # noqa: E402

VIEWS = {
    "why": "",
    "flip": "?switch=true",
    "chat": "chat",
    "view-circuit": "circuit?contrast=desert"
    "&prompt=The+ice+bear+lives+in+the&counterfactual=The+wild+camel+lives+in+the",
    "neuron": "neurons?neuron=L29.ffn.170&polarity=%2B",
    "search": "neurons?text=music",
    "atlas": "atlas",
    "steer": "steer?section=edits",
    "concept": "steer?section=concepts",
}


def shoot(address: str, chromium, width: int, scheme: str, suffix: str) -> None:  # type: ignore[no-untyped-def]
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    for name, query in VIEWS.items():
        open_view(page, address, query)
        if name == "why":
            page.locator("svg.stages").wait_for()
        if name == "atlas":
            page.locator(".map canvas").wait_for()
            settled(page)
        if name == "view-circuit":
            page.locator(".circuit .node[data-id^='L23.head.4']").last.click(timeout=120_000)
            settled(page)
        if name == "chat":
            box = page.get_by_test_id("stChatInputTextArea")
            box.fill("What is the capital of France? Answer in one sentence.")
            box.press("Enter")
            page.get_by_role("button", name="Paris").click(timeout=120_000)
            settled(page)
        if name == "concept":
            page.get_by_role("button", name="Try an example: music").click()
            page.get_by_role("button", name="Generate").click(timeout=120_000)
            page.locator("mark").first.wait_for(timeout=120_000)
            settled(page)
        if name == "neuron" and page.get_by_text("Color the tokens that activate it").count():
            page.get_by_text("Color the tokens that activate it").click()
            settled(page)
        if name == "steer":
            page.get_by_text("Recipes").click()
            page.get_by_role("button", name="Make the ice bear live in the desert").click()
            page.locator("mark").first.wait_for(timeout=120_000)
            settled(page).keyboard.press("Escape")
        height = page.evaluate("document.querySelector('[data-testid=stMainBlockContainer]').offsetHeight")
        page.set_viewport_size({"width": width, "height": min(height + 40, 2600)})
        page.wait_for_timeout(1500)
        page.screenshot(path=DOCS / f"{name}{suffix}.png")
        page.set_viewport_size({"width": width, "height": 900})
    page.close()


def circuit() -> None:
    """As the command draws it."""
    from icebear import circuit, load_model

    graph = circuit(load_model(), "The capital of France is", counterfactual="The capital of Japan is")
    (DOCS / "circuit.png").write_bytes(graph.to_png(1.5))


def card(address: str, chromium, store: Path) -> None:  # type: ignore[no-untyped-def]
    """The card as `icebear neuron --html` writes it."""
    from icebear import Neuron, describe, open_store

    with open_store(store) as opened:
        html = describe(opened, Neuron.parse("L29.ffn.170"), k=4).to_html()
    page = chromium.new_page(viewport={"width": 1000, "height": 1100})
    page.set_content(html)
    page.screenshot(path=DOCS / "card.png", full_page=True)
    page.close()


if __name__ == "__main__":
    path = Path(sys.argv[1]).resolve()
    circuit()
    with serving(path) as found, browser() as chromium:
        shoot(found, chromium, 1280, "light", "")
        shoot(found, chromium, 1280, "dark", "-dark")
        shoot(found, chromium, 390, "light", "-phone")
        card(found, chromium, path)
