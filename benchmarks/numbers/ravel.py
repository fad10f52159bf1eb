"""RAVEL, cities: a flip edits one attribute of a city; which answers about it follow, and which stay?

python -m benchmarks.numbers.ravel --samples 150 --out ravel

`flip` makes the answer about city A that about city B, in one wording. *Cause*: the share of other wordings about the
same attribute of A whose answer is then B's. *Isolate*: the share of prompts about other attributes of A, for which B
has another value, whose answer stays A's. Only prompts that the model answers rightly count. Without a flip there is no
edit: cause 0, isolate 1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any, ClassVar

from benchmarks.numbers import common
from icebear.app.cli.verbs.evaluate import command
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.evaluation.flips import SEARCHES
from icebear.evaluation.protocol import Evaluation, Lines, Part, Seed
from icebear.models.model import Model
from icebear.records import Neuron
from icebear.steering.apply import steer
from icebear.steering.flipping.flip import FlipRequest, flip_by

COLUMNS = {
    "flipped": "share of flips that succeed in the wording that is edited",
    "cause": "other wordings about this attribute that take B's value, higher is better",
    "isolate": "prompts about other attributes that keep A's value, higher is better",
    "score": "mean of cause and isolate, higher is better",
    "edits": "edits of a flip",
}
ATTRIBUTES = ("Country", "Continent", "Language")
"""Those whose values are words that more than one city has."""
WORDINGS = 5
OTHERS_TRIED = 12
RANDOM_HEADS = "random heads"


@dataclass(frozen=True)
class Asked:
    """City A, the attribute to edit, the cities tried as B, and the frames of each attribute in a seeded order."""

    city: str
    attribute: str
    others: tuple[str, ...]
    frames: dict[str, tuple[str, ...]]


def questions(seed: int) -> Iterator[Asked]:
    """Yield cities of the test part in a seeded order, attribute by attribute."""
    split = common.read("ravel/ravel_city_entity_to_split.json")
    prompts = common.read("ravel/ravel_city_attribute_to_prompts.json")
    cities = common.shuffled([city for city, of in split.items() if of == "test"], seed)
    for number, city in enumerate(cities):
        generator = random.Random(f"{seed} {city}")
        frames = {name: tuple(generator.sample(usable_frames(prompts[name]), WORDINGS)) for name in ATTRIBUTES}
        others = tuple(generator.sample(cities, OTHERS_TRIED))
        yield Asked(city, ATTRIBUTES[number % len(ATTRIBUTES)], others, frames)


def usable_frames(frames: Sequence[str]) -> list[str]:
    """Return the frames after which an answer begins with a space."""
    return [frame for frame in frames if frame.count("%s") == 1 and frame[-1] not in '" (']


def known(model: Model, city: str, attribute: str, frames: Sequence[str]) -> list[str]:
    """Return the frames in which the model knows an attribute of a city."""
    answer = values_of(city)[attribute]
    are_right = common.are_right(model, [frame % city for frame in frames], [answer] * len(frames))
    return [frame for frame, right in zip(frames, are_right, strict=True) if right]


def values_of(city: str) -> dict[str, str]:
    return _VALUES[city]


_VALUES = common.read("ravel/ravel_city_entity_attributes.json") if common.DATA.exists() else {}


@dataclass(frozen=True)
class Case:
    """A prompt to flip, the source prompt, and the prompts that are asked after it."""

    prompt: str
    source: str
    to: str
    cause: tuple[str, ...]
    isolate: tuple[tuple[str, str], ...]
    """With A's values."""


def case_of(model: Model, one: Asked, right: Sequence[str]) -> Case | None:
    """Return the case; None if the model knows too little of A, or no B."""
    mine = values_of(one.city)
    if len(right) < 2:
        return None
    for other in one.others:
        theirs = values_of(other)
        tokens = [common.answer_token(model, right[0] % one.city, of[one.attribute]) for of in (mine, theirs)]
        if tokens[0] == tokens[1] or not common.is_right(model, right[0] % other, theirs[one.attribute]):
            continue
        rest = [name for name in ATTRIBUTES if name != one.attribute and mine[name] != theirs[name]]
        isolate = [(f % one.city, mine[name]) for name in rest for f in known(model, one.city, name, one.frames[name])]
        if isolate:
            cause = tuple(frame % one.city for frame in right[1:])
            source = right[0] % other
            return Case(right[0] % one.city, source, theirs[one.attribute], cause, tuple(isolate))
    return None


def judged(model: Model, case: Case, edits: Sequence[Edit], flipped: bool) -> dict[str, float]:
    """Return the columns under edits."""
    with steer(model, edits) if edits else nullcontext():
        cause = fmean(common.are_right(model, case.cause, [case.to] * len(case.cause)))
        isolate = fmean(common.are_right(model, *zip(*case.isolate, strict=True)))
    numbers = (float(flipped), cause, isolate, (cause + isolate) / 2, float(len(edits)))
    return dict(zip(COLUMNS, numbers, strict=True))


def measured(model: Model, one: Asked, seed: int) -> dict[str, Any]:
    right = known(model, one.city, one.attribute, one.frames[one.attribute])
    case = case_of(model, one, right)
    about = {"city": one.city, "attribute": one.attribute, "right": len(right), "prompts": WORDINGS}
    if case is None:
        return {**about, "counts": False, "methods": {}}
    methods, edits, written = {}, [], {}
    token = common.answer_token(model, case.prompt, case.to)
    for name, options in SEARCHES.items():
        try:
            edits = list(flip_by(FlipRequest(model, case.prompt, token, case.source, **options)).edits)
        except InputError:
            edits = []
        methods[name] = judged(model, case, edits, bool(edits))
        written[name] = list(map(str, edits))
    generator = random.Random(f"{seed} {one.city}")
    count = len(written["heads, then neurons"]) or 1
    drawn = [
        Edit.from_prompt(Neuron(generator.randrange(model.layers), "head", head), case.source)
        for head in generator.sample(range(model.heads), min(count, model.heads))
    ]
    with steer(model, drawn):
        flipped = common.is_right(model, case.prompt, case.to)
    methods[RANDOM_HEADS] = judged(model, case, drawn, flipped)
    methods["all heads"] = _all_heads(model, case)
    return {**about, **vars(case), "edits": written, "methods": methods}


def _all_heads(model: Model, case: Case) -> dict[str, float]:
    """Return the columns with all heads of the last third of the layers swapped: an upper bound of cause."""
    layers = range(2 * model.layers // 3, model.layers)
    edits = [Edit.from_prompt(Neuron(n, "head", head), case.source) for n in layers for head in range(model.heads)]
    with steer(model, edits):
        flipped = common.is_right(model, case.prompt, case.to)
    return judged(model, case, edits, flipped)


def notes(lines: Lines) -> list[str]:
    prompts, right = (sum(line[key] for line in lines) for key in ("prompts", "right"))
    counted = sum(line.get("counts", True) for line in lines)
    return [f"the model is right on {right} of {prompts} prompts about {len(lines)} cities; {counted} are usable"]


@dataclass(frozen=True)
class Ravel(Evaluation):
    """Flips of one attribute of a city, judged by RAVEL's cause and isolate scores."""

    name: ClassVar = "ravel"
    samples: common.Samples = 150
    seed: Seed = 0

    def parts(self, model: Model) -> Iterator[Part]:
        tried = list(islice(questions(self.seed), self.samples))
        yield Part(COLUMNS, tried, partial(measured, model, seed=self.seed), notes=notes)


if __name__ == "__main__":
    command(Ravel)()
