"""Pictures that a visitor uploads. They stay in the session: a link has the digest of a picture, not the picture."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import streamlit as st

from icebear.errors import InputError
from icebear.models.text.chat import Chat
from icebear.models.text.images import read_picture
from icebear.models.text.prompts import Prompt


def digest(uploaded: Any) -> str:
    """Return the SHA-256 digest of an uploaded file."""
    return sha256(uploaded.getvalue()).hexdigest()


def read(uploaded: Any) -> Any:
    """Return the picture in an uploaded file. Raises `InputError`."""
    try:
        return read_picture(uploaded)
    except InputError:
        raise InputError("This file cannot be read as an image; choose another one.") from None


def keep(uploaded: Any) -> str:
    """Keep the picture in an uploaded file for a conversation. Return its digest, which is the image of a message.
    Raises `InputError`."""
    picture, name = read(uploaded), digest(uploaded)
    _kept()[name] = uploaded.name, picture
    return name


def forget() -> None:
    """Drop the pictures of this visitor."""
    _kept().clear()


def _kept() -> dict[str, tuple[str, Any]]:
    """Return digest -> the name of the file, and the picture."""
    return st.session_state.setdefault("pictures", {})


def picture_of(chat: Chat) -> Any:
    """Return the picture of a conversation, None if it has none. Raises `InputError` for one that is not here; a path
    in a message is never opened, because it would be a file of the server."""
    if chat.image is None:
        return None
    if chat.image not in _kept():
        raise InputError(
            "The image of this conversation is not in its link; start a new conversation, and upload the image there."
        )
    return _kept()[chat.image][1]


def prompt_of(chat: Chat) -> Prompt:
    """Return a conversation with its picture. Raises `InputError`."""
    return Prompt(chat=chat, image=picture_of(chat))


def saved(chat: Chat) -> str:
    """Return a conversation as JSON, with the name of the file in place of the digest, as `--messages` reads it."""
    names = {name: file for name, (file, _) in _kept().items()}
    images = [{"image": names[message["image"]]} if message.get("image") else {} for message in chat.messages]
    return chat.of([{**message, **image} for message, image in zip(chat.messages, images, strict=True)]).to_json()
