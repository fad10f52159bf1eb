"""How long the app's first view takes, in real Chromium, with a server that has loaded its model.

python benchmarks/app.py STORE
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from serving import browser, open_view, serving, settled

PAIRS = (
    ("The capital of Spain is", "The capital of China is"),
    ("The capital of Japan is", "The capital of Spain is"),
    ("The ice bear lives in the", "The wild camel lives in the"),
    ("The opposite of hot is", "The opposite of big is"),
    ("The doctor put on his", "The soldier put on his"),
    ("The capital of Italy is", "The capital of Japan is"),
    ("The girl in the photo", "The girls in the photo"),
)


def seconds(act: Callable[[], Any], wait: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    act()
    wait()
    return time.perf_counter() - begun


def first_paint(page: Any, address: str) -> tuple[float, float]:
    """Return the times until the example's sentence and until its stages are seen."""
    page.goto("about:blank")
    begun = time.perf_counter()
    page.goto(address)
    page.locator(".heat").first.wait_for()
    sentence = time.perf_counter() - begun
    page.locator("svg.stages").wait_for()
    return sentence, time.perf_counter() - begun


def own(page: Any, address: str, pair: tuple[str, str]) -> tuple[float, float, float]:
    """Return the times from a prompt's link until its stages, and from the switch until the flip with random edits, and
    until its side effects."""
    prompt, counterfactual = map(quote, pair)
    link = f"{address}/?prompt={prompt}&counterfactual={counterfactual}"
    staged = seconds(lambda: page.goto(link), lambda: page.locator("svg.stages").wait_for(timeout=60_000))
    settled(page)
    begun = time.perf_counter()
    page.get_by_text("Make it say").click()
    page.get_by_text("draws, seed 0").first.wait_for(timeout=120_000)
    flipped = time.perf_counter() - begun
    page.get_by_text("Side effects are").wait_for(timeout=120_000)
    return staged, flipped, time.perf_counter() - begun


def line(name: str, times: list[float]) -> str:
    return f"{name}: median {median(times):.2f} s, {min(times):.2f} to {max(times):.2f} (of {len(times)})"


if __name__ == "__main__":
    with serving(Path(sys.argv[1]).resolve()) as address, browser() as chromium:
        page = open_view(chromium.new_page(viewport={"width": 1280, "height": 800}), address, "?prompt=Hi")
        page.locator(".heat").first.wait_for(timeout=120_000)
        paints = [first_paint(page, address) for _ in PAIRS]
        owns = [own(page, address, pair) for pair in PAIRS]
    print(line("the sentence of the example", [one for one, _ in paints]))
    print(line("its stages", [one for _, one in paints]))
    print(line("a prompt's stages", [one for one, _, _ in owns]))
    print(line("another answer, with random edits", [one for _, one, _ in owns]))
    print(line("and with side effects", [one for _, _, one in owns]))
