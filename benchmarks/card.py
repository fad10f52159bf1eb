"""How long the app takes to show another neuron's card from the store, in real Chromium, without a model.

python benchmarks/card.py STORE
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from serving import browser, open_view, serving

HEAD = "(name) => [...document.querySelectorAll('h2')].some(e => e.innerText.includes(name))"

if __name__ == "__main__":
    with serving(Path(sys.argv[1]).resolve()) as address, browser() as chromium:
        page = open_view(chromium.new_page(), address, "neuron")
        taken = []
        for index in range(20, 40):
            name = f"L{index - 15}.ffn.{31 * index}"
            page.get_by_label("Neuron").first.fill(name)
            start = time.perf_counter()
            page.keyboard.press("Enter")
            page.wait_for_function(HEAD, arg=name)
            page.get_by_text("Strongest positive sentences").wait_for()
            taken.append(1000 * (time.perf_counter() - start))
            page.wait_for_timeout(500)
        print(f"a card, from Enter to its heading: median {statistics.median(taken):.0f} ms, most {max(taken):.0f} ms")
