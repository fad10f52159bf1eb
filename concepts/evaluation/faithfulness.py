"""Perturbation curves: what the answer loses when tokens go, most and least relevant first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from icebear.concepts.evaluation import metrics
from icebear.concepts.evaluation.protocol import CorpusName, MethodEvaluation, Option, Part, accuracy
from icebear.concepts.evaluation.questions import CORPORA, Question, of_task
from icebear.concepts.methods.common import without
from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import able_and_unable
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan, plan
from icebear.errors import InputError

STEPS = 5
"""Removed are 0, 1/5, ... of the tokens, rounded, by setting their embeddings to zero."""

SHARES = [step / STEPS for step in range(STEPS + 1)]

COLUMNS = {
    "delta_a": "Delta A^F = Delta A^I (logit), higher is better",
    "delta_p": "the same of the probability, higher is better",
    "auac": "AUAC in generation (probability), higher is better",
    "au_mse": "AU-MSE in pruning (logit), lower is better",
    "compr": "loss without the most relevant, higher is better",
    "suff": "loss with the most relevant alone, lower is better",
}


TUNED_ON = 10
"""Other samples that parameters are chosen on."""


@dataclass(frozen=True)
class Faithfulness(MethodEvaluation):
    """Remove tokens, most and least relevant first, and watch the predicted answer go.

    Predicted is the next word, whether a review is positive, or one answer of four.

    Example:
      icebear evaluate faithfulness --samples 5 --methods attnlrp,gxi,random --out faithfulness
    """

    name: ClassVar = "faithfulness"
    steps: ClassVar = SHARES
    task: Annotated[Literal["next-word", "reviews", "choice"], Option("What is asked of the model.")] = "next-word"
    corpus: CorpusName = None
    max_tokens: Annotated[int, Option(least=17)] = 128
    tune: Annotated[
        bool, Option("Choose parameters on other samples first, where a method has one.", decides=False)
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task == "choice" and self.corpus:
            raise InputError("--task choice makes its own prompts; leave out --corpus.")

    def parts(self, model: Model) -> Iterator[Part]:
        corpus = self.corpus or CORPORA[self.task]
        count = self.samples + TUNED_ON * self.tune
        questions = of_task(model, self.task, corpus, count, self.seed, self.max_tokens)
        methods, unable = able_and_unable(model, questions[0].prompt, self.chosen())
        if self.tune:
            methods = tuned(model, questions[self.samples :], methods)
        yield Part(
            COLUMNS,
            questions[: self.samples],
            partial(sample, model, methods=methods),
            methods=methods,
            unable=unable,
            settings={"corpus": corpus},
            notes=accuracy,
        )


def sample(model: Model, question: Question, methods: Mapping[str, Method]) -> dict[str, Any]:
    """One prompt's curves for its most probable answer, and their metrics, by method; JSON-ready."""
    answer = question.choice(model)
    objective = plan(model, [question.prompt], answer).resolved(model)
    ranked = {name: method.scores(model, objective)[0] for name, method in methods.items()}
    masks = {name: removals(values) for name, values in ranked.items()}
    wanted = torch.cat([part for pair in masks.values() for part in pair])
    different, where = torch.unique(wanted, dim=0, return_inverse=True)  # many methods begin and end alike
    measured = without(model, objective, 0, different, _answer).cpu()[where]
    curves = iter(measured.split(STEPS + 1))  # (STEPS + 1, 2) each
    results: dict[str, Any] = {}
    for name in masks:
        most, least = next(curves).T.tolist(), next(curves).T.tolist()  # [logits, probabilities]
        line = {"scores": ranked[name].tolist(), "curve_most": most[0], "curve_least": least[0]}  # of logits
        results[name] = {**line, **numbers(most, least)}
    right = {} if question.right is None else {"correct": answer == question.right}
    return {
        "tokens": list(objective.batch.row_ids(0)),
        "target": list(objective.targets[0] or ()),
        **right,
        "methods": results,
    }


def tuned(model: Model, questions: Sequence[Question], methods: Mapping[str, Method]) -> dict[str, Method]:
    """The methods, those with variants as the one that has the largest mean Delta A^F on `questions`."""
    if not questions:
        raise InputError("No other samples are left to choose parameters on; ask for fewer --samples.")
    chosen = dict(methods)
    for name, method in methods.items():
        tries = {repr(variant): variant for variant in method.variants()}
        if not tries:
            continue
        lines = [sample(model, question, tries)["methods"] for question in questions]
        best = max(tries, key=lambda key: sum(line[key]["delta_a"] for line in lines))
        chosen[name] = tries[best]
    return chosen


def numbers(most: list[list[float]], least: list[list[float]]) -> dict[str, float]:
    """The metrics (`COLUMNS`) of curves [logits, probabilities]."""
    return {
        "delta_a": metrics.faithfulness(most[0], least[0]),
        "delta_p": metrics.faithfulness(most[1], least[1]),
        "auac": metrics.auac(least[1]),
        "au_mse": metrics.au_mse(least[0]),
        "compr": metrics.comprehensiveness(most[1]),
        "suff": metrics.sufficiency(least[1]),
    }


def removals(values: Tensor) -> tuple[Tensor, Tensor]:
    """(STEPS + 1, T) each, True for what is removed: most relevant first, least relevant first."""
    order = values.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    counts = torch.tensor([round(step / STEPS * len(order)) for step in range(STEPS + 1)])[:, None]
    return rank < counts, rank >= len(order) - counts


def _answer(model: Model, plan: Plan) -> Tensor:
    """(N, 2) logit and probability of the answer (of several, the mean)."""
    needed = plan.needed
    logits = model.logits(plan.batch, needed).float()
    rows = []
    for row, at in enumerate(plan.positions):
        here = logits[row, [needed.index(place) for place in at]]
        targets = list(plan.targets[row] or ())
        own = here[range(len(targets)), targets]
        rows.append(torch.stack((own.mean(), (own - here.logsumexp(-1)).exp().mean())))
    return torch.stack(rows)
