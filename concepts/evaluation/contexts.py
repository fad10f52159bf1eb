"""Contexts of which we know what answers a question: facts, a needle, two hops, documents; made from templates."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from icebear.concepts.calibration import TEXTS
from icebear.errors import InputError


@dataclass(frozen=True)
class Item:
    """A context of parts, of which some are the evidence, a question, and what the answer says."""

    parts: tuple[str, ...]
    evidence: tuple[int, ...]
    question: str
    said: tuple[str, ...]
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
        kept = line.split()[:words]
        parts += [f"{' '.join(kept).rstrip('.,;:')}."] if kept else []
        words -= len(kept)
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
    said = (lead, f" {others[at]}", f". {others[at]} lives in", f" {cities[at]}")
    evidence = (parts.index(are[at]), parts.index(live[at]))
    return Item(tuple(parts), evidence, question, said, f" {cities[at - 1]}")


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
