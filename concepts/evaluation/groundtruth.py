"""Does the relevance lie where the evidence is? Prompts whose evidence is known by construction or from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from icebear.concepts.evaluation import metrics
from icebear.concepts.evaluation.protocol import DataFile, Lines, MethodEvaluation, Option, Part, Table, accuracy
from icebear.concepts.methods.registry import able_and_unable
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import plan
from icebear.errors import InputError
from icebear.paths import read_text

TOGETHER = 16
"""Prompts in one pass, which takes about half the time of one by one."""

COLUMNS = {
    "pointing": "pointing game: the largest score is evidence, higher is better",
    "mrr": "mean reciprocal rank of the evidence, it first in ties, higher is better",
    "mrr_worst": "the same, it last in ties, higher is better",
    "mass": "relevance mass accuracy, higher is better",
    "accuracy": "of as many largest scores as evidence, the share that is evidence, higher is better",
    "iou": "intersection over union of those and the evidence, higher is better",
}


PARTS = ("all", "inner", "context")
"""Which tokens of a prompt count: all; without special tokens and the first; those of a question's text only."""


@dataclass(frozen=True)
class Item:
    """A prompt, what follows and what does not, the characters that decide it, and where a question's text ends."""

    prompt: str
    target: str
    contrast: str
    evidence: tuple[int, int]
    context: int | None = None


def subject_verb(count: int, seed: int = 0) -> list[Item]:
    """Agreement of a verb with its subject, past another noun of the other number (attractor)."""
    return [_sentence(*parts, (" is", " are")) for parts in _subjects(count, seed, _THINGS)]


def reflexive(count: int, seed: int = 0) -> list[Item]:
    """Agreement of a reflexive pronoun with its subject, past an attractor."""
    items = []
    for opening, noun, plural, middle in _subjects(count, seed, _PEOPLE):
        verb = random.Random(f"{seed} {noun} {middle}").choice(("hurt", "saw", "blamed", "described", "taught"))
        pronouns = (f" {_PEOPLE[noun if not plural else _singular(noun)][1]}", " themselves")
        items.append(_sentence(opening, noun, plural, f"{middle} {verb}", pronouns))
    return items


def facts(count: int, seed: int = 0) -> list[Item]:
    """A question about one of four facts in the context."""
    items = []
    for context, person, city, cities in homes(count, seed):
        start = context.index(f"in {city}.") + 3
        other = cities[(cities.index(city) + 1) % 4]
        prompt = f"{context}\nQuestion: Where does {person} live?\nAnswer: {person} lives in"
        items.append(Item(prompt, f" {city}", f" {other}", (start, start + len(city)), len(context)))
    return items


def homes(count: int, seed: int) -> Iterator[tuple[str, str, str, list[str]]]:
    """Where four people live; one of them, where he or she lives, and the four cities."""
    generator = random.Random(seed)
    for _ in range(count):
        people, cities = generator.sample(_NAMES, 4), generator.sample(_CITIES, 4)
        place = generator.randrange(4)
        context = " ".join(f"{person} lives in {city}." for person, city in zip(people, cities, strict=True))
        yield context, people[place], cities[place], cities


TASKS = {"agreement": subject_verb, "anaphora": reflexive, "qa": facts}


def read(path: str, count: int, seed: int = 0) -> list[Item]:
    """Of a BLiMP file (JSON lines with a common prefix) or a SQuAD file (JSON). Raises `InputError`."""
    try:
        text = read_text(path)
        rows = json.loads(text)["data"] if text.lstrip().startswith('{"data"') or path.endswith(".json") else None
        items = _squad(rows) if rows is not None else [_blimp(json.loads(line)) for line in text.splitlines() if line]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise InputError(f"{path} is neither BLiMP (JSON lines with one_prefix_prefix) nor SQuAD (JSON).") from None
    return random.Random(seed).sample(items, min(count, len(items)))


def _blimp(row: dict[str, Any]) -> Item:
    """The subject is the first word of the prefix that is no determiner."""
    prefix = row["one_prefix_prefix"]
    place = 0
    for word in prefix.split():
        start = prefix.index(word, place)
        place = start + len(word)
        if word.lower() not in _DETERMINERS:
            break
    return Item(prefix, f" {row['one_prefix_word_good']}", f" {row['one_prefix_word_bad']}", (start, place))


def _squad(articles: list[dict[str, Any]]) -> list[Item]:
    items = []
    for article in articles:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                if not question["answers"]:
                    continue
                answer = question["answers"][0]
                start = answer["answer_start"]
                prompt = f"{paragraph['context']}\nQuestion: {question['question']}\nAnswer:"
                end = start + len(answer["text"])
                items.append(Item(prompt, f" {answer['text']}", "", (start, end), len(paragraph["context"])))
    return items


@dataclass(frozen=True)
class GroundTruth(MethodEvaluation):
    """Whether relevance lies where the evidence is: the subject of a verb, the answer in a text.

    Instead of a task, --data takes a BLiMP file (JSON lines) or a SQuAD file (JSON).

    Example:
      icebear evaluate groundtruth --samples 4 --methods attnlrp,gxi,random --out agreement
    """

    name: ClassVar = "groundtruth"
    task: Annotated[Literal["agreement", "anaphora", "qa"], Option("What is asked of the model.")] = "agreement"
    data: DataFile = None
    no_contrast: Annotated[bool, Option("Explain the right answer, not the right against the wrong one.")] = False
    tokens: Annotated[
        Literal["all", "inner", "context"],
        Option(
            "Which tokens count: all, none special nor the first, or a question's text only. You can change it for a "
            "folder that is measured.",
            decides=False,
        ),
    ] = "all"

    def parts(self, model: Model) -> Iterator[Part]:
        make = TASKS[self.task]
        items = read(self.data, self.samples, self.seed) if self.data else make(self.samples, self.seed)
        methods, unable = able_and_unable(model, items[0].prompt, self.chosen())
        yield Part(
            COLUMNS,
            items,
            lambda group: samples(model, group, methods, not self.no_contrast),
            together=TOGETHER,
            methods=methods,
            unable=unable,
            tables=lambda lines: {"": Table(COLUMNS, [x for x in counted(lines, self.tokens) if x["counts"]])},
            notes=self._notes,
        )

    def _notes(self, lines: Lines) -> list[str]:
        return [*accuracy(counted(lines, self.tokens)), f"tokens that count: {self.tokens}"]


# --- measured -------------------------------------------------------------------------------------------


def samples(
    model: Model, items: Sequence[Item], methods: Mapping[str, Any], contrastive: bool = True
) -> list[dict[str, Any]]:
    """Each method's scores on each item that the model predicts, all in the same passes; JSON-ready.

    contrastive: explain the target against the contrast.
    """
    answers = [(_first(model, item.prompt, item.target), _first(model, item.prompt, item.contrast)) for item in items]
    lines = [_judged(model, *row) for row in zip(items, answers, _logits(model, items), strict=True)]
    predicted = [row for row, line in enumerate(lines) if line["correct"]]
    if not predicted:
        return lines
    prompts, targets, contrasts = zip(*((items[row].prompt, *answers[row]) for row in predicted), strict=True)
    objective = plan(model, prompts, targets, contrasts if contrastive else None)
    for name, method in methods.items():
        for row, scores in zip(predicted, method.scores(model, objective.resolved(model)), strict=True):
            lines[row]["methods"][name] = {"scores": scores.tolist()}
    return lines


def counted(lines: Sequence[dict[str, Any]], part: str = "all") -> list[dict[str, Any]]:
    """Of `samples`, each method's `COLUMNS` where one of `PARTS` counts. Raises `InputError` where there is none."""
    results = []
    for line in lines:
        places = line["parts"].get(part, []) if line["correct"] else []
        if line["correct"] and not places:
            raise InputError("Only questions about a text have a context; use --tokens all or inner.")
        evidence = [number for number, place in enumerate(places) if place in line["evidence"]]
        if not evidence:
            results.append({**line, "counts": False})
            continue
        methods = {name: [one["scores"][place] for place in places] for name, one in line["methods"].items()}
        measured = {name: {**numbers(scores, evidence), "scores": scores} for name, scores in methods.items()}
        results.append({**line, "counts": True, "evidence": evidence, "methods": measured})
    return results


def _judged(model: Model, item: Item, answers: tuple[int | None, int | None], logits: Tensor) -> dict[str, Any]:
    """Whether the model predicts an item, and what is known of it before any method; logits (V,)."""
    target, contrast = answers
    if target is None or target == contrast:
        return {"correct": None, "why": "target and contrast begin with the same token"}
    if not (logits[target] > logits[contrast] if contrast is not None else logits.argmax() == target):
        return {"correct": False}
    evidence = tokens_between(model, item.prompt, *item.evidence)
    return {"correct": True, "prompt": item.prompt, "evidence": evidence, "parts": _parts(model, item), "methods": {}}


def _parts(model: Model, item: Item) -> dict[str, list[int]]:
    """The tokens of each of `PARTS`."""
    ids = plan(model, [item.prompt]).batch.row_ids(0)
    inner = [place for place, token in enumerate(ids) if place > 0 and token not in model.special_ids()]
    context = [] if item.context is None else tokens_between(model, item.prompt, 0, item.context)
    return {"all": list(range(len(ids))), "inner": inner, "context": context}


def _logits(model: Model, items: Sequence[Item]) -> Tensor:
    """(B, V) where each item's answer is predicted."""
    objective = plan(model, [item.prompt for item in items])
    with model.lock, torch.no_grad():
        logits = model.logits(objective.batch, objective.needed)
    return torch.stack(
        [row[objective.needed.index(at)] for row, (at,) in zip(logits, objective.positions, strict=True)]
    )


def numbers(values: list[float], evidence: list[int]) -> dict[str, float]:
    return {
        "pointing": metrics.pointing(values, evidence),
        "mrr": metrics.reciprocal_rank(values, evidence, "best"),
        "mrr_worst": metrics.reciprocal_rank(values, evidence, "worst"),
        "mass": metrics.mass_accuracy(values, evidence),
        "accuracy": metrics.token_accuracy(values, evidence),
        "iou": metrics.iou(values, evidence),
    }


def tokens_between(model: Model, text: str, start: int, end: int) -> list[int]:
    """The tokens that have characters of text[start:end]."""
    offsets = model.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return [place for place, (a, b) in enumerate(offsets) if a < end and b > start and text[a:b].strip()]


def _first(model: Model, prompt: str, text: str) -> int | None:
    """The first token of what follows a prompt."""
    return model.continuation(text, prompt)[0] if text else None


# --- templates ------------------------------------------------------------------------------------------

_THINGS = {
    "key": "keys",
    "book": "books",
    "letter": "letters",
    "window": "windows",
    "painting": "paintings",
    "car": "cars",
    "house": "houses",
    "river": "rivers",
    "bridge": "bridges",
    "song": "songs",
    "road": "roads",
    "picture": "pictures",
}
_PEOPLE = {
    "boy": ("boys", "himself"),
    "man": ("men", "himself"),
    "king": ("kings", "himself"),
    "girl": ("girls", "herself"),
    "woman": ("women", "herself"),
    "queen": ("queens", "herself"),
    "actress": ("actresses", "herself"),
    "waitress": ("waitresses", "herself"),
    "uncle": ("uncles", "himself"),
    "mother": ("mothers", "herself"),
}
# Else the subject would always be the second token, and whoever looks at early tokens would find it.
_OPENINGS = (
    "The",
    "Today the",
    "As you can see, the",
    "In the end, the",
    "It is often said that the",
    "Because of the rain last night, the",
)
_MIDDLES = ("near the {}", "behind the {}", "next to the {}", "that the {} {like}", "which the {} {see}")
_NAMES = "Anna Tom Maria Peter Julia David Laura James Sarah Michael Emma Daniel".split()
_CITIES = "Paris London Rome Berlin Madrid Tokyo Boston Chicago Dublin Vienna Moscow Athens".split()
_DETERMINERS = set(
    "a an the this that these those some many most all every each no few several lot of both any".split()
)


def _subjects(count: int, seed: int, nouns: Mapping[str, Any]) -> list[tuple[str, str, bool, str]]:
    """(what stands before the noun, the noun, whether it is plural, what stands between it and the verb)."""
    generator = random.Random(seed)
    plurals = {noun: forms if isinstance(forms, str) else forms[0] for noun, forms in nouns.items()}
    subjects = []
    for _ in range(count):
        subject, attractor = generator.sample(list(plurals), 2)
        plural = generator.random() < 0.5
        other = attractor if plural else plurals[attractor]
        like, see = ("likes", "sees") if plural else ("like", "see")
        middle = generator.choice(_MIDDLES).format(other, like=like, see=see)
        subjects.append((generator.choice(_OPENINGS), plurals[subject] if plural else subject, plural, middle))
    return subjects


def _singular(plural: str) -> str:
    return next(noun for noun, forms in _PEOPLE.items() if forms[0] == plural)


def _sentence(opening: str, noun: str, plural: bool, middle: str, answers: tuple[str, str]) -> Item:
    singular, many = answers
    good, bad = (many, singular) if plural else (singular, many)
    start = len(opening) + 1
    return Item(f"{opening} {noun} {middle}", good, bad, (start, start + len(noun)))
