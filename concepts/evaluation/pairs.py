"""Pairs of prompts that differ in what decides the answer: from templates, or a file."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import torch

from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import plan
from icebear.errors import InputError, UnknownName
from icebear.paths import read_text

log = logging.getLogger("icebear")

CLEAR = 0.5
"""Logits by which a model must be right on both prompts."""


@dataclass(frozen=True)
class Pair:
    """A prompt and its answer, and another one and its."""

    prompt: str
    other: str
    answer: str
    other_answer: str


Task = Callable[[], list[Pair]]

_NOUNS = [
    *("key keys,book books,letter letters,car cars,house houses,song songs,road roads,picture pictures".split(",")),
    *("girl girls,boy boys,king kings,teacher teachers,doctor doctors,lawyer lawyers,writer writers".split(",")),
]
_PEOPLE = [
    noun.split()
    for noun in "girl girls,boy boys,king kings,teacher teachers,doctor doctors,lawyer lawyers,writer writers,"
    "student students,driver drivers,farmer farmers".split(",")
]
_PLACES = "near the house,behind the car,next to the road,with the picture,by the river,in the garden".split(",")
_VERBS = [
    verb.split() for verb in "like likes,see sees,know knows,help helps,love loves,hate hates,need needs".split(",")
]
_CAPITALS = dict(
    pair.split(":")
    for pair in "France:Paris,Italy:Rome,Spain:Madrid,Japan:Tokyo,China:Beijing,Russia:Moscow,Egypt:Cairo,Cuba:Havana,"
    "Greece:Athens,Austria:Vienna,Poland:Warsaw,Portugal:Lisbon,Ireland:Dublin,Sweden:Stockholm,Hungary:Budapest,"
    "Germany:Berlin,England:London,Turkey:Ankara,Kenya:Nairobi,Peru:Lima,Iraq:Baghdad,Iran:Tehran,Norway:Oslo,"
    "Thailand:Bangkok,Canada:Ottawa,India:New,Mexico:Mexico,Vietnam:Hanoi".split(",")
)
_OPPOSITES = dict(
    pair.split(":")
    for pair in "hot:cold,cold:hot,big:small,small:large,good:bad,bad:good,fast:slow,slow:fast,rich:poor,poor:rich,"
    "old:young,high:low,low:high,light:dark,dark:light,long:short,short:long,strong:weak,weak:strong,hard:soft,"
    "happy:sad,sad:happy,dry:wet,wet:dry,black:white,white:black,early:late,late:early,left:right,up:down".split(",")
)
_WOMEN = "woman,girl,mother,queen,sister,aunt,daughter,wife,actress,princess,lady,grandmother".split(",")
_MEN = "man,boy,father,king,brother,uncle,son,husband,actor,prince,gentleman,grandfather".split(",")
_HER, _HIS = (
    "Anna Mary Laura Julia Sarah Emma Alice Jane".split(),
    "Peter John David James Daniel Michael Paul Tom".split(),
)
_DEEDS = "went home because,was late because,said that,stayed in bed because,was tired when,smiled when".split(",")


def simple() -> list[Pair]:
    """A verb and its subject, nothing between."""
    starts = "The,I know that the,As you can see the,We said that the".split(",")
    return [_numbered(f"{start} {{}}", noun.split()) for start, noun in product(starts, _NOUNS)]


def past_a_phrase() -> list[Pair]:
    """A verb and its subject, a prepositional phrase between."""
    return [_numbered(f"The {{}} {place}", noun.split()) for place, noun in product(_PLACES, _NOUNS)]


def within_a_clause() -> list[Pair]:
    """The verb of a relative clause and the subject of it."""
    pairs = []
    for number, (first, (one, many)) in enumerate(product("key book letter song picture house".split(), _PEOPLE)):
        plural, singular = _VERBS[number % len(_VERBS)]
        pairs.append(Pair(f"The {first} that the {many}", f"The {first} that the {one}", f" {plural}", f" {singular}"))
    return pairs


def across_a_clause() -> list[Pair]:
    """A verb and its subject, a relative clause between."""
    pairs = []
    for noun, (one, many), (plural, singular) in product(_PEOPLE, _PEOPLE, _VERBS):
        if noun[0] != one:
            for who, verb in ((one, singular), (many, plural)):
                pairs.append(_numbered(f"The {{}} that the {who} {verb}", noun))
    return pairs


def _numbered(frame: str, noun: Sequence[str]) -> Pair:
    one, many = noun
    return Pair(frame.format(many), frame.format(one), " are", " is")


def indirect_object() -> list[Pair]:
    """Who is given something: the one of two who does not give."""
    things = "a drink,a book,a letter,the key".split(",")
    return [
        Pair(
            f"When {a} and {b} went to the store, {b} gave {thing} to",
            f"When {a} and {b} went to the store, {a} gave {thing} to",
            f" {a}",
            f" {b}",
        )
        for thing, (a, b) in product(things, permutations(_HER[:4] + _HIS[:4], 2))
    ]


def greater_than() -> list[Pair]:
    """The year in which something ended: its third digit is not below that of the year in which it began."""
    things = "war,reign,journey,expedition,plague,strike".split(",")
    return [
        Pair(
            f"The {thing} lasted from the year {century}{late}{last} to the year {century}",
            f"The {thing} lasted from the year {century}{early}{last} to the year {century}",
            str(late + 1),
            str(early + 1),
        )
        for thing, century, late, early, last in product(things, (16, 17, 18), (6, 7, 8), (1, 2, 3), (2, 5))
    ]


def capitals() -> list[Pair]:
    """The capital of a country."""
    return _looked_up("The capital of {} is", _CAPITALS)


def opposites() -> list[Pair]:
    """The opposite of an adjective."""
    return _looked_up("The opposite of {} is", _OPPOSITES)


def _looked_up(frame: str, known: dict[str, str]) -> list[Pair]:
    return [Pair(frame.format(a), frame.format(b), f" {known[a]}", f" {known[b]}") for a, b in permutations(known, 2)]


def pronouns() -> list[Pair]:
    """She or he."""
    return [Pair(f"The {a} {deed}", f"The {b} {deed}", " she", " he") for a, b, deed in product(_WOMEN, _MEN, _DEEDS)]


TASKS: dict[str, Task] = {
    "simple": simple,
    "phrase": past_a_phrase,
    "within-clause": within_a_clause,
    "across-clause": across_a_clause,
    "indirect-object": indirect_object,
    "greater-than": greater_than,
    "capitals": capitals,
    "opposites": opposites,
    "pronouns": pronouns,
}


def named(names: str) -> dict[str, list[Pair]]:
    """The pairs of tasks, a comma-separated list. Raises `UnknownName`."""
    wanted = list(TASKS) if names == "all" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in TASKS:
            raise UnknownName("task", name, TASKS, f"The tasks are {', '.join(TASKS)}.")
    return {name: TASKS[name]() for name in wanted}


def read(path: str) -> list[Pair]:
    """A file of JSON lines with clean_prefix, patch_prefix, clean_answer and patch_answer. Raises `InputError`."""
    try:
        rows = [json.loads(line) for line in read_text(path).splitlines() if line.strip()]
        names = ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")
        pairs = [Pair(*(str(row[name]) for name in names)) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{path} is not JSON lines with clean_prefix, patch_prefix, clean_answer and patch_answer."
        ) from None
    if not pairs:
        raise InputError(f"{path} has no pair; give at least one.")
    return pairs


def usable_by_task(
    model: Model, tasks: Mapping[str, Sequence[Pair]], count: int, seed: int
) -> Iterator[tuple[str, list[Pair], int]]:
    """Of each task the pairs to measure, and how many were tried; a task without any is passed over with a warning."""
    for task, pairs in tasks.items():
        right, tried = usable(model, pairs, count, seed)
        if right:
            yield task, right, tried
        else:
            log.warning(f"{task}: the model is right on none of {tried} pairs of equal length.")


def usable(model: Model, pairs: Sequence[Pair], count: int, seed: int = 0) -> tuple[list[Pair], int]:
    """The first `count`, in a seeded order, of equal length on both of which the model is right by `CLEAR` logits; and
    how many were tried."""
    order = list(pairs)
    random.Random(seed).shuffle(order)
    right: list[Pair] = []
    for tried, pair in enumerate(order, 1):
        if clear(model, pair):
            right.append(pair)
        if len(right) == count:
            return right, tried
    return right, len(order)


def answers(model: Model, pair: Pair) -> tuple[int, int]:
    """The first token of its answer, and of the other one's."""
    here, there = (model.continuation(text, pair.prompt)[0] for text in (pair.answer, pair.other_answer))
    return here, there


def clear(model: Model, pair: Pair) -> bool:
    ids = [model.token_ids(text) for text in (pair.prompt, pair.other)]
    answers = [model.continuation(text, pair.prompt)[:1] for text in (pair.answer, pair.other_answer)]
    if len(ids[0]) != len(ids[1]) or ids[0] == ids[1] or answers[0] == answers[1] or not all(answers):
        return False
    objective = plan(model, [pair.prompt, pair.other], answers[0][0], answers[1][0])
    with model.lock, torch.no_grad():
        _, (here, there) = objective.explained(model.logits(objective.batch, objective.needed))
    return bool(here > CLEAR and there < -CLEAR)
