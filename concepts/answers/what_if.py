"""What if: the exchanges of each content word of a prompt, and which of them change the explained word.

1. The explained word is the likeliest content word after the prompt (`likely_words`); of a chat, the first content word
   of the model's answer.
2. Each of the content words of the prompt, or of the last message of a chat's user, is exchanged for at most five
   others (`candidates_for`); all are read.
3. The change of an exchange is the log-odds of the explained word after it, less those before it, in nats.
4. The table has the three words with the lowest median change, each with its two lowest changes. The range
   of the changes of all other words is its control.
5. A comparison is an exchange by which the explained word loses, and which a person could have made
   (`icebear.concepts.answers.comparisons`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, takewhile
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.concepts.answers.comparisons import GOOD_SCORE, WRITTEN, Exchange, ExchangeContext, comparison_score
from icebear.concepts.answers.content_words import is_content, words_of
from icebear.concepts.answers.exchanges import (
    PER_WORD,
    Candidate,
    Embeddings,
    by_absolute_relevance,
    candidates_for,
    exchangeable,
    fitting_words,
    may_change,
)
from icebear.concepts.answers.likely_words import (
    APPENDED,
    LikelyWord,
    Reader,
    likeliest,
    likely_words,
    word_of_answer,
)
from icebear.errors import InputError
from icebear.models.loading.presets import model_option
from icebear.models.model import Model
from icebear.models.text.answer import Answer
from icebear.models.text.chat import Chat, other_prompt, turns_of
from icebear.models.text.prompts import Prompt, PromptLike
from icebear.records import InNotebooks
from icebear.render import quoted
from icebear.values import typed

if TYPE_CHECKING:
    import pandas

EXCHANGED_WORDS = 12
"""The largest number of words that are exchanged: those with the largest relevance."""
SHOWN_WORDS = 3
SHOWN_EACH = 2
"""The exchanges of a word in the table."""
LONGEST = 128
"""The largest number of tokens of a text whose words are exchanged without being asked for."""
FEWEST = 3
"""Of a long text fewer words are exchanged, but so many."""
READ = 1500
"""The largest number of tokens that are read in all exchanges of further words."""
LIKELY_CONTRASTS = 5
"""The tokens after an exchange among which a contrast is looked for."""
ANSWER_TOKENS = 40
"""The largest number of tokens of an answer whose first content word is explained."""
ONE_NAT = 1.0
"""Where no exchange changes the explained word by this much, no single word matters."""


@dataclass(frozen=True, repr=False)
class WhatIf(InNotebooks):
    """What the explained word hangs on: all exchanges that were read, those of the words that matter most first."""

    prompt: str | Chat | Answer
    """A text; a chat, of which the next token is explained; or the answer to a chat, of which a word is explained."""
    explained: LikelyWord
    explained_after: str
    """What the model writes before the explained word; empty if it is the next token."""
    is_next: bool
    """Whether the explained token is the likeliest one."""
    exchanges: tuple[Exchange, ...]
    made_with: dict[str, Any]
    """See `Model.made_with`."""
    is_long: bool = False
    """Whether no word was exchanged because the prompt is long."""
    file: str = "FILE"
    """The file of a conversation of several messages, in the commands."""

    @property
    def answer(self) -> Answer | None:
        """The answer whose word is explained."""
        return self.prompt if isinstance(self.prompt, Answer) else None

    @property
    def chat(self) -> Chat | None:
        """The chat whose message is exchanged."""
        return self.prompt.question if isinstance(self.prompt, Answer) else Prompt.of(self.prompt).chat

    @cached_property
    def words(self) -> tuple[tuple[Exchange, ...], ...]:
        """The exchanges by word."""
        spans = dict.fromkeys((exchange.position, exchange.length) for exchange in self.exchanges)
        return tuple(tuple(x for x in self.exchanges if (x.position, x.length) == span) for span in spans)

    @property
    def shown(self) -> tuple[Exchange, ...]:
        """The rows of the table."""
        return tuple(exchange for word in self.words[:SHOWN_WORDS] for exchange in word[:SHOWN_EACH])

    def median_text(self, exchange: Exchange) -> str:
        """Say the median change by the exchanges of the same word, where several were read and this is the first."""
        word = next(word for word in self.words if exchange in word)
        is_first = len(word) > 1 and exchange is word[0]
        return f"median of {len(word)}: {median_change(word):+.1f}" if is_first else ""

    @property
    def matters(self) -> bool:
        """Whether an exchange changes the explained word by a nat or more."""
        return any(abs(exchange.change) >= ONE_NAT for exchange in self.exchanges)

    @property
    def control(self) -> tuple[float, float] | None:
        """The range of the changes by the exchanges of all words that are not in the table; None of fewer than two."""
        others = [exchange.change for word in self.words[SHOWN_WORDS:] for exchange in word]
        return (min(others), max(others)) if len(self.words) >= SHOWN_WORDS + 2 else None

    @property
    def comparisons(self) -> tuple[Exchange, ...]:
        """The exchanges that a person could have made to compare with, the best first (`comparison_score`)."""
        return tuple(sorted((x for x in self.exchanges if x.score >= GOOD_SCORE), key=lambda x: -x.score))

    def arguments(self, exchange: Exchange | None) -> dict[str, Any]:
        """Return the arguments of `attribute` that explain the word, compared by an exchange or alone."""
        if isinstance(self.prompt, Answer):
            word = {"prompt": self.prompt, "span": self._span}
        else:
            read = self.read(self.prompt) if isinstance(self.prompt, str) else self.prompt
            word = {"prompt": read, "target": self.explained.token}
        if exchange is None:
            return word
        other = self.chat.asking(exchange.text) if self.chat else self.read(exchange.text)
        contrast = {} if exchange.contrast is None else {"contrast": exchange.contrast}
        return {**word, "counterfactual": other, **contrast}

    def answers(self, exchange: Exchange | None) -> tuple[str | None, str | None]:
        """Return target and contrast of a comparison by an exchange as texts; None for what is taken unasked."""
        contrast = exchange.contrast_text if exchange and exchange.contrast is not None else None
        return None if self.is_next else self.explained.token_text, contrast

    @property
    def begun_word(self) -> str:
        """The explained word, if its token is only the beginning of it; else empty."""
        token, word = self.explained.token_text.strip(), self.explained.text.strip()
        return word if token and word != token else ""

    @property
    def _span(self) -> tuple[int, int]:
        """The explained token of the answer."""
        start = len(self.explained.after)
        return start, start + 1

    def read(self, text: str) -> str:
        """Return what the model reads before the explained word, of a text or a changed one."""
        return text + self.explained_after

    def command(self, exchange: Exchange) -> str:
        """Return the command that explains the prompt beside one exchange."""
        if self.chat:
            prompts = [*_chat_words(self.chat, self.file), "--counterfactual", exchange.text]
        else:
            prompts = [self.read(str(self.prompt)), "--counterfactual", self.read(exchange.text)]
        words = ["icebear", "explain", *prompts, *self._named_word()]
        words += [] if exchange.contrast is None else ["--contrast", exchange.contrast_text]
        return shlex.join([*words, *model_option(self.made_with)])

    def _named_word(self) -> list[str]:
        """Return the option that names the explained token: of an answer the word, if it has no other token."""
        if not isinstance(self.prompt, Answer):
            return [] if self.is_next else ["--target", self.explained.token_text]
        word, (start, stop) = self.explained.text.strip(), self._span
        is_named = self.prompt.token_range(word or None) == (start, stop)
        return ["--span", word if is_named else f"{start}:{stop}"]

    def __str__(self) -> str:
        if self.is_long:
            return f"No word was exchanged, because the prompt has more than {LONGEST} tokens."
        if not self.exchanges:
            return "The prompt has no word that can be exchanged."
        if not self.matters:
            answer = quoted(self.explained.text)
            return f"No single word matters: none of {len(self.exchanges)} exchanges changes {answer} by a nat or more."
        (most, *others), count = self.words[0], len(self.words[0])
        if most.change > -ONE_NAT:
            row = max(self.exchanges, key=lambda exchange: abs(exchange.change))
            return (
                f"No word is decisive: the largest change of {self.explained.text!r} is {row.change:+.1f} nats, with "
                f"{row.instead!r} instead of {row.word!r}."
            )
        change = f"{median_change(self.words[0]):+.1f} nats"
        several = f"{count} other words there change it by {change} (median)"
        changes = several if others else f"another word there changes it by {change}"
        verb = "stays" if most.answer == self.explained.text else "is"
        example = f"with {most.instead!r}, {most.answer!r} {verb} the likeliest content word"
        return f"The answer hangs most on {most.word!r}: {changes}; {example}."

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-ready data."""
        shown = {id(exchange) for exchange in self.shown}
        rows = [{**x.to_dict(), "tokens": list(x.tokens), "shown": id(x) in shown} for x in self.exchanges]
        return {"exchanges": rows, "explained_after": self.explained_after}

    def to_frame(self) -> pandas.DataFrame:
        """Return a row for each exchange, with its command."""
        import pandas

        commands = [self.command(exchange) for exchange in self.exchanges]
        frame = pandas.DataFrame(self.to_dict()["exchanges"], columns=[*WRITTEN, "shown"])
        return frame.assign(command=commands)


def exchange_words(model: Model, prompt: PromptLike, next_token: bool = False) -> WhatIf:
    """Exchange the content words of a prompt.

    A chat is answered first, and the first content word of its answer is explained; so is that of an answer to a chat.
    next_token: explain the likeliest token, also where it is no content word. Raises `InputError` for a model that does
    not predict the next token.
    """
    if not model.task.is_causal:
        raise InputError(
            f"{model.name} is not a causal language model, and icebear exchanges words only for these; give a "
            "counterfactual yourself."
        )
    return _what_if(model, _answered(model, prompt, next_token, ANSWER_TOKENS), next_token)


def _what_if(model: Model, source: str | Chat | Answer | list[int], next_token: bool) -> WhatIf:
    """Exchange the words of what is explained, see `_answered`."""
    ids = list(source.prompt_ids) if isinstance(source, Answer) else list(model.encode([source]).row_ids(0))
    reader, embeddings = Reader(model, ids), Embeddings(model)
    logits = reader.logits()
    model.top_tokens(logits[-1], 1)  # raises for NaN
    explained = _explained(reader, source, logits[-1], next_token)
    question = source.question if isinstance(source, Answer) else source
    assert question is not None
    changeable = _Changeable.of(model, question, ids)
    candidates = [row for row in _chosen_candidates(reader, embeddings, logits, changeable) if changeable.is_read(row)]
    exchanges = _exchanges(reader, changeable, embeddings, candidates, explained, logits[-1])
    is_next = not explained.after and explained.token == int(logits[-1].argmax())
    shown = source if isinstance(source, str | Chat | Answer) else model.tokenizer.decode(ids)
    after = "".join(model.pieces(explained.after))
    return WhatIf(shown, explained, after, is_next, tuple(_ordered(exchanges)), model.made_with)


def own_exchange(model: Model, exchanged: WhatIf, span: tuple[int, int], word: str) -> Exchange:
    """Exchange the tokens of a content word of a text for a word of a person; if that has more tokens, or fewer, for
    the nearest word that fits. Raises `InputError` if none does."""
    assert isinstance(exchanged.prompt, str)
    ids = list(model.encode([exchanged.prompt]).row_ids(0))
    reader, embeddings, changeable = Reader(model, ids), Embeddings(model), _Changeable.of(model, exchanged.prompt, ids)
    words = (row for row in fitting_words(reader, embeddings, span, word) if row.tokens != tuple(ids[slice(*span)]))
    fitting = next(filter(changeable.is_read, words), None)
    if fitting is None:
        raise InputError(f"No word like {word!r} has {span[1] - span[0]} tokens, as the word that it replaces.")
    (row,) = _exchanges(reader, changeable, embeddings, [fitting], exchanged.explained, reader.logits()[-1])
    return row


def exchange_words_if_short(
    model: Model, prompt: str | Chat, next_token: bool = False, max_new_tokens: int = ANSWER_TOKENS
) -> WhatIf | None:
    """Return the exchanges that `explain` makes by itself: of a text or a chat that is explained alone and is not long.

    A message to a chat model that is given as a text (`is_message`) is asked as a chat. Of a long chat, a word of the
    answer is explained, without exchanges; for a long text there is nothing (None). max_new_tokens: the length of the
    answer.
    """
    if not model.task.is_causal:
        return None
    is_long = len(model.ids(prompt)) > LONGEST
    if not (is_long or next_token or isinstance(prompt, Chat)) and is_message(model, prompt):
        prompt = Chat([{"role": "user", "content": prompt}])
    source = _answered(model, prompt, next_token, max_new_tokens)
    if not is_long:
        return _what_if(model, source, next_token)
    if not isinstance(source, Answer):
        return None
    explained = word_of_answer(source)
    is_next = not explained.after
    after = "".join(model.pieces(explained.after))
    return WhatIf(source, explained, after, is_next, (), model.made_with, is_long=True)


def is_message(model: Model, text: str) -> bool:
    """Return whether a text is a message to a chat model, which would end its turn after it instead of continuing it.

    Then a special token is the likeliest next token; after a question, it is among the next ones before any content
    word."""
    if not getattr(model.tokenizer, "chat_template", None) or not model.task.generates:
        return False
    count, special = APPENDED if text.rstrip().endswith("?") else 1, {*model.special_ids(), *model.ends}
    (written,) = model.continuations([model.ids(text)], count)
    before = list(takewhile(lambda token: token not in special, written))
    texts = model.pieces(before)
    return len(before) < len(written) and not any(is_content("".join(texts[slice(*span)])) for span in words_of(texts))


@typed
def what_if(model: Model, prompt: PromptLike) -> pandas.DataFrame:
    """Exchange the content words of a prompt, one at a time, and measure what this changes.

    The explained word is the likeliest content word after the prompt; of a chat, the first content word of the answer
    that the model generates. Each content word of the prompt (of a chat, of the user's last message), and phrase of
    capitalized words, gives way to at most five similar ones of as many tokens.

    Parameters
    ----------
    model : Model
        A causal language model.
    prompt : str, sequence of int or Chat

    Returns
    -------
    pandas.DataFrame
        A row for each exchange, the words on which the answer hangs most first: the word, its position and length in
        tokens, the word instead and its token ids, the likeliest content word after the exchange with its probability,
        the change of the explained word's log-odds in nats, whether the row is in the table that `icebear explain`
        shows, and the command that explains both prompts.

    Raises
    ------
    InputError
        If the model does not predict the next token.
    """
    return exchange_words(model, prompt).to_frame()


def _answered(
    model: Model, prompt: PromptLike, next_token: bool, max_new_tokens: int
) -> str | Chat | Answer | list[int]:
    """Return what is explained.

    Of a chat it is the model's answer, or the chat itself if the next token is explained or the answer is empty. A text
    stays as it is, and other prompts are token ids."""
    if isinstance(prompt, Answer) and prompt.question and prompt.ids:
        return prompt.question if next_token else prompt
    chat = prompt.question if isinstance(prompt, Answer) else Prompt.of(prompt).chat
    if chat is None:
        return prompt if isinstance(prompt, str) else list(model.ids(prompt))
    room = model.context_length - len(model.ids(chat))
    if next_token or room < 1 or not model.task.generates or isinstance(prompt, Answer):
        return chat
    answer = model.answer(chat, min(max_new_tokens, room))
    return answer if answer.ids else chat


def _explained(reader: Reader, source: PromptLike, logits: Tensor, next_token: bool) -> LikelyWord:
    """Return the explained word. logits: (V,) after the prompt."""
    if isinstance(source, Answer):
        return word_of_answer(source)
    if next_token or isinstance(source, Chat):
        return likeliest(reader.model, logits)
    return likely_words(reader, [reader.ids], [logits])[0]


@dataclass(frozen=True)
class _Changeable:
    """What may be exchanged, tokens [start, stop): all of a text, or the last message of a chat's user."""

    model: Model
    source: str | Chat | list[int]
    ids: list[int]
    start: int
    stop: int

    @classmethod
    def of(cls, model: Model, source: str | Chat | list[int], ids: list[int]) -> _Changeable:
        if not isinstance(source, Chat):
            return cls(model, source, ids, 0, len(ids))
        turns = [turn for turn in turns_of(model, source, model.pieces(ids)) if turn.role == "user"]
        start, stop = (turns[-1].text_start, turns[-1].text_stop) if turns else (0, 0)
        return cls(model, source, ids, start, stop)

    @property
    def positions(self) -> set[int]:
        if isinstance(self.source, Chat):
            return set(range(self.start, self.stop))
        return may_change(self.model, self.ids)

    def text(self, candidate: Candidate) -> str:
        """Return the text, or the message, after an exchange."""
        ids, is_text = candidate.of(self.ids)[self.start : self.stop], not isinstance(self.source, Chat)
        return self.model.tokenizer.decode(ids, skip_special_tokens=is_text)

    def is_read(self, candidate: Candidate) -> bool:
        """Return whether the command of an exchange reads the same tokens."""
        if not isinstance(self.source, str | Chat):
            return True
        return self.model.ids(other_prompt(self.source, self.text(candidate))) == candidate.of(self.ids)


def _chat_words(chat: Chat, file: str) -> list[str]:
    """Return the words of a command that name a chat: its message, or the file of a conversation of several."""
    *before, last = chat.messages
    is_asked = last["role"] == "user" and all(message.keys() == {"role", "content"} for message in chat.messages)
    switches = [f"{name}={json.dumps(value)}" for name, value in chat.template.items()]
    template = [word for switch in switches for word in ("--template-option", switch)]
    if not is_asked or [message["role"] for message in before] not in ([], ["system"]):
        return ["--messages", file, *template]
    system = [word for message in before for word in ("--system", message["content"])]
    return ["--chat", last["content"], *system, *template]


def _chosen_candidates(
    reader: Reader, embeddings: Embeddings, logits: Tensor, changeable: _Changeable
) -> list[Candidate]:
    """Return the exchanges of the words with the largest relevance. logits: (T, V)."""
    model, ids = reader.model, reader.ids
    spans = exchangeable(model, ids, changeable.positions)
    if sum(len(ids) - start for start, _ in spans) * PER_WORD > READ or len(spans) > EXCHANGED_WORDS:
        spans = by_absolute_relevance(model, ids, spans)
    read = accumulate(PER_WORD * (len(ids) - start) for start, _ in spans)
    chosen = [
        span for number, (span, tokens) in enumerate(zip(spans, read, strict=True)) if number < FEWEST or tokens <= READ
    ]
    each = [candidates_for(reader, embeddings, span, logits) for span in chosen[:EXCHANGED_WORDS]]
    return [candidate for candidates in each for candidate in candidates]


def _exchanges(
    reader: Reader,
    changeable: _Changeable,
    embeddings: Embeddings,
    candidates: Sequence[Candidate],
    explained: LikelyWord,
    logits: Tensor,
) -> list[Exchange]:
    """Read all exchanges. logits: (V,) after the prompt."""
    ids, after = reader.ids, explained.after
    rows = [[*candidate.of(ids), *after] for candidate in candidates]
    logits_after = reader.next_logits(rows)
    answers = likely_words(reader, rows, logits_after)
    before = reader.next_logits([[*ids, *after]])[0] if after else logits
    return [
        _exchange(changeable, *row, ExchangeContext(embeddings, ids, explained, before, values))
        for row, values in zip(zip(candidates, answers, strict=True), logits_after, strict=True)
    ]


def _exchange(changeable: _Changeable, candidate: Candidate, answer: LikelyWord, context: ExchangeContext) -> Exchange:
    model, ids, start, end = changeable.model, context.ids, candidate.start, candidate.end
    before, after = (log_odds(x, context.explained.token) for x in (context.logits, context.logits_after))
    word, instead = ("".join(model.pieces(tokens)).strip() for tokens in (ids[start:end], candidate.tokens))
    contrast, contrast_text = _contrast(model, answer, context)
    row = Exchange(
        word=word,
        position=start,
        length=end - start,
        instead=instead,
        tokens=candidate.tokens,
        answer=answer.text,
        probability=answer.probability,
        change=after - before,
        text=changeable.text(candidate),
        likely=answer,
        contrast=contrast,
        contrast_text=contrast_text,
        score=-inf,
    )
    return replace(row, score=comparison_score(model, candidate, row, context))


def _contrast(model: Model, answer: LikelyWord, context: ExchangeContext) -> tuple[int | None, str]:
    """Return the token that the explained word is compared with, and its text. Where the explained word is the
    likeliest one after the exchange too, it is the likely token that gains most."""
    explained = context.explained.token
    if not answer.after and answer.token != explained:
        return answer.token, answer.token_text
    if int(context.logits_after.argmax()) != explained:
        return None, ""
    likely = [token.id for token in model.top_tokens(context.logits_after, LIKELY_CONTRASTS) if token.id != explained]
    gains = context.logits_after.softmax(-1) - context.logits.softmax(-1)
    gaining = max([token for token in likely if model.reads_back(token)] or likely, key=lambda x: gains[x].item())
    return gaining, model.answer_text(gaining)


def _ordered(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Sort by the median change of the word, and by the change; those by which the explained word loses most first."""
    words: dict[int, list[Exchange]] = {}
    for exchange in exchanges:
        words.setdefault(exchange.position, []).append(exchange)
    medians = {position: median_change(word) for position, word in words.items()}
    return sorted(exchanges, key=lambda x: (medians[x.position], x.position, x.change))


def median_change(exchanges: Sequence[Exchange]) -> float:
    return median(exchange.change for exchange in exchanges)


def log_odds(logits: Tensor, token: int) -> float:
    """Return the log-odds of a token, from the logits (V,) of all."""
    others = logits.double().clone()
    others[token] = -torch.inf
    return (logits[token].double() - others.logsumexp(-1)).item()
