"""What stages say: the lines of a screen, which page, chat and report show too.

Probabilities come first, then logits, then shares; whole parts that the search left out, and that matter, are said.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from icebear.concepts.stages.stage_records import ENOUGH, OVERSHOOT, SMALL
from icebear.lines import Line
from icebear.models.loading.presets import model_option
from icebear.render import characters, quoted

if TYPE_CHECKING:
    from icebear.concepts.stages.stage_records import Answers, Control, StageRecord, StageShares, Swap, WholePart
    from icebear.concepts.stages.task_records import TaskRecord
    from icebear.records import Neuron, Ranked

LOW_NECESSITY = 0.6
"""If less than this share is lost without the set, other parts take over."""
FEW_HEADS = 10
"""The heads of a small set, at most; more are not named."""
FEW_NEURONS = 50
"""The neurons of a small set, at most."""
OTHER_COUNTERFACTUALS = "These parts carry the difference from this counterfactual; another may name others."
ONE_HEAD = "With only this head swapped for its counterfactual value"
TRACE = "One token's state after one layer, copied into the counterfactual prompt: share that comes back (%)"
ABOVE_RANDOM = 0.05
"""Shares that exceed those of random parts by less are no more than random."""
INDENT = 11
"""The columns of a stage's name."""
PROMPT_WIDTH = 44
"""The characters of a prompt in a line."""
SHOWN_SWAPS = 3
"""The number of heads whose swap is shown, those that change the probabilities of target and contrast most."""
SHOWN_NAMES = 8
"""The number of heads, and of neurons, that are named, the most relevant first."""
SHOWN_CHANGE = 0.05
"""A smaller change of the probabilities by a swap is not shown."""
CLEAR = 2
"""The head of the headline changes the answer so many times as much as any random one."""
PAST_CONTRAST = 1.05
"""If more than this share is lost, a sentence says what more than 100 % means."""
FETCHED = 0.2
"""A token with at least this share as the only source is one that heads fetch from."""


def question(stages: StageRecord) -> str:
    against = f", not {quoted(stages.contrast.text)}" if stages.contrast else ""
    return f"Why {quoted(stages.target.text)}{against}?"


def answer_lines(stages: StageRecord) -> list[str]:
    rows = answer_rows(stages)
    width = max(len(text) for text, _ in rows)
    return [f"{text:<{width}}   {numbers}" for text, numbers in rows]


def answer_rows(stages: StageRecord) -> list[tuple[str, str]]:
    """Return each prompt, and the probabilities of target and contrast with their logits' difference."""
    each = (stages.prompt, stages.counterfactual)
    return [(text_of(answers, stages), _probabilities(stages, answers)) for answers in each]


def text_of(answers: Answers, stages: StageRecord) -> str:
    """Return a prompt in a line; of a long one, its end from the first token that differs on."""
    text = "".join(answers.tokens).replace("\n", " ")
    if len(text) <= PROMPT_WIDTH:
        return text
    begin = max(0, min(stages.differing, default=stages.position) - 2)
    end = "".join(answers.tokens[begin:]).replace("\n", " ")
    return f"...{end[: PROMPT_WIDTH - 3]}" if len(end) < len(text) else f"{end[: PROMPT_WIDTH - 3]}..."


def _probabilities(stages: StageRecord, answers: Answers) -> str:
    tokens = [stages.target, *([stages.contrast] if stages.contrast else [])]
    known = [
        (token.text, p) for token, p in zip(tokens, (answers.target, answers.contrast), strict=False) if p is not None
    ]
    known.sort(key=lambda pair: -pair[1])
    shown = ", ".join(f"{quoted(text)} {p:.2f}" for text, p in known)
    number = f"{answers.number:+.1f} logits"
    return f"{shown}   ({number})" if shown else number


def summary(stages: StageRecord) -> list[str]:
    """Say which parts give how much of the difference, what else is recomputed, and the control; then what is lost
    without them."""
    if stages.kind == "last token":
        return [
            f"The last tokens of the prompts differ ({stages.prompt.tokens[stages.position]!r} and "
            f"{stages.counterfactual.tokens[-1]!r}): one token is read and the answer is written there, so that no "
            "heads need to move anything."
        ]
    if stages.alone is None:
        return ["No head or neuron of the last token has a positive relevance for the difference."]
    if stages.says_little:
        return [f"{_little(stages)} The search named {set_text(stages)} at {_at(stages)}."]
    return [keep_text(stages), remove_text(stages)]


def keep_text(stages: StageRecord) -> str:
    """Say what comes back when only the set is computed from the prompt."""
    recomputed = whole_texts(stages.prompt.tokens, stages.whole)
    parts = " and ".join([f"{set_text(stages)} at {_at(stages)}", *(f"all of {text}" for text in recomputed)])
    come = "comes" if _is_single(stages) and not recomputed else "come"
    return (
        f"Keep: only {parts} {come} from the prompt; {_held(stages)}. {percent(stages.alone)} of the difference of "
        f"{abs(stages.difference):.1f} logits between the prompts comes back "
        f"[instead, at {_at(stages)}: {controls_text(stages)}]."
    )


def remove_text(stages: StageRecord) -> str:
    """Say what is lost when only the set has its counterfactual values."""
    take = "takes its counterfactual value" if _is_single(stages) else "take their counterfactual values"
    return (
        f"Remove: only {set_text(stages)} {take}; everything else is computed from the prompt. "
        f"{percent(stages.without)} of the difference is lost."
    )


def headline(stages: StageRecord) -> str:
    """Say in a sentence which head changes the answer, or that no part does; empty where no parts were searched."""
    if stages.alone is None or stages.random is None:
        return ""
    if stages.says_little:
        return _little(stages)
    bring = "brings" if _is_single(stages) else "bring"
    share = f"{set_text(stages)} {bring} back {percent(stages.alone)} of the difference between the prompts"
    if _is_random(stages):
        return f"No parts carry the answer: {share}, no more than random ones ({percent(stages.random)})."
    swap = leading_swap(stages)
    if swap is None:
        none = "No single head changes the answer clearly more than random ones: " if shown_swaps(stages) else ""
        return f"{none}{share}."
    spread = f", one of {len(stages.heads) + len(stages.neurons)} parts" * _is_spread(stages)
    head = "Head" if stages.reached else "Partly explained: head"
    return f"{head} {swap.neuron} {_moves(stages)}: with only this head swapped, {_turn(stages, swap)}{spread}."


def headline_control(stages: StageRecord) -> str:
    """Return what random heads do in place of the head of the headline; empty if it names none."""
    return " ".join(random_swaps_texts(stages)) if leading_swap(stages) else ""


def leading_swap(stages: StageRecord) -> Swap | None:
    """Return the head whose swap changes the answer most; None where a random head changes it half as much, or shares
    mean little."""
    swaps = [] if stages.alone is None or stages.says_little or _is_random(stages) else shown_swaps(stages)
    if not swaps:
        return None
    random = [_change(replace(swaps[0], after=swap.after)) for swap in stages.random_swaps]
    least = CLEAR * max(random) if random else SHOWN_CHANGE
    return swaps[0] if _change(swaps[0]) > least else None


def _is_random(stages: StageRecord) -> bool:
    """Return whether the set gives no more than random ones."""
    return stages.alone is not None and stages.alone <= (stages.random or 0) + ABOVE_RANDOM


def _moves(stages: StageRecord) -> str:
    """Say what heads move, if the changed tokens are what they read."""
    strongest = max(stages.sources, key=lambda source: source.share, default=None)
    if strongest and strongest.share >= FETCHED and strongest.position in stages.differing:
        return f"moves {tokens_text(stages.prompt.tokens, [strongest.position])} to the answer"
    return "changes the answer"


def _turn(stages: StageRecord, swap: Swap) -> str:
    """Say how a swap changes the probability of the target; that of the contrast, where this changes more."""
    rows = zip((stages.target, stages.contrast), swap.before, swap.after, strict=False)
    known = [(t.text, a, b) for t, a, b in rows if t is not None and a is not None and b is not None]
    text, before, after = max(known, key=lambda row: abs(row[1] - row[2]) / (1 + (row is not known[0])))
    verb = "falls" if after < before else "rises"
    return f"{quoted(text)} {verb} from {probability_text(before)} to {probability_text(after)}"


def _is_single(stages: StageShares) -> bool:
    return len(stages.heads) + len(stages.neurons) == 1


def _is_spread(stages: StageRecord) -> bool:
    return len(stages.heads) > FEW_HEADS or len(stages.neurons) > FEW_NEURONS


def controls_text(stages: StageRecord) -> str:
    """Say what as many others give in place of the set."""
    random = f"as many random {kinds_text(stages)} {percent(stages.random)}"
    if stages.most_changed is None:
        return random
    beside = ", with the same neurons," if stages.neurons else ""
    return f"{random}; the other heads that change most between the prompts{beside} {percent(stages.most_changed)}"


def _little(stages: StageRecord) -> str:
    if abs(stages.difference) < SMALL:
        return f"The difference is only {stages.difference:+.2g} logits: shares of it mean little, and none is shown."
    return (
        f"{stages.target.text!r} is not the likeliest token ({stages.prompt.likeliest.text!r} is): shares of the "
        "difference mean little, and none is shown."
    )


def set_text(stages: StageShares | TaskRecord) -> str:
    heads, neurons = len(stages.heads), len(stages.neurons)
    parts = [f"{heads} head{'s' * (heads != 1)}"]
    if neurons:
        parts.append(f"{neurons} FFN neuron{'s' * (neurons != 1)}")
    return " and ".join(parts)


def kinds_text(stages: StageShares | TaskRecord) -> str:
    return "heads and neurons" if stages.neurons else "heads"


def _held(stages: StageRecord) -> str:
    """Say what was held."""
    if stages.kind == "cut":
        return f"the other heads at {_at(stages)}, and nothing else, come from the counterfactual prompt"
    return "every other head and neuron, at every token, comes from the counterfactual prompt"


def whole_texts(tokens: Sequence[str], parts: Sequence[WholePart]) -> list[str]:
    """Name whole parts, such as "attention and the FFN at ' France'"."""
    kinds: dict[tuple[int, ...], list[str]] = {}
    for part in sorted(parts, key=lambda part: part.positions):
        kinds.setdefault(part.positions, []).append("attention" if part.kind == "attn" else "the FFN")
    return [f"{' and '.join(names)} at {tokens_text(tokens, positions)}" for positions, names in kinds.items()]


def tokens_text(tokens: Sequence[str], positions: Sequence[int]) -> str:
    groups = [[position for position in group if position in positions] for group in characters(tokens)]
    quoted = [repr("".join(tokens[position] for position in group)) for group in groups if group]
    if len(quoted) > 4:
        return f"the {len(quoted)} tokens from {quoted[0]} to {quoted[-1]}"
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _at(stages: StageRecord) -> str:
    return repr(stages.prompt.tokens[stages.position])


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:z.0%}"


def trace_lines(stages: StageRecord) -> list[str]:
    """Return the causal trace as a table."""
    trace = stages.trace
    if not trace.positions or stages.says_little:
        return []
    names = [repr(stages.prompt.tokens[position]) for position in trace.positions]
    width = max(len("  after layer"), *(len(name) + 2 for name in names))
    rows = [
        f"  {name:<{width - 2}}" + "".join(f"{100 * share:>5.0f}" for share in row)
        for name, row in zip(names, trace.shares, strict=True)
    ]
    return [
        TRACE,
        f"{'  after layer':<{width}}" + "".join(f"{layer:>5}" for layer in trace.layers),
        *(row.replace("   -0", "    0") for row in rows),
    ]


def stage_sentences(stages: StageRecord) -> list[tuple[str, list[str]]]:
    """Return the stages by name, each with its lines."""
    if not stages.heads:
        return []
    free = whole_texts(stages.prompt.tokens, stages.whole)
    named = [("Read", [f"{_capital('; '.join(free))}, recomputed in all layers"] if free else [])]
    swaps = [f"  {swap_text(stages, swap)}" for swap in shown_swaps(stages)]
    random = [f"  {text}" for text in random_swaps_texts(stages) if swaps and not headline_control(stages)]
    shown = f" ({len(swaps)} of {len(stages.heads)} shown)" if 0 < len(swaps) < len(stages.heads) else ""
    named.append(
        ("Moved", [_moved(stages), _names(stages.heads), *([f"{ONE_HEAD}{shown}:"] * bool(swaps)), *swaps, *random])
    )
    if stages.neurons:
        named.append(("Written", [written(stages), _names(stages.neurons), _words(stages)]))
    if not stages.says_little and stages.everything is not None:
        more = (
            f"With all heads and neurons at {_at(stages)} recomputed: {percent(stages.everything)}; with the whole "
            "model: 100%"
        )
        named.append(("", [more]))
    return [(name, lines) for name, lines in named if lines]


def _names(nodes: Sequence[Ranked]) -> str:
    names = [str(node.neuron) for node in nodes[:SHOWN_NAMES]]
    return ", ".join(names) + f" and {len(nodes) - len(names)} more" * (len(nodes) > len(names))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def layers_text(nodes: Sequence[Ranked]) -> str:
    layers = [node.neuron.layer for node in nodes]
    lowest, highest = min(layers), max(layers)
    return f"layer {lowest}" if lowest == highest else f"layers {lowest} to {highest}"


def _share(stages: StageRecord, share: float | None, control: Control | None, what: str, verb: str = ":") -> str:
    if stages.says_little or share is None:
        return ""
    return f"{verb} {percent(share)}" + (f" [{what} {percent(control.median)}]" if control else "")


def _moved(stages: StageRecord) -> str:
    count = len(stages.heads)
    sources = [source.position for source in stages.sources if source.share >= FETCHED]
    is_single = count == 1
    fetch = (
        f" fetch{'es' * is_single} it from {tokens_text(stages.prompt.tokens, sources)}"
        if sources
        else f" move{'s' * is_single} it"
    )
    text = f"{count} head{'s' * (not is_single)} at {_at(stages)}, {layers_text(stages.heads)},{fetch}"
    return text + _share(stages, stages.moved, stages.moved_random, "random heads:")


def shown_swaps(stages: StageRecord) -> list[Swap]:
    """Return the heads whose swap changes the probabilities most."""
    known = [swap for swap in stages.swaps if swap.after and swap.after[0] is not None]
    known.sort(key=_change, reverse=True)
    return [swap for swap in known[:SHOWN_SWAPS] if _change(swap) >= SHOWN_CHANGE] or known[:1]


def _change(swap: Swap) -> float:
    """Return the sum of the changes of the probabilities of target and contrast."""
    return sum(abs((before or 0) - (after or 0)) for before, after in zip(swap.before, swap.after, strict=False))


def swap_text(stages: StageRecord, swap: Swap) -> str:
    return f"{swap.neuron}: {changes_text(stages, swap)}"


def changes_text(stages: StageRecord, swap: Swap) -> str:
    """Return the probabilities of the target and the contrast before and after a swap."""
    tokens = [stages.target, *([stages.contrast] if stages.contrast else [])]
    changes = [
        f"{quoted(token.text)} {probability_text(before)} -> {probability_text(after)}"
        for token, before, after in zip(tokens, swap.before, swap.after, strict=False)
        if before is not None and after is not None
    ]
    return ", ".join(changes)


def probability_text(probability: float) -> str:
    """Return a probability with two decimals, or with its first digit where these are zeros."""
    return f"{probability:.2f}" if probability >= 0.005 else f"{probability:.1g}"


def random_swaps_texts(stages: StageRecord) -> list[str]:
    """Return the lowest and the highest probabilities of target and contrast after random swaps; none without them."""
    if not stages.random_swaps:
        return []
    tokens = [stages.target, *([stages.contrast] if stages.contrast else [])]
    ranges = []
    for token, column in zip(tokens, zip(*(swap.after for swap in stages.random_swaps), strict=True), strict=False):
        known = [probability for probability in column if probability is not None]
        ranges += (
            [f"{quoted(token.text)} {probability_text(min(known))} to {probability_text(max(known))}"] if known else []
        )
    return [f"[{len(stages.random_swaps)} random other heads, one at a time: {', '.join(ranges)}]"]


def written(stages: StageRecord) -> str:
    """Say what the neurons add to the heads."""
    count = len(stages.neurons)
    is_single = count == 1
    text = f"{count} FFN neuron{'s' * (not is_single)} at {_at(stages)}, {layers_text(stages.neurons)}"
    before = f" from {percent(stages.moved)}" if stages.moved is not None else ""
    verb = f", bring{'s' * is_single} the share{before} to"
    return text + _share(stages, stages.alone, stages.written_random, "random neurons: to", verb)


def _words(stages: StageRecord) -> str:
    """Say which likely words the neurons raise and lower, by how many logits. A word with and without space is one."""
    effects: dict[str, float] = {}
    for word in sorted(stages.words, key=lambda word: -abs(word.effect)):
        effects.setdefault(word.text.strip() or repr(word.text), word.effect)
    raised, lowered = (
        ", ".join(f"{text} {effect:+.1f}" for text, effect in effects.items() if (effect > 0) is sign)
        for sign in (True, False)
    )
    parts = [f"{verb} {words}" for verb, words in (("raise", raised), ("lower", lowered)) if words]
    return f"Compared with their counterfactual values, they {'; '.join(parts)} (logits)"


def warnings(stages: StageRecord) -> list[str]:
    """Return what fails, each kind in a sentence."""
    if stages.alone is None or stages.says_little:
        return []
    lines = []
    if not stages.reached:
        nearest = "overshoots" if stages.alone > OVERSHOOT else "falls short"
        wanted = f"{100 * ENOUGH:g} to {percent(OVERSHOOT)}"
        lines.append(f"Not explained: no set that was tried gives {wanted}; the nearest is shown, and it {nearest}.")
    if _is_spread(stages):
        lines.append(f"No small set carries this answer: it takes {set_text(stages)}.")
    for left in stages.left_out:
        effect = "works against the answer" if left.change < 0 else "adds to it"
        name = _capital(whole_texts(stages.prompt.tokens, [left.part])[0])
        points = f"{100 * left.change:+.0f} points"
        lines.append(f"{name} {effect}: it is held; with it and all attention at {_at(stages)} recomputed, {points}.")
    if stages.without is not None and stages.without < LOW_NECESSITY:
        lines.append(f"Without the set only {percent(stages.without)} is lost: other heads or neurons take over.")
    if stages.without is not None and stages.without > PAST_CONTRAST:
        lines.append(
            f"{percent(stages.without)} is lost: without the set the difference of the prompt is below that of the "
            "counterfactual prompt."
        )
    return lines


def transfer_text(text: str, transfer: StageShares) -> str:
    """Say what the same parts give on another pair. text: its prompt."""
    return (
        f"After {text!r} the same heads and neurons give {percent(transfer.alone)} "
        f"[random {percent(transfer.random)}]; without them, {percent(transfer.without)} is lost."
    )


def stage_lines(stages: StageRecord, notes: Sequence[str] = ()) -> list[Line]:
    """Return the lines of a screen. notes: what is known of these parts on other prompts, in sentences."""
    lines = [Line(question(stages), "bold"), *(Line(text, wraps=False) for text in answer_lines(stages)), Line("")]
    if finding := headline(stages):
        lines[-1:] = [Line(finding, "bold"), *([Line(control, "dim")] if (control := headline_control(stages)) else [])]
    lines += [Line(text) for text in summary(stages)]
    lines += [Line(text, "yellow") for text in warnings(stages)]
    lines += [Line(text, wraps=False) for text in trace_lines(stages)]
    for number, (name, texts) in enumerate(stage_sentences(stages), 1):
        heads = [f"{number} {name}" if name else ""] + [""] * (len(texts) - 1)
        lines += [Line(f"{head:<{INDENT}}{text}", indent=INDENT + 2) for head, text in zip(heads, texts, strict=True)]
    lines += [Line(OTHER_COUNTERFACTUALS, "dim")] if stages.heads else []
    lines += [Line(note) for note in notes]
    return lines + ([Line(card_sentence(str(_named_head(stages)), stages.made_with), "dim")] if stages.heads else [])


def _named_head(stages: StageRecord) -> Neuron:
    """Return the head whose swap changes the answer most, or the most relevant one."""
    swap = leading_swap(stages)
    return swap.neuron if swap else stages.heads[0].neuron


def card_sentence(neuron: str, made_with: dict[str, Any]) -> str:
    """Say which command shows what a neuron or head does in other texts."""
    command = shlex.join(["icebear", "neuron", neuron, *model_option(made_with)])
    return f"{neuron} in other texts: {command}"
