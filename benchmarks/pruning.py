"""Prune FFN neurons or heads, least and most relevant first, and measure the predictions (AttnLRP, section 4.2).

python -m benchmarks.pruning --samples 4 --methods attnlrp,random,activation --out pruning
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from benchmarks.baselines import ControlledEvaluation, log_probability
from icebear.actmax.index.corpus import WIKI, read_corpus
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.methods.method import Method
from icebear.concepts.passes.neuron_recorders import Values
from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.passes.sites import hooks, neuron_site
from icebear.concepts.statistics import area
from icebear.evaluation.faithfulness import beginnings
from icebear.evaluation.protocol import CorpusName, Part, Setting, Table
from icebear.models.model import Model
from icebear.models.objective import objective_of

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of all neurons (or heads) that are pruned."""
METRICS = {
    "delta_a": "area with the least relevant pruned first, minus that with the most relevant first, higher is better",
    "least": "mean log-probability of the answer, least relevant pruned first, higher is better",
    "most": "the same, most relevant pruned first, lower is better",
}
CONTROLS = ("random", "activation")
"""Uniform numbers, and the magnitude of each neuron's activation."""


@dataclass(frozen=True)
class Pruning(ControlledEvaluation):
    """Prune FFN neurons or heads, least and most relevant first, and measure the predicted words.

    Neurons are ranked by their relevance to half of the prompts, and set to zero for the other half. For the neurons of
    one answer, see `benchmarks.ablation`.

    Example:
      python -m benchmarks.pruning --samples 4 --methods attnlrp,random,activation --out pruning
    """

    name: ClassVar = "pruning"
    usual: ClassVar = (*CONTROLS, "gxi", "cp-lrp", "attnlrp")
    controls: ClassVar = CONTROLS
    site: Annotated[Literal["ffn", "head"], Setting("Prune FFN neurons or heads.")] = "ffn"
    corpus: CorpusName = None
    max_tokens: Annotated[int, Setting(least=17)] = 64

    def parts(self, model: Model) -> Iterator[Part]:
        """Yield one part whose samples are the methods: each is measured on all prompts."""
        methods, corpus = self.chosen(), self.corpus or WIKI
        texts = [text for _, text in read_corpus(corpus).documents()]
        drawn = beginnings(model, texts, 2 * self.samples, self.seed, self.max_tokens)
        mixed = random.Random(self.seed).sample(drawn, len(drawn))
        prompts, reference = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
        yield Part(
            METRICS,
            list(methods.values()),
            partial(curves, model, prompts, reference, site=self.site, seed=self.seed),
            methods={name: name for name in methods},
            settings={
                "corpus": corpus,
                "steps": list(SHARES),
                "axes": ["share of all neurons pruned", "log-probability of the answer"],
            },
            tables=lambda lines: {"": Table(METRICS, prompt_lines(prompts, dict(zip(methods, lines, strict=True))))},
            notes=lambda _: [
                f"Neurons are ranked on {len(reference)} other prompts; pruned are {list(SHARES)} of all."
            ],
        )


def ranking(model: Model, prompts: Sequence[Any], site: str, method: Method | str, seed: int = 0) -> Tensor:
    """Return (L, N) the relevance of each FFN neuron (or head) to the prompts' answers.

    It is the sum over tokens, and over prompts, of a method's scores, or of the scores of a control of `CONTROLS`.
    """
    total = torch.zeros(model.layers, model.width(neuron_site(site)), dtype=torch.float64)
    if method == "random":
        total = torch.rand(total.shape, generator=torch.Generator().manual_seed(seed))
    else:
        for prompt in prompts:
            objective = objective_of(model, [prompt]).resolved(model)
            if isinstance(method, Method):
                scores = method.neuron_scores(model, objective, neuron_site(site))
            else:
                values = Values(model, objective.batch, (neuron_site(site),))
                forward(model, Logits(objective), [values])
                scores = values.values(0, values.activation[neuron_site(site)]).abs().cpu()
            total += scores.sum(1).double()
    return total.unflatten(-1, (model.heads, -1)).sum(-1) if site == "head" else total


def answer_curves(model: Model, prompts: Sequence[Any], site: str, order: Tensor) -> list[list[float]]:
    """Return for each prompt the log-probability of the unpruned model's answer at each of `SHARES`.

    order: (L, N), the neurons with the smallest values are pruned (set to zero at every token) first.
    """
    objectives = [objective_of(model, [prompt]).resolved(model) for prompt in prompts]
    rank = order.flatten().argsort(stable=True).argsort().view(order.shape)
    curves_by_prompt: list[list[float]] = [[] for _ in prompts]
    for share in SHARES:
        pruned = rank < round(share * order.numel())  # (L, N)
        if site == "head":
            pruned = pruned.repeat_interleave(model.head_dim, 1)
        layers = [(neuron_site(site), layer) for layer in range(model.layers) if pruned[layer].any()]
        prune = lambda site, layer, x: x.masked_fill(pruned[layer].to(x.device), 0)  # noqa: B023, E731
        with model.lock, torch.no_grad(), hooks(model, layers, prune):
            for curve, objective in zip(curves_by_prompt, objectives, strict=True):
                curve.append(log_probability(model, objective)[0].item())
    return curves_by_prompt


def curves(
    model: Model, prompts: Sequence[Any], reference: Sequence[Any], method: Method | str, site: str, seed: int = 0
) -> dict[str, Any]:
    """Rank neurons on `reference` prompts, and return `answer_curves` of other prompts, pruned from both ends."""
    scores = ranking(model, reference, site, method, seed)
    return {"least": answer_curves(model, prompts, site, scores), "most": answer_curves(model, prompts, site, -scores)}


def prompt_lines(prompts: Sequence[Any], by_method: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line with `METRICS` for each prompt; by_method: name -> `curves`."""
    lines = []
    for row, prompt in enumerate(prompts):
        methods = {}
        for name, both in by_method.items():
            least, most = both["least"][row], both["most"][row]
            areas = {"least": area(least, SHARES), "most": area(most, SHARES)}
            delta = areas["least"] - areas["most"]
            methods[name] = {"curve_least": least, "curve_most": most, "delta_a": delta, **areas}
        lines.append({"prompt": list(prompt), "methods": methods})
    return lines


if __name__ == "__main__":
    command(Pruning)()
