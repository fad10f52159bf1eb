"""Claims about an answer: the source in its context that it hangs on."""

from __future__ import annotations

from dataclasses import dataclass

from icebear.claims.kind import Draft, Kind, Measured
from icebear.concepts.answers.sources import Sources, effect_of_source
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.answer import Answer
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
    units: str = "sentence"
    """What is removed: a sentence, message or document."""
    kind = "source"
    value_is = "nats that the sentence of the answer loses without its source"
    control_is = "the largest loss without a random other source"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        read = self.prompt
        if not 0 <= self.message < len(read) or self.source not in read[self.message]["content"]:
            raise InputError(f"Message {self.message} of the claim has no text {self.source!r}; correct the claim.")
        at = read[self.message]["content"].index(self.source)
        chat = Chat([*read, {"role": "assistant", "content": self.answer}])
        effect = effect_of_source(model, chat, self.message, at, self.units, self.sentence, seed)
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
        rows = [(sentence.text.strip(), sentence.sources[0]) for sentence in hanging]
        return [
            (cls(prompt, answer.text, text, source.text.strip(), source.message, sources.units), None)
            for text, source in rows
        ]

    def __str__(self) -> str:
        return f"{self.sentence!r} hangs on {self.source!r}"


def _messages(answer: Answer) -> Messages:
    if answer.question is None:
        raise InputError("A claim of a source is about an answer to a chat; add --chat.")
    messages = answer.question.messages
    if answer.question.template or any(message.get("tool_calls") for message in messages):
        raise InputError("A claim is about a conversation of texts; leave out calls of tools and template options.")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
