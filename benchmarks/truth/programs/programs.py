"""All programs by name: those that fetch words from other places, and those that count and calculate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

from benchmarks.truth.programs.program import (
    BOS,
    END,
    EVEN,
    ONES,
    PAD,
    SHARP,
    Circuitry,
    Program,
    Variables,
    Vector,
    answer,
    answer_matched,
    at_the_end,
    copying,
    drawn,
    letters,
    matching,
    scaled,
    total,
)


def previous_variables(prompt: Sequence[str]) -> Variables:
    before = [None, *prompt[:-1]]
    following = dict(zip(letters(4), (*letters(4)[1:], "a"), strict=True))
    return {"before": before, "output": [following.get(word or "") for word in before]}


def previous(circuit: Circuitry) -> None:
    before = circuit.block("before", len(circuit.words))
    circuit.head(0, matching(circuit.positions[1:], circuit.positions[:-1]), copying(circuit.tokens, before))
    outputs = circuit.block("out", 4)
    circuit.look_up(0, [([before[1 + number]], outputs[(number + 1) % 4]) for number in range(4)])


def induction_variables(prompt: Sequence[str]) -> Variables:
    """Answer with the word that followed the same word before, if it was there once."""
    answers = []
    for position, word in enumerate(prompt):
        after = [prompt[at + 1] for at in range(1, position) if prompt[at] == word]
        answers.append(after[0] if len(after) == 1 else None)
    return {"before": [None, *prompt[:-1]], "output": answers}


def induction(circuit: Circuitry) -> None:
    before, earlier, read = (circuit.block(name, len(circuit.words)) for name in ("before", "earlier", "read"))
    circuit.head(0, matching(circuit.positions[1:], circuit.positions[:-1]), copying(circuit.tokens, before))
    circuit.look_up(0, [([a], b) for a, b in zip(before, earlier, strict=True)], saturates=True)
    circuit.head(1, matching(circuit.tokens, earlier), copying(circuit.tokens, read))
    answer(circuit, 1, "read", circuit.outputs)


def reverse_sample(random: Random) -> list[str]:
    words = random.choices(letters(4), k=random.randint(3, 6))
    return [BOS, *words, END, *[PAD] * (6 - len(words))]


def reverse_variables(prompt: Sequence[str]) -> Variables:
    end = prompt.index(END)
    pointer = [end - position if 0 < position < end else None for position in range(len(prompt))]
    return {
        "end": [end] * len(prompt),
        "pointer": pointer,
        "output": [None if position is None else prompt[position] for position in pointer],
    }


def reverse(circuit: Circuitry) -> None:
    end, pointer = (circuit.block(name, circuit.length) for name in ("end", "pointer"))
    circuit.head(0, [(scaled(ONES, SHARP), circuit.word(END))], copying(circuit.positions, end))
    pairs = [(n, at) for at in range(4, circuit.length) for n in range(1, at)]
    circuit.look_up(0, [([circuit.positions[n], end[at]], pointer[at - n]) for n, at in pairs], saturates=True)
    answer_matched(circuit, 1, matching(pointer, circuit.positions))


def conditional_sample(random: Random) -> list[str]:
    left = random.choice(letters(4))
    right = left if random.random() < 0.5 else random.choice(letters(4))
    return [BOS, left, right, *random.choices(letters(4), k=2), END]


def conditional_variables(prompt: Sequence[str]) -> Variables:
    """BOS, four words and END: the third word if the first two are equal, or else the fourth."""
    equal = prompt[1] == prompt[2]
    return {"pointer": at_the_end(3 if equal else 4, prompt), "output": at_the_end(prompt[3 if equal else 4], prompt)}


def conditional(circuit: Circuitry) -> None:
    left, right = (circuit.block(name, len(circuit.words)) for name in ("first", "second"))
    for position, block in ((1, left), (2, right)):
        circuit.head(0, [(scaled(ONES, SHARP), circuit.positions[position])], copying(circuit.tokens, block))
    pointer = circuit.block("pointer", circuit.length)
    words = range(1, len(circuit.words) - 1)
    rows = [([circuit.word(END), left[a], right[b]], pointer[3 if a == b else 4]) for a, b in product(words, repeat=2)]
    circuit.look_up(0, rows, saturates=True)
    answer_matched(circuit, 1, matching(pointer, circuit.positions))


def hops_sample(random: Random) -> list[str]:
    """Three pairs of a key and a value, and a key whose value is a key."""
    a, b, c, d, e = random.sample(letters(6), 5)
    pairs = [(a, b), (b, c), (d, random.choice((c, e)))]
    random.shuffle(pairs)
    return [BOS, *(word for pair in pairs for word in pair), a]


def hops_variables(prompt: Sequence[str]) -> Variables:
    table = dict(zip(prompt[1:7:2], prompt[2:7:2], strict=True))
    hop = table.get(prompt[-1])
    return {
        "key": [prompt[position - 1] if position in (2, 4, 6) else None for position in range(len(prompt))],
        "hop": at_the_end(hop, prompt),
        "output": at_the_end(table.get(hop or ""), prompt),
    }


def hops(circuit: Circuitry) -> None:
    size = len(circuit.words)
    before, key, value, hop, read = (circuit.block(name, size) for name in ("before", "key", "first", "hop", "read"))
    circuit.head(0, matching(circuit.positions[1:], circuit.positions[:-1]), copying(circuit.tokens, before))
    is_value = total(*(circuit.positions[position] for position in (2, 4, 6)))
    circuit.look_up(0, [([before[n], is_value], key[n]) for n in range(1, size)], saturates=True)
    circuit.head(1, matching(circuit.tokens, key), copying(circuit.tokens, value))
    circuit.look_up(1, [([value[n]], hop[n]) for n in range(1, size)], saturates=True)
    circuit.head(2, matching(hop, key), copying(circuit.tokens, read))
    answer(circuit, 2, "read", circuit.outputs)


def histogram_variables(prompt: Sequence[str]) -> Variables:
    counts = [None if word == BOS else str(prompt.count(word)) for word in prompt]
    return {"output": counts}


def histogram(circuit: Circuitry) -> None:
    match = [*matching(circuit.tokens[1:], circuit.tokens[1:], EVEN), (scaled(ONES, EVEN), circuit.word(BOS))]
    circuit.head(0, match, [(circuit.word(BOS), {("share", 0): 1.0})], chooses=False)
    counts, outputs = circuit.block("count", len(circuit.outputs) + 1), circuit.block("out", len(circuit.outputs))
    circuit.count(0, ("share", 0), counts)
    circuit.look_up(1, [([count], output) for count, output in zip(counts[1:], outputs, strict=True)])


def sort_variables(prompt: Sequence[str]) -> Variables:
    order = sorted(range(1, len(prompt)), key=lambda position: (prompt[position], position))
    ranks = [None, *(1 + order.index(position) for position in range(1, len(prompt)))]
    return {"rank": ranks, "output": [None, *(prompt[position] for position in order)]}


def sort(circuit: Circuitry) -> None:
    """Number the pairs of word and place in their order, count the smaller ones, and fetch the n-th."""
    words, positions = range(1, len(circuit.words)), range(1, circuit.length)
    start, *code = circuit.block("code", 1 + len(words) * len(positions))
    pairs = zip(code, product(words, positions), strict=True)
    circuit.look_up(0, [([circuit.tokens[word], circuit.positions[at]], feature) for feature, (word, at) in pairs])
    circuit.look_up(0, [([circuit.word(BOS)], start)])
    larger = [total(*(scaled(above, EVEN) for above in code[n + 1 :])) for n in range(len(code))]
    match = [(scaled(ONES, EVEN), start), *zip(larger[:-1], code[:-1], strict=True)]
    circuit.head(1, match, [(circuit.word(BOS), {("share", 0): 1.0})], chooses=False)
    ranks = circuit.block("rank", len(positions))
    circuit.count(1, ("share", 0), ranks)
    match = [*matching(circuit.positions[1:], ranks), (scaled(ONES, -2 * SHARP), circuit.word(BOS))]
    answer_matched(circuit, 2, match)


def parity_variables(prompt: Sequence[str]) -> Variables:
    counts = [prompt[: position + 1].count("1") for position in range(len(prompt))]
    return {"count": counts, "output": [None, *(("even", "odd")[count % 2] for count in counts[1:])]}


def parity(circuit: Circuitry) -> None:
    match = [(scaled(ONES, EVEN), total(circuit.word(BOS), circuit.word("1")))]
    circuit.head(0, match, [(circuit.word(BOS), {("share", 0): 1.0})], chooses=False)
    counts, outputs = circuit.block("count", circuit.length), circuit.block("out", 2)
    circuit.count(0, ("share", 0), counts)
    circuit.look_up(1, [([count], outputs[number % 2]) for number, count in enumerate(counts)])


def brackets_sample(random: Random) -> list[str]:
    """Half of the prompts are balanced, the others differ in a bracket or two."""
    word = ""
    while len(word) < 8:
        depth = word.count("(") - word.count(")")
        word += random.choice("()") if 0 < depth < 8 - len(word) else ")" if depth else "("
    signs = list(word)
    if random.random() < 0.5:
        for position in random.sample(range(8), random.randint(1, 2)):
            signs[position] = "()"[signs[position] == "("]
    return [BOS, *signs, END]


def brackets_variables(prompt: Sequence[str]) -> Variables:
    opened, closed = ([prompt[: position + 1].count(sign) for position in range(len(prompt))] for sign in "()")
    depth = [a - b for a, b in zip(opened, closed, strict=True)]
    below = [min(depth[: position + 1]) < 0 for position in range(len(prompt))]
    balanced = depth[-1] == 0 and not below[-1]
    values: Variables = {"opened": opened, "closed": closed, "depth": depth, "below": below}
    return values | {"output": at_the_end("balanced" if balanced else "other", prompt)}


def brackets(circuit: Circuitry) -> None:
    size = circuit.length - 2
    counts = {}
    for sign in "()":
        match = [(scaled(ONES, EVEN), total(circuit.word(BOS), circuit.word(sign)))]
        circuit.head(0, match, [(circuit.word(BOS), {(f"share {sign}", 0): 1.0})], chooses=False)
        counts[sign] = circuit.block(f"count {sign}", size + 1)
        circuit.count(0, (f"share {sign}", 0), counts[sign])
    zero, negative, violation = ({(name, 0): 1.0} for name in ("zero", "negative", "violation"))
    for a, b in product(range(size + 1), repeat=2):
        if a + b <= size and a <= b:
            circuit.look_up(1, [([counts["("][a], counts[")"][b]], zero if a == b else negative)], saturates=a < b)
    match = [(scaled(ONES, 2 * SHARP), negative), (scaled(ONES, SHARP), circuit.word(BOS))]
    circuit.head(2, match, [(negative, violation)])
    circuit.unit(2, total(zero, scaled(violation, -1)), 0.0, {("out", 0): 1.0})
    circuit.answers = [{("out", 0): 1.0}, scaled(ONES, 0.5)]


def addition_variables(prompt: Sequence[str]) -> Variables:
    """BOS, the digits of two numbers of base 3, the smallest first; the answer is at the second number's digits."""
    a, b = ([int(word) for word in part] for part in (prompt[1:5], prompt[5:]))
    low, kinds, carries, digits, carry = [], [], [], [], 0
    for x, y in zip(a, b, strict=True):
        low.append((x + y) % 3)
        kinds.append("stops" if x + y < 2 else "passes" if x + y == 2 else "makes")
        carries.append(carry)
        digits.append(str((x + y + carry) % 3))
        carry = (x + y + carry) // 3
    start: list[Any] = [None] * 5
    return {"low": start + low, "kind": start + kinds, "carry": start + carries, "output": start + digits}


def addition(circuit: Circuitry) -> None:
    """The carry into a digit is made by the last digit before it that does not pass a carry on."""
    second, digits = range(5, 9), ("0", "1", "2")
    other, low, outputs = circuit.block("other", 4), circuit.block("low", 3), circuit.block("out", 3)
    stops, makes, carry = ({(name, 0): 1.0} for name in ("stops", "makes", "carry"))
    seconds = [circuit.positions[position] for position in second]
    circuit.head(0, matching(seconds, circuit.positions[1:5]), copying(circuit.tokens, other))
    for x, y in product(range(3), repeat=2):
        kind = [stops] * (x + y < 2) + [makes] * (x + y > 2)
        pair = [circuit.word(digits[x]), other[circuit.words.index(digits[y])], total(*seconds)]
        circuit.look_up(0, [(pair, total(low[(x + y) % 3], *kind))])
    match = [*nearest_before(circuit, second), (scaled(ONES, 10 * SHARP), total(stops, makes))]
    circuit.head(1, match, [(makes, carry)])
    for digit in range(3):
        circuit.look_up(1, [([low[digit], carry], outputs[(digit + 1) % 3])])
        circuit.unit(1, total(low[digit], scaled(carry, -1)), 0.0, outputs[digit])


def nearest_before(circuit: Circuitry, positions: Sequence[int]) -> list[tuple[Vector, Vector]]:
    """Match the last of these places before the query's, and `BOS` if there is none."""
    match = [(scaled(ONES, (len(positions) + 1) * SHARP), circuit.word(BOS))]
    for number, position in enumerate(positions):
        later = [scaled(circuit.positions[at], (number + 1) * SHARP) for at in positions if at > position]
        match.append((total(scaled(circuit.positions[position], -20 * SHARP), *later), circuit.positions[position]))
    return match


_ALL = (
    Program("previous", (BOS, *letters(4)), letters(4), 6, True, drawn(letters(4), 5), previous_variables, previous),
    Program("induction", (BOS, *letters(5)), letters(5), 8, True, drawn(letters(5), 7), induction_variables, induction),
    Program("reverse", (BOS, *letters(4), END, PAD), letters(4), 8, False, reverse_sample, reverse_variables, reverse),
    Program(
        "conditional",
        (BOS, *letters(4), END),
        letters(4),
        6,
        True,
        conditional_sample,
        conditional_variables,
        conditional,
    ),
    Program("hops", (BOS, *letters(6)), letters(6), 8, True, hops_sample, hops_variables, hops),
    Program(
        "histogram",
        (BOS, *letters(3)),
        tuple("1234567"),
        8,
        False,
        drawn(letters(3), 7),
        histogram_variables,
        histogram,
    ),
    Program("sort", (BOS, *letters(4)), letters(4), 7, False, drawn(letters(4), 6), sort_variables, sort),
    Program("parity", (BOS, "0", "1"), ("even", "odd"), 8, True, drawn("01", 7), parity_variables, parity),
    Program(
        "brackets", (BOS, "(", ")", END), ("balanced", "other"), 10, True, brackets_sample, brackets_variables, brackets
    ),
    Program("addition", (BOS, "0", "1", "2"), tuple("012"), 9, True, drawn("012", 8), addition_variables, addition),
)
PROGRAMS = {program.name: program for program in _ALL}
