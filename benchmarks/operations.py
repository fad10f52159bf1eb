"""Operations that a GPU would launch, as multiples of those of gradient x input: a number that needs no quiet machine.

    python -m benchmarks.operations [--model smollm2-135m]

A GPU waits for Python with small models, so the number of operations decides. Views and what only allocates or asks for
a type are left out; a library's fused kernel is one operation.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from icebear import attribute, load_model, stages
from icebear.models.model import Model

PROMPT, COUNTERFACTUAL = "The capital of France is", "The capital of Italy is"
NO_KERNEL = {
    f"aten::{name}"
    for name in "_unsafe_view empty new_empty empty_like set_ lift_fresh promote_types result_type".split()
}
LIMITS = {"tokens": 1.02, "all neurons": 1.06, "a comparison": 2.35, "stages": 8.0}
"""What is computed -> the largest multiple."""


class Launched(TorchDispatchMode):
    """Counts operations by name, in a forward and a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(value.alias_info and not value.alias_info.is_write for value in func._schema.returns)
        if not is_view and func._schema.name not in NO_KERNEL:
            self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def count(compute: Callable[[], Any]) -> int:
    """Return the number of operations, after what is measured once (a proof of rules, calibration) was."""
    for _ in range(2):  # the second pass makes the proof
        compute()
    with Launched() as launched:
        compute()
    return launched.names.total()


def gradient_x_input(model: Model, prompt: str) -> torch.Tensor:
    """Return the scores (T,) of the tokens for the likeliest next one, as anyone would write it."""
    embeddings = model.net.get_input_embeddings()(torch.tensor([model.ids(prompt)])).detach().requires_grad_()
    logits = model.net(inputs_embeds=embeddings, use_cache=False).logits[0, -1]
    (gradient,) = torch.autograd.grad(logits[logits.argmax()], embeddings)
    return (gradient * embeddings).sum(-1)[0]


def ratios(model: Model) -> dict[str, float]:
    """Return the names of `LIMITS` with their multiples."""
    baseline = count(lambda: gradient_x_input(model, PROMPT))
    computed: dict[str, Callable[[], Any]] = {
        "tokens": lambda: attribute(model, PROMPT, sites=()),
        "all neurons": lambda: attribute(model, PROMPT),
        "a comparison": lambda: attribute(model, PROMPT, counterfactual=COUNTERFACTUAL),
        "stages": lambda: stages(model, PROMPT, counterfactual=COUNTERFACTUAL),
    }
    return {name: count(compute) / baseline for name, compute in computed.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    print("| | operations / gradient x input | limit |\n| --- | --- | --- |")
    for name, ratio in ratios(load_model(parser.parse_args().model)).items():
        print(f"| {name} | {ratio:.2f} | {LIMITS[name]} |")
