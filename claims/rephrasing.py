"""Claims in paraphrases: of their prompts by templates, or by a file of paraphrases."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from icebear.claims.checked_claim import CheckedClaim, Repeats, check_claim, not_run
from icebear.claims.claim import Claim
from icebear.claims.conditions import AUTO, TEMPLATES
from icebear.claims.kind import Kind, NodeId
from icebear.convert import read_json
from icebear.converters import plain_converter
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.paths import read_text
from icebear.steering.monitor.text_values import interval
from icebear.values import shown, text_of

TEXTS = ("examples", "others")
"""Fields of claims with a text each time."""
CONVERTER = plain_converter()


@dataclass(frozen=True)
class Paraphrase:
    """A line of a file of paraphrases."""

    prompt: str
    """As claims have it."""
    paraphrase: str
    counterfactual: str | None = None
    """That of the paraphrase, for claims with a counterfactual."""

    def __post_init__(self) -> None:
        for text in (self.prompt, self.paraphrase, self.counterfactual):
            if text is not None and not text_of(text).strip():
                raise InputError("A text of it is empty.")


Rewrite = Callable[[str, str | None], tuple[str, str | None]]
"""Returns another wording of a prompt and of its counterfactual."""
Versions = Callable[[Sequence[str]], list[tuple[str, Rewrite]]]
"""Returns for the texts of a claim each wording, with its name."""


def versions_of(source: str) -> Versions:
    """Return what rewords texts: the templates for ``auto``, else the paraphrases of a file. Raises `InputError`."""
    if source == AUTO:
        return lambda texts: [(name, _rewrite(by_template(template))) for name, template in TEMPLATES.items()]
    by_prompt: dict[str, list[Paraphrase]] = {}
    for line in read_paraphrases(source):
        by_prompt.setdefault(line.prompt, []).append(line)

    def versions(texts: Sequence[str]) -> list[tuple[str, Rewrite]]:
        lines = [by_prompt.get(text, []) for text in texts]
        if not all(lines):
            raise InputError(f"{source} has no paraphrase of {shown(texts[lines.index([])])}.")
        each = (dict(zip(texts, wordings, strict=True)) for wordings in zip(*lines, strict=False))
        return [(wording[texts[0]].paraphrase, _by_lines(wording)) for wording in each]

    return versions


def read_paraphrases(path: str) -> list[Paraphrase]:
    """Read JSON lines of paraphrases. Raises `InputError`."""
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(CONVERTER.structure(read_json(line), Paraphrase))
        except Exception as reason:  # of JSON, of cattrs, or of the record
            why = f"it lacks {reason}" if isinstance(reason, KeyError) else " ".join(str(reason).split()).rstrip(".")
            raise InputError(
                f"Line {number} of {path} cannot be read ({why}); write it like "
                f"{json.dumps({'prompt': 'A b', 'paraphrase': 'C b', 'counterfactual': 'C d'})}."
            ) from None
    if not rows:
        raise InputError(f"{path} has no paraphrase; write one JSON object per line.")
    return rows


def by_template(template: str) -> Callable[[str], str]:
    """Return what puts a text into a template."""
    return lambda text: template.replace("{}", text)


def _rewrite(worded: Callable[[str], str]) -> Rewrite:
    return lambda prompt, other: (worded(prompt), None if other is None else worded(other))


def _by_lines(lines: dict[str, Paraphrase]) -> Rewrite:
    def rewrite(prompt: str, other: str | None) -> tuple[str, str | None]:
        line = lines[prompt]
        if other is not None and line.counterfactual is None:
            raise InputError(f"The paraphrase {shown(line.paraphrase)} has no counterfactual; add one to its line.")
        return line.paraphrase, None if other is None else line.counterfactual

    return rewrite


def check_paraphrases(model: Model, claim: Claim, versions: Versions) -> CheckedClaim:
    """Measure a claim in each wording of its prompt. It passes if it holds in all that can be measured."""
    try:
        rows = {
            name: check_claim(model, replace(claim, what=rephrased(model, claim.what, rewrite)))
            for name, rewrite in versions(texts_of(claim.what))
        }
    except InputError as error:
        return not_run(claim, str(error))
    measured = {name: row for name, row in rows.items() if row.verdict != "cannot be measured here"}
    if not measured:
        return not_run(claim, next(iter(rows.values())).why)
    passed = sum(not row.failed for row in measured.values())
    repeats = Repeats(passed, len(measured), interval(passed, len(measured)))
    name, worst = min(measured.items(), key=lambda named: (not named[1].failed, _value(named[1])))
    low, high = repeats.interval
    why = f"It holds in {passed} of {len(measured)} paraphrases (95 % interval {low:.2f} to {high:.2f})."
    if worst.failed:
        why += f" In {shown(name)}: {worst.why}"
    return replace(worst, claim=claim, why=why, repeats=repeats)


def _value(row: CheckedClaim) -> float:
    return row.measured.value if row.measured else float("-inf")


def texts_of(what: Any) -> list[str]:
    """Return the texts of a claim that paraphrases replace. Raises `InputError` for a chat, and where there is none."""
    if hasattr(what, "pairs"):
        return [text for pair in what.pairs for text in texts_of(pair)]
    if all(hasattr(what, name) for name in TEXTS):
        return [*what.examples, *what.others]
    prompt = getattr(what, "prompt", None)
    if not isinstance(prompt, str):
        raise InputError("It has no prompt that is a text, so there is nothing to paraphrase.")
    return [prompt]


def rephrased(model: Model, what: Any, rewrite: Rewrite) -> Any:
    """Return a claim, or a pair of a task, with other texts; its nodes are at the same tokens. Raises `InputError`."""
    if hasattr(what, "pairs"):
        return replace(what, pairs=tuple(rephrased(model, pair, rewrite) for pair in what.pairs))
    if all(hasattr(what, name) for name in TEXTS):
        return replace(what, **{name: tuple(rewrite(text, None)[0] for text in getattr(what, name)) for name in TEXTS})
    prompt, other = rewrite(what.prompt, getattr(what, "counterfactual", None))
    texts = {"prompt": prompt} | ({"counterfactual": other} if other is not None else {})
    return replace(what, **texts, **(moved(model, what, prompt) if isinstance(what, Kind) else {}))


def moved(model: Model, what: Any, prompt: str) -> dict[str, Any]:
    """Return the fields of a claim that name tokens of its prompt, for another prompt. Raises `InputError`."""
    before, after = (model.pieces(model.ids(text)) for text in (what.prompt, prompt))

    def at(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(at, value))
        return (
            replace(value, position=same_token(before, after, value.position)) if isinstance(value, NodeId) else value
        )

    if any(edit.where.startswith("position") for edit in getattr(what, "edits", ())):
        raise InputError("Its edits name positions of tokens, which a paraphrase moves; claim edits at @last.")
    fields = {name: at(value) for name, value in vars(what).items() if isinstance(value, NodeId | tuple)}
    if getattr(what, "token", None) is not None:
        token = same_token(before, after, what.token)
        fields |= {"token": token, "text": after[token]}
    return fields


def same_token(before: Sequence[str], after: Sequence[str], position: int) -> int:
    """Return the position in another prompt of a token: the last one stays the last, what follows the prompt stays
    behind it, and others are counted from the end among the tokens of this text. Raises `InputError`."""
    if position >= len(before) - 1:
        return position - len(before) + len(after)
    text = before[position].strip()
    behind = sum(piece.strip() == text for piece in before[position + 1 :])
    equal = [number for number, piece in enumerate(after) if piece.strip() == text]
    if len(equal) <= behind:
        raise InputError(f"The paraphrase {shown(''.join(after))} has no token {text!r}, which the claim names.")
    return equal[-1 - behind]
