"""Compare difference rules with captum's LayerDeepLift and LayerIntegratedGradients on the models whose
mechanism is known, FFN neurons, hard pairs.

python -m benchmarks.truth_peers [--pairs 5]

captum sees the same network. Its DeepLIFT needs ReLUs as modules, which are put in the place of the functions; softmax
and products are functions, which it takes by their gradient at the prompt, and so is GELU, for which it has no rule.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from itertools import islice, product
from statistics import fmean

import torch
from captum.attr import LayerDeepLift, LayerIntegratedGradients
from torch import Tensor, nn

from benchmarks.truth.judge.evaluation import VARIANTS
from benchmarks.truth.judge.judged_pairs import Pair, pairs_of
from benchmarks.truth.judge.judging import SITES, Judge, candidates_of, relevances, scores_of, truth_of
from benchmarks.truth.programs.compiler import names, trained
from benchmarks.truth.programs.programs import PROGRAMS
from icebear.concepts.methods.registry import method_of
from icebear.models.model import Model

OURS = ("difference", "difference-rounds", "gxi@midpoint", "ig@path")
COLUMNS = ("at_k", "at_2k", "area", "zero")


class FromEmbeddings(nn.Module):
    """The logit difference of a pair as a function of embeddings (B, T, D)."""

    def __init__(self, model: Model, pair: Pair) -> None:
        super().__init__()
        self.net = copy.deepcopy(model.net)
        self.embed, self.net.model.embed = self.net.model.embed, nn.Identity()
        for block in self.net.model.blocks:
            block.mlp.act = nn.ReLU() if self.net.config.act_fn == "relu" else nn.GELU()
        self.pair = pair
        self.requires_grad_()  # captum hooks tensors with a gradient only

    def forward(self, embeddings: Tensor) -> Tensor:
        logits = self.net(embeddings).logits[:, self.pair.position]
        return logits[:, self.pair.target] - logits[:, self.pair.contrast]


def captum_scores(model: Model, pair: Pair) -> dict[str, Tensor]:
    """Return the scores (L, T, N) of FFN neurons by both methods."""
    number = FromEmbeddings(model, pair)
    here, there = (number.embed(torch.tensor([ids])).detach() for ids in (pair.prompt, pair.counterfactual))
    layers = [block.mlp.out for block in number.net.model.blocks]
    lift = [LayerDeepLift(number, one).attribute(here, there, attribute_to_layer_input=True) for one in layers]
    paths = [LayerIntegratedGradients(number, one) for one in layers]
    steps = [path.attribute(here, there, n_steps=50, attribute_to_layer_input=True) for path in paths]
    return {
        "captum LayerDeepLift": torch.cat(lift).detach(),
        "captum LayerIntegratedGradients": torch.cat(steps).detach(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--variants", nargs="*")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    methods = {name: name if name == "difference-rounds" else method_of(name) for name in OURS}
    generator = torch.Generator().manual_seed(0)
    for variant in options.variants or (*VARIANTS, "trained"):
        rows: dict[str, dict[str, list[float]]] = {}
        for name, pair in product(names() if variant == "trained" else PROGRAMS, range(options.pairs)):
            program = PROGRAMS[name]
            made = trained(program) if variant == "trained" else VARIANTS[variant](program, 0)
            (own,) = islice(pairs_of(program), pair, pair + 1)
            candidates = candidates_of(made.model, own, SITES["neurons"])
            if candidates is None:
                continue
            judge = Judge(candidates, truth_of(candidates), {})
            if not judge.is_hard:
                continue
            scores = scores_of(candidates, methods, relevances(made.model, own, methods), generator)
            theirs = captum_scores(made.model, own)
            scores |= {key: x.flatten()[candidates.entries] for key, x in theirs.items()}
            for key, x in scores.items():
                for column, value in judge.numbers(x, generator).items():
                    rows.setdefault(key, {}).setdefault(column, []).append(value)
        for key, columns in rows.items():
            print(json.dumps({"variant": variant, "method": key, **{c: round(fmean(columns[c]), 3) for c in COLUMNS}}))


if __name__ == "__main__":
    main()
