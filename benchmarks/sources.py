"""Does relevance with eight removals find what an answer hangs on as well as ContextCite, and at which cost?

python -m benchmarks.sources --samples 60 --out sources    # resumes; a prefix of the samples has all kinds and sizes

The answer's first sentence is explained in contexts of 5 to 60 sources: Wikipedia summaries that are joined, mail of
BIPIA (../shared/data), and conversations with a tool's output. Measured: the rank correlation of the summed scores of
the sources that are left with the log-probability, over 64 random halves that no method has seen; the log-probability
that is lost without the first 1, 3 and 5 sources; passes (a backward pass counts as two) and CPU seconds.

ContextCite (Cohen-Wang et al. 2024, arXiv 2409.00729) is written from its paper: masks that keep each source with
probability 1/2, the logit of the answer's probability, a Lasso with alpha 0.01 on standardized masks.
`contextcite_masks` and `contextcite_scores` equal those of context-cite 0.0.4 (tests/test_benchmarks.py).
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import DynamicCache

from benchmarks.numbers import bipia, common
from icebear.actmax.index.corpus import read_corpus
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.answers.removals import Removals
from icebear.concepts.answers.source_measurement import SourcesRequest, sources_request
from icebear.concepts.answers.units import span_relevance
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.attnlrp import CP_LRP
from icebear.concepts.passes.sites import eager
from icebear.errors import InputError
from icebear.evaluation.protocol import Evaluation, Lines, Part, Seed, Table
from icebear.models.model import Model
from icebear.models.text.chat import Chat
from icebear.models.text.splitting import bounds_of

SIZES = (5, 10, 20, 40, 60)
"""Sources of a context, about."""
LARGE = 40
"""Sources of a large context, which has a table of its own."""
HALVES = 64
MAILS = 40
MASKS = (16, 32, 64)
REMOVED = 8
FIRST = (1, 3, 5)
ARTICLES = 1000
WORDS = 14
"""Of a sentence of a summary, on average at most."""
NEW_TOKENS = 32
LONGEST = 900
"""Tokens of a context."""
COLUMNS = {
    "rank correlation": "of summed scores with the log-probability, over 64 held-out halves, higher is better",
    **{f"lost without {k}": f"nats lost without the first {k} sources, higher is better" for k in FIRST},
    "passes": "forward passes; a backward pass counts as two, lower is better",
    "CPU seconds": "of these passes, lower is better",
}
BIPIA_COLUMNS = {
    "first": "the injected instruction is first of all spans, higher is better",
    "rank": "reciprocal rank of the injected instruction, higher is better",
    "passes": "forward passes; a backward pass counts as two, lower is better",
}


# --- contexts -------------------------------------------------------------------------------------------


def chats(seed: int) -> Iterator[tuple[str, Chat]]:
    """Yield conversations of the three kinds, of each size in turn. Without end."""
    generator = random.Random(seed)
    articles = [row for row in read_corpus("wiki-summaries", limit=ARTICLES).documents() if _is_short(row[1])]
    emails = [row for part in ("test", "train") for row in common.read(f"bipia/email_{part}.jsonl")]
    while True:
        for size in SIZES:
            yield f"summaries {size}", _summaries(generator, articles, size)
            yield f"mail {size}", _mail(generator, emails, size)
            yield f"tool {size}", _tool(generator, size)


def _is_short(text: str) -> bool:
    """Return whether the sentences of a summary are short, so that many of them are a context."""
    return len(text.split()) <= WORDS * len(bounds_of(text))


def _summaries(generator: random.Random, articles: Sequence[tuple[str, str]], size: int) -> Chat:
    chosen: list[tuple[str, str]] = []
    while sum(len(bounds_of(text)) for _, text in chosen) < size:
        chosen.append(generator.choice(articles))
    title, texts = generator.choice(chosen)[0], " ".join(text for _, text in chosen)
    return Chat([{"role": "user", "content": f"{texts}\n\nWhat does the text say about {title}?"}])


def _mail(generator: random.Random, emails: Sequence[dict[str, str]], size: int) -> Chat:
    """Join mails until they have about so many sentences, and ask BIPIA's question about the last of them."""
    texts: list[str] = []
    while True:
        left = size - sum(len(bounds_of(text)) for text in texts)
        able = [mail for mail in emails if len(bounds_of(_lines(mail))) <= left]
        if not able and texts:
            break
        mail = generator.choice(able or sorted(emails, key=lambda mail: len(_lines(mail)))[:10])
        texts.append(_lines(mail))
    return Chat([{"role": "user", "content": "\n\n".join(texts) + f"\n\n{mail['question']} Answer:"}])


def _lines(mail: dict[str, str]) -> str:
    return "\n".join(line.strip() for line in re.split(r"\||\n+", mail["context"]) if line.strip())


def _tool(generator: random.Random, size: int) -> Chat:
    """Return a question, a call, and the rows that a tool returns; the user asks about one of them."""
    people = generator.sample(
        "Anna Tom Maria Peter Julia David Laura James Sarah Emma Daniel Alice Robert Helen George Lucy".split(), 15
    )
    cities = generator.sample("Oslo Rome Paris Berlin Madrid Lisbon Vienna Athens Dublin Prague Warsaw".split(), 11)
    jobs = generator.sample("baker pilot nurse lawyer farmer singer painter teacher doctor waiter".split(), 10)
    rows = [
        {"name": name, "city": generator.choice(cities), "job": generator.choice(jobs), "age": generator.randrange(80)}
        for name in people[: max(2, size // 4)]
    ]
    name = generator.choice(rows)["name"]
    call = json.dumps({"name": "list_people", "arguments": {"limit": len(rows)}})
    return Chat(
        [
            {"role": "user", "content": f"Look at the list of people. Where does {name} live, and what is the job?"},
            {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
            {"role": "tool", "content": json.dumps({"people": rows})},
        ]
    )


# --- removals -------------------------------------------------------------------------------------------


class Measured:
    """The log-probability of the explained sentence with some sources, each set read once."""

    def __init__(self, model: Model, request: SourcesRequest) -> None:
        self.model, self.request = model, request
        self.passes = Removals(model, request.answer.ids)
        self.tokens: dict[frozenset[int], Tensor] = {}
        """Sources that are left out -> log-probability (S,) of each token of the sentence."""
        self.seconds: dict[frozenset[int], float] = {}

    def read(self, removed: Iterable[Iterable[int]]) -> list[float]:
        """Return the log-probability without each of some sets of sources."""
        every = [frozenset(indices) for indices in removed]
        new = [indices for indices in dict.fromkeys(every) if indices not in self.tokens]
        prompts = [self.model.ids(self.request.without(indices)) for indices in new]
        [(start, stop)], begun = self.request.spans, time.process_time()
        for index, values in self.passes.log_probabilities(prompts):
            self.tokens[new[index]] = values[start:stop]
            self.seconds[new[index]], begun = time.process_time() - begun, time.process_time()
        return [self.tokens[indices].sum().item() for indices in every]

    def cost(self, removed: Iterable[Iterable[int]]) -> tuple[int, float]:
        """Return the passes and seconds of some sets."""
        every = [frozenset(indices) for indices in removed]
        return len(every), sum(self.seconds[indices] for indices in every)


Scored = tuple[np.ndarray, float, float]
"""Scores (sources,), passes and CPU seconds."""


def contextcite_masks(count: int, sources: int) -> np.ndarray:
    """Return masks (count, sources) of the sources that are kept."""
    return np.array([np.random.RandomState(seed).choice([False, True], sources, p=[0.5, 0.5]) for seed in range(count)])


def contextcite_scores(masks: np.ndarray, log_probabilities: np.ndarray, tokens: int) -> np.ndarray:
    """Return a score for each source. log_probabilities: (masks,) of a sentence of so many tokens."""
    from sklearn.linear_model import Lasso
    from sklearn.preprocessing import StandardScaler

    logits = log_probabilities - np.log1p(-np.exp(log_probabilities))
    scaler, lasso = StandardScaler(), Lasso(alpha=0.01, random_state=0)
    lasso.fit(scaler.fit_transform(masks.astype(np.float32)), logits / tokens)
    return lasso.coef_ / scaler.scale_ * tokens


def methods(model: Model, measured: Measured, seed: int) -> dict[str, Scored]:
    """Return the scores of all methods."""
    request, count = measured.request, len(measured.request.sources)
    scored: dict[str, Scored] = {"random": (np.random.default_rng(seed).random(count), 0, 0.0)}
    for name, compute in {"relevance": relevance, "gradient x input": gradients, "attention": attention}.items():
        begun = time.process_time()
        values = compute(model, request)
        scored[name] = (values, 1 if name == "attention" else 3, time.process_time() - begun)
    base = measured.read([[]])[0]
    losses = base - np.array(measured.read([index] for index in range(count)))
    passes, seconds = measured.cost([index] for index in range(count))
    scored["leave one out"] = (losses, passes, seconds)
    scored |= with_removals(measured, scored["relevance"], losses)
    masks = contextcite_masks(max(MASKS), count)
    for size in MASKS:
        left_out = [np.flatnonzero(~mask).tolist() for mask in masks[:size]]
        values = np.array(measured.read(left_out))
        [(start, stop)] = request.spans
        scores = contextcite_scores(masks[:size], values, stop - start)
        scored[f"ContextCite {size}"] = (scores, *measured.cost(left_out))
    return scored


def with_removals(measured: Measured, relevance: Scored, losses: np.ndarray) -> dict[str, Scored]:
    """Return the scores of the eight first removals: alone, and with what a regression expects of the others."""
    values, passes, seconds = relevance
    chosen = np.argsort(-values, kind="stable")[:REMOVED]
    more, longer = measured.cost([index] for index in chosen)
    cost = (passes + more, seconds + longer)
    alone = np.zeros_like(losses)
    alone[chosen] = losses[chosen]
    slope = max(0.0, float(values[chosen] @ losses[chosen] / (values[chosen] @ values[chosen] or 1.0)))
    expected = slope * values
    expected[chosen] = losses[chosen]
    name = f"relevance + {REMOVED} removals"
    return {name: (alone, *cost), f"{name}, regression": (expected, *cost)}


def relevance(model: Model, request: SourcesRequest) -> np.ndarray:
    """CP-LRP, summed by source."""
    answer, [(start, stop)] = request.answer, request.spans
    begins = len(answer.prompt_ids)
    values = span_relevance(model, model.read_ids([answer.before(stop)]), [(begins + start, begins + stop)], CP_LRP)[0]
    return by_source(request, values)


def gradients(model: Model, request: SourcesRequest) -> np.ndarray:
    [span] = request.spans
    values = attribute(model, request.answer, span=span, method="gxi", number="logit", sites=()).tokens
    return by_source(request, values)


@torch.no_grad()
def attention(model: Model, request: SourcesRequest) -> np.ndarray:
    """The mean over layers and heads of what the tokens that predict the sentence attend to."""
    answer, [(start, stop)], cache = request.answer, request.spans, DynamicCache()
    ids = answer.before(stop - 1)
    before = len(answer.prompt_ids) + start - 1
    with model.lock:
        model.net(torch.tensor([ids[:before]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        with eager(model):
            output = model.net(torch.tensor([ids[before:]]), past_key_values=cache, output_attentions=True)
    return by_source(request, torch.stack([layer[0].sum((0, 1)) for layer in output.attentions]).mean(0))


def by_source(request: SourcesRequest, values: Tensor) -> np.ndarray:
    return np.array([values[start:stop].sum().item() for start, stop in request.tokens])


# --- numbers --------------------------------------------------------------------------------------------


def numbers(measured: Measured, scored: Scored, halves: np.ndarray, seen: np.ndarray) -> dict[str, float]:
    """Return the columns. halves: (64, sources) of kept sources; seen: their log-probabilities."""
    values, passes, seconds = scored
    expected = halves @ values
    correlation = spearmanr(expected, seen).statistic if np.ptp(expected) > 0 else 0.0
    order = np.argsort(-values, kind="stable")
    base, *left = measured.read([[], *(order[:k].tolist() for k in FIRST)])
    lost = {f"lost without {k}": base - value for k, value in zip(FIRST, left, strict=True)}
    return {"rank correlation": float(correlation), **lost, "passes": passes, "CPU seconds": seconds}


def measure(model: Model, sample: tuple[str, Chat], seed: int) -> dict[str, Any]:
    name, chat = sample
    answer = model.answer(chat, max_new_tokens=NEW_TOKENS)
    about = {"name": name, "answer": answer.text, "counts": False, "methods": {}}
    request = sources_request(model, answer, "sentence", None) if answer.ids else None
    if request is None or not len(request.sources) >= 2 or request.spans[0][1] - request.spans[0][0] < 2:
        return about
    [span, *_] = request.spans
    answer = replace(answer, ids=answer.ids[: span[1]], token_strings=answer.token_strings[: span[1]])
    request = SourcesRequest(answer, (span,), request.context, request.sources, request.tokens, ())
    measured, count = Measured(model, request), len(request.sources)
    halves = np.random.default_rng(1000 + seed).random((HALVES, count)) < 0.5
    seen = np.array(measured.read(np.flatnonzero(~half).tolist() for half in halves))
    scored = methods(model, measured, seed)
    rows = {method: numbers(measured, scores, halves, seen) for method, scores in scored.items()}
    return {**about, "counts": True, "sources": count, "tokens": len(answer.prompt_ids), "methods": rows}


def by_size(lines: Lines) -> Mapping[str, Table]:
    counted = [line for line in lines if line.get("counts", True)]
    large = [line for line in counted if line["sources"] >= LARGE]
    return {"all": Table(COLUMNS, counted)} | ({"large": Table(COLUMNS, large)} if large else {})


def notes(lines: Lines) -> list[str]:
    counted = [line for line in lines if line.get("counts", True)]
    if not counted:
        return []
    sizes = sorted(line["sources"] for line in counted)
    return [f"{len(counted)} of {len(lines)} answers count; {sizes[0]} to {sizes[-1]} sources, mean {fmean(sizes):.0f}"]


# --- BIPIA ----------------------------------------------------------------------------------------------


def injected(model: Model, item: bipia.Item) -> dict[str, Any]:
    """Where is the injected instruction, for the first token that it changes: by relevance, and by eight removals?"""
    ids = bipia.written(model, item.user())
    changed = bipia.diverged(model, item, ids)
    if changed is None:
        return {"user": item.user(), "counts": False, "methods": {}}
    prompt, answer = model.ids(bipia.chat(model, item.user())), [*changed.prefix, changed.target]
    spans = bipia.span_tokens(model, item)
    begins = len(prompt) + len(changed.prefix)
    values = span_relevance(model, model.read_ids([[*prompt, *answer]]), [(begins, begins + 1)], CP_LRP)[0]
    sums = np.array([values[list(tokens)].sum().item() for tokens in spans])
    chosen = np.argsort(-sums, kind="stable")[:REMOVED].tolist()
    left = [prompt, *(model.ids(bipia.chat(model, item.user(number))) for number in chosen)]
    read = dict(Removals(model, answer).log_probabilities(left))
    losses = np.full(len(spans), -math.inf)
    losses[chosen] = [(read[0][-1] - read[number + 1][-1]).item() for number in range(len(chosen))]
    scores = {"relevance": (sums, 3), "relevance + 8 removals": (losses, 3 + len(chosen))}
    rows = {name: _placed(values, item.injected) | {"passes": passes} for name, (values, passes) in scores.items()}
    ranks = range(1, len(spans) + 1)
    rows["random"] = {"first": 1 / len(spans), "rank": fmean(1 / rank for rank in ranks), "passes": 0}
    return {"user": item.user(), "counts": True, "spans": len(spans), "methods": rows}


def _placed(values: np.ndarray, index: int) -> dict[str, float]:
    rank = 1 + int((values > values[index]).sum())
    return {"first": float(rank == 1), "rank": 1 / rank}


@dataclass(frozen=True)
class SourceScores(Evaluation):
    """Whether scores of the sources of an answer agree with removals that no method has seen."""

    name: ClassVar = "sources"
    samples: common.Samples = 60
    seed: Seed = 0

    def parts(self, model: Model) -> Iterator[Part]:
        items = list(islice(bipia.items(self.seed), min(self.samples, MAILS)))
        yield Part(BIPIA_COLUMNS, items, partial(injected, model), name="bipia", settings={"removed": REMOVED})
        tried = list(islice((row for row in chats(self.seed) if fits(model, row[1])), self.samples))
        run = partial(measure, model, seed=self.seed)
        yield Part(COLUMNS, tried, run, name="answers", tables=by_size, notes=notes, settings={"removed": REMOVED})


def fits(model: Model, chat: Chat) -> bool:
    try:
        return len(model.ids(chat)) <= LONGEST
    except InputError:
        return False


if __name__ == "__main__":
    command(SourceScores)()
