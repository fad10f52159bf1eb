"""How long a flip takes.

python benchmarks/flip.py FLIPS.json [--pairs 6]     in forward and backward passes of its prompt: medians over pairs
python benchmarks/flip.py --long                     a flip behind 145 tokens
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

TEXT = (
    "The town lies on the north bank of the river, between two low hills, and was first named in a letter of the "
    "year 1204. A market was held there every week, and later a bridge, a mill and a school were built. "
)
TOKENS = 145


def over_pairs(data: str, pairs: int) -> None:
    from icebear import flip, load_model
    from icebear.concepts.methods.common import token_relevance
    from icebear.concepts.passes.timing import seconds
    from icebear.errors import InputError
    from icebear.models.objective import objective_of

    model = load_model(dtype="float32")
    ratios = []
    for row in json.loads(Path(data).read_text())[:pairs]:
        plain = partial(token_relevance, model, objective_of(model, [row["prompt"]]))
        one = statistics.median(seconds(plain, model.device) for _ in range(5))
        for source in (row["source"], None):
            try:
                taken = seconds(partial(flip, model, row["prompt"], row["to"], source), model.device)
            except InputError:
                continue
            ratios.append(taken / one)
            print(
                f"{row['prompt']} ->{row['to']} {'source' if source else 'free'}: {taken:.1f} s, "
                f"{ratios[-1]:.0f} passes",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.0f}, most {max(ratios):.0f} forward and backward passes")


def behind_a_long_text() -> None:
    """Processor seconds, which other work on the machine changes least; run it with OMP_NUM_THREADS=1."""
    from icebear import flip, load_model

    model, end = load_model("smollm2-135m", dtype="float32"), " The ice bear lives in the"
    begin = model.token_ids(TEXT * 4)[: TOKENS - len(model.token_ids(end))]
    prompt = model.tokenizer.decode(begin) + end
    start = time.process_time()
    recipe = flip(model, prompt, to=" desert")
    taken = time.process_time() - start
    print(f"{len(model.token_ids(prompt))} tokens, {len(recipe)} neurons, {taken:.1f} s of the processor")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    if options.long:
        behind_a_long_text()
    else:
        over_pairs(options.data, options.pairs)
