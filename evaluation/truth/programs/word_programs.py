"""Programs that fetch words from other places."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

from icebear.evaluation.truth.programs.circuitry import ONE, SHARP, Circuitry, copying, matching, scaled, total
from icebear.evaluation.truth.programs.program import (
    BOS,
    END,
    PAD,
    Program,
    Variables,
    answer,
    at_the_end,
    drawn,
    letters,
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


WORD_PROGRAMS = (
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
)
