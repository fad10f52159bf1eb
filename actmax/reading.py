"""How a model reads the sentences of an index: texts by their tokens, images by their patches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from icebear.cache import sha256
from icebear.errors import InputError, StoreError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.text.images import encode_pixels, names, own_names, read_picture
from icebear.models.text.prompts import PromptLike
from icebear.paths import existing
from icebear.records import IMAGES, Sentence

log = logging.getLogger("icebear")

TEXTS_PER_PASS = 32
IMAGES_PER_PASS = 8
"""Of a few hundred patches each, which is as much as 32 sentences."""


@dataclass(frozen=True)
class ReadTogether:
    """Sentences that share a pass."""

    numbers: list[int]
    """Which of the sentences these are."""
    batch: Batch
    counted: Batch
    """The batch without the tokens at the end that do not count."""


class Reading(Protocol):
    """How the sentences of one index are read."""

    begins: int
    """The position of the first token that counts."""
    max_tokens: int | None
    """The most tokens of a text; None for images, whose patches have no token ids."""
    per_pass: int

    def prompt(self, sentence: Sentence) -> PromptLike:
        """Return what the model reads."""

    def tokens(self, sentence: Sentence) -> tuple[str, ...]:
        """Return the tokens of a sentence that was read, as texts."""

    def batches(self, sentences: Sequence[Sentence], size: int) -> Iterator[ReadTogether]:
        """Yield the sentences in batches, without those in which nothing counts."""


class TextReading(Reading):
    """The first token (a sink or a special token) and special tokens at the end do not count."""

    begins, per_pass = 1, TEXTS_PER_PASS

    def __init__(self, model: Model, max_tokens: int) -> None:
        if not model.task.reads_text:
            raise InputError(f"{model.name} reads images, not text; index images (--images), or choose another model.")
        self.model, self.max_tokens = model, max_tokens

    def prompt(self, sentence: Sentence) -> list[int]:
        return self.model.token_ids(sentence.text, self.max_tokens)

    def tokens(self, sentence: Sentence) -> tuple[str, ...]:
        return self.model.pieces(self.prompt(sentence))

    def batches(self, sentences: Sequence[Sentence], size: int) -> Iterator[ReadTogether]:
        rows = [(index, self.prompt(sentence)) for index, sentence in enumerate(sentences)]
        special = self.model.special_ids()
        lengths = [counted_length(ids, special) for _, ids in rows]
        rows = sorted(
            (row for row in rows if lengths[row[0]] > self.begins),
            key=lambda row: (lengths[row[0]], len(row[1]), sentences[row[0]].id),
        )
        for numbers in self.model.batches([len(ids) for _, ids in rows], size):
            part = [rows[number] for number in numbers]
            batch = self.model.read([ids for _, ids in part])
            yield ReadTogether([index for index, _ in part], batch, _counted(self.model, batch))


class ImageReading(Reading):
    """All patches count, and none of the model's own tokens. A file that is no image is skipped, and named."""

    max_tokens, per_pass = None, IMAGES_PER_PASS

    def __init__(self, model: Model, folder: str | Path) -> None:
        if model.task.reads_text:
            raise InputError(f"{model.name} reads text, not images; choose a model that reads images, or index texts.")
        if model.processor is None:
            raise InputError(
                f"{model.name} has no image processor (preprocessor_config.json), which makes pixels of an image; save "
                "one with it."
            )
        self.model, self.folder, self.begins = model, folder, len(own_names(model))
        self._tokens: dict[int, tuple[str, ...]] = {}  # of the shard that is read, until it is saved

    def prompt(self, sentence: Sentence) -> Tensor:
        """Return the pixels (C, H, W). Raises `StoreError` for a missing or changed file, `InputError` for one that is
        no image."""
        return encode_pixels(self.model, read_picture(image_file(self.folder, sentence)))

    def tokens(self, sentence: Sentence) -> tuple[str, ...]:
        return self._tokens.pop(sentence.id, ())

    def batches(self, sentences: Sequence[Sentence], size: int) -> Iterator[ReadTogether]:
        waiting: dict[int, Tensor] = {}
        for number, sentence in enumerate(sentences):
            try:
                pixels = self.prompt(sentence)
            except InputError as error:
                log.warning("Skipped: %s", error)
                continue
            self._tokens[sentence.id] = names(self.model, pixels)
            if waiting and (len(waiting) == size or pixels.shape != next(iter(waiting.values())).shape):
                yield self._together(waiting)
                waiting = {}
            waiting[number] = pixels
        if waiting:
            yield self._together(waiting)

    def _together(self, images: Mapping[int, Tensor]) -> ReadTogether:
        batch = self.model.encode(list(images.values()))
        return ReadTogether(list(images), batch, batch)


Key = TypeVar("Key")


def readable(reading: Reading, sentences: Iterable[tuple[Key, Sentence]]) -> list[tuple[Key, Any]]:
    """Return what the model reads of sentences, each with its key, without images that are missing or have changed,
    which are named."""
    prompts = []
    for key, sentence in sentences:
        try:
            prompts.append((key, reading.prompt(sentence)))
        except (StoreError, InputError) as error:
            if isinstance(reading, TextReading):
                raise
            log.warning("Skipped: %s", error)
    return prompts


def reading_of(model: Model, facts: Mapping[str, Any]) -> Reading:
    """Return how the sentences of an index with these facts are read. Raises `InputError` if the model cannot."""
    if facts.get("input") == IMAGES:
        return ImageReading(model, facts["corpus"])
    return TextReading(model, facts["max_tokens"])


def image_file(folder: str | Path, image: Sentence) -> Path:
    """Return the file of an image of an index.

    Raises `StoreError` if the file is missing, or is not the one that was indexed. The digest decides, so that a store
    of others can show only files that its maker has.
    """
    path = Path(folder, *image.text.split("/"))
    again = "put the image back, or name the folder that has it with icebear index --images FOLDER"
    try:
        digest = sha256(existing(path, StoreError))
    except FileNotFoundError:
        raise StoreError(f"The image {path} is missing; {again}.") from None
    except (OSError, InputError) as error:
        raise StoreError(f"The image {path} cannot be read ({error}); {again}.") from None
    if digest != image.title:
        raise StoreError(f"The image {path} has changed since it was indexed; {again}.")
    return path


def counted_length(ids: Sequence[int], special: set[int]) -> int:
    """Return the length without special tokens at the end, such as [SEP] or </s>."""
    length = len(ids)
    while length and ids[length - 1] in special:
        length -= 1
    return length


def _counted(model: Model, batch: Batch) -> Batch:
    """Return the batch without special tokens at the end."""
    special = model.special_ids()
    lengths = tuple(counted_length(ids[:n], special) for ids, n in zip(batch.ids.tolist(), batch.lengths, strict=True))
    positions = torch.arange(batch.ids.shape[1])
    mask = (positions < torch.tensor(lengths)[:, None]).long().to(batch.ids.device)
    return Batch(batch.ids, mask, lengths)
