"""How exactly difference rules add up on SmolLM2-135M in float32, for pairs of `benchmarks.ablation`.

python -m benchmarks.differences [--pairs 200]
"""

from __future__ import annotations

import argparse
import json
import random
from contextlib import ExitStack
from statistics import median

import torch

from benchmarks import task_pairs
from benchmarks.task_pairs import Pair
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Logits, forward_backward
from icebear.lrp.paired_rows import partner
from icebear.models.loading.loading import load_model
from icebear.models.model import Model
from icebear.models.objective import objective_of


def errors(model: Model, pair: Pair) -> tuple[float, float]:
    """Return the errors of the tokens' relevance and of the worst cut, as shares of the real difference.

    A cut is the residual stream after a layer: its neurons, through W_out, and the stream around them.
    """
    target, contrast = (model.continuation(text, pair.prompt)[0] for text in (pair.answer, pair.counterfactual_answer))
    objective, inputs, cuts = objective_of(model, [pair.prompt, pair.counterfactual], target, contrast), Inputs(), {}

    def read(layer: int, x: torch.Tensor) -> None:
        difference = (x - partner(x)).detach()
        x.register_hook(lambda g: cuts.__setitem__(layer, (difference * g)[0].sum().item()))

    with ExitStack() as undo:
        for number, layer in enumerate(model.net.model.layers):
            hook = layer.register_forward_hook(lambda module, args, x, number=number: read(number, x))
            undo.callback(hook.remove)
        numbers, _ = forward_backward(model, Logits(objective), [inputs], DIFFERENCE)
    real = (numbers[0] - numbers[1]).item()
    tokens = ((inputs.values[0] - partner(inputs.values[0])) * inputs.gradients[0])[0].sum().item()
    return abs(tokens / real - 1), max(abs(cut / real - 1) for cut in cuts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    model = load_model("smollm2-135m", dtype="float32", device="cpu")
    everything = [pair for task in task_pairs.TASKS.values() for pair in task]
    random.Random(0).shuffle(everything)
    results = []
    for pair in everything:
        if len(results) < options.pairs and task_pairs.is_usable(model, pair):
            results.append(errors(model, pair))
    tokens, cuts = zip(*results, strict=True)
    rows = {"tokens": tokens, "worst layer": cuts}
    print(json.dumps({name: {"median": median(row), "largest": max(row)} for name, row in rows.items()}))


if __name__ == "__main__":
    main()
