"""Decoys: heads and neurons that are active and do not matter, each kind for a reason of its own."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from benchmarks.truth.programs.program import (
    ONES,
    SHARP,
    Circuitry,
    Feature,
    Head,
    Unit,
    Vector,
    scaled,
    total,
)

KINDS = {
    "idle": "nothing reads what it writes",
    "cancelling": "another one writes the opposite",
    "redundant": "another one does the same, and either suffices",
    "other inputs": "what it writes is read only at a token that the prompts do not have",
    "saturated": "it changes attention scores too little to change attention weights",
}
RARE = "RARE"
"""The token of "other inputs"."""
IDLE_UNITS = 4
"""Idle neurons of each layer."""
IDLE_HEADS = 1
"""Idle heads of each layer."""
CANCELING_PAIRS = 2
"""Pairs of neurons that cancel."""
OTHER_UNITS = 2
"""Neurons for other inputs."""
JITTER_UNITS = 2
"""Neurons of each layer that change scores."""
PART = 0.3
"""What one neuron of a pair that cancels adds to an answer, which has 1. It is too little to replace the program."""
JITTER: Vector = {("jitter", 0): 1.0}


def with_decoys(circuitry: Circuitry, seed: int = 0) -> Circuitry:
    """Return a program with decoys of all kinds, and a last layer of steps that makes redundant neurons possible."""
    random, last = Random(seed), circuitry.layers - 1
    units = [*circuitry.units, *steps(circuitry)]
    jittery = (scaled(ONES, 0.1 * SHARP), JITTER)
    heads = [
        replace(head, match=[*head.match, jittery]) if head.chooses and head.layer else head for head in circuitry.heads
    ]
    units += [replace(unit, kind="redundant") for unit in units if is_saturating(unit, last) and random.random() < 0.5]
    decoyed = replace(
        circuitry,
        words=(*circuitry.words, RARE),
        heads=heads,
        units=units,
        answers=[_answer(vector) for vector in circuitry.answers],
    )
    choosing = [head.layer for head in circuitry.heads if head.chooses]
    for layer in range(last + 1):
        for _ in range(IDLE_UNITS):
            read, _ = reading(circuitry, layer, random)
            decoyed.units.append(Unit(layer, read, 0.0, _junk(random), "idle"))
        decoyed.heads += [_head(decoyed, layer, random, "idle", _junk(random)) for _ in range(IDLE_HEADS)]
        if any(layer < later for later in choosing):
            decoyed.units += [jitter(circuitry, layer, random) for _ in range(JITTER_UNITS)]
    for _ in range(CANCELING_PAIRS):
        decoyed.units += cancelling_units(circuitry, random)
    write = direction(circuitry, random)
    head = _head(decoyed, last + 1, random, "cancelling", write)
    decoyed.heads += [head, replace(head, copy=[(read, scaled(write, -1)) for read, _ in head.copy])]
    for _ in range(OTHER_UNITS):
        read, _ = reading(circuitry, last, random)
        decoyed.units.append(Unit(last, read, 0.0, {("rare", 0): 1.0}, "other inputs"))
    gate = total({("rare", 0): 1.0}, scaled(decoyed.word(RARE), 20.0))
    decoyed.units.append(Unit(last + 1, gate, -20.0, {("answer", 0): 1.0}, "other inputs"))
    return decoyed


def steps(circuitry: Circuitry) -> list[Unit]:
    """Return two neurons for each feature of the answer, which make it 0 below 7/16 and 1 above 9/16."""
    units, features = [], dict.fromkeys(feature for vector in circuitry.answers for feature in vector)
    for feature in features:
        if feature[0] == "out":
            for bias, sign in ((-3.5, 1.0), (-4.5, -1.0)):
                units.append(Unit(circuitry.layers, {feature: 8.0}, bias, {("answer", feature[1]): sign}))
    return units


def _answer(vector: Vector) -> Vector:
    return {("answer" if name == "out" else name, number): value for (name, number), value in vector.items()}


def is_saturating(unit: Unit, last: int) -> bool:
    """Return whether a second neuron like this one changes nothing."""
    return unit.saturates or (unit.layer == last and all(name == "out" for name, _ in unit.write))


def jitter(circuitry: Circuitry, layer: int, random: Random) -> Unit:
    read, size = reading(circuitry, layer, random)
    return Unit(layer, read, 0.0, scaled(JITTER, 1 / size), "saturated")


def reading(circuitry: Circuitry, layer: int, random: Random) -> tuple[Vector, float]:
    """Return random weights of some features that the program's neurons of a layer read, and their sum."""
    read = (feature for unit in circuitry.units if unit.layer == layer for feature in unit.read)
    features: list[Feature] = sorted(set(read))
    chosen = random.sample(features, min(6, len(features)))
    weights = {feature: random.uniform(0.5, 1.5) for feature in chosen}
    return weights, sum(weights.values())


def direction(circuitry: Circuitry, random: Random) -> Vector:
    """Return a direction that changes the logits of the answers by a part of what the program does."""
    features = dict.fromkeys(feature for vector in circuitry.answers for feature in vector if feature[0] == "out")
    signs = random.sample([PART * (-1) ** number for number in range(len(features))], len(features))
    return _answer(dict(zip(features, signs, strict=True)))


def _junk(random: Random) -> Vector:
    return {("junk", random.randrange(3)): 0.25}


def cancelling_units(circuitry: Circuitry, random: Random) -> list[Unit]:
    """Return two neurons of the last layer, one twice as active, that write opposite directions."""
    read, _ = reading(circuitry, circuitry.layers - 1, random)
    write = direction(circuitry, random)
    return [
        Unit(circuitry.layers, read, 0.0, write, "cancelling"),
        Unit(circuitry.layers, scaled(read, 2.0), 0.0, scaled(write, -0.5), "cancelling"),
    ]


def _head(circuitry: Circuitry, layer: int, random: Random, kind: str, write: Vector) -> Head:
    """Return a head with random, soft attention to tokens."""

    def mixed() -> Vector:
        return {("token", number): random.gauss(0, 1) for number in range(len(circuitry.words))}

    return Head(layer, [(mixed(), mixed()) for _ in range(2)], [(mixed(), write)], kind)
