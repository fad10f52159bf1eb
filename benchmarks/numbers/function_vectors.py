"""Function vectors (Todd et al. 2024): heads by relevance against heads by their mean causal effect, ten tasks.

python -m benchmarks.numbers.function_vectors --out function-vectors

Prompts of five examples; the counterfactual has their answers in another order. *Causal effect*: the answer's
probability in the counterfactual when a head at the last token takes its mean over prompts of the task, less that
without. *Added*: the sum of what K heads write on average (at the last token) is added after a third of the layers, in
prompts without examples. *Distributed*: each head takes its mean. Queries are in no prompt that chose the heads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.numbers import common
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.methods.pair import Pair
from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.passes.sites import hooks
from icebear.evaluation.protocol import Evaluation, Lines, Part, Seed
from icebear.models.model import Model
from icebear.models.objective import objective_of

K = 10
"""Heads of each method."""
COLUMNS = {
    "added": f"accuracy without examples, the sum of {K} heads added, higher is better",
    "distributed": f"accuracy without examples, {K} heads at their means, higher is better",
    "overlap": f"of {K} heads those among the {K} with the largest causal effect",
}
EXAMPLES = 5
MEANS = 8
"""Prompts whose heads' values are averaged."""
EFFECTS = 3
"""Prompts that rank heads."""
QUERIES = 15
Word = tuple[str, str]


@dataclass(frozen=True)
class Split:
    """Prompts of a task with their answers: with examples, with the examples' answers in another order, and without."""

    means: tuple[Word, ...]
    clean: tuple[Word, ...]
    reordered: tuple[Word, ...]
    queries: tuple[Word, ...]
    with_examples: tuple[Word, ...]
    """The same queries."""


# --- data ---


def tasks() -> list[str]:
    return sorted(path.stem for path in (common.DATA / "function_vectors").glob("*.json"))


def prompt_of(examples: Sequence[Word], query: str) -> str:
    return "".join(f"Q: {x}\nA: {y}\n\n" for x, y in examples) + f"Q: {query}\nA:"


def split(model: Model, task: str, seed: int) -> Split:
    """Return the prompts; the examples' answers are single tokens, so that reordering them moves no token."""
    rows = [(row["input"], row["output"]) for row in common.read(f"function_vectors/{task}.json")]
    short = [row for row in rows if len(model.continuation(f" {row[1]}", "A:")) == 1]
    order = common.shuffled(short, seed)
    queries, pool = order[:QUERIES], order[QUERIES:] if len(order) > 2 * QUERIES else order[len(order) // 2 :]
    queries = [row for row in queries if row not in pool]
    generator = random.Random(f"{seed} {task}")

    def drawn() -> tuple[Word, Word]:
        *examples, (query, answer) = generator.sample(pool, EXAMPLES + 1)
        answers = [y for _, y in examples]
        other = answers[1:] + answers[:1]
        reordered = [(x, y) for (x, _), y in zip(examples, other, strict=True)]
        return (prompt_of(examples, query), answer), (prompt_of(reordered, query), answer)

    pairs = [drawn() for _ in range(MEANS + EFFECTS)]
    shown = [(prompt_of(generator.sample(pool, EXAMPLES), x), y) for x, y in queries]
    clean, reordered = zip(*pairs[MEANS:], strict=True)
    means = tuple(pair[0] for pair in pairs[:MEANS])
    return Split(means, clean, reordered, tuple((prompt_of([], x), y) for x, y in queries), tuple(shown))


# --- heads ---


def target(model: Model, word: Word) -> int:
    return common.answer_token(model, *word)


def mean_values(model: Model, words: Sequence[Word]) -> Tensor:
    """Return (L, H, W) the mean values of heads at the last token."""
    total = torch.zeros(model.layers, model.heads, model.head_dim)
    for prompt, _ in words:
        row = attribute(model, prompt, sites=("attn",), record="last", number="logit", method="gxi")
        total += row.activation("attn")[:, -1].float().unflatten(-1, (model.heads, -1))
    return total / len(words)


def causal_effects(model: Model, words: Sequence[Word], values: Tensor) -> Tensor:
    """Return (L, H) the mean gain of the answer's probability when a head at the last token takes its mean value."""
    layers, heads, width = values.shape
    gains = torch.zeros(layers * heads)
    for word in words:
        *before, last = model.token_ids(word[0])
        prefix = Prefix.read(model, [before])
        ids = torch.full((layers * heads + 1, 1), last)  # the last row has no edit

        def exchanged(site: str, layer: int, x: Tensor) -> Tensor:
            x = x.clone()
            for head in range(heads):
                x[layer * heads + head, -1, head * width : (head + 1) * width] = values[layer, head]
            return x

        with model.lock, torch.no_grad(), hooks(model, [("attn", n) for n in range(layers)], exchanged):
            logits = model.net(**prefix.after(ids)).logits[:, -1].float()
        p = logits.softmax(-1)[:, target(model, word)]
        gains += p[:-1] - p[-1]
    return (gains / len(words)).view(layers, heads)


def relevances(model: Model, pairs: Sequence[tuple[Word, Word]], against: bool) -> Tensor:
    """Return (L, H) the mean relevance of heads at the last token for the logit of the answer: by difference rules
    against the reordered examples, or AttnLRP alone."""
    total = torch.zeros(model.layers, model.heads)
    for clean, reordered in pairs:
        if against:
            objective = objective_of(model, [clean[0], reordered[0]], target(model, clean))
            relevance = DIFFERENCE.compare(Pair(model, objective, False, ("attn",), "last")).relevance["attn"]
        else:
            relevance = attribute(model, clean[0], target(model, clean), number="logit", record="last").of("attn")
        total += relevance[:, -1].unflatten(-1, (model.heads, -1)).sum(-1)
    return total / len(pairs)


# --- used ---


@contextmanager
def added(model: Model, chosen: Sequence[int], values: Tensor, last: Tensor) -> Iterator[None]:
    """Add the sum of what heads write to the residual stream after a third of the layers, at the last token."""
    vector = torch.zeros(model.config.hidden_size)
    width = values.shape[2]
    for layer, head in (divmod(number, values.shape[1]) for number in chosen):
        weight = model.site_module("attn", layer).weight
        vector += weight[:, head * width : (head + 1) * width] @ values[layer, head]

    def after(module: Any, args: Any, output: Any) -> Any:
        x = (output[0] if isinstance(output, tuple) else output).clone()
        x[range(len(last)), last] += vector
        return (x, *output[1:]) if isinstance(output, tuple) else x

    with ExitStack() as undo:
        undo.callback(model.layer_modules[model.layers // 3].register_forward_hook(after).remove)
        yield


def distributed(model: Model, chosen: Sequence[int], values: Tensor, last: Tensor) -> AbstractContextManager[None]:
    """Give heads their mean values at the last token."""
    nodes = [divmod(number, values.shape[1]) for number in chosen]
    width = values.shape[2]

    def exchanged(site: str, layer: int, x: Tensor) -> Tensor:
        x = x.clone()
        for head in (head for at, head in nodes if at == layer):
            x[range(len(last)), last, head * width : (head + 1) * width] = values[layer, head]
        return x

    return hooks(model, [("attn", layer) for layer in sorted({layer for layer, _ in nodes})], exchanged)


def accuracy(
    model: Model, words: Sequence[Word], change: Callable[[Tensor], AbstractContextManager[None]] | None = None
) -> float:
    """Return the share of prompts whose first word is right, with a change at their last tokens."""
    if change is None:
        tokens = common.first_tokens(model, [prompt for prompt, _ in words])
    else:
        objective = objective_of(model, [prompt for prompt, _ in words])
        with change(torch.tensor([at for (at,) in objective.positions])):
            tokens = [row[0] for row in objective.resolved(model).targets if row]
    return fmean(token == target(model, word) for token, word in zip(tokens, words, strict=True))


def measured(model: Model, task: str, seed: int) -> dict[str, Any]:
    part = split(model, task, seed)
    values = mean_values(model, part.means)
    pairs = list(zip(part.clean, part.reordered, strict=True))
    ranked = {
        "difference": relevances(model, pairs, True),
        "attnlrp": relevances(model, pairs, False),
        "causal effect": causal_effects(model, part.reordered, values),
        "random": torch.rand(values.shape[:2], generator=torch.Generator().manual_seed(seed + len(task))),
    }
    chosen = {name: scores.flatten().topk(K).indices.tolist() for name, scores in ranked.items()}
    best = set(chosen["causal effect"])
    methods = {
        name: {
            "added": accuracy(model, part.queries, partial(added, model, heads, values)),
            "distributed": accuracy(model, part.queries, partial(distributed, model, heads, values)),
            "overlap": len(best & set(heads)) / K,
        }
        for name, heads in chosen.items()
    }
    plain = accuracy(model, part.queries)
    methods["no heads"] = {"added": plain, "distributed": plain, "overlap": 0.0}
    shown = accuracy(model, part.with_examples)
    names = {name: [f"L{n // model.heads}.head.{n % model.heads}" for n in heads] for name, heads in chosen.items()}
    return {"task": task, "queries": len(part.queries), "examples": shown, "heads": names, "methods": methods}


def notes(lines: Lines) -> list[str]:
    right = [f"{line['task']} {line['examples']:.2f}" for line in lines]
    mean = fmean(line["examples"] for line in lines)
    queries = sum(line["queries"] for line in lines)
    return [f"with {EXAMPLES} examples the model is right on {mean:.2f} of {queries} queries: {', '.join(right)}"]


@dataclass(frozen=True)
class FunctionVectors(Evaluation):
    """Heads that carry a task from its examples to prompts without examples, by relevance and by causal effect."""

    name: ClassVar = "function-vectors"
    samples: common.Samples = 10
    seed: Seed = 0

    def parts(self, model: Model) -> Iterator[Part]:
        chosen = tasks()[: self.samples]
        yield Part(COLUMNS, chosen, partial(measured, model, seed=self.seed), notes=notes)


if __name__ == "__main__":
    command(FunctionVectors)()
