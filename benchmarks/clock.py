"""Train modular addition until it generalizes (a "grokked clock"), and judge methods on it.

python -m benchmarks.clock [--modulus 31]
"""

from __future__ import annotations

import argparse
import random
from statistics import fmean

import torch
from torch.nn.functional import cross_entropy

from benchmarks.truth.judge.evaluation import judged
from benchmarks.truth.judge.judged_pairs import Pair
from benchmarks.truth.programs.compiler import Compiled
from icebear.concepts.methods.registry import method_of
from icebear.models.loading.hooked_model import HookedConfig, HookedForCausalOutputs
from icebear.models.model import Model
from icebear.models.text.words import Words

METHODS = ("difference", "ig@path", "gxi@midpoint", "gxi@prompt")
CONTROLS = ("difference-rounds", "random")
COLUMNS = ("at_k", "at_2k", "area")


def clock(modulus: int, most: int = 20_000) -> HookedForCausalOutputs:
    """Return a network that was trained on three quarters of all sums, right on all others."""
    torch.manual_seed(0)
    shape = {"n_layers": 1, "d_model": 64, "n_heads": 4, "d_head": 16, "d_mlp": 192, "n_ctx": 3}
    words = {"d_vocab": modulus + 1, "d_vocab_out": modulus}
    net = HookedForCausalOutputs(HookedConfig(**shape, **words, act_fn="relu", normalization_type=None))
    net.config.id2label = {number: str(number) for number in range(modulus)}
    for weight in net.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    ids = torch.tensor([[a, b, modulus] for a in range(modulus) for b in range(modulus)])
    sums, mixed = (ids[:, 0] + ids[:, 1]) % modulus, torch.randperm(len(ids))
    seen, unseen = mixed[: 3 * len(ids) // 4], mixed[3 * len(ids) // 4 :]
    optimizer = torch.optim.AdamW(net.parameters(), 1.5e-3, betas=(0.9, 0.98), weight_decay=1.0)
    for step in range(most):
        loss = cross_entropy(net(ids[seen]).logits[:, -1], sums[seen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            with torch.no_grad():
                right = (net(ids[unseen]).logits[:, -1].argmax(-1) == sums[unseen]).float().mean().item()
            print(f"{step} loss {loss.item():.5f}, right on unseen sums {right:.3f}", flush=True)
            if right == 1:
                break
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modulus", type=int, default=31)
    modulus = parser.parse_args().modulus
    model = Model(clock(modulus), Words({**{str(n): n for n in range(modulus)}, "=": modulus}), "clock")
    methods = {**{name: method_of(name) for name in METHODS}, **{name: name for name in CONTROLS}}
    draw, generator, rows = random.Random(0), torch.Generator().manual_seed(0), {}
    for _ in range(10):
        (a, b), (c, d) = (draw.sample(range(modulus), 2) for _ in range(2))
        target, contrast = (a + b) % modulus, (c + d) % modulus
        if target != contrast:
            pair = Pair((a, b, modulus), (c, d, modulus), 2, target, contrast)
            for row in judged(Compiled(model), pair, methods, generator):
                for name, numbers in row["methods"].items():
                    rows.setdefault((row["sites"], name), []).append([numbers[column] for column in COLUMNS])
    for key, values in rows.items():
        print(
            *key,
            *(f"{column} {fmean(some):.2f}" for column, some in zip(COLUMNS, zip(*values, strict=True), strict=True)),
        )


if __name__ == "__main__":
    main()
