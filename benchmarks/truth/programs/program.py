"""What a program is: a function from a prompt to an answer at each token, and the heads and neurons that compute it.

The residual stream is a list of features, such as ("token", 3): blocks of one-hot codes and single numbers. Heads
match features of the query with features of the key, so hard that the softmax is nearly 0 or 1; FFN neurons look up
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

Feature = tuple[str, int]
Vector = Mapping[Feature, float]
"""A direction of the residual stream."""
SHARP = 30.0
"""The difference of attention scores between a key that matches and one that does not."""
EVEN = 12.0
"""The same where attention is the mean over all keys that match, whose scores must be equal."""
ONES: Vector = {("one", 0): 1.0}
"""1 at every token."""
PROGRAM = "program"
Variables = dict[str, list[Any]]
BOS = "BOS"
END = "END"
PAD = "PAD"


@dataclass(frozen=True)
class Head:
    """An attention head: scores are sums of products query x key, and it adds what it copies from a key's token."""

    layer: int
    match: Sequence[tuple[Vector, Vector]]
    copy: Sequence[tuple[Vector, Vector]]
    """What is read at the key, and where it is written."""
    kind: str = PROGRAM
    chooses: bool = True
    """Whether one key wins. The other heads take the mean over the keys that match."""


@dataclass(frozen=True)
class Unit:
    """A neuron of an FFN: relu(read . x + bias), times what it writes."""

    layer: int
    read: Vector
    bias: float
    write: Vector
    kind: str = PROGRAM
    saturates: bool = False
    """Whether whatever reads it does the same where it writes twice as much."""


@dataclass
class Circuitry:
    """The heads and neurons of a program."""

    words: Sequence[str]
    outputs: Sequence[str]
    length: int
    causal: bool
    heads: list[Head] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    answers: Sequence[Vector] = ()
    """What the logit of each output reads; by default the block "out"."""

    def __post_init__(self) -> None:
        self.answers = self.answers or self.block("out", len(self.outputs))

    @property
    def layers(self) -> int:
        return 1 + max([head.layer for head in self.heads] + [unit.layer for unit in self.units])

    def word(self, name: str) -> Vector:
        """Return the feature of a token."""
        return {("token", self.words.index(name)): 1.0}

    def block(self, name: str, size: int) -> list[Vector]:
        """Return the features of a one-hot code."""
        return [{(name, number): 1.0} for number in range(size)]

    @property
    def tokens(self) -> list[Vector]:
        return self.block("token", len(self.words))

    @property
    def positions(self) -> list[Vector]:
        return self.block("position", self.length)

    def head(
        self,
        layer: int,
        match: Sequence[tuple[Vector, Vector]],
        copy: Sequence[tuple[Vector, Vector]],
        chooses: bool = True,
    ) -> None:
        self.heads.append(Head(layer, match, copy, chooses=chooses))

    def unit(self, layer: int, read: Vector, bias: float, write: Vector, saturates: bool = False) -> None:
        self.units.append(Unit(layer, read, bias, write, saturates=saturates))

    def look_up(self, layer: int, rows: Iterable[tuple[Sequence[Vector], Vector]], saturates: bool = False) -> None:
        """Add a neuron for each row of a table: it is 1 where all of its features are 1."""
        for features, write in rows:
            self.unit(layer, total(*features), 1.0 - len(features), write, saturates)

    def count(self, layer: int, share: Feature, writes: Sequence[Vector]) -> None:
        """Read a number of keys n from a share 1 / (1 + n), and write ``writes[n]``.

        A step n >= c is a difference of two neurons, with a ramp between the shares of c and of c - 1.
        """
        for number in range(1, len(writes)):
            low, high = 1 / (1 + number), 1 / number
            slope, middle = 2 / (high - low), (low + high) / 2
            change = total(writes[number], scaled(writes[number - 1], -1))
            for sign in (1, -1):
                self.unit(layer, {share: -slope}, slope * middle + sign / 2, scaled(change, sign))
        self.unit(layer, ONES, 0.0, writes[0])


def scaled(vector: Vector, factor: float) -> Vector:
    return {feature: factor * value for feature, value in vector.items()}


def total(*vectors: Vector) -> Vector:
    """Return the sum of vectors."""
    result: dict[Feature, float] = {}
    for vector in vectors:
        for feature, value in vector.items():
            result[feature] = result.get(feature, 0.0) + value
    return result


def matching(queries: Sequence[Vector], keys: Sequence[Vector], weight: float = SHARP) -> list[tuple[Vector, Vector]]:
    """Return a match of equal features."""
    return [(scaled(query, weight), key) for query, key in zip(queries, keys, strict=True)]


def copying(reads: Sequence[Vector], writes: Sequence[Vector]) -> list[tuple[Vector, Vector]]:
    return list(zip(reads, writes, strict=True))


@dataclass(frozen=True)
class Program:
    """A function from a prompt to an answer at each token."""

    name: str
    words: tuple[str, ...]
    outputs: tuple[str, ...]
    length: int
    causal: bool
    sample: Callable[[Random], list[str]]
    """Returns a prompt."""
    variables: Callable[[Sequence[str]], Variables]
    """Returns what the program computes from a prompt: variable -> its value at each token, None where it has none. The
    last variable, ``output``, is the answer."""
    build: Callable[[Circuitry], None]

    def answers(self, prompt: Sequence[str]) -> list[str | None]:
        return self.variables(prompt)["output"]

    def circuitry(self) -> Circuitry:
        circuit = Circuitry(self.words, self.outputs, self.length, self.causal)
        self.build(circuit)
        return circuit


def letters(count: int) -> tuple[str, ...]:
    return tuple("abcdefgh"[:count])


def drawn(words: Sequence[str], count: int) -> Callable[[Random], list[str]]:
    """Return a function that draws a prompt of random words after `BOS`."""
    return lambda random: [BOS, *random.choices(words, k=count)]


def at_the_end(value: Any, prompt: Sequence[str]) -> list[Any]:
    return [None] * (len(prompt) - 1) + [value]


def answer(circuit: Circuitry, layer: int, block: str, words: Sequence[str]) -> None:
    """Write the word that a block has to the output, with a neuron for each word."""
    features, outputs = circuit.block(block, len(circuit.words)), circuit.block("out", len(circuit.outputs))
    ids = [(circuit.words.index(word), circuit.outputs.index(word)) for word in words]
    circuit.look_up(layer, [([features[number]], outputs[output]) for number, output in ids])


def answer_matched(circuit: Circuitry, layer: int, match: Sequence[tuple[Vector, Vector]]) -> None:
    """Write the word that a head attends to to the output."""
    circuit.head(layer, match, copying(circuit.tokens, circuit.block("read", len(circuit.words))))
    answer(circuit, layer, "read", circuit.outputs)
