"""Claims about the source in its context that an answer depends on."""

from __future__ import annotations

from dataclasses import dataclass

from icebear.claims.kind import Draft, Kind, Measured
from icebear.concepts.answers.source_records import SourcedSentence
from icebear.concepts.answers.sources import Sources, effect_of_source
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.answer import Answer, answer_of
from icebear.models.text.chat import Chat

Messages = tuple[dict[str, str], ...]
"""The messages of a chat, with role and content."""


@dataclass(frozen=True)
class SourceClaim(Kind):
    """A sentence of an answer loses this many nats of log-probability without one source of its context. The control is
    the largest loss without a random other source."""

    prompt: Messages
    answer: str
    sentence: str
    """Of the answer."""
    source: str
    message: int
    """The index of its message."""
    at: int
    """The character of its message where the source begins."""
    sentence_at: int
    """The character of the answer where the sentence begins."""
    units: str = "sentence"
    """What is removed: a sentence, message or document."""
    kind = "source"
    value_is = "nats that the sentence of the answer loses without its source"
    control_is = "the largest loss without a random other source"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        chat = Chat([*self.prompt, {"role": "assistant", "content": self.answer}])
        text = chat.messages[self.message]["content"] if 0 <= self.message < len(self.prompt) else ""
        _check_at(text, self.at, self.source, f"Message {self.message}")
        _check_at(self.answer, self.sentence_at, self.sentence, "The answer")
        answer = answer_of(model, chat, len(chat.messages) - 1)
        span = answer.tokens_at(self.sentence_at, self.sentence_at + len(self.sentence))
        effect = effect_of_source(model, answer, self.message, self.at, self.units, span, seed)
        [affected] = effect.sentences
        if effect.text.strip() != self.source:
            raise InputError(f"{self.source!r} is no whole {self.units} of its message; correct the claim.")
        if not affected.random:
            raise InputError("The context has no other source as a control; claim a source of a longer context.")
        return Measured(-affected.change, max(-change for change in affected.random))

    @classmethod
    def of(cls, sources: Sources, answer: Answer) -> list[Draft]:
        """Return the claim of the first source of each sentence that hangs on it. Raises `InputError` for a chat with
        calls of tools, or a prompt of token ids."""
        prompt = _messages(answer)
        hanging = [sentence for sentence in sources.sentences if sentence.is_decided]
        return [(cls._of_sentence(sentence, prompt, answer, sources.units), None) for sentence in hanging]

    @classmethod
    def _of_sentence(cls, sentence: SourcedSentence, prompt: Messages, answer: Answer, units: str) -> SourceClaim:
        source, text = sentence.sources[0], sentence.text
        assert source.characters is not None  # `_messages` refuses calls of tools
        at = len("".join(answer.token_strings[: sentence.start])) + len(text) - len(text.lstrip())
        begin = source.characters[0] + len(source.text) - len(source.text.lstrip())
        return cls(prompt, answer.text, text.strip(), source.text.strip(), source.message, begin, at, units)

    def __str__(self) -> str:
        return f"{self.sentence!r} hangs on {self.source!r}"


def _check_at(text: str, at: int, part: str, name: str) -> None:
    if at < 0 or not part or not text.startswith(part, at):
        raise InputError(f"{name} of the claim has no text {part!r} at character {at}; correct the claim.")


def _messages(answer: Answer) -> Messages:
    if answer.question is None:
        raise InputError("A claim of a source is about an answer to a chat; add --chat.")
    messages = answer.question.messages
    if answer.image is not None:
        raise InputError("A claim of a source is about a conversation of texts; explain this answer without --claim.")
    if answer.question.template or any(message.get("tool_calls") for message in messages):
        raise InputError("A claim is about a conversation of texts; leave out calls of tools and template options.")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
