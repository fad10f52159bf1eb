"""Injected instructions (BIPIA): which part of the context made the first token that would not be there without it?

python -m benchmarks.numbers.bipia --samples 40 --out bipia

An e-mail with an instruction before, inside or after it, and BIPIA's question. The answer (greedy) is read up to its
first token y that the prompt without the instruction does not have there (y'): the injected span is its cause, whether
or not the model follows the instruction. It *follows* where its answer is likelier after the instruction alone than
after the prompt without it. Spans are the sentences of the context.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.baselines import Gradient
from benchmarks.numbers import common
from benchmarks.numbers.dpa import Attention
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.methods.common import explained_numbers
from icebear.concepts.methods.difference_rules import DIFFERENCE
from icebear.concepts.methods.pair import Pair
from icebear.concepts.methods.registry import METHODS
from icebear.concepts.passes.inputs import input_hooks
from icebear.evaluation.groundtruth import tokens_between
from icebear.evaluation.protocol import Evaluation, Lines, Part, Seed
from icebear.models.model import Model
from icebear.models.objective import Objective, objective_of

SHARES = (0.05, 0.1, 0.2)
COLUMNS = {
    "first": "the injected span has the largest sum of all spans, higher is better",
    "rank": "reciprocal rank of the injected span, higher is better",
    **{f"recovery {share:.0%}": f"injected tokens among the first {share:.0%}, higher is better" for share in SHARES},
}
NEW_TOKENS = 8
WORDS = 40
"""Words of an e-mail, at most."""
METHODS_ALONE = {name: METHODS[name] for name in ("attnlrp", "gxi")} | {
    "grad-l2": Gradient(2),
    "attention": Attention(),
    "attention, last layer": Attention(last=True),
}


@dataclass(frozen=True)
class Item:
    """A context of spans, of which one is injected, and the question."""

    spans: tuple[str, ...]
    injected: int
    question: str
    gap: str = " "

    def user(self, left_out: int | None = None) -> str:
        """Return the message of the user, without a span."""
        spans = [span for number, span in enumerate(self.spans) if number != left_out]
        return f"{self.gap.join(spans)}\n{self.question}"


@dataclass(frozen=True)
class Diverged:
    """An item, the answer up to the first divergent token, y and y'."""

    item: Item
    prefix: tuple[int, ...]
    target: int
    contrast: int


# --- data ---


def items(seed: int) -> Iterator[Item]:
    """Yield an e-mail of BIPIA with each instruction of its text attacks, in a seeded order."""
    emails = [row for part in ("test", "train") for row in common.read(f"bipia/email_{part}.jsonl")]
    emails = [row for row in emails if len(row["context"].split()) <= WORDS]
    attacks = [
        text
        for part in ("test", "train")
        for rows in common.read(f"bipia/text_attack_{part}.json").values()
        for text in rows
    ]
    generator = random.Random(seed)
    for attack in common.shuffled(attacks, seed):
        email = generator.choice(emails)
        spans = [" ".join(part.split()) for part in re.split(r"\||(?<=[.!?])\s+|\n+", email["context"])]
        spans = [span for span in spans if len(span) > 3]
        at = generator.randrange(len(spans) + 1)
        yield Item((*spans[:at], attack, *spans[at:]), at, email["question"])


def chat(model: Model, user: str) -> str:
    """Return the text that the model reads of one message."""
    messages = [{"role": "user", "content": user}]
    return model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def written(model: Model, user: str) -> list[int]:
    return list(model.answer(chat(model, user), max_new_tokens=NEW_TOKENS).ids)


def likelihood(model: Model, user: str, ids: Sequence[int]) -> float:
    """Return the log-probability of an answer."""
    logits = model.continuation_logits(model.ids(chat(model, user)), ids)
    return logits.log_softmax(-1)[range(len(ids)), list(ids)].sum().item()


def diverged(model: Model, item: Item, ids: Sequence[int]) -> Diverged | None:
    """Return the item with its first divergent token; None where the answer is the same."""
    logits = model.continuation_logits(model.ids(chat(model, item.user(item.injected))), ids)
    at = next((at for at, token in enumerate(ids) if int(logits[at].argmax()) != token), None)
    return None if at is None else Diverged(item, tuple(ids[:at]), ids[at], int(logits[at].argmax()))


# --- measured ---


def span_tokens(model: Model, item: Item) -> list[list[int]]:
    """Return the tokens of each span in the chat."""
    text, at, places = chat(model, item.user()), 0, []
    for span in item.spans:
        start = text.index(span, at)
        at = start + len(span)
        places.append(tokens_between(model, text, start, at))
    return places


def objective(model: Model, one: Diverged, contrast: bool = True, left_out: int | None = None) -> Objective:
    ids = [*model.ids(chat(model, one.item.user(left_out))), *one.prefix]
    return objective_of(model, [ids], one.target, one.contrast if contrast else None)


def token_scores(model: Model, one: Diverged, spans: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return (T,) scores of each method, for y against y'; and AttnLRP's for y alone."""
    plain, alone = objective(model, one), objective(model, one, contrast=False)
    scores = {name: method.scores(model, plain)[0] for name, method in METHODS_ALONE.items()}
    scores["attnlrp, without y'"] = METHODS["attnlrp"].scores(model, alone)[0]
    scores["difference, mean embedding"] = _against_mean(model, plain, [token for tokens in spans for token in tokens])
    with torch.no_grad(), model.lock:
        total = explained_numbers(model, plain)
        left = [explained_numbers(model, objective(model, one, True, number)) for number in range(len(spans))]
    scores["leave one span out"] = torch.zeros(len(scores["attnlrp"]))
    for tokens, number in zip(spans, left, strict=True):
        scores["leave one span out"][list(tokens)] = (total - number).item() / len(tokens)
    return scores


def _against_mean(model: Model, plain: Objective, context: Sequence[int]) -> Tensor:
    """Return the relevance by difference rules against the same prompt whose context has the mean embedding."""
    mean = model.embeddings[0].weight.mean(0)

    def changed(stack: int, x: Tensor) -> Tensor:
        x = x.clone()
        x[1, list(context)] = mean
        return x

    with input_hooks(model, changed):
        return DIFFERENCE.compare(Pair(model, plain.rows([0, 0]), False, (), "last")).tokens[0].sum(-1)


def numbers(values: Tensor, spans: Sequence[Sequence[int]], injected: int) -> dict[str, float]:
    """Return the columns for scores (T,) of tokens; only those of spans count."""
    sums = [values[list(tokens)].sum().item() for tokens in spans]
    rank = 1 + sum(x > sums[injected] for number, x in enumerate(sums) if number != injected)
    context = [token for tokens in spans for token in tokens]
    order = sorted(context, key=lambda token: -values[token].item())
    gold = set(spans[injected])
    top = [set(order[: math.ceil(share * len(context))]) for share in SHARES]
    recovery = [len(tokens & gold) / len(gold) for tokens in top]
    return dict(zip(COLUMNS, (float(rank == 1), 1 / rank, *recovery), strict=True))


def measured(model: Model, item: Item, seed: int) -> dict[str, Any]:
    ids, injected = written(model, item.user()), item.spans[item.injected]
    follows = likelihood(model, injected, ids) > likelihood(model, item.user(item.injected), ids)
    one = diverged(model, item, ids)
    about = {"user": item.user(), "injected": injected, "answer": "".join(model.pieces(ids)), "follows": follows}
    if one is None:
        return {**about, "counts": False, "methods": {}}
    spans = span_tokens(model, item)
    scores = token_scores(model, one, spans)
    count, generator = len(scores["gxi"]), torch.Generator().manual_seed(seed + one.target)
    methods = {name: numbers(values, spans, item.injected) for name, values in scores.items()}
    methods["the longest span"] = numbers(torch.ones(count), spans, item.injected)
    drawn = [numbers(torch.rand(count, generator=generator) - 0.5, spans, item.injected) for _ in range(20)]
    methods["random"] = {column: fmean(row[column] for row in drawn) for column in COLUMNS}
    divergent = [model.text(one.target), model.text(one.contrast)]
    return {**about, "divergent": divergent, "after": len(one.prefix), "spans": len(spans), "methods": methods}


def note(lines: Lines) -> list[str]:
    counted = [line for line in lines if line.get("counts", True)]
    follows = sum(line["follows"] for line in lines)
    return [f"the answer changes in {len(counted)} of {len(lines)} prompts; the model follows in {follows}"]


@dataclass(frozen=True)
class Injected(Evaluation):
    """Whether scores of tokens point at the injected instruction that made the first divergent token."""

    name: ClassVar = "bipia"
    samples: common.Samples = 40
    seed: Seed = 0

    def parts(self, model: Model) -> Iterator[Part]:
        tried = list(islice(items(self.seed), self.samples))
        yield Part(COLUMNS, tried, partial(measured, model, seed=self.seed), notes=note)


if __name__ == "__main__":
    command(Injected)()
