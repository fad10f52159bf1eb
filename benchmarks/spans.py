"""Does the relevance of a phrase of an answer lie where its evidence is, in contexts of which we know what answers?

python -m benchmarks.spans --task needle --sizes 10,50 --samples 4 --methods attnlrp,gxi,random --out needle
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from benchmarks.baselines import OTHERS, Alti, AltiLogit, AtMan, GradCAM, GradientRollout
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.attnlrp import AttnLRP
from icebear.concepts.methods.method import Method
from icebear.concepts.passes.inputs import Stream
from icebear.concepts.statistics import localization_metrics
from icebear.concepts.vocabulary.calibration import TEXTS
from icebear.errors import InputError
from icebear.evaluation.baselines import BASELINES, AttentionRollout, Occlusion, able_and_unable, methods_of
from icebear.evaluation.groundtruth import tokens_between
from icebear.evaluation.protocol import Evaluation, Methods, Part, Samples, Seed, Setting
from icebear.models.model import Model
from icebear.models.text.answer import Answer

COLUMNS = {
    "pointing": "the largest score of the context is evidence, higher is better",
    "mass": "the evidence's share of the context's positive relevance, higher is better",
    "recall": "of as many largest scores as evidence, the share that is evidence, higher is better",
    "part": "the fact, line or document with the largest sum is evidence, higher is better",
}
FIRST = {"first": "the share of positive relevance of the first fact, behind the step, higher is better"}
OWN = {"own": "of all positive relevance the share of the answer's own words, sinks left out"}
"""Of ``two-hop`` as well; the second has no control."""
DRAWS = 20
"""Random spans that are the control."""
TRIES = 10
"""Prompts that are tried for each sample that is wanted."""
TRIED_ON = 16
"""Tokens of the prompt that say whether a method runs on a model."""
LONG = 400
"""Tokens of a prompt up to which all methods run."""
SLOW = (AttentionRollout, GradientRollout, GradCAM, AltiLogit, Alti, Occlusion, AtMan)
"""They take a pass for each token, or memory for each pair of tokens."""


def columns(task: str) -> dict[str, str]:
    """Each with its control."""
    hop = task == "two-hop"
    measured = {
        name: text
        for column, about in (COLUMNS | (FIRST if hop else {})).items()
        for name, text in ((column, about), (f"{column}_random", f"{column} with {_CONTROL.get(column, _SPANS)}"))
    }
    return measured | (OWN if hop else {})


_SPANS = f"random spans of the context as evidence, as long and as many, mean of {DRAWS}"
_CONTROL = {"part": "as many random parts as evidence"}

# --- contexts ---


@dataclass(frozen=True)
class Item:
    """A context of parts, of which some are the evidence, a question, and what the answer says."""

    parts: tuple[str, ...]
    evidence: tuple[int, ...]
    question: str
    answer_parts: tuple[str, ...]
    """What we write, and what has to be the model's own words, in turn; explained is the last."""
    contrast: str
    """Another phrase, which the context or a list of ours has."""
    gap: str = " "

    @property
    def prompt(self) -> str:
        return self.gap.join(self.parts) + self.question

    @property
    def places(self) -> list[tuple[int, int]]:
        """The characters of each part."""
        begins = accumulate((len(part) + len(self.gap) for part in self.parts), initial=0)
        return [(begin, begin + len(part)) for begin, part in zip(begins, self.parts, strict=False)]


def facts(size: int, generator: random.Random) -> Item:
    """A question about one of `size` facts."""
    roles, names = generator.sample(_ROLES, size), _names(generator, size)
    at = generator.randrange(size)
    parts = tuple(_called(role, name) for role, name in zip(roles, names, strict=True))
    return Item(parts, (at,), _question(roles[at]), ("", f" {names[at]}"), f" {names[at - 1]}")


def needle(size: int, generator: random.Random) -> Item:
    """One line that answers among about `size` tokens of others, which are icebear's own texts."""
    role, (name, other) = generator.choice(_ROLES), _names(generator, 2)
    words, parts = round(size * _WORDS_A_TOKEN), []
    for line in generator.sample(_PROSE, len(_PROSE)):
        words_of_line = line.split()[:words]
        parts += [f"{' '.join(words_of_line).rstrip('.,;:')}."] if words_of_line else []
        words -= len(words_of_line)
    at = generator.randrange(len(parts) + 1)
    parts.insert(at, _called(role, name))
    return Item(tuple(parts), (at,), _question(role), ("", f" {name}"), f" {other}")


def two_hop(size: int, generator: random.Random) -> Item:
    """Where somebody's sister lives: who she is, and where that one lives, among `size` pairs of such facts. What the
    model writes first is who she is."""
    people, cities = generator.sample(_FIRST, 2 * size), generator.sample(_CITIES, size)
    relations, at = generator.sample(_RELATIONS, size), generator.randrange(size)
    owners, others = people[:size], people[size:]
    are = [f"{one}'s {how} is called {two}." for one, how, two in zip(owners, relations, others, strict=True)]
    live = [f"{two} lives in {city}." for two, city in zip(others, cities, strict=True)]
    parts = generator.sample([*are, *live], 2 * size)
    question = f"\nQuestion: Where does {owners[at]}'s {relations[at]} live?\nAnswer:"
    lead = f" {owners[at]}'s {relations[at]} is called"
    answer_parts = (lead, f" {others[at]}", f". {others[at]} lives in", f" {cities[at]}")
    evidence = (parts.index(are[at]), parts.index(live[at]))
    return Item(tuple(parts), evidence, question, answer_parts, f" {cities[at - 1]}")


def documents(size: int, generator: random.Random) -> Item:
    """A question that one of `size` paragraphs answers."""
    roles, names = generator.sample(_ROLES, size), _names(generator, size)
    at, parts = generator.randrange(size), []
    for role, name in zip(roles, names, strict=True):
        lines = [line.format(role) for line in generator.sample(_HABITS, 3)]
        lines.insert(generator.randrange(4), _called(role, name))
        parts.append(" ".join(lines))
    return Item(tuple(parts), (at,), _question(roles[at]), ("", f" {names[at]}"), f" {names[at - 1]}", "\n\n")


class Task(NamedTuple):
    """How an item of a size is made, sizes by default, and the least and largest one."""

    make: Callable[[int, random.Random], Item]
    sizes: tuple[int, ...]
    least: int
    most: int


def items(task: str, size: int, seed: int = 0) -> Iterator[Item]:
    """Without end. Raises `InputError` for a size that the templates do not reach."""
    own = TASKS[task]
    if not own.least <= size <= own.most:
        raise InputError(f"A size of {task} is {own.least} to {own.most}, not {size}.")
    generator = random.Random(f"{task} {size} {seed}")
    return (own.make(size, generator) for _ in iter(int, 1))


def _called(role: str, name: str) -> str:
    return f"The {role} is called {name}."


def _question(role: str) -> str:
    return f"\nQuestion: What is the {role} called?\nAnswer: The {role} is called"


def _names(generator: random.Random, count: int) -> list[str]:
    return [
        f"{one} {two}" for one, two in zip(generator.sample(_FIRST, count), generator.sample(_LAST, count), strict=True)
    ]


_FIRST = (
    "Anna Tom Maria Peter Julia David Laura James Sarah Michael Emma Daniel Alice Robert Helen George Lucy Simon Clara "
    "Henry Nina Oscar Ruth Victor Grace Felix Irene Martin Olga Edward Paula Frank Rosa Thomas Eva Arthur"
).split()
_LAST = (
    "Miller Weber Fischer Clark Lopez Novak Rossi Larsen Dubois Kowalski Tanaka Silva Hansen Moreau Bauer Jensen "
    "Romero Petrov Adams Brown Carter Evans Foster Gray Hughes Kelly Lewis Morgan Nelson Parker Quinn Reed"
).split()
_ROLES = (
    "baker doctor painter teacher farmer singer pilot lawyer judge mayor butcher carpenter dancer driver fisherman "
    "gardener hunter jeweler king librarian miner nurse plumber priest sailor soldier tailor waiter writer astronomer "
    "banker chef"
).split()
_RELATIONS = "sister brother mother father teacher neighbour boss friend".split()
_CITIES = (
    "New York,San Francisco,Los Angeles,Las Vegas,Hong Kong,Buenos Aires,Cape Town,Mexico City,New Delhi,Tel Aviv,"
    "San Diego,New Orleans,Salt Lake City,Kansas City,Santa Fe,San Antonio,Abu Dhabi,Panama City,Fort Worth,Long Beach"
).split(",")
_HABITS = (
    "Every morning the {} walks along the river.",
    "In the evening the {} reads the paper.",
    "The {} lives next to the old station.",
    "On Sundays the {} plays chess in the park.",
    "The {} has two dogs and a garden.",
    "Last winter the {} was ill for a month.",
    "The {} likes strong coffee.",
    "In summer the {} swims in the lake.",
)
_PROSE = [line for line in TEXTS if line.isascii() and re.fullmatch(r"[A-Z].*[a-z]\.", line)]
_WORDS_A_TOKEN = 0.75

TASKS = {
    "facts": Task(facts, (4, 8, 16, 32), 2, len(_ROLES)),
    "needle": Task(needle, (10, 50, 200, 500, 1000, 2000), 1, 2500),
    "two-hop": Task(two_hop, (2, 4, 8), 2, len(_RELATIONS)),
    "documents": Task(documents, (2, 4, 8, 16), 2, len(_ROLES)),
}


# --- asked ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnsweredItem:
    """An item as a model reads it."""

    item: Item
    answer: Answer
    spans: tuple[tuple[int, int], ...]
    """The tokens of the answer that have to be the model's own words: of two hops the step, and what is explained."""
    sinks: tuple[int, ...]
    right: bool
    """Whether greedy decoding writes these words."""

    @property
    def span(self) -> tuple[int, int]:
        """What is explained."""
        return self.spans[-1]


def answered(model: Model, item: Item) -> AnsweredItem:
    """One forward pass, the answer written."""
    prompt = model.ids(item.prompt)
    ids, text = list(prompt), item.prompt
    own: list[tuple[int, int]] = []
    for number, part in enumerate(item.answer_parts):
        new = model.continuation(part, text) if part else []
        begin = len(ids) - len(prompt)
        own += [(begin, begin + len(new))] if number % 2 else []
        ids, text = ids + new, text + part
    written = ids[len(prompt) :]
    stream = Stream(model, model.read_ids([ids[:-1]]))
    with model.lock, stream.reading(model):
        logits = model.continuation_logits(prompt, written)  # (P, V)
    probabilities = logits.softmax(-1)[range(len(written)), written].tolist()
    answer = Answer(tuple(prompt), tuple(written), model.pieces(written), tuple(probabilities), ended=False)
    right = all(_predicted(logits[place], written[place]) for span in own for place in range(*span))
    return AnsweredItem(item, answer, tuple(own), stream.sinks(0), right)


def _predicted(logits: Tensor, token: int) -> bool:
    return int(logits.argmax()) == token


def usable(model: Model, items: Iterator[Item], count: int) -> tuple[list[AnsweredItem], int]:
    """The first `count` that the model answers rightly, and how many were tried (at most `TRIES` times as many)."""
    chosen: list[AnsweredItem] = []
    for tried, item in enumerate(islice(items, TRIES * count), start=1):
        chosen += [one for one in [answered(model, item)] if one.right]
        if len(chosen) == count:
            return chosen, tried
    return chosen, TRIES * count


def able(model: Model, one: AnsweredItem, methods: Mapping[str, Method]) -> tuple[dict[str, Method], dict[str, str]]:
    """Methods that can run on prompts as long as this one, and why others are left out."""
    ids = one.answer.prompt_ids
    unable = {}
    for name, method in methods.items():
        if len(ids) > LONG and isinstance(method, SLOW):
            unable[name] = f"beyond {LONG} tokens it is left out, as it takes a pass a token or much memory"
        else:
            unable |= able_and_unable(model, list(ids[-TRIED_ON:]), {name: method})[1]
    return {name: method for name, method in methods.items() if name not in unable}, unable


def length(lines: Sequence[dict[str, Any]]) -> str:
    """Of the contexts of `sample`."""
    return f"the context has {fmean(line['tokens'] for line in lines):.0f} tokens on average"


# --- measured -------------------------------------------------------------------------------------------


def sample(model: Model, one: AnsweredItem, methods: Mapping[str, Method], seed: int = 0) -> dict[str, Any]:
    """Each method's numbers on an item; only tokens of the context count, sinks left out. JSON-ready."""
    item = one.item
    parts = [tokens_between(model, item.prompt, *place) for place in item.places]
    context = sorted({token for part in parts for token in part} - set(one.sinks))
    at = {token: number for number, token in enumerate(context)}
    parts = [[at[token] for token in part if token in at] for part in parts]
    drawn = draws(parts, item.evidence, random.Random(f"{seed} {item.prompt}"))
    rows = {}
    for name, method in methods.items():
        for reading, scores in readings(model, one, method).items():
            counted = scores[context].tolist()
            own_numbers = numbers(counted, parts, item.evidence, drawn)
            rows[f"{name}{reading}"] = {**own_numbers, "own": _own(scores, one), "scores": counted}
    return {
        "prompt": item.prompt,
        "answer": one.answer.text,
        "span": list(one.span),
        "parts": parts,
        "evidence": list(item.evidence),
        "tokens": len(context),
        "methods": rows,
    }


def readings(model: Model, one: AnsweredItem, method: Method) -> dict[str, Tensor]:
    """(T,) the tokens' scores: plain, and by relevance also against the contrast, and for the step of two hops."""
    explain = partial(attribute, model, one.answer, span=one.span, method=method, sites=(), number="logit")
    plain = explain()
    if not isinstance(method, AttnLRP) or method.positions:
        return {"": plain.tokens if plain.positions is None else plain.combined()}
    rows = {"": plain.tokens, ", against": explain(contrast=one.item.contrast).tokens}
    return rows | ({", of the step": explain(span=one.spans[0]).tokens} if len(one.spans) > 1 else {})


Drawn = Sequence[Sequence[Sequence[int]]]
"""Random spans: draw, span, token."""


def draws(parts: Sequence[Sequence[int]], evidence: Sequence[int], generator: random.Random) -> Drawn:
    """Spans of the context as long as those of the evidence."""
    count = sum(map(len, parts))
    lengths = [len(parts[number]) for number in evidence]
    begins = [[generator.randrange(count - length + 1) for length in lengths] for _ in range(DRAWS)]
    return [[range(begin, begin + own) for begin, own in zip(row, lengths, strict=True)] for row in begins]


def numbers(
    scores: Sequence[float], parts: Sequence[Sequence[int]], evidence: Sequence[int], drawn: Drawn
) -> dict[str, float]:
    """The `columns`."""
    results = _by_token(scores, [parts[number] for number in evidence])
    by_chance = [_by_token(scores, spans) for spans in drawn]
    for name in list(results):
        results[f"{name}_random"] = fmean(one[name] for one in by_chance)
    sums = [sum(scores[token] for token in part) for part in parts]
    return {
        **results,
        "part": localization_metrics(sums, evidence)["pointing"],
        "part_random": len(evidence) / len(parts),
    }


def _own(scores: Tensor, one: AnsweredItem) -> float:
    """The answer's words' share of positive relevance."""
    positive = scores.clamp(min=0)
    positive[list(one.sinks)] = 0
    whole = positive.sum().item()
    return positive[len(one.answer.prompt_ids) :].sum().item() / whole if whole else 0.0


def _by_token(scores: Sequence[float], spans: Sequence[Sequence[int]]) -> dict[str, float]:
    tokens = sorted({token for span in spans for token in span})
    every, first = localization_metrics(scores, tokens), localization_metrics(scores, spans[0])
    return {"pointing": every["pointing"], "mass": every["mass"], "recall": every["accuracy"], "first": first["mass"]}


@dataclass(frozen=True)
class Spans(Evaluation):
    """Whether the relevance of a phrase of an answer lies where its evidence is, in contexts of growing length.

    Only what the model answers rightly counts; the columns with _random have random evidence. Each size has a folder.
    """

    name: ClassVar = "spans"
    methods: Methods = "all"
    samples: Samples = 20
    seed: Seed = 0
    task: Annotated[Literal["facts", "needle", "two-hop", "documents"], Setting("What is asked of the model.")] = (
        "needle"
    )
    sizes: Annotated[
        str | None, Setting("Facts, tokens, pairs of facts or documents; commas. Default: the task's.", decides=False)
    ] = None

    def parts(self, model: Model) -> Iterator[Part]:
        sizes = map(int, self.sizes.split(",")) if self.sizes else TASKS[self.task].sizes
        for size in sizes:
            right, tried = usable(model, items(self.task, size, self.seed), self.samples)
            note = f"{self.task} {size}: the model is right on {len(right)} of {tried}"
            if not right:
                print(note)
                continue
            methods, unable = able(model, right[0], methods_of(self.methods))
            yield Part(
                columns(self.task),
                right,
                partial(sample, model, methods=methods, seed=self.seed),
                name=str(size),
                methods=methods,
                unable=unable,
                settings={"size": size},
                notes=lambda lines, note=note: [f"{note}; {length(lines)}"],
            )


if __name__ == "__main__":
    BASELINES.update(OTHERS)
    command(Spans)()
