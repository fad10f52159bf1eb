"""How long a flip takes, in forward and backward passes of its prompt (gradient x input): medians over pairs.

python benchmarks/flip.py FLIPS.json [--pairs 6]
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

from concepts import load_model
from concepts.selftest import gradient_times_input, seconds
from icebear.errors import InputError
from steering import flip

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    model = load_model(dtype="float32")
    ratios = []
    for row in json.loads(Path(options.data).read_text())[: options.pairs]:
        plain = partial(gradient_times_input, model, row["prompt"])
        one = statistics.median(seconds(plain, model.device) for _ in range(5))
        for like in (row["like"], None):
            try:
                taken = seconds(partial(flip, model, row["prompt"], row["to"], like), model.device)
            except InputError:
                continue
            ratios.append(taken / one)
            print(
                f"{row['prompt']} ->{row['to']} {'like' if like else 'free'}: {taken:.1f} s, {ratios[-1]:.0f} passes",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.0f}, most {max(ratios):.0f} forward and backward passes")
