"""Perturbation curves: how the answer changes while the most, or the least, relevant tokens are removed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from icebear.actmax.index.corpus import WIKI, read_corpus
from icebear.concepts.methods.common import measure_without
from icebear.concepts.methods.method import Method
from icebear.concepts.statistics import removal_metrics
from icebear.errors import InputError
from icebear.evaluation.baselines import able_and_unable
from icebear.evaluation.protocol import CorpusName, MethodEvaluation, Part, Setting
from icebear.models.model import Model
from icebear.models.objective import Objective, objective_of

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Shares of the tokens that are removed (rounded), by setting their embeddings to zero."""
SHORTEST = 16
"""Tokens that a text has at least before it is cut."""
METRICS = {
    "delta_a": "Delta A^F = Delta A^I (logit), higher is better",
    "delta_p": "the same of the probability, higher is better",
    "auac": "AUAC in generation (probability), higher is better",
    "au_mse": "AU-MSE in pruning (logit), lower is better",
    "compr": "loss without the most relevant, higher is better",
    "suff": "loss with the most relevant alone, lower is better",
}


@dataclass(frozen=True)
class Faithfulness(MethodEvaluation):
    """Remove tokens, most and least relevant first, and measure the predicted next token of beginnings of texts.

    Example:
      icebear evaluate faithfulness --samples 5 --methods attnlrp,gxi,random --out faithfulness
    """

    name: ClassVar = "faithfulness"
    corpus: CorpusName = None
    max_tokens: Annotated[int, Setting(least=17)] = 128

    def parts(self, model: Model) -> Iterator[Part]:
        corpus = self.corpus or WIKI
        texts = [text for _, text in read_corpus(corpus).documents()]
        prompts = beginnings(model, texts, self.samples, self.seed, self.max_tokens)
        methods, unable = able_and_unable(model, prompts[0], self.chosen())
        yield Part(
            METRICS,
            prompts,
            partial(sample, model, methods=methods),
            methods=methods,
            unable=unable,
            settings={
                "corpus": corpus,
                "steps": list(SHARES),
                "axes": ["share of the tokens removed", "logit of the answer"],
            },
        )


def beginnings(model: Model, texts: Sequence[str], samples: int, seed: int = 0, longest: int = 128) -> list[list[int]]:
    """Return token ids of texts' beginnings, cut at a random token."""
    generator = random.Random(seed)
    pool = list(texts)
    generator.shuffle(pool)
    prompts: list[list[int]] = []
    for text in pool:
        ids = model.token_ids(text)
        if len(ids) > SHORTEST:
            prompts.append(ids[: generator.randint(SHORTEST, min(longest, len(ids) - 1))])
        if len(prompts) == samples:
            break
    if not prompts:
        raise InputError(f"The corpus has no text of more than {SHORTEST} tokens; name another --corpus.")
    return prompts


def sample(model: Model, prompt: list[int], methods: Mapping[str, Method]) -> dict[str, Any]:
    """Return the curves of a prompt's most probable answer and their metrics, by method; JSON-ready."""
    objective = objective_of(model, [prompt]).resolved(model)
    scores = {name: method.scores(model, objective)[0] for name, method in methods.items()}
    masks = torch.cat([removals(values).flatten(0, 1) for values in scores.values()])
    different, where = torch.unique(masks, dim=0, return_inverse=True)  # many methods begin and end alike
    measured = measure_without(model, objective, 0, different, _answer).cpu()[where]
    results: dict[str, Any] = {}
    for name, (most, least) in zip(scores, measured.view(-1, 2, len(SHARES), 2), strict=True):
        logits = {"curve_most": most[:, 0].tolist(), "curve_least": least[:, 0].tolist()}
        results[name] = {"scores": scores[name].tolist(), **logits, **removal_metrics(most, least)}
    return {"tokens": prompt, "target": list(objective.targets[0] or ()), "methods": results}


def removals(values: Tensor) -> Tensor:
    """Return (2, S, T) which tokens are removed at each of S shares: most relevant first, and least relevant first."""
    order = values.argsort(descending=True, stable=True)
    rank = order.argsort()
    counts = torch.tensor([round(share * len(order)) for share in SHARES])[:, None]
    return torch.stack([rank < counts, rank >= len(order) - counts])


def _answer(model: Model, plan: Objective) -> Tensor:
    """Return (N, 2) the mean logit and probability of the answer's tokens, for N variants of one prompt."""
    targets, (positions, *_) = list(plan.targets[0] or ()), plan.positions
    logits = model.logits(plan.batch, plan.all_positions).float()[
        :, [plan.all_positions.index(position) for position in positions]
    ]
    answer = logits[:, range(len(targets)), targets]
    return torch.stack((answer.mean(1), (answer - logits.logsumexp(-1)).exp().mean(1)), 1)
