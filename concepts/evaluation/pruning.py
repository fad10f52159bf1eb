"""Latent ground truth: prune neurons or heads, least and most relevant first, and watch the predictions go."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from icebear.concepts.evaluation import metrics
from icebear.concepts.evaluation.protocol import CorpusName, FfnOrHead, MethodEvaluation, Option, Part, Table
from icebear.concepts.evaluation.questions import CORPORA, of_task
from icebear.concepts.methods.common import log_probability
from icebear.concepts.methods.method import Method
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan, plan
from icebear.concepts.passes.neurons import Values
from icebear.concepts.passes.run import forward
from icebear.concepts.passes.sites import hooks
from icebear.concepts.passes.targets import Logits

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Of all neurons (or heads) pruned."""

COLUMNS = {
    "delta_a": "area with the least relevant pruned first, minus that with the most relevant first, higher is better",
    "least": "mean log-probability of the answer, least relevant pruned first, higher is better",
    "most": "the same, most relevant pruned first, lower is better",
}


METHODS = ("random", "activation", "gxi", "cp-lrp", "attnlrp")
CONTROLS = ("random", "activation")
"""Uniform numbers, and the magnitude of each neuron's activation."""


@dataclass(frozen=True)
class Pruning(MethodEvaluation):
    """Prune FFN neurons or heads, least and most relevant first, and watch the predicted words go.

    Which are needed by prompts in general: ranked on some, set to zero for others. Those of one answer: ablation.

    Example:
      icebear evaluate pruning --samples 4 --methods attnlrp,random --out pruning
    """

    name: ClassVar = "pruning"
    usual: ClassVar = METHODS
    controls: ClassVar = tuple(CONTROLS)
    steps: ClassVar = SHARES
    site: FfnOrHead = "ffn"
    corpus: CorpusName = None
    max_tokens: Annotated[int, Option(least=17)] = 64

    def parts(self, model: Model) -> Iterator[Part]:
        """Methods are measured one by one, each on all prompts."""
        methods = self.chosen()
        corpus = self.corpus or CORPORA["next-word"]
        questions = of_task(model, "next-word", corpus, 2 * self.samples, self.seed, self.max_tokens)
        prompts, reference = split([question.prompt for question in questions], self.seed)
        note = f"Neurons are ranked on {len(reference)} other prompts; pruned are {list(SHARES)} of all."
        yield Part(
            COLUMNS,
            list(methods.values()),
            lambda method: curves(model, prompts, reference, method, self.site, self.seed),
            methods=methods,
            settings={"corpus": corpus},
            tables=lambda lines: {"": Table(COLUMNS, samples(prompts, dict(zip(methods, lines, strict=True))))},
            notes=lambda _: [note],
        )


def ranking(model: Model, prompts: Sequence[Any], site: str, method: Method | str, seed: int = 0) -> Tensor:
    """(L, N) how much each neuron of ``ffn`` (or head, for ``head``) matters to the prompts' most probable answers.

    Sums over tokens, and over prompts, of a method's scores, or of what a control of `CONTROLS` scores.
    """
    tap = "attn" if site == "head" else site
    total = torch.zeros(model.layers, model.width(tap), dtype=torch.float64)
    if method == "random":
        return _by_head(torch.rand(total.shape, generator=torch.Generator().manual_seed(seed)), model, site)
    for prompt in prompts:
        objective = plan(model, [prompt]).resolved(model)
        total += _latent(model, objective, tap, method).sum(1).double()
    return _by_head(total, model, site)


def _latent(model: Model, plan: Plan, site: str, method: Method | str) -> Tensor:
    """(L, T, N)"""
    if isinstance(method, Method):
        return method.neuron_scores(model, plan, site)
    values = Values(model, plan.batch, (site,))
    forward(model, Logits(plan), [values])
    return values.values(0, values.activation[site]).abs()


def _by_head(values: Tensor, model: Model, site: str) -> Tensor:
    return values.unflatten(-1, (model.heads, -1)).sum(-1) if site == "head" else values


def measure(model: Model, prompts: Sequence[Any], site: str, order: Tensor) -> list[list[float]]:
    """For each prompt the log-probability of its answer (that of the whole model) at each of `SHARES`.

    order: (L, N), the neurons with the smallest values are pruned (set to zero at every token) first.
    """
    plans = [plan(model, [prompt]).resolved(model) for prompt in prompts]
    rank = torch.empty(order.numel(), dtype=torch.long)
    rank[order.flatten().argsort(stable=True)] = torch.arange(order.numel())
    rank = rank.view(order.shape)
    tap = "attn" if site == "head" else site
    curves: list[list[float]] = [[] for _ in prompts]
    for share in SHARES:
        gone = rank < round(share * order.numel())  # (L, N)
        if site == "head":
            gone = gone.repeat_interleave(model.head_dim, 1)
        places = [(tap, layer) for layer in range(model.layers) if gone[layer].any()]
        prune = lambda site, layer, x: x.masked_fill(gone[layer].to(x.device), 0)  # noqa: B023, E731
        with model.lock, torch.no_grad(), hooks(model, places, prune):
            for row, objective in enumerate(plans):
                curves[row].append(log_probability(model, objective)[0].item())
    return curves


def curves(
    model: Model, prompts: Sequence[Any], reference: Sequence[Any], method: Method | str, site: str, seed: int = 0
) -> dict[str, Any]:
    """Neurons ranked by a method on `reference` prompts, pruned on others: `measure`, least relevant first and most."""
    scores = ranking(model, reference, site, method, seed)
    return {"least": measure(model, prompts, site, scores), "most": measure(model, prompts, site, -scores)}


def samples(prompts: Sequence[Any], by_method: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each prompt, as reports take them; found: name of a method -> its `curves`."""
    lines = []
    for row, prompt in enumerate(prompts):
        methods = {}
        for name, of in by_method.items():
            least, most = of["least"][row], of["most"][row]
            methods[name] = {"curve_least": least, "curve_most": most, **numbers(least, most)}
        lines.append({"prompt": list(prompt), "methods": methods})
    return lines


def numbers(least: list[float], most: list[float]) -> dict[str, float]:
    areas = [metrics.area_over(SHARES, curve) for curve in (least, most)]
    return {"delta_a": areas[0] - areas[1], "least": areas[0], "most": areas[1]}


def split(prompts: Sequence[Any], seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Half to prune on, half to rank on."""
    mixed = random.Random(seed).sample(list(prompts), len(prompts))
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
