"""How long a flip takes.

python benchmarks/flip.py FLIPS.json [--pairs 6]     in forward and backward passes of its prompt: medians over pairs
python benchmarks/flip.py --before FOLDER            a flip behind 145 tokens, here and in an older checkout
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

TEXT = (
    "The town lies on the north bank of the river, between two low hills, and was first named in a letter of the "
    "year 1204. A market was held there every week, and later a bridge, a mill and a school were built. "
)
TOKENS = 145
CHILD = f"""
import sys, time
from icebear.concepts import load_model
from icebear.steering import flip
model = load_model("smollm2-135m", dtype="float32")
start = model.token_ids({TEXT!r} * 4)[: {TOKENS} - len(model.token_ids(sys.argv[1]))]
prompt = model.tokenizer.decode(start) + sys.argv[1]
begun = time.process_time()
recipe = flip(model, prompt, to=sys.argv[2])
print(len(model.token_ids(prompt)), len(recipe), time.process_time() - begun)
"""


def over_pairs(data: str, pairs: int) -> None:
    from icebear.concepts import load_model
    from icebear.concepts.selftest import gradient_times_input, seconds
    from icebear.errors import InputError
    from icebear.steering import flip

    model = load_model(dtype="float32")
    ratios = []
    for row in json.loads(Path(data).read_text())[:pairs]:
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


def beside(before: str) -> None:
    """Processor seconds of one thread, which other work on the machine changes least."""
    here = str(Path(__file__).parent.parent)
    for name, folder in (("here", here), ("before", before)):
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", CHILD, " The ice bear lives in the", " desert"]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
        tokens, neurons, taken = done.stdout.split()
        print(f"{name}: {tokens} tokens, {neurons} neurons, {float(taken):.1f} s of one core", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--before", help="a checkout to compare with")
    options = parser.parse_args()
    if options.before:
        beside(options.before)
    else:
        over_pairs(options.data, options.pairs)
