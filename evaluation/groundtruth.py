"""Test whether relevance lies on the evidence, with prompts whose evidence is known by construction or from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from icebear.concepts.statistics import localization_metrics
from icebear.errors import InputError
from icebear.evaluation.baselines import able_and_unable
from icebear.evaluation.protocol import DataFile, MethodEvaluation, Part, Setting, Table, accuracy
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.paths import read_text

BATCH_SIZE = 16
"""Prompts in one pass take about half the time of one by one."""
LEXICON = json.loads(Path(__file__).with_name("groundtruth.json").read_text(encoding="utf-8"))
"""The openings vary because otherwise the subject would always be the second token."""
METRICS = {
    "pointing": "pointing game: the largest score is evidence, higher is better",
    "mrr": "mean reciprocal rank of the evidence, it first in ties, higher is better",
    "mrr_worst": "the same, it last in ties, higher is better",
    "mass": "relevance mass accuracy, higher is better",
    "accuracy": "of as many largest scores as evidence, the share that is evidence, higher is better",
    "iou": "intersection over union of those and the evidence, higher is better",
    "pta": "per-token accuracy: the share of tokens that are positive just where there is evidence, higher is better",
    "iou_positive": "intersection over union of the tokens with positive scores and the evidence, higher is better",
}


@dataclass(frozen=True)
class Question:
    """A prompt, its target and contrast, the characters of the evidence, and where a question's text ends."""

    prompt: str
    target: str
    contrast: str
    evidence: tuple[int, int]
    context: int | None = None


def subject_verb(count: int, seed: int = 0) -> list[Question]:
    """Return sentences whose verb agrees with a subject before a noun of the other number (an attractor)."""
    return [
        _sentence(opening, noun, middle, (" are", " is") if noun != singular else (" is", " are"))
        for opening, singular, noun, middle in _subjects(count, seed, LEXICON["things"])
    ]


def reflexive(count: int, seed: int = 0) -> list[Question]:
    """Return sentences whose reflexive pronoun agrees with a subject before an attractor."""
    items, persons = [], LEXICON["persons"]
    for opening, singular, noun, middle in _subjects(count, seed, {noun: many for noun, (many, _) in persons.items()}):
        verb = random.Random(f"{seed} {noun} {middle}").choice(LEXICON["reflexive_verbs"])
        pronoun, plural = f" {persons[singular][1]}", " themselves"
        answers = (plural, pronoun) if noun != singular else (pronoun, plural)
        items.append(_sentence(opening, noun, f"{middle} {verb}", answers))
    return items


def _subjects(count: int, seed: int, plurals: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the words before the subject, its singular, the subject itself, and the words between it and the verb."""
    generator = random.Random(seed)
    for _ in range(count):
        singular, attractor = generator.sample(list(plurals), 2)
        is_plural = generator.random() < 0.5
        verbs = {"likes": "likes", "sees": "sees"} if is_plural else {"likes": "like", "sees": "see"}
        middle = generator.choice(LEXICON["attractors"]).format(attractor if is_plural else plurals[attractor], **verbs)
        yield generator.choice(LEXICON["openings"]), singular, plurals[singular] if is_plural else singular, middle


def _sentence(opening: str, noun: str, middle: str, answers: tuple[str, str]) -> Question:
    start = len(opening) + 1
    return Question(f"{opening} {noun} {middle}", *answers, (start, start + len(noun)))


def facts(count: int, seed: int = 0) -> list[Question]:
    """Return questions about one of four facts in the context."""
    generator = random.Random(seed)
    items = []
    for _ in range(count):
        people, cities = generator.sample(LEXICON["residents"], 4), generator.sample(LEXICON["cities"], 4)
        number = generator.randrange(4)
        person, city, other = people[number], cities[number], cities[(number + 1) % 4]
        context = " ".join(f"{resident} lives in {home}." for resident, home in zip(people, cities, strict=True))
        start = context.index(f"in {city}.") + 3
        prompt = f"{context}\nQuestion: Where does {person} live?\nAnswer: {person} lives in"
        items.append(Question(prompt, f" {city}", f" {other}", (start, start + len(city)), len(context)))
    return items


TASKS = {"agreement": subject_verb, "anaphora": reflexive, "qa": facts}


def read_items(path: str, count: int, seed: int = 0) -> list[Question]:
    """Read a BLiMP file (JSON lines with a common prefix) or a SQuAD file (JSON). Raises `InputError`."""
    try:
        text = read_text(path)
        if text.lstrip().startswith('{"data"') or path.endswith(".json"):
            items = _squad(json.loads(text)["data"])
        else:
            items = [_blimp(json.loads(line)) for line in text.splitlines() if line]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise InputError(
            f"{path} must be a file of BLiMP (JSON lines with one_prefix_prefix) or SQuAD (JSON)."
        ) from None
    return random.Random(seed).sample(items, min(count, len(items)))


def _blimp(row: dict[str, Any]) -> Question:
    """Return an item whose evidence is the first word of the prefix that is no determiner."""
    prefix, end = row["one_prefix_prefix"], 0
    for word in prefix.split():
        start = prefix.index(word, end)
        end = start + len(word)
        if word.lower() not in LEXICON["determiners"]:
            break
    return Question(prefix, f" {row['one_prefix_word_good']}", f" {row['one_prefix_word_bad']}", (start, end))


def _squad(articles: list[dict[str, Any]]) -> list[Question]:
    items = []
    for paragraph in (paragraph for article in articles for paragraph in article["paragraphs"]):
        context = paragraph["context"]
        for question in paragraph["qas"]:
            for answer in question["answers"][:1]:
                prompt = f"{context}\nQuestion: {question['question']}\nAnswer:"
                start, end = answer["answer_start"], answer["answer_start"] + len(answer["text"])
                items.append(Question(prompt, f" {answer['text']}", "", (start, end), len(context)))
    return items


@dataclass(frozen=True)
class GroundTruth(MethodEvaluation):
    """Test whether relevance lies on the evidence: the subject of a verb, or the answer in a text.

    Instead of a task, --data takes a BLiMP file (JSON lines) or a SQuAD file (JSON).

    Example:
      icebear evaluate groundtruth --samples 4 --methods attnlrp,gxi,random --out agreement
    """

    name: ClassVar = "groundtruth"
    task: Annotated[Literal["agreement", "anaphora", "qa"], Setting("The kind of prompts.")] = "agreement"
    data: DataFile = None
    no_contrast: Annotated[bool, Setting("Explain the right answer alone, without the wrong one as contrast.")] = False
    tokens: Annotated[
        Literal["all", "inner", "context"],
        Setting(
            "Which tokens count: all, inner (without special tokens and the first) or context (the text of a question)."
            " You can change this for a folder whose samples are complete.",
            decides=False,
        ),
    ] = "all"

    def parts(self, model: Model) -> Iterator[Part]:
        make = TASKS[self.task]
        items = read_items(self.data, self.samples, self.seed) if self.data else make(self.samples, self.seed)
        methods, unable = able_and_unable(model, items[0].prompt, self.chosen())
        yield Part(
            METRICS,
            items,
            lambda group: score_items(model, group, methods, not self.no_contrast),
            batch_size=BATCH_SIZE,
            methods=methods,
            unable=unable,
            tables=lambda lines: {"": Table(METRICS, [x for x in counted(lines, self.tokens) if x["counts"]])},
            notes=lambda lines: [*accuracy(counted(lines, self.tokens)), f"tokens that count: {self.tokens}"],
        )


def score_items(
    model: Model, items: Sequence[Question], methods: Mapping[str, Any], contrastive: bool = True
) -> list[dict[str, Any]]:
    """Return each method's scores on each item that the model predicts; JSON-ready.

    All items share their passes. contrastive: explain the target against the contrast.
    """
    answers = [(_token(model, q.prompt, q.target), _token(model, q.prompt, q.contrast)) for q in items]
    lines = [_judged(model, *row) for row in zip(items, answers, _logits(model, items), strict=True)]
    predicted = [row for row, line in enumerate(lines) if line["correct"]]
    if not predicted:
        return lines
    prompts, targets, contrasts = zip(*((items[row].prompt, *answers[row]) for row in predicted), strict=True)
    objective = objective_of(model, prompts, targets, contrasts if contrastive else None)
    for name, method in methods.items():
        for row, scores in zip(predicted, method.scores(model, objective.resolved(model)), strict=True):
            lines[row]["methods"][name] = {"scores": scores.tolist()}
    return lines


def counted(lines: Sequence[dict[str, Any]], part: str = "all") -> list[dict[str, Any]]:
    """Return each method's `COLUMNS` for the lines of `score_items`, over the tokens of a part: all, inner or context.

    Raises `InputError` where the prompts have no such part.
    """
    results = []
    for line in lines:
        tokens = line["parts"].get(part, []) if line["correct"] else []
        if line["correct"] and not tokens:
            raise InputError(
                "These prompts have no context (questions about a text have one); use --tokens all or inner."
            )
        evidence = [number for number, token in enumerate(tokens) if token in line["evidence"]]
        if not evidence:
            results.append({**line, "counts": False})
            continue
        methods = {}
        for name, scored in line["methods"].items():
            scores = [scored["scores"][token] for token in tokens]
            methods[name] = {**localization_metrics(scores, evidence), "scores": scores}
        results.append({**line, "counts": True, "evidence": evidence, "methods": methods})
    return results


def _judged(model: Model, question: Question, answers: tuple[int | None, int | None], logits: Tensor) -> dict[str, Any]:
    """Return whether the model predicts an item, with its evidence and the tokens of each part; logits (V,)."""
    target, contrast = answers
    if target is None or target == contrast:
        return {"correct": None, "why": "target and contrast begin with the same token"}
    if not (logits[target] > logits[contrast] if contrast is not None else logits.argmax() == target):
        return {"correct": False}
    ids = objective_of(model, [question.prompt]).batch.row_ids(0)
    parts = {
        "all": list(range(len(ids))),
        "inner": [position for position, token in enumerate(ids) if position > 0 and token not in model.special_ids()],
        "context": [] if question.context is None else tokens_between(model, question.prompt, 0, question.context),
    }
    evidence = tokens_between(model, question.prompt, *question.evidence)
    return {"correct": True, "prompt": question.prompt, "evidence": evidence, "parts": parts, "methods": {}}


def _logits(model: Model, items: Sequence[Question]) -> Tensor:
    """Return the logits (B, V) where each item's answer is predicted."""
    objective = objective_of(model, [question.prompt for question in items])
    with model.lock, torch.no_grad():
        logits = model.logits(objective.batch, objective.all_positions)
    columns = [objective.all_positions.index(at) for (at,) in objective.positions]
    return logits[range(len(items)), columns]


def tokens_between(model: Model, text: str, start: int, end: int) -> list[int]:
    """Return the tokens that have characters of text[start:end]."""
    offsets = model.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return [position for position, (a, b) in enumerate(offsets) if a < end and b > start and text[a:b].strip()]


def _token(model: Model, prompt: str, text: str) -> int | None:
    return model.continuation(text, prompt)[0] if text else None
