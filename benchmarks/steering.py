"""Compare concepts of few neurons with a residual-stream vector, a prompt and controls, at equal off-target KL.

python -m benchmarks.steering --concepts music --out steering
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas
import torch
from torch import Tensor

from benchmarks.task_pairs import LEXICON, named
from benchmarks.topics import CONCEPTS, PARTS, Topic, TopicSentences, topics
from icebear.actmax.index.corpus import WIKI, read_corpus
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.passes.sites import by_site_layer
from icebear.concepts.statistics import auroc
from icebear.edits import VectorEdit
from icebear.errors import InputError
from icebear.evaluation.protocol import CorpusName, Evaluation, Lines, Part, Seed, Setting, Table
from icebear.models.model import Model
from icebear.models.text.prompts import PromptLike
from icebear.steering.apply import steer
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.finding import logistic, parts_of, ranked, separation, universal
from icebear.steering.concept.reading import neurons_of, read
from icebear.steering.side_effects import HELD_OUT_TEXTS, HeldOutContexts, strength_at
from icebear.values import stable_hash

KLS = (0.02, 0.1, 0.25, 0.5)
"""Off-target KL in nats, at which methods are compared; each is met within `TOLERANCE`."""
TOLERANCE = 0.05
SIZES = (1, 5, 20, 100)
STEERED_SIZES = (5, 20)
VECTOR = "residual stream"
PROMPT = "prompt"
PLAIN = "plain"
OPENINGS = LEXICON["plain_openings"]
"""Prompts of the generated texts: none is about a concept, none is a held-out context."""
NEW_TOKENS = 30
BATCH_SIZE = 12
LAYER_STEP = 4
"""The vector's layer is chosen among every fourth layer."""
LAYER_KL = 0.1
"""Nats of off-target KL at which it is chosen."""
METRICS = {
    "score": "share of the texts that the frozen classifier takes for the concept's",
    "words": "rise of the mean log-probability of the concept's held-out words at held-out contexts, in nats",
    "perplexity": "of the generated texts, under the plain model, lower is better",
    "repetition": "share of their three-token sequences that were there before, lower is better",
    "distinct": "share of their two-token sequences that are different",
}
DETECTED = {
    "held-out words": "AUROC on sentences of other documents whose only words of the concept were held out",
    "no words": "AUROC on sentences without any of the concept's words, of documents that begin with a held-out one",
}
TESTS = dict(zip(DETECTED, ("report", "silent"), strict=True))

Steering = Callable[[], AbstractContextManager[Any]]
Direction = Callable[[float], Steering]
"""Strength -> context in which the model is steered."""


@dataclass(frozen=True)
class ConceptSteering(Evaluation):
    """Compare concepts of few neurons with a residual-stream vector, a prompt and controls, at equal off-target KL.

    It measures how well each method detects a concept in texts of other words. It also measures the texts that the
    model generates with each method at an off-target KL of 0.02, 0.1, 0.25 and 0.5 nats. Twelve concepts take an hour.
    """

    name: ClassVar = "steering"
    concepts: Annotated[str, Setting("Separated by commas: music, sport, animals, medicine, ...", decides=False)] = (
        "all"
    )
    seed: Seed = 0
    corpus: CorpusName = None

    def parts(self, model: Model) -> Iterator[Part]:
        corpus = self.corpus or WIKI
        names = named(self.concepts, "concept", CONCEPTS)
        rows = [(sentence.title, sentence.text) for sentence in read_corpus(corpus).sentences()]
        material = topics(rows, names, self.seed)
        yield Part(
            {},
            material.concepts,
            partial(compare_methods, Ground(model, material), seed=self.seed),
            settings={"corpus": corpus, "concepts": names, "off_target_kls": list(KLS)},
            tables=tables,
            notes=steering_notes,
        )


def compare_methods(ground: Ground, topic: Topic, seed: int = 0) -> dict[str, Any]:
    data = ConceptData(ground, topic)
    classifier, aurocs = classifier_of(ground, topic)
    return {
        "concept": topic.name,
        "detection": detection(data),
        "classifier": aurocs,
        "steered": steered(ground, data, classifier, seed),
    }


class Ground:
    """The data that all concepts share: sentences without any concept, read once, and held-out contexts."""

    def __init__(self, model: Model, topics: TopicSentences) -> None:
        self.model, self.topics, neurons = model, topics, neurons_of(model, ("ffn",))
        self.others = {part: read(model, topics.others[part], neurons) for part in PARTS}
        self.contexts = HeldOutContexts(model, HELD_OUT_TEXTS).contexts
        self.plain = next_log_probabilities(model, self.contexts, nullcontext)  # (P, V) after the contexts


@torch.no_grad()
def next_log_probabilities(model: Model, contexts: Sequence[list[int]], steering: Steering) -> Tensor:
    """Return the log-probabilities (P, V) of the next token after contexts in order of length."""
    last = []
    with steering():
        for part in model.batches(list(map(len, contexts)), BATCH_SIZE):
            rows = [contexts[number] for number in part]
            ends = sorted({len(row) - 1 for row in rows})
            logits = model.logits(model.encode(rows), ends)
            last.append(logits[range(len(rows)), [ends.index(len(row) - 1) for row in rows]])
    return torch.cat(last).float().log_softmax(-1).cpu()


class ConceptData:
    """The activations of a concept's sentences and of others: `x` of neurons, standardized, part (or ``silent``) ->
    (S, N), with the concept's sentences first, and `stream` of the residual stream, part -> (S, L, D)."""

    def __init__(self, ground: Ground, topic: Topic) -> None:
        model, others, find = ground.model, ground.others, ground.others["find"]
        texts = {part: rows for part, rows in {**topic.sentences, "silent": topic.silent}.items() if rows}
        seen_in = {part: read(model, rows, find.neurons) for part, rows in texts.items()}
        self.model, self.topic, self.centre, self.spread = model, topic, find.means.mean(0), find.means.std(0)
        self.x: dict[str, np.ndarray] = {}
        self.stream: dict[str, np.ndarray] = {}
        self.positive: dict[str, np.ndarray] = {}
        for part, seen in seen_in.items():
            without = "report" if part == "silent" else part
            means = np.concatenate([seen.means, others[without].means])
            self.x[part] = (means - self.centre) / np.where(self.spread > 0, self.spread, 1)
            self.stream[part] = np.concatenate([seen.stream, others[without].stream])
            self.positive[part] = np.arange(len(means)) < len(seen.means)
        with_it = seen_in["find"]
        self.seen = replace(find, low=np.minimum(with_it.low, find.low), high=np.maximum(with_it.high, find.high))
        excluded = universal(find.means) | (self.spread == 0)
        self.order, self.weights = ranked(self.x["find"], self.positive["find"], excluded)

    def concept(self, name: str, columns: np.ndarray, weights: np.ndarray) -> Concept:
        """Return a concept of these neurons; weights (N,)."""
        parts = parts_of(self.seen, columns, weights[columns], self.centre, self.spread)
        return Concept(name, parts, self.model.name, self.model.fingerprint)

    def difference(self, layer: int) -> np.ndarray:
        return separation(self.stream["find"][:, layer], self.positive["find"])

    def logistic(self, layer: int) -> np.ndarray:
        return logistic(self.stream["find"][:, layer], self.positive["find"])


def detection(data: ConceptData) -> dict[str, dict[str, float]]:
    """Return method -> column -> AUROC.

    The detectors are neurons by their difference of means, and two vectors of the residual stream at the layer that is
    the best on the validation sentences.
    """
    tests = {column: part for column, part in TESTS.items() if part in data.x}
    methods: dict[str, dict[str, float]] = {}
    for size in SIZES:
        columns = data.order[:size]
        methods[f"{size} neuron{'s' * (size > 1)}"] = {
            name: auroc(data.x[part][:, columns] @ data.weights[columns], data.positive[part])
            for name, part in tests.items()
        }
    for name, fit in (("difference of means", data.difference), ("logistic", data.logistic)):
        x, positive = data.stream["choose"], data.positive["choose"]
        vectors = [fit(layer) for layer in range(x.shape[1])]
        _, layer = max((auroc(x[:, layer] @ vector, positive), layer) for layer, vector in enumerate(vectors))
        methods[f"residual stream, {name}"] = {
            column: auroc(data.stream[part][:, layer] @ vectors[layer], data.positive[part])
            for column, part in tests.items()
        }
    return methods


def classifier_of(ground: Ground, topic: Topic) -> tuple[Any, dict[str, float]]:
    """Return a classifier of texts, frozen before the model is steered, and its AUROC on the columns of `DETECTED`.

    It is TF-IDF without the concept's known words, and logistic regression. A search for the held-out words has AUROCs
    of 1 and 0.5 by construction.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    others = ground.topics.others
    examples = [*topic.sentences["find"], *topic.sentences["choose"]]
    texts = [*examples, *others["find"], *others["choose"]]
    words = TfidfVectorizer(stop_words=list(topic.known), sublinear_tf=True)
    model = make_pipeline(words, LogisticRegression(C=10, class_weight="balanced", max_iter=2000))
    model.fit(texts, np.arange(len(texts)) < len(examples))
    aurocs = {}
    for name, rows in zip(DETECTED, (topic.sentences["report"], topic.silent), strict=True):
        if rows:
            scores = model.predict_proba([*rows, *others["report"]])[:, 1]
            aurocs[name] = auroc(scores, np.arange(len(scores)) < len(rows))
    return model, aurocs


def directions(ground: Ground, data: ConceptData, seed: int) -> dict[str, Direction]:
    model, seen = ground.model, data.seen
    concepts = {
        f"{size} neurons": data.concept(f"{size} neurons", data.order[:size], data.weights) for size in STEERED_SIZES
    }
    generator = np.random.default_rng([seed, stable_hash(data.topic.name)])
    best = concepts[f"{STEERED_SIZES[-1]} neurons"]
    by_layer = by_site_layer(seen.neurons)
    random_neurons = [generator.choice(by_layer[part.neuron.site, part.neuron.layer]) for part in best.parts]
    signs = np.zeros(len(seen.neurons))
    signs[random_neurons] = generator.choice((-1.0, 1.0), len(random_neurons)) * [part.weight for part in best.parts]
    concepts["random neurons"] = data.concept("random neurons", np.unique(random_neurons), signs)
    layer = vector_layer(ground, data)
    vector = torch.tensor(data.difference(layer), dtype=torch.float32)
    noise = torch.tensor(generator.standard_normal(len(vector)), dtype=torch.float32)
    noise *= vector.norm() / noise.norm()

    def of(concept: Concept, suppress: bool = False) -> Direction:
        return lambda s: lambda: steer(model, concept.recipe(model, s, suppress=suppress))

    return {
        **{name: of(concept) for name, concept in concepts.items()},
        "wrong sign": of(best, suppress=True),
        VECTOR: _along(model, layer, vector),
        "noise": _along(model, layer, noise),
    }


def word_ids(model: Model, words: Sequence[str]) -> list[int]:
    """Return the first token of each word, with a space before it."""
    return list(dict.fromkeys(model.tokens_of(f" {word}")[0] for word in words))


def vector_layer(ground: Ground, data: ConceptData) -> int:
    """Return the layer whose difference of means, at `LAYER_KL` nats, raises the concept's known words most."""
    ids, rises = word_ids(ground.model, data.topic.known), {}
    for layer in range(LAYER_STEP // 2, ground.model.layers, LAYER_STEP):
        vector = torch.tensor(data.difference(layer), dtype=torch.float32)
        _, _, rise = _at(LAYER_KL, _along(ground.model, layer, vector), ground, 1.0)
        rises[layer] = float(rise[:, ids].mean())
    return max(rises, key=lambda layer: rises[layer])


def _along(model: Model, layer: int, vector: Tensor) -> Direction:
    return lambda s: lambda: steer(model, VectorEdit(layer, tuple((s * vector).tolist())))


def steered(ground: Ground, data: ConceptData, classifier: Any, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return off-target KL -> method -> numbers; a method that cannot reach a KL is measured as near as it comes."""
    model = ground.model
    rows: dict[str, dict[str, dict[str, float]]] = {f"{kl}": {} for kl in KLS}
    ids = word_ids(model, data.topic.held_out)
    outcome = partial(_outcome, model, classifier, seed=seed)
    for name, direction in directions(ground, data, seed).items():
        strength, before = 0.1, KLS[0]
        for kl in KLS:  # it grows about as the square of the strength
            strength, reached, rise = _at(kl, direction, ground, strength * math.sqrt(kl / before))
            before = kl
            numbers = {"words": float(rise[:, ids].mean()), "strength": strength, "off_target_kl": reached}
            rows[f"{kl}"][name] = {**outcome(direction(strength), OPENINGS), **numbers}
    request = f"Write about {data.topic.name}."
    special = model.special_ids()
    contexts = [[*model.ids(request), *(token for token in row if token not in special)] for row in ground.contexts]
    words = float((next_log_probabilities(model, contexts, nullcontext) - ground.plain)[:, ids].mean())
    prompted = {**outcome(nullcontext, [f"{request} {opening}" for opening in OPENINGS]), "words": words}
    plain = {**outcome(nullcontext, OPENINGS), "words": 0.0}
    return {kl: {**cells, PROMPT: prompted, PLAIN: plain} for kl, cells in rows.items()}


def _at(kl: float, direction: Direction, ground: Ground, start: float) -> tuple[float, float, Tensor]:
    """Return the strength at an off-target KL, the KL, and the change (P, V) of log-probabilities at held-out contexts.

    A direction that cannot reach the KL is measured at the strength `first`.
    """
    rises: dict[float, Tensor] = {}

    def divergence(strength: float) -> float:
        rises[strength] = next_log_probabilities(ground.model, ground.contexts, direction(strength)) - ground.plain
        return float(-(ground.plain.exp() * rises[strength]).sum(-1).mean())

    try:
        strength, reached = strength_at(kl, divergence, start, TOLERANCE)
    except InputError:
        strength, reached = start, divergence(start)
    return strength, reached, rises[strength]


def _outcome(model: Model, classifier: Any, steering: Steering, openings: Sequence[str], seed: int) -> dict[str, float]:
    prompts: list[PromptLike] = [*openings]
    with steering():
        texts = model.generate(prompts, NEW_TOKENS, temperature=1.0, seed=seed)
    written = [model.tokens_of(text) for text in texts]
    return {
        "score": float(classifier.predict_proba(texts)[:, 1].mean()),
        "perplexity": perplexity(model, openings, written),
        "repetition": float(np.mean([repeated_trigrams(row) for row in written])),
        "distinct": float(np.mean([len(set(pairwise(row))) / max(len(row) - 1, 1) for row in written])),
    }


def repeated_trigrams(ids: Sequence[int]) -> float:
    threes = list(zip(ids, ids[1:], ids[2:], strict=False))
    return 1 - len(set(threes)) / len(threes) if threes else 0.0


@torch.no_grad()
def perplexity(model: Model, openings: Sequence[str], written: Sequence[Sequence[int]]) -> float:
    losses = []
    for opening, row in zip(openings, written, strict=True):
        logs = model.continuation_logits(model.ids(opening), row).log_softmax(-1)
        losses.append(-logs[range(len(row)), list(row)])
    return math.exp(min(float(torch.cat(losses).mean()), 20.0))


def tables(lines: Lines) -> dict[str, Table]:
    """Return a table of detection, and one for each off-target KL; a sample is a concept."""
    columns = {name: about for name, about in DETECTED.items() if all(name in line["classifier"] for line in lines)}
    detected = [{"concept": line["concept"], "methods": line["detection"]} for line in lines]
    by_kl = {
        f"{kl} nats": Table(
            METRICS, [{"concept": line["concept"], "methods": line["steered"][f"{kl}"]} for line in lines]
        )
        for kl in KLS
    }
    return {"detection": Table(columns, detected), **by_kl}


def steering_notes(lines: Lines) -> list[str]:
    """Return medians of detection and their ratio to a logistic model, and the off-target KLs that were not met."""
    texts = []
    for column in DETECTED:
        able = [line for line in lines if column in line["classifier"]]
        if able:
            frame = pandas.DataFrame([{name: row[column] for name, row in line["detection"].items()} for line in able])
            medians = frame.median()
            best = medians["residual stream, logistic"]
            text = ", ".join(f"{name} {value:.3f} ({value / best:.2f})" for name, value in medians.items())
            texts.append(f"median AUROC, {column} (and the ratio to a logistic model of the residual stream): {text}")
            median = np.median([line["classifier"][column] for line in able])
            texts.append(f"the frozen classifier's own AUROC, {column}: median {median:.3f}")
    for kl in KLS:
        cells = [(name, cell) for line in lines for name, cell in line["steered"][f"{kl}"].items()]
        reached = [(name, cell["off_target_kl"]) for name, cell in cells if "off_target_kl" in cell]
        missed = [name for name, value in reached if abs(value - kl) > TOLERANCE * kl]
        if missed:
            texts.append(f"{kl} nats: {len(missed)} of {len(reached)} were not met within 5 %: {', '.join(missed)}")
    return texts


if __name__ == "__main__":
    command(ConceptSteering)()
