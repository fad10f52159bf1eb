"""Time and memory of explaining a 16-token answer by the length of what it answers, against gradient x input.

    python benchmarks/answers.py [--rounds 3] [--lengths 128,512,1024] [--peaks 1024,2048,4096] [--model smollm2-135m]

Every figure of a line comes from the same rounds, A B C A B C ...; read the ratios, not the seconds. Peak memory is
that of a fresh process for each figure, less what the loaded model takes.
"""

from __future__ import annotations

import statistics
import time

import torch
from attribution import arguments, memory, tokens
from resident import peak

from icebear import attribute, load_model
from icebear.concepts.passes.inputs import Inputs
from icebear.models.text.answer import Answer

ANSWER = 16


def answer(model, count: int) -> Answer:
    """Random tokens behind `count` others."""
    ids = tokens(model, count + ANSWER)
    answer_ids = tuple(ids[count:])
    return Answer(tuple(ids[:count]), answer_ids, model.pieces(answer_ids), (0.0,) * ANSWER, ended=False)


def gradient_x_input(model, reply):
    ids = torch.tensor([reply.before(ANSWER - 1)])
    inputs = Inputs()
    with torch.enable_grad(), inputs.reading(model):
        logits = model.net(ids, use_cache=False, logits_to_keep=ANSWER).logits[0]
        (gradient,) = torch.autograd.grad(logits[range(ANSWER), list(reply.ids)].sum(), inputs.leaves)
    return (gradient * inputs.leaves[0]).sum(-1)


def explaining(**options):
    return lambda model, reply: attribute(model, reply, **{"checkpoint": False, **options})


CASES = {
    "gradient x input": gradient_x_input,
    "tokens": explaining(sites=()),
    "all neurons": explaining(),
    'record="last"': explaining(record="last"),
    "checkpoint": explaining(checkpoint=True),
    'record="last", checkpoint': explaining(record="last", checkpoint=True),
}


def times(model, rounds: int, counts: list[int]) -> None:
    print("| tokens before | " + " | ".join(CASES) + " |\n|" + " --- |" * (len(CASES) + 1))
    for count in counts:
        reply = answer(model, count)
        seconds: dict[str, list[float]] = {name: [] for name in CASES}
        for _ in range(rounds):
            for name, case in CASES.items():
                start = time.perf_counter()
                case(model, reply)
                seconds[name].append(time.perf_counter() - start)
        cells = []
        for name in CASES:
            pairs = [a / b for a, b in zip(seconds.get(name, ()), seconds["gradient x input"], strict=False)]
            cells.append(f"{statistics.median(seconds[name]):.2f} s ({statistics.median(pairs):.2f})" if pairs else "-")
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)
    print("\nIn brackets: the median over rounds of the ratio to gradient x input.\n")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    parser = arguments(__doc__, 3)
    parser.add_argument("--lengths", type=numbers, default=[128, 512, 1024, 2048])
    parser.add_argument("--peaks", type=numbers, default=[512, 1024, 2048, 4096])
    parser.add_argument("--cases", default=";".join(CASES), help="Of which peaks are measured, with semicolons.")
    options = parser.parse_args()
    loaded = load_model(options.model)
    if options.peak:
        attribute(loaded, answer(loaded, 8))
        reply = answer(loaded, options.tokens)
        peak(lambda: CASES[options.peak](loaded, reply))
    else:
        print(f"{loaded!r}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
        if options.lengths:
            times(loaded, options.rounds, options.lengths)
        if options.peaks:
            memory(__file__, options.model, options.cases.split(";"), options.peaks)
