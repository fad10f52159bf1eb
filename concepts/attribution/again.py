"""An answer as it stands in a chat that was kept."""

from __future__ import annotations

from icebear.concepts.models.answer import Answer
from icebear.concepts.models.chat import Chat
from icebear.concepts.models.model import Model
from icebear.errors import InputError


def written(model: Model, chat: Chat, turn: int) -> list[int]:
    """The tokens of a message that the model wrote; of one without ids its text is tokenised. Raises `InputError`."""
    content, ids = chat.messages[turn]["content"], chat.messages[turn].get("ids")
    if not isinstance(content, str) or not content:
        raise InputError(f"Message {turn} of the chat has no text; give it some.")
    if not ids:
        return model.tokens_of(content)
    if "".join(model.pieces(model.ids(ids))) != content:
        raise InputError(f"The tokens of message {turn} are another text; were they written by {model.name}?")
    return ids


def answer_of(model: Model, chat: Chat, turn: int) -> Answer:
    """A message of a chat as the answer to those before it, with the probability of each of its tokens.

    Raises `InputError` for what is no answer of this model.
    """
    if not 0 < turn < len(chat.messages) or chat.messages[turn]["role"] != "assistant":
        raise InputError(f"Message {turn} of the chat is no answer; name one that the model wrote behind another one.")
    question = Chat(chat.messages[:turn])
    read, ids = model.ids(question), written(model, chat, turn)
    model.ids([*read, *ids])  # refused where it is too long
    probabilities = model.following(read, ids).softmax(-1)[range(len(ids)), ids].tolist()
    return Answer(tuple(read), tuple(ids), model.pieces(ids), tuple(probabilities), True, question)
