"""Evaluation: concepts of neurons against a residual-stream vector, a plain prompt and chance, at equal price."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.concept.choosing import separation, universal
from icebear.concepts.concept.ranking import RANKINGS, Material, word_ids
from icebear.concepts.concept.reading import Read, columns_of, neurons_of, read
from icebear.concepts.concept.topics import CONCEPTS, PARTS, Topic, TopicSentences, topics
from icebear.concepts.concept.vectors import pushed, streams
from icebear.concepts.corpus import read_corpus
from icebear.concepts.evaluation.protocol import CorpusName, Evaluation, Lines, Option, Part, Seed, Table
from icebear.concepts.evaluation.questions import CORPORA
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import PromptLike
from icebear.concepts.statistics import auroc
from icebear.errors import InputError
from icebear.hashing import stable_hash
from icebear.steering.apply import steer
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.finding import parts_of
from icebear.steering.side_effects import NEUTRAL, HeldOutContexts, repeated_trigrams, strength_at

PRICES = (0.02, 0.1, 0.25, 0.5)
"""Nats at held-out contexts."""
SIZES = (1, 5, 20, 100)
"""Neurons of the detectors, and"""
TURNED = (5, 20)
"""of the concepts that are turned."""
WAYS = ("means", "cna", "w2", "relevance")
VECTOR, PROMPT, PLAIN = "residual stream", "prompt", "plain"
CONTROLS = ("random neurons", "wrong sign", "noise")
METHODS = (*(f"{way} {size}" for way in WAYS for size in TURNED), VECTOR, *CONTROLS)
OPENINGS = (
    "Yesterday I read that",
    "It is well known that",
    "The most important thing is",
    "My friend told me about",
    "In the beginning there was",
    "People often talk about",
    "The first chapter is about",
    "There is a new",
)
"""Where text is written: our own, of no concept, none of them a neutral text of the price."""
TOKENS = 30
TOGETHER = 12
"""Held-out contexts in one pass."""
DRIFT = 0.05
"""How near a price is met."""
EVERY = 4
"""Of the layers those tried for the vector, at"""
TRIED_AT = 0.1
"""nats."""
COLUMNS = {
    "score": "share of the texts that the frozen classifier takes for the concept's",
    "words": "rise of the mean log-probability of the concept's held-out words at held-out contexts, in nats",
    "perplexity": "of what was written, under the plain model, lower is better",
    "repetition": "share of its three-token sequences that were there before, lower is better",
    "distinct": "share of its two-token sequences that are different",
}
DETECTED = {
    "held-out words": "AUROC on sentences of other documents that have only words which nothing was found by",
    "no words": "AUROC on sentences without any of the concept's words, of documents that begin with one held out",
}

Turned = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class ConceptSteering(Evaluation):
    """Concepts of few neurons against a residual-stream vector, a prompt and random controls, at equal off-target KL.

    How well each detects a concept in texts of other words, and what each writes at an off-target KL of 0.02, 0.1, 0.25
    and 0.5 nats. Tables and a figure of the whole frontier; about an hour for twelve concepts.

    Example:
      icebear evaluate steering --concepts music --out steering
    """

    name: ClassVar = "steering"
    needs: ClassVar = ("evaluate", "circuits")
    concepts: Annotated[str, Option("music, sport, animals, medicine, ...; commas.", decides=False)] = "all"
    seed: Seed = 0
    corpus: CorpusName = None

    def parts(self, model: Model) -> Iterator[Part]:
        corpus = self.corpus or CORPORA["next-word"]
        names = list(CONCEPTS) if self.concepts == "all" else [name.strip() for name in self.concepts.split(",")]
        rows = [(sentence.title, sentence.text) for sentence in read_corpus(corpus).sentences()]
        material = topics(rows, names, self.seed)
        yield Part(
            {},
            material.concepts,
            partial(sample, Ground.of(model, material), seed=self.seed),
            settings={"corpus": corpus, "concepts": names, "prices": list(PRICES)},
            tables=tables,
            notes=notes,
            write=lambda folder, lines: frontier(folder / "frontier.png", lines),
        )


@dataclass(frozen=True, eq=False)
class Ground:
    """What all concepts share: sentences without any, read once; and held-out contexts."""

    model: Model
    topics: TopicSentences
    others: dict[str, Read]
    streams: dict[str, np.ndarray]
    """part -> (S, L, D)"""
    places: list[list[int]]
    plain: Tensor
    """(P, V) log-probabilities there."""

    @classmethod
    def of(cls, model: Model, topics: TopicSentences) -> Ground:
        neurons, places = neurons_of(model, ("ffn",)), HeldOutContexts(model, NEUTRAL).places
        return cls(
            model,
            topics,
            {part: read(model, topics.others[part], neurons) for part in PARTS},
            {part: streams(model, topics.others[part]) for part in PARTS},
            places,
            predicted(model, places, nullcontext),
        )


@torch.no_grad()
def predicted(model: Model, places: Sequence[list[int]], turned: Turned) -> Tensor:
    """(P, V) log-probabilities of the next token, of places in order of length."""
    last = []
    with turned():
        for start in range(0, len(places), TOGETHER):
            rows = places[start : start + TOGETHER]
            ends = sorted({len(row) - 1 for row in rows})
            logits = model.logits(model.encode(rows), ends)
            last.append(logits[range(len(rows)), [ends.index(len(row) - 1) for row in rows]])
    return torch.cat(last).float().log_softmax(-1).cpu()


# --- detection ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Seen:
    """A concept's sentences and the others', read and standardised."""

    topic: Topic
    x: dict[str, np.ndarray]
    """part -> (S, N), of those with the concept first; ``silent`` beside the parts."""
    stream: dict[str, np.ndarray]
    """The same of the residual stream, (S, L, D)."""
    positive: dict[str, np.ndarray]
    material: Material
    centre: np.ndarray
    spread: np.ndarray


def seen(ground: Ground, topic: Topic) -> Seen:
    model, others = ground.model, ground.others
    texts = {**topic.sentences, "silent": topic.silent}
    own = {part: read(model, reading, others["find"].neurons) for part, reading in texts.items() if reading}
    base = others["find"].means
    centre, spread = base.mean(0), base.std(0)
    scale = np.where(spread > 0, spread, 1)
    of_part = {part: "report" if part == "silent" else part for part in own}
    x = {part: (np.concatenate([own[part].means, others[of_part[part]].means]) - centre) / scale for part in own}
    stream = {part: np.concatenate([streams(model, texts[part]), ground.streams[of_part[part]]]) for part in own}
    positive = {part: np.arange(len(x[part])) < len(own[part].means) for part in own}
    reading = Read(
        others["find"].neurons,
        np.concatenate([own["find"].means, base]),
        np.concatenate([own["find"].last, others["find"].last]),
        np.minimum(own["find"].low, others["find"].low),
        np.maximum(own["find"].high, others["find"].high),
    )
    material = Material(
        model,
        [*topic.sentences["find"], *ground.topics.others["find"]],
        positive["find"],
        np.arange(len(reading.means)),
        reading,
        x["find"],
        universal(base) | (spread == 0),
        topic.known,
        None,
    )
    return Seen(topic, x, stream, positive, material, centre, spread)


def detection(data: Seen) -> dict[str, dict[str, float]]:
    """method -> column -> AUROC: neurons by their difference of means, and two detectors of the residual stream whose
    layer is the best on the sentences to choose on."""
    ranked, weights = RANKINGS["means"](data.material)
    tests = {"held-out words": "report", **({"no words": "silent"} if "silent" in data.x else {})}
    methods: dict[str, dict[str, float]] = {}
    for size in SIZES:
        columns = ranked[:size]
        methods[f"{size} neuron{'s' * (size > 1)}"] = {
            name: auroc(data.x[part][:, columns] @ weights[columns], data.positive[part])
            for name, part in tests.items()
        }
    for name, fit in (("residual stream, difference of means", _difference), ("residual stream, logistic", _logistic)):
        by_layer = [
            (auroc(_told(data.stream["choose"], layer, fit(data, layer)), data.positive["choose"]), layer)
            for layer in range(data.stream["choose"].shape[1])
        ]
        layer = max(by_layer)[1]
        vector = fit(data, layer)
        methods[name] = {
            column: auroc(_told(data.stream[part], layer, vector), data.positive[part])
            for column, part in tests.items()
        }
    return methods


def _told(stream: np.ndarray, layer: int, vector: np.ndarray) -> np.ndarray:
    return stream[:, layer] @ vector


def _difference(data: Seen, layer: int) -> np.ndarray:
    return separation(data.stream["find"][:, layer], data.positive["find"])


def _logistic(data: Seen, layer: int) -> np.ndarray:
    """In the units of the stream: weights of standardised dimensions over their deviations."""
    from sklearn.linear_model import LogisticRegression

    x = data.stream["find"][:, layer]
    spread = x.std(0) + 1e-6
    model = LogisticRegression(C=0.01, class_weight="balanced", max_iter=2000)
    return model.fit((x - x.mean(0)) / spread, data.positive["find"]).coef_[0] / spread


# --- turning ------------------------------------------------------------------------------------------------


def concept_of(data: Seen, way: str, size: int) -> Concept:
    """The first neurons of a ranking, with its weights."""
    ranked, weights = RANKINGS[way](data.material)
    return _concept(data, f"{way} {size}", ranked[:size], weights)


def _concept(data: Seen, name: str, columns: np.ndarray, weights: np.ndarray) -> Concept:
    model = data.material.model
    parts = parts_of(data.material.seen, columns, weights[columns], data.centre, data.spread)
    return Concept(name, parts, model.name, model.fingerprint)


def directions(ground: Ground, data: Seen, seed: int) -> dict[str, Callable[[float], Turned]]:
    """method -> strength -> context."""
    model = ground.model
    concepts = {f"{way} {size}": concept_of(data, way, size) for way in WAYS for size in TURNED}
    generator = np.random.default_rng([seed, stable_hash(data.topic.name)])
    best = concepts[f"means {TURNED[-1]}"]
    by_layer = columns_of(data.material.seen.neurons)
    places = [generator.choice(by_layer[part.neuron.site, part.neuron.layer]) for part in best.parts]
    signs = np.zeros(len(data.material.seen.neurons))
    signs[places] = generator.choice((-1.0, 1.0), len(places)) * [part.weight for part in best.parts]
    concepts["random neurons"] = _concept(data, "random neurons", np.unique(places), signs)
    layer = vector_layer(ground, data)
    vector = _vector(data, layer)
    noise = torch.tensor(generator.standard_normal(len(vector)), dtype=torch.float32)
    noise *= vector.norm() / noise.norm()

    def of(concept: Concept, suppress: bool = False) -> Callable[[float], Turned]:
        return lambda s: lambda: steer(model, concept.recipe(model, s, suppress=suppress))

    along = {VECTOR: _along(model, layer, vector), "noise": _along(model, layer, noise)}
    return {**{name: of(concept) for name, concept in concepts.items()}, "wrong sign": of(best, suppress=True), **along}


def _vector(data: Seen, layer: int) -> Tensor:
    return torch.tensor(_difference(data, layer), dtype=torch.float32)


def _along(model: Model, layer: int, direction: Tensor) -> Callable[[float], Turned]:
    return lambda s: pushed(model, layer, s * direction)


def vector_layer(ground: Ground, data: Seen) -> int:
    """The layer whose difference of means, at `TRIED_AT` nats, adds most to the words that the sentences to choose on
    have."""
    ids, rises = word_ids(ground.model, data.topic.known), {}
    for layer in range(EVERY // 2, ground.model.layers, EVERY):
        _, _, rise = _at(TRIED_AT, _along(ground.model, layer, _vector(data, layer)), ground, 1.0)
        rises[layer] = float(rise[:, ids].mean())
    return max(rises, key=lambda layer: rises[layer])


def steered(
    ground: Ground, data: Seen, seed: int = 0, prices: Sequence[float] = PRICES
) -> dict[str, dict[str, dict[str, float]]]:
    """price -> method -> what comes of it; a method that cannot cost so much is where it comes nearest."""
    model, judge = ground.model, Classifier.of(ground, data)
    ids = word_ids(model, data.topic.held_out)
    plain = _outcome(model, judge, nullcontext, seed, OPENINGS)
    asking = f"Write about {data.topic.name}."
    rows: dict[str, dict[str, dict[str, float]]] = {f"{price}": {} for price in prices}
    for name, direction in directions(ground, data, seed).items():
        strength, before = 0.1, prices[0]
        for price in prices:  # it grows about as the square of the strength
            strength, cost, rise = _at(price, direction, ground, strength * math.sqrt(price / before))
            before = price
            outcome = _outcome(model, judge, direction(strength), seed, OPENINGS)
            numbers = {**outcome, "words": float(rise[:, ids].mean()), "strength": strength, "price": cost}
            rows[f"{price}"][name] = numbers
    prompted = _outcome(model, judge, nullcontext, seed, [f"{asking} {opening}" for opening in OPENINGS])
    prompted["words"] = float((_behind(ground, asking) - ground.plain)[:, ids].mean())
    for cells in rows.values():
        cells |= {PROMPT: prompted, PLAIN: {**plain, "words": 0.0}}
    return rows


def _behind(ground: Ground, asking: str) -> Tensor:
    """(P, V) log-probabilities at the held-out contexts, each behind a request."""
    model = ground.model
    request, special = model.ids(asking), model.special_ids()
    places = [[*request, *(token for token in row if token not in special)] for row in ground.places]
    return predicted(model, places, nullcontext)


def _at(
    price: float, direction: Callable[[float], Turned], ground: Ground, first: float
) -> tuple[float, float, Tensor]:
    """The strength at a price, what it costs, and the change (P, V) of log-probabilities at held-out contexts; where it
    cannot cost so much, what it does at the strength to begin with."""
    rises: dict[float, Tensor] = {}

    def cost(strength: float) -> float:
        after = predicted(ground.model, ground.places, direction(strength))
        rises[strength] = after - ground.plain
        return float(-(ground.plain.exp() * rises[strength]).sum(-1).mean())

    try:
        strength, nats = strength_at(price, cost, first, DRIFT)
    except InputError:
        strength, nats = first, cost(first)
    return strength, nats, rises[strength]


def _outcome(model: Model, judge: Classifier, turned: Turned, seed: int, openings: Sequence[str]) -> dict[str, float]:
    prompts: list[PromptLike] = [*openings]
    with turned():
        texts = model.generate(prompts, TOKENS, temperature=1.0, seed=seed)
    written = [model.tokens_of(text) for text in texts]
    twos = [len(set(pairwise(row))) / max(len(row) - 1, 1) for row in written]
    return {
        "score": judge.share(texts),
        "perplexity": perplexity(model, openings, written),
        "repetition": float(np.mean([repeated_trigrams(row) for row in written])),
        "distinct": float(np.mean(twos)),
    }


@torch.no_grad()
def perplexity(model: Model, openings: Sequence[str], written: Sequence[Sequence[int]]) -> float:
    """Of what was written, under the model as it is."""
    begins = [model.ids(opening) for opening in openings]
    rows = [[*begin, *row] for begin, row in zip(begins, written, strict=True)]
    first, last = min(map(len, begins)) - 1, max(map(len, rows)) - 1
    logits = model.logits(model.read_ids(rows), list(range(first, last))).float().log_softmax(-1).cpu()
    losses = [
        -logits[number, range(len(begin) - 1 - first, len(row) - 1 - first), row[len(begin) :]]
        for number, (begin, row) in enumerate(zip(begins, rows, strict=True))
    ]
    return math.exp(min(float(torch.cat(losses).mean()), 20.0))


@dataclass(frozen=True, eq=False)
class Classifier:
    """Of text: TF-IDF and logistic regression, frozen before anything is turned; words to find by are not among its
    features."""

    model: Any
    aurocs: dict[str, float]
    """Its own, on the columns of `DETECTED`. Matching the held-out words has 1 and 0.5 there, by how they are made."""

    @classmethod
    def of(cls, ground: Ground, data: Seen) -> Classifier:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        topic, others = data.topic, ground.topics.others
        with_ = [*topic.sentences["find"], *topic.sentences["choose"]]
        learn = [*with_, *others["find"], *others["choose"]]
        labels = np.arange(len(learn)) < len(with_)
        words = TfidfVectorizer(stop_words=list(topic.known), sublinear_tf=True)
        model = make_pipeline(words, LogisticRegression(C=10, class_weight="balanced", max_iter=2000))
        model.fit(learn, labels)
        tests = {"held-out words": topic.sentences["report"], "no words": topic.silent}
        scores = {}
        for name, own in tests.items():
            if own:
                probabilities = model.predict_proba([*own, *others["report"]])[:, 1]
                scores[name] = auroc(probabilities, np.arange(len(probabilities)) < len(own))
        return cls(model, scores)

    def share(self, texts: Sequence[str]) -> float:
        """The mean of its probabilities."""
        return float(self.model.predict_proba(texts)[:, 1].mean())


# --- the report ---------------------------------------------------------------------------------------------


def sample(ground: Ground, topic: Topic, seed: int = 0) -> dict[str, Any]:
    """A line: what detects a concept, and what turning it does."""
    data = seen(ground, topic)
    return {
        "concept": topic.name,
        "detection": detection(data),
        "classifier": Classifier.of(ground, data).aurocs,
        "prices": steered(ground, data, seed),
    }


def tables(lines: Lines) -> dict[str, Table]:
    """Detection, and one for each price; a sample a concept."""
    columns = {name: about for name, about in DETECTED.items() if all(_has(line, name) for line in lines)}
    detected = [{"concept": line["concept"], "methods": line["detection"]} for line in lines]
    by_price = {
        f"{price} nats": Table(
            COLUMNS, [{"concept": line["concept"], "methods": line["prices"][f"{price}"]} for line in lines]
        )
        for price in PRICES
    }
    return {"detection": Table(columns, detected), **by_price}


def _has(line: dict[str, Any], column: str) -> bool:
    return all(column in cells for cells in line["detection"].values())


def notes(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What the tables do not say: medians of detection, its share of the ceiling, and prices that were not met."""
    texts = []
    for column in DETECTED:
        able = [line["detection"] for line in lines if _has(line, column)]
        if able:
            medians = {name: float(np.median([detection[name][column] for detection in able])) for name in able[0]}
            best = medians["residual stream, logistic"]
            text = ", ".join(f"{name} {value:.3f} ({value / best:.2f})" for name, value in medians.items())
            texts.append(f"median AUROC, {column} (and of that of a logistic model of the residual stream): {text}")
    for column in DETECTED:
        scores = [line["classifier"][column] for line in lines if column in line["classifier"]]
        if scores:
            texts.append(f"the frozen classifier's own AUROC, {column}: median {np.median(scores):.3f}")
    for price in PRICES:
        cells = [(name, cell) for line in lines for name, cell in line["prices"][f"{price}"].items() if "price" in cell]
        missed = [name for name, cell in cells if abs(cell["price"] - price) > 0.05 * price]
        if missed:
            texts.append(f"{price} nats: {len(missed)} of {len(cells)} were not met within 5 %: {', '.join(missed)}")
    return texts


def frontier(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Concept score over price and over the text's perplexity, a line a method: means over concepts, with standard
    errors from a bootstrap over them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def mean_and_error(name: str, column: str) -> tuple[list[float], list[float]]:
        values = np.array([[line["prices"][f"{price}"][name][column] for price in PRICES] for line in lines])
        draws = np.random.default_rng(0).integers(len(lines), size=(2000, len(lines)))
        return values.mean(0).tolist(), values[draws].mean(1).std(0).tolist()

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    for number, name in enumerate(METHODS):
        (score, error), (fluency, _) = mean_and_error(name, "score"), mean_and_error(name, "perplexity")
        control = name in CONTROLS
        style: dict[str, Any] = {
            "color": f"{0.3 + 0.2 * CONTROLS.index(name)}" if control else f"C{number // 2}",
            "linestyle": ":" if control else "--" if name.endswith(f" {TURNED[0]}") else "-",
            "marker": "x" if control else "o",
        }
        left.errorbar(PRICES, score, error, label=name, capsize=2, **style)
        right.plot(fluency, score, **style)
    for name, marker in ((PROMPT, "*"), (PLAIN, "s")):
        height, place = mean_and_error(name, "score")[0][0], mean_and_error(name, "perplexity")[0][0]
        right.scatter([place], [height], marker=marker, color="black", zorder=3)
        left.axhline(height, color="black", linestyle="-" if name == PLAIN else "-.", linewidth=0.8, label=name)
    left.set_xscale("log")
    right.set_xscale("log")
    left.set_xticks(PRICES, [f"{price}" for price in PRICES])
    left.minorticks_off()
    right.xaxis.set_minor_formatter("{x:.0f}")
    right.xaxis.set_major_formatter("{x:.0f}")
    left.set_xlabel("price: KL at held-out contexts, nats")
    right.set_xlabel("perplexity under the plain model (star: a plain prompt, square: plain text)")
    left.set_ylabel("concept score: mean probability of the frozen classifier")
    left.legend(fontsize=7)
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=100)
    pyplot.close(figure)
