"""Time and memory of AttnLRP against a forward pass and gradient x input, in one run, in turn.

    python benchmarks/attribution.py [--rounds 7] [--model smollm2-135m]

Every figure of a line comes from the same rounds, A B C D A B C D ...; read the ratios, not the seconds. Peak memory
is that of a fresh process for each line, less what the loaded model takes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from resident import peak

from icebear import attribute, load_model
from icebear.concepts.passes.inputs import Inputs


def tokens(model, count: int) -> list[int]:
    torch.manual_seed(0)
    return torch.randint(100, model.net.config.vocab_size, (count,)).tolist()


def forward(model, ids):
    with torch.no_grad():
        model.net(torch.tensor([ids]), use_cache=False, logits_to_keep=1)


def gradient_x_input(model, ids):
    inputs = Inputs()
    with torch.enable_grad(), inputs.reading(model):
        logits = model.net(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        (gradient,) = torch.autograd.grad(logits.max(), inputs.leaves)
    return (gradient * inputs.leaves[0]).sum(-1)


CASES = {
    "forward": forward,
    "gradient x input": gradient_x_input,
    "AttnLRP, tokens": lambda model, ids: attribute(model, ids, sites=(), checkpoint=False),
    "AttnLRP, all ffn and attn neurons": lambda model, ids: attribute(model, ids, checkpoint=False),
    "AttnLRP, all neurons, checkpointed": lambda model, ids: attribute(model, ids, checkpoint=True),
}


def against(count: int, method: str | None):
    """A case of relevance compared with `count` other prompts."""

    def case(model, ids):
        others = [[*ids[:-2], 200 + number, ids[-1]] for number in range(count)]
        return attribute(model, ids, 1000, 1001, counterfactual=others, method=method)

    return case


COMPARED = {
    "AttnLRP, all ffn and attn neurons": CASES["AttnLRP, all ffn and attn neurons"],
    "counterfactual one, difference rules": against(1, "difference"),
    "counterfactual one, attention weights constant": against(1, "difference-constant"),
    "counterfactual one, gradient at the midpoint": against(1, "gxi"),
    "counterfactual four, difference rules": against(4, "difference"),
    "counterfactual four, gradient at the midpoint": against(4, "gxi"),
}


def times(model, rounds: int, cases: dict, unit: str, counts: tuple[int, ...]) -> None:
    print("| tokens | " + " | ".join(cases) + " |\n|" + " --- |" * (len(cases) + 1))
    for count in counts:
        ids = tokens(model, count)
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for turn in range(rounds + 1):
            for name, case in cases.items():
                start = time.perf_counter()
                case(model, ids)
                if turn:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
        cells = []
        for values in seconds.values():
            pairs = [a / b for a, b in zip(values, seconds[unit], strict=True)]
            cells.append(f"{statistics.median(values):.3f} s ({statistics.median(pairs):.2f})")
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nIn brackets: the median over rounds of the ratio to: {unit}.\n")


def memory(script: str, model_name: str, names: Sequence[str], counts: Sequence[int]) -> None:
    """A process of a script for each figure, which it prints with `--peak` NAME `--tokens` N."""
    print("| tokens | " + " | ".join(f"{name}, peak MiB" for name in names) + " |\n|" + " --- |" * (len(names) + 1))
    for count in counts:
        cells = []
        for name in names:
            command = [sys.executable, script, "--model", model_name, "--peak", name, "--tokens", str(count)]
            cells.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)


def arguments(about: str | None, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    options = arguments(__doc__, 7).parse_args()
    loaded = load_model(options.model)
    if options.peak:
        attribute(loaded, tokens(loaded, 8))
        ids = tokens(loaded, options.tokens)
        peak(lambda: CASES[options.peak](loaded, ids))
    else:
        print(f"{loaded!r}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
        times(loaded, options.rounds, CASES, "gradient x input", (32, 128, 512, 1024))
        times(loaded, options.rounds, COMPARED, "AttnLRP, all ffn and attn neurons", (32, 128, 512))
        memory(__file__, options.model, list(CASES)[1:], (512, 1024, 2048, 4096))
