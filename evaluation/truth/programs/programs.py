"""All programs by name: those that fetch words from other places, and those that count and calculate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

from icebear.evaluation.truth.programs.program import (
    BOS,
    END,
    EVEN,
    ONE,
    PAD,
    SHARP,
    Circuitry,
    Program,
    Variables,
    Vector,
    answer,
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


def previous(made: Circuitry) -> None:
    before = made.block("before", len(made.words))
    made.head(0, matching(made.positions[1:], made.positions[:-1]), copying(made.tokens, before))
    outputs = made.block("out", 4)
    made.look_up(0, [([before[1 + number]], outputs[(number + 1) % 4]) for number in range(4)])


def induction_variables(prompt: Sequence[str]) -> Variables:
    """Answer with the word that followed the same word before, if it was there once."""
    answers = []
    for place, word in enumerate(prompt):
        after = [prompt[at + 1] for at in range(1, place) if prompt[at] == word]
        answers.append(after[0] if len(after) == 1 else None)
    return {"before": [None, *prompt[:-1]], "output": answers}


def induction(made: Circuitry) -> None:
    before, earlier, read = (made.block(name, len(made.words)) for name in ("before", "earlier", "read"))
    made.head(0, matching(made.positions[1:], made.positions[:-1]), copying(made.tokens, before))
    made.look_up(0, [([a], b) for a, b in zip(before, earlier, strict=True)], saturates=True)
    made.head(1, matching(made.tokens, earlier), copying(made.tokens, read))
    answer(made, 1, "read", made.outputs)


def reverse_sample(random: Random) -> list[str]:
    words = random.choices(letters(4), k=random.randint(3, 6))
    return [BOS, *words, END, *[PAD] * (6 - len(words))]


def reverse_variables(prompt: Sequence[str]) -> Variables:
    end = prompt.index(END)
    pointer = [end - place if 0 < place < end else None for place in range(len(prompt))]
    return {
        "end": [end] * len(prompt),
        "pointer": pointer,
        "output": [None if place is None else prompt[place] for place in pointer],
    }


def reverse(made: Circuitry) -> None:
    end, pointer = (made.block(name, made.length) for name in ("end", "pointer"))
    made.head(0, [(scaled(ONE, SHARP), made.word(END))], copying(made.positions, end))
    places = [(place, at) for at in range(4, made.length) for place in range(1, at)]
    made.look_up(0, [([made.positions[place], end[at]], pointer[at - place]) for place, at in places], saturates=True)
    made.head(1, matching(pointer, made.positions), copying(made.tokens, made.block("read", len(made.words))))
    answer(made, 1, "read", made.outputs)


def conditional_sample(random: Random) -> list[str]:
    first = random.choice(letters(4))
    second = first if random.random() < 0.5 else random.choice(letters(4))
    return [BOS, first, second, *random.choices(letters(4), k=2), END]


def conditional_variables(prompt: Sequence[str]) -> Variables:
    """BOS, four words and END: the third word if the first two are equal, or else the fourth."""
    equal = prompt[1] == prompt[2]
    return {"pointer": at_the_end(3 if equal else 4, prompt), "output": at_the_end(prompt[3 if equal else 4], prompt)}


def conditional(made: Circuitry) -> None:
    first, second = (made.block(name, len(made.words)) for name in ("first", "second"))
    for place, block in ((1, first), (2, second)):
        made.head(0, [(scaled(ONE, SHARP), made.positions[place])], copying(made.tokens, block))
    pointer = made.block("pointer", made.length)
    words = range(1, len(made.words) - 1)
    rows = [([made.word(END), first[a], second[b]], pointer[3 if a == b else 4]) for a, b in product(words, repeat=2)]
    made.look_up(0, rows, saturates=True)
    made.head(1, matching(pointer, made.positions), copying(made.tokens, made.block("read", len(made.words))))
    answer(made, 1, "read", made.outputs)


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
        "key": [prompt[place - 1] if place in (2, 4, 6) else None for place in range(len(prompt))],
        "hop": at_the_end(hop, prompt),
        "output": at_the_end(table.get(hop or ""), prompt),
    }


def hops(made: Circuitry) -> None:
    size = len(made.words)
    before, key, first, hop, read = (made.block(name, size) for name in ("before", "key", "first", "hop", "read"))
    made.head(0, matching(made.positions[1:], made.positions[:-1]), copying(made.tokens, before))
    is_value = total(*(made.positions[place] for place in (2, 4, 6)))
    made.look_up(0, [([before[n], is_value], key[n]) for n in range(1, size)], saturates=True)
    made.head(1, matching(made.tokens, key), copying(made.tokens, first))
    made.look_up(1, [([first[n]], hop[n]) for n in range(1, size)], saturates=True)
    made.head(2, matching(hop, key), copying(made.tokens, read))
    answer(made, 2, "read", made.outputs)


def histogram_variables(prompt: Sequence[str]) -> Variables:
    counts = [None if word == BOS else str(prompt.count(word)) for word in prompt]
    return {"output": counts}


def histogram(made: Circuitry) -> None:
    match = [*matching(made.tokens[1:], made.tokens[1:], EVEN), (scaled(ONE, EVEN), made.word(BOS))]
    made.head(0, match, [(made.word(BOS), {("share", 0): 1.0})], chooses=False)
    counts, outputs = made.block("count", len(made.outputs) + 1), made.block("out", len(made.outputs))
    made.count(0, ("share", 0), counts)
    made.look_up(1, [([count], output) for count, output in zip(counts[1:], outputs, strict=True)])


def sort_variables(prompt: Sequence[str]) -> Variables:
    order = sorted(range(1, len(prompt)), key=lambda place: (prompt[place], place))
    ranks = [None, *(1 + order.index(place) for place in range(1, len(prompt)))]
    return {"rank": ranks, "output": [None, *(prompt[place] for place in order)]}


def sort(made: Circuitry) -> None:
    """Number the pairs of word and place in their order, count the smaller ones, and fetch the n-th."""
    words, places = range(1, len(made.words)), range(1, made.length)
    start, *code = made.block("code", 1 + len(words) * len(places))
    pairs = enumerate(product(words, places))
    made.look_up(0, [([made.tokens[word], made.positions[place]], code[n]) for n, (word, place) in pairs])
    made.look_up(0, [([made.word(BOS)], start)])
    larger = [total(*(scaled(above, EVEN) for above in code[n + 1 :])) for n in range(len(code))]
    match = [(scaled(ONE, EVEN), start), *zip(larger[:-1], code[:-1], strict=True)]
    made.head(1, match, [(made.word(BOS), {("share", 0): 1.0})], chooses=False)
    ranks = made.block("rank", len(places))
    made.count(1, ("share", 0), ranks)
    match = [*matching(made.positions[1:], ranks), (scaled(ONE, -2 * SHARP), made.word(BOS))]
    made.head(2, match, copying(made.tokens, made.block("read", len(made.words))))
    answer(made, 2, "read", made.outputs)


def parity_variables(prompt: Sequence[str]) -> Variables:
    counts = [prompt[: place + 1].count("1") for place in range(len(prompt))]
    return {"count": counts, "output": [None, *(("even", "odd")[count % 2] for count in counts[1:])]}


def parity(made: Circuitry) -> None:
    match = [(scaled(ONE, EVEN), total(made.word(BOS), made.word("1")))]
    made.head(0, match, [(made.word(BOS), {("share", 0): 1.0})], chooses=False)
    counts, outputs = made.block("count", made.length), made.block("out", 2)
    made.count(0, ("share", 0), counts)
    made.look_up(1, [([count], outputs[number % 2]) for number, count in enumerate(counts)])


def brackets_sample(random: Random) -> list[str]:
    """Half of the prompts are balanced, the others differ in a bracket or two."""
    word = ""
    while len(word) < 8:
        depth = word.count("(") - word.count(")")
        word += random.choice("()") if 0 < depth < 8 - len(word) else ")" if depth else "("
    signs = list(word)
    if random.random() < 0.5:
        for place in random.sample(range(8), random.randint(1, 2)):
            signs[place] = "()"[signs[place] == "("]
    return [BOS, *signs, END]


def brackets_variables(prompt: Sequence[str]) -> Variables:
    opened, closed = ([prompt[: place + 1].count(sign) for place in range(len(prompt))] for sign in "()")
    depth = [a - b for a, b in zip(opened, closed, strict=True)]
    below = [min(depth[: place + 1]) < 0 for place in range(len(prompt))]
    balanced = depth[-1] == 0 and not below[-1]
    values: Variables = {"opened": opened, "closed": closed, "depth": depth, "below": below}
    return values | {"output": at_the_end("balanced" if balanced else "other", prompt)}


def brackets(made: Circuitry) -> None:
    size = made.length - 2
    counts = {}
    for sign in "()":
        match = [(scaled(ONE, EVEN), total(made.word(BOS), made.word(sign)))]
        made.head(0, match, [(made.word(BOS), {(f"share {sign}", 0): 1.0})], chooses=False)
        counts[sign] = made.block(f"count {sign}", size + 1)
        made.count(0, (f"share {sign}", 0), counts[sign])
    zero, negative, violation = ({(name, 0): 1.0} for name in ("zero", "negative", "violation"))
    for a, b in product(range(size + 1), repeat=2):
        if a + b <= size and a <= b:
            made.look_up(1, [([counts["("][a], counts[")"][b]], zero if a == b else negative)], saturates=a < b)
    match = [(scaled(ONE, 2 * SHARP), negative), (scaled(ONE, SHARP), made.word(BOS))]
    made.head(2, match, [(negative, violation)])
    made.unit(2, total(zero, scaled(violation, -1)), 0.0, {("out", 0): 1.0})
    made.answers = [{("out", 0): 1.0}, scaled(ONE, 0.5)]


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


def addition(made: Circuitry) -> None:
    """The carry into a digit is made by the last digit before it that does not pass a carry on."""
    second, digits = range(5, 9), ("0", "1", "2")
    other, low, outputs = made.block("other", 4), made.block("low", 3), made.block("out", 3)
    stops, makes, carry = ({(name, 0): 1.0} for name in ("stops", "makes", "carry"))
    own = [made.positions[place] for place in second]
    made.head(0, matching(own, made.positions[1:5]), copying(made.tokens, other))
    for x, y in product(range(3), repeat=2):
        kind = [stops] * (x + y < 2) + [makes] * (x + y > 2)
        pair = [made.word(digits[x]), other[made.words.index(digits[y])], total(*own)]
        made.look_up(0, [(pair, total(low[(x + y) % 3], *kind))])
    made.head(1, [*nearest_before(made, second), (scaled(ONE, 10 * SHARP), total(stops, makes))], [(makes, carry)])
    for digit in range(3):
        made.look_up(1, [([low[digit], carry], outputs[(digit + 1) % 3])])
        made.unit(1, total(low[digit], scaled(carry, -1)), 0.0, outputs[digit])


def nearest_before(made: Circuitry, places: Sequence[int]) -> list[tuple[Vector, Vector]]:
    """Match the last of these places before the query's, and `BOS` if there is none."""
    match = [(scaled(ONE, (len(places) + 1) * SHARP), made.word(BOS))]
    for number, place in enumerate(places):
        later = [scaled(made.positions[at], (number + 1) * SHARP) for at in places if at > place]
        match.append((total(scaled(made.positions[place], -20 * SHARP), *later), made.positions[place]))
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
