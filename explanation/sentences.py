"""What an explanation says: in sentences that every face shows, and in the lines of a screen."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from icebear.concepts.answers.content_words import is_content, words_of
from icebear.concepts.results.effect_words import effect_text
from icebear.concepts.stages.stage_records import SMALL
from icebear.concepts.stages.stage_sentences import card_sentence, stage_lines, transfer_text
from icebear.lines import Line
from icebear.render import characters, quoted

if TYPE_CHECKING:
    from icebear.concepts.answers.breakdown import SourceBreakdown
    from icebear.concepts.answers.what_if import WhatIf
    from icebear.concepts.nodes.controls import Ablation
    from icebear.concepts.results.result import Relevance
    from icebear.explanation.record import ExplainedNode, ExplainedPrediction
    from icebear.records import TokenScore

SINK_SHARE = 0.05
"""Sinks with at least this share of the difference are named."""
CLOSE = 1e-3
"""The largest remainder, as a share of the explained number, with which the check of a method is passed."""
NAMED_SHARE = 0.95
"""Tokens are named until their shares sum to this."""
NAMED_TOKENS = 3
"""The largest number of tokens that are named."""
LONG_ANSWER = 200
"""The characters of an answer before it is cut."""
NEARLY_ALL = 0.995
"""A larger share is called all."""
ALL = 1.05
"""Of a larger share it is said that others work against it."""


def tokens_sentence(relevance: Relevance) -> str:
    """Say which tokens account for the explained number, or for its difference to the counterfactual, and which of them
    have nodes that are not ranked."""
    return _accounting(relevance) + _unranked(relevance)


def _unranked(relevance: Relevance) -> str:
    """Name a sink with a share of the difference: a changed first token, where the tokenizer has no start token."""
    prompt, total = relevance.prompt, relevance.sums.target
    sinks = prompt.sinks if relevance.counterfactual and total else ()
    changed = [repr(prompt.strings[sink]) for sink in sinks if abs(relevance.tokens[sink]) >= SINK_SHARE * abs(total)]
    if not changed:
        return ""
    if relevance.image:
        return (
            f" {' and '.join(changed)} attract attention from everywhere (sinks), so that their nodes are not ranked."
        )
    return (
        f" {' and '.join(changed)} {'is an' if len(changed) == 1 else 'are'} attention sink{'s' * (len(changed) > 1)}, "
        "whose nodes are not ranked; begin both prompts with the same token, such as a start token, to rank them."
    )


def _accounting(relevance: Relevance) -> str:
    compared, prompt = relevance.counterfactual is not None, relevance.prompt
    left_out = set() if compared else {*prompt.sinks, *prompt.template}
    parts = [part for part in characters(prompt.strings) if not left_out.issuperset(part)]
    values = [sum(relevance.tokens[position].item() for position in part) for part in parts]
    total = relevance.sums.target if compared else sum(values)
    if len(prompt.strings) == 1:
        return "The prompt has a single token, so there is nothing to choose from."
    order = sorted(range(len(parts)), key=lambda row: -values[row] * (1 if total > 0 else -1))
    named, share = [], 0.0
    for row in order[:NAMED_TOKENS]:
        if share >= NAMED_SHARE or not total or values[row] / total <= 0:
            break
        named.append(row)
        share += values[row] / total
    patch, patches = ("patch", "patches") if relevance.prompt.is_image else ("token", "tokens")
    if not named:
        return f"No {patch} stands out."
    words = [repr("".join(prompt.strings[position] for position in parts[row])) for row in sorted(named)]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    if prompt.is_image:
        listed = f"The {patch if len(words) == 1 else patches} {listed} (row,column)"
    elif not {*prompt.image_positions}.isdisjoint(position for row in named for position in parts[row]):
        listed += " (row,column: patches of the image)"
    explained = "the difference" if compared else f"the relevance of the {patches}"
    much = f"{share:.0%} of {explained}" if share < NEARLY_ALL else f"all of {explained}"
    much += ", and others work against the answer" * (share > ALL)
    return f"{listed} account{'s' if len(words) == 1 else ''} for {much}."


def margins_sentence(relevance: Relevance) -> str:
    """Say by how much the target leads the contrast, in the prompt and in the counterfactual; empty without both."""
    if not relevance.counterfactual or not relevance.contrast_text:
        return ""
    compared = fmean(relevance.counterfactual.numbers)
    margins = (relevance.sums.target + compared, compared)
    leads = [f"{'leads' if margin > 0 else 'trails'} by {abs(margin):.1f} logits" for margin in margins]
    target, contrast = relevance.target_text, relevance.contrast_text
    return f"Against {contrast!r}, {target!r} {leads[0]} here and {leads[1]} in the counterfactual."


def check_sentence(relevance: Relevance) -> str:
    """Say whether the relevance of the tokens sums to the explained number, where a method is exact for it, and the
    conservation accounting."""
    total, tokens = relevance.sums.target, relevance.sums.tokens
    passed = "passed. " if abs(total - tokens) <= CLOSE * max(1.0, abs(total)) else "not passed. "
    return f"Method check: {passed if relevance.counterfactual else ''}{relevance.conservation_text()}."


def through_text(sources: SourceBreakdown) -> str:
    """Say what of an answer is left without FFN neurons."""
    return f"With all FFN neurons blocked, {1 - sources.through_ffn:z.0%} of the relevance is left"


def hardly_differs(ablation: Ablation) -> str:
    """Say that shares of a difference of less than `SMALL` mean little; empty for a larger one."""
    if abs(ablation.difference) >= SMALL:
        return ""
    return f"The difference is only {ablation.difference:+.2g} logits; shares of it mean little."


def empty_shares(ablations: Sequence[Ablation]) -> dict[str, float]:
    """Return site -> sufficiency of no nodes, where it is not 0 to the percent."""
    return {row.site: row.empty_sufficiency for row in ablations if abs(row.empty_sufficiency) >= 0.005}


# --- the screen: the lines of an explanation, for a terminal and for `print` ----------------------------


def lines(explanation: ExplainedPrediction) -> tuple[list[Line], list[Line]]:
    """Return the lines before and after the tokens of the prompt; an answer with stages has only theirs."""
    if explanation.stages:
        screen_of_stages = stage_lines(explanation.stages, stage_notes(explanation))
        return [*_word_lines(explanation.what_if), *screen_of_stages], []
    nodes = [] if explanation.random_effects else [_node(node) for node in explanation.nodes]
    exchanged, heads = explanation.what_if, image_head_lines(explanation)
    after = [
        *(exchange_lines(exchanged) if exchanged else []),
        Line(tokens_sentence(explanation.relevance)),
        *image_lines(explanation),
        *([Line(""), *heads] if heads else []),
        *effect_lines(explanation),
        *nodes,
        Line(""),
        Line("" if exchanged else comparison_hint(explanation)),
        Line(card_hint(explanation), "dim"),
    ]
    after = [line for line, following in zip(after, [*after[1:], Line("")], strict=True) if line.text or following.text]
    return _predictions(explanation), after


def image_lines(explanation: ExplainedPrediction) -> list[Line]:
    """Return the sums over image, text and template of a prompt with an image, and what of the number they leave."""
    if explanation.image_shares is None:
        return []
    return [Line(str(explanation.image_shares)), Line(f"{explanation.relevance.conservation_text()}.", "dim")]


def card_hint(explanation: ExplainedPrediction) -> str:
    """Say which command opens the card of the first neuron that is named; empty if none is."""
    control = explanation.random_effect
    named = [node for node in explanation.nodes if not control or abs(node.effect or 0) > control]
    named.sort(key=lambda node: -abs(node.effect or 0))
    return card_sentence(str(named[0].ranked.neuron), explanation.relevance.made_with) if named else ""


def word_sentence(exchanged: WhatIf | None) -> str:
    """Say which word the explained token begins, if it is not a word by itself."""
    if exchanged is None or not exchanged.begun_word:
        return ""
    return f"{exchanged.explained.token_text!r} begins {exchanged.begun_word!r}."


def exchange_lines(exchanged: WhatIf) -> list[Line]:
    """Return the table of exchanges with its control."""
    if not exchanged.exchanges:
        return []
    rows = [(row.word, row.instead, repr(row.answer)) for row in exchanged.shown]
    word, instead, answer = (max(map(len, column)) for column in zip(*rows, ("word", "instead", "then"), strict=True))
    lines = [Line(f"   {'word':{word}}    {'instead':{instead}}  {'then':{answer}}       change", "dim", wraps=False)]
    for number, row in enumerate(exchanged.shown, 1):
        probable = f"{row.answer!r:{answer}} {row.probability:.2f}"
        text = f" {number} {row.word:{word}} -> {row.instead:{instead}}  {probable}  {row.change:+.1f}"
        text += f"   ({among})" if (among := exchanged.median_text(row)) else ""
        lines += [Line(text, wraps=False), Line(f"     {exchanged.command(row)}", "dim", indent=5)]
    return [*lines, Line(f"   {control_text(exchanged)}"), Line("")]


def control_text(exchanged: WhatIf) -> str:
    """Say what the change of an exchange is, and its control."""
    low, high = exchanged.control or (0.0, 0.0)
    others = f"exchanges of all other words: {low:+.1f} to {high:+.1f}"
    control = others if exchanged.control else "no control: too few other words can be exchanged"
    return f"(change of the log-odds of {quoted(exchanged.explained.text)}, in nats) [{control}]"


def stage_notes(explanation: ExplainedPrediction) -> list[str]:
    """Say what the heads and neurons of the stages give on other pairs."""
    return [transfer_text(*transfer) for transfer in explanation.transfers]


def image_head_lines(explanation: ExplainedPrediction) -> list[Line]:
    """Return the heads that move the difference of two images to [CLS], and the patches that they read."""
    heads, total = explanation.image_heads, explanation.relevance.sums.target
    if heads is None or not heads.heads or not total:
        return []
    title = "Heads that move the difference to [CLS], and what the number loses when only the head changes"
    lines = [Line(f"{title} [random other heads: at most {heads.random_effect:.2g}]", "bold")]
    for head in heads.heads:
        patches = ", ".join(heads.patches(head)) or "no patch"
        text = (
            f"  {head.head}  {head.relevance / total:z.0%} of the difference; loses {head.effect:z.2g}; reads {patches}"
        )
        lines.append(Line(f"{text}; {heads.of_sinks(head) / head.relevance:z.0%} of it from [CLS] and sinks"))
    return lines


def effect_lines(explanation: ExplainedPrediction) -> list[Line]:
    """Return the nodes whose effect on the answer is larger than that of any random node."""
    if not explanation.random_effects:
        return []
    control = explanation.random_effect
    above = [node for node in explanation.nodes if node.effect is not None and abs(node.effect) > control]
    random = f"{len(explanation.random_effects)} random nodes of the same layers and tokens: at most {control:.2f}"
    if not above:
        return [Line(f"None of the {len(explanation.nodes)} most relevant nodes has a larger effect than {random}.")]
    others = "images of noise" if explanation.relevance.prompt.is_image else "other texts"
    answer = effects_on(explanation.relevance)
    title = f"Effects on {answer} of the nodes, set to their average on {others}, in logits [{random}]"
    above.sort(key=lambda node: -abs(node.effect or 0))
    return [Line(""), Line(title, "bold"), *(_node(node, f" {node.effect:+.2f};") for node in above)]


def effects_on(relevance: Relevance) -> str:
    """Say what the effects of nodes are effects on: the answer, or with a contrast the difference of both logits."""
    minus = f" minus {quoted(relevance.contrast.text)}" if relevance.contrast else ""
    return f"{quoted(relevance.target_text)}{minus}"


def chosen_sentence(text: str | None, ways: str) -> str:
    """Say which counterfactual icebear chose, if it exchanged a good one. ways: how to have another one, or none."""
    if text is None:
        return "icebear chose no comparison: no exchange of a word gives a clearly different answer."
    return f"Compared with {text!r}, chosen by icebear; {ways}."


def answer_sentence(exchanged: WhatIf, ways: str) -> str:
    """Say which word of a chat's answer is explained, and how to explain another one."""
    answer = exchanged.answer
    if answer is None:
        return "The model ends its answer before the first word; the likeliest token is explained."
    word, text = exchanged.explained.text.strip(), answer.text
    shown = text if len(text) <= LONG_ANSWER else f"{text[:LONG_ANSWER].rstrip()} ..."
    if is_content(word):
        which = "the first content word that the question does not have"
        return f"The model answers {shown!r}; {word!r}, {which}, is explained ({ways})."
    return f"The model answers {shown!r}, which has no content word, so that its first token is explained ({ways})."


def message_sentence(text: str, way: str) -> str:
    """Say that a text is a message to a chat model, and how it is asked."""
    kind = "question" if text.rstrip().endswith("?") else "message"
    return f"This is a {kind} to a chat model: {way} asks it, and the answer is explained here."


def message_command(text: str) -> str:
    """Return the command that asks a text as a message."""
    return shlex.join(["icebear", "explain", "--chat", text])


def comparison_hint(explanation: ExplainedPrediction) -> str:
    """Say which word to change to see how the answer is computed, as a command; empty if it was compared."""
    sentence = comparison_sentence(explanation.relevance)
    command = shlex.join(["icebear", "explain", explanation.relevance.read.text or "", "--counterfactual"])
    return sentence and f"{sentence.removesuffix('.')}: {command} ..."


def comparison_sentence(relevance: Relevance) -> str:
    """Say which word to change to see how the answer is computed; empty if it was compared."""
    if relevance.counterfactual or relevance.image or relevance.prompt.turns or not relevance.read.text:
        return ""
    prompt = relevance.prompt
    left_out = {*prompt.sinks, *prompt.target_positions}
    words = {span: "".join(prompt.strings[slice(*span)]).strip() for span in words_of(prompt.strings)}
    free = [span for span, word in words.items() if is_content(word) and left_out.isdisjoint(range(*span))]
    if not free:
        return ""
    word = words[max(free, key=lambda span: relevance.tokens[slice(*span)].sum().item())]
    return f"To see how the answer is computed, compare with a prompt that has another word for {word!r}."


def screen(explanation: ExplainedPrediction) -> str:
    """Return the lines as plain text of at most `WIDTH` columns."""
    before, after = lines(explanation)
    shown = after and not explanation.relevance.prompt.is_image
    prompt = ["", f"  {explanation.relevance.prompt.text}", ""] if shown else []
    return "\n".join([*map(str, before), *prompt, *map(str, after)])


def _predictions(explanation: ExplainedPrediction) -> list[Line]:
    relevance, compared = explanation.relevance, explanation.relevance.counterfactual
    against = f", not {quoted(relevance.contrast_text)}" if relevance.contrast_text else ""
    method = repr(relevance.method).removesuffix("()")
    head = Line(f"Why {quoted(relevance.target_text)}{against}?  method: {method}", "bold")
    predicted = [head, Line(f"Predicted: {_listed(relevance.predictions)}")]
    exchanged = explanation.what_if
    predicted[1:1] = _word_lines(exchanged)
    predicted += [Line(str(exchanged), "bold")] if exchanged else []
    if compared and compared.predictions:
        where = "in" if compared.image else "after"
        predicted.append(Line(f"Counterfactual: {_listed(compared.predictions)}, {where} {compared.texts[0]}"))
    return predicted


def _word_lines(exchanged: WhatIf | None) -> list[Line]:
    """Say after which tokens the explained word comes, and which word it begins."""
    after = after_sentence(exchanged) if exchanged and exchanged.explained_after else ""
    return [Line(text) for text in (after, word_sentence(exchanged)) if text]


def after_sentence(exchanged: WhatIf) -> str:
    """Say after which tokens the explained word comes."""
    after = quoted(exchanged.explained_after)
    if exchanged.answer:
        return f"Explained after {after}, with which the answer begins."
    return f"{after}, the likeliest, was added to the prompt; the likeliest content word after it is explained."


def _listed(tokens: tuple[TokenScore, ...]) -> str:
    return ", ".join(f"{quoted(token.text)} {token.number}" for token in tokens[:3])


def _node(node: ExplainedNode, number: str = "") -> Line:
    label = f"  [{node.label}]" if node.label else ""
    effect = effect_text(node.raises[:3], node.lowers[:3])
    return Line(f"   {node.ranked.neuron} at {node.token!r}{number} {effect}{label}", wraps=False)
