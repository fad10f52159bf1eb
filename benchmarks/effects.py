"""What the effects of ten nodes cost, as a multiple of one forward pass of ten rows of the prompt.

    OMP_NUM_THREADS=1 python benchmarks/effects.py [--rounds 9] [--model smollm2-135m]

Both are measured in turn, in seconds of the processor; medians of the ratios of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from icebear import attribute, load_model

PROMPTS = "The ice bear lives in the", "The wild camel lives in the"
NODES = 10
TEXT = (
    "The town lies on the north bank of the river, between two low hills, and was first named in a letter of the "
    "year 1204. A market was held there every week, and later a bridge, a mill and a school were built. "
)
BEFORE = 128
"""Tokens of the text before the prompts, in the second case."""


def processor_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def case(model, prompt: list[int], counterfactual: list[int], rounds: int) -> None:
    relevance = attribute(model, prompt, counterfactual=counterfactual)
    top = relevance.top(NODES, position="all")
    last = [node for node in relevance.top(20 * NODES, position="all") if node.position == len(prompt) - 1]
    rows = model.read_ids([prompt] * NODES)

    @torch.no_grad()
    def forward() -> None:
        model.logits(rows, [len(prompt) - 1])

    for name, nodes in (("of all", top), ("of those at the last token", last[:NODES])):
        ratios, taken = [], []
        for turn in range(rounds + 1):
            one = processor_seconds(forward)
            own = processor_seconds(lambda nodes=nodes: relevance.effects(nodes))
            if turn:  # the first round warms up
                ratios.append(own / one)
                taken.append(own)
        places = ", ".join(str(place) for place in sorted({node.position for node in nodes}))
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{len(prompt)} tokens, {len(nodes)} nodes with the largest relevance {name} (at {places}): "
            f"{statistics.median(taken):.2f} s, {middle:.2f} [{low:.2f}, {high:.2f}] passes of {NODES} rows",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    model = load_model(options.model, dtype="float32", device="cpu")
    prompts = [model.token_ids(text) for text in PROMPTS]
    begin = model.token_ids(TEXT * 4)[:BEFORE]
    case(model, *prompts, options.rounds)
    case(model, *([*begin, *model.token_ids(f" {text}")] for text in PROMPTS), options.rounds)
