"""Answers that are named by a text: of several tokens, the one that is explained; and what their spaces mean."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Token
from icebear.models.text.answer import Answer
from icebear.models.text.prompts import Prompt, prompts_of


def at_first_difference(
    model: Model, prompt: Any, target: Token | None, contrast: Token | None, counterfactual: Any = None
) -> tuple[Any, Any, Any, Any]:
    """Return the arguments of `attribute` for the first token in which two answers of several tokens differ.

    The tokens that they share are appended to the prompt and to each counterfactual. An answer of several tokens that
    is compared with no other one, or with one that differs at once, is explained at its first token. Single tokens,
    labels, and the answers of other models than causal ones stay as they are. What was chosen is logged.

    Parameters
    ----------
    model
    prompt, counterfactual
        A prompt; a prompt, several prompts or None.
    target, contrast

    Raises
    ------
    InputError
        If one answer begins with the other, or if a text is one token with a space, and several without.
    """
    named = {role: text for role, text in (("target", target), ("contrast", contrast)) if isinstance(text, str)}
    if not named or isinstance(prompt, Answer) or not model.task.is_causal or model.labels:
        return prompt, target, contrast, counterfactual
    read = Prompt.of(prompt)
    tokens: dict[str, tuple[Any, ...]] = {"target": (target,), "contrast": (contrast,)} | {
        role: _tokens(model, text, role, read) for role, text in named.items()
    }
    wanted, against = tokens["target"], tokens["contrast"]
    if len(wanted) == len(against) == 1:
        return prompt, target, contrast, counterfactual
    same = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, against, strict=False))
    shared = [token for token, _ in same]
    if len(shared) == min(len(wanted), len(against)):
        raise InputError(
            f"One of the answers {target!r} and {contrast!r} begins with the other; give two answers that differ in a "
            "token."
        )
    chosen = wanted[len(shared)], against[len(shared)]
    _say_which(model, named, shared, [model.text(token) for token in chosen if token is not None])
    if not shared:
        return prompt, *chosen, counterfactual
    others, alone = ([], True) if counterfactual is None else prompts_of(counterfactual)
    longer = [_continued(model, other, shared) for other in others]
    return _continued(model, read, shared), *chosen, next(iter(longer), None) if alone else longer


def note_space(model: Model, prompt: Any, text: str) -> None:
    """Log that an answer is likelier with the space that a word has in its token, if it is."""
    if not text.strip() or text[0].isspace():
        return
    spaced, plain = (model.continuation(words, prompt) for words in (f" {text}", text))
    if len(spaced) != 1 or spaced == plain[:1]:
        return
    words = model.token_scores(model.next_logits(prompt), [*spaced, plain[0]])
    if words[0].logit > words[1].logit:
        say(f"{words[0].text!r} ({words[0].number}) is likelier than {text!r} ({words[1].number}).")


def note_ending(model: Model, prompt: Any) -> None:
    """Log that a prompt ends in a space, and what is likely without it: words have their space in their own token."""
    text = Prompt.of(prompt).text
    bare = (text or "").rstrip(" ")
    if not model.task.is_causal or not bare or bare == text or model.pieces(model.ids(prompt))[-1].strip():
        return
    word = model.predict(bare, 1)[0]
    say(f"The prompt ends in a space; without it, {word.text!r} ({word.number}) is the likeliest.")


@lru_cache(1000)
def say(sentence: str) -> None:
    """Log a sentence, once."""
    logging.getLogger("icebear").warning(sentence)


def _tokens(model: Model, text: str, role: str, prompt: Prompt) -> tuple[Any, ...]:
    """Return the tokens of an answer. Raises `InputError` if it is one token, but for its missing space."""
    ids = tuple(model.continuation(text, prompt))
    lacks_space = len(ids) > 1 and len(model.continuation(f" {text}", prompt)) == 1
    return (model.token_id(text, role, prompt),) if not ids or lacks_space else ids


def _say_which(model: Model, named: dict[str, str], shared: Sequence[int], chosen: Sequence[str]) -> None:
    answers, words = (" and ".join(map(repr, named.values())), ", not ".join(map(repr, chosen)))
    if shared:
        common = "".join(model.pieces(list(shared)))
        say(f"{answers} begin with {common!r}, which is appended to each prompt; explained is {words}.")
    else:
        say(f"Of {answers} the first token is explained: {words}. --target-text explains all tokens.")


def _continued(model: Model, read: Prompt, ids: Sequence[int]) -> Prompt:
    """Return a prompt with tokens at its end: a text, where its tokenizer reads them so."""
    known = [*model.ids(read), *ids]
    text = (read.text or "") + "".join(model.pieces(list(ids)))
    written = replace(read, text=text, ids=None) if read.text is not None and read.pair is None else None
    return written if written and model.ids(written) == known else Prompt(ids=tuple(known))
