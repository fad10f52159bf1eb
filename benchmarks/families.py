"""AttnLRP against gradient x input for every family: random models of 8 layers, 384 wide, 128 tokens, in turn.

python benchmarks/families.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from configurations import dense, mixtures, others

from icebear import Model, attribute
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Logits, forward_backward
from icebear.concepts.passes.timing import seconds
from icebear.models.objective import objective_of


class Masked:
    """A tokenizer for token ids, the last of which is the mask."""

    mask_token_id, all_special_ids = 49, ()

    def decode(self, ids):
        return str(ids[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    size = {"scale": 16, "layers": 8, "positions": 256}
    ids = [*random.Random(0).choices(range(49), k=127), 49]
    print(
        "| family | gradient x input | AttnLRP, tokens | AttnLRP, all ffn and attn neurons |\n| --- | --- | --- | --- |"
    )
    causal = {name: ("AutoModelForCausalLM", config) for name, config in {**dense(**size), **mixtures(**size)}.items()}
    for name, (auto, config) in {**causal, **others(**size)}.items():
        torch.manual_seed(0)
        cls = getattr(transformers, auto)
        create = cls.from_config if auto.startswith("Auto") else cls._from_config
        model = Model(create(config).float(), Masked(), name)
        prompt = torch.randn(3, 16, 24) if model.task.name == "image" else ids
        works = [
            lambda: forward_backward(model, Logits(objective_of(model, [prompt])), [Inputs()]),  # noqa: B023
            lambda: attribute(model, prompt, sites=()),  # noqa: B023
            lambda: attribute(model, prompt),  # noqa: B023
        ]
        for work in works:
            work()
        taken = [[seconds(work, model.device) for work in works] for _ in range(rounds)]
        plain, tokens, neurons = (statistics.median(row[i] for row in taken) for i in range(3))
        ratios = [statistics.median(row[i] / row[0] for row in taken) for i in (1, 2)]
        print(
            f"| {name} | {plain:.3f} s | {tokens:.3f} s ({ratios[0]:.2f}) | {neurons:.3f} s ({ratios[1]:.2f}) |",
            flush=True,
        )
