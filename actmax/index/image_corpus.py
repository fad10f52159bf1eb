"""A folder of images as a corpus: an image is a document of one sentence, and its patches are the tokens."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from icebear.actmax.index.corpus import Corpus, Document, Seen
from icebear.cache import sha256
from icebear.errors import InputError, need
from icebear.models.image_examples import ENDINGS, image_names
from icebear.paths import local
from icebear.records import IMAGES, Sentence
from icebear.values import check_int, typed


@dataclass(frozen=True)
class ImageCorpus(Corpus):
    """The images of a folder. The text of a document is the file's name in the folder, its title the SHA-256 of the
    file."""

    def sentences(self, counts: Counter[str] | None = None) -> Iterator[Sentence]:
        """Yield each distinct image once, and count copies in `counts`. Its id is 62 bits of its digest."""
        counts, seen = Counter() if counts is None else counts, Seen()
        for digest, name in self.documents():
            counts["documents"] += 1
            identity = int(digest[:16], 16) >> 2
            if seen.add(identity):
                counts["sentences"] += 1
                yield Sentence(identity, name, digest, 0, len(name))
            else:
                counts["duplicates"] += 1


@typed
def read_images(folder: str | Path, limit: int | None = None) -> Corpus:
    """Open a folder of images as a corpus for `build_index`.

    Parameters
    ----------
    folder
        The folder, with subfolders or without, as the ``imagefolder`` of Hugging Face's datasets is laid out. Files
        that end in .png, .jpg, .jpeg, .webp, .gif, .bmp, .tif or .tiff are read; hidden ones are left out.
    limit
        The number of images to read, a sample drawn by a hash of their names; None for all.

    Returns
    -------
    Corpus

    Raises
    ------
    InputError
        If there is no such folder, it has no images, or a file cannot be read.
    """
    need("images")
    if limit is not None:
        check_int(limit, "The number of images")
    path = local(folder).absolute()
    if not path.is_dir():
        raise InputError(f"There is no folder {path}; give a folder of images.")
    rows = [(_digest(path / name), name) for name in image_names(path)]
    if not rows:
        raise InputError(f"{path} has no images; give a folder with files that end in {', '.join(ENDINGS)}.")
    content = hashlib.sha256("\n".join(f"{digest} {name}" for digest, name in rows).encode()).hexdigest()
    order = "as read" if limit is None else "drawn"
    facts: dict[str, Any] = {"corpus": str(path), "input": IMAGES, "content": content, "order": order}
    return ImageCorpus(facts, limit, partial(_documents, rows))


def _documents(rows: list[Document]) -> Iterator[Document]:
    return iter(rows)


def _digest(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the file, or take it away.") from None
