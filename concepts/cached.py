"""Tensors in files of the cache: each with its digest, and with what made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icebear.models.model import Model
from icebear.paths import write_file


class Damaged(Exception):
    """A file of the cache that is not as it was written; the caller measures again, or says what to do."""


def save_tensors(file: Path, tensors: Mapping[str, Tensor], made_with: Mapping[str, Any]) -> None:
    """Write tensors with their digests, and replace the file atomically. Raises `OSError` or `InputError`."""
    from safetensors.torch import save

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    digests = {name: _digest(tensor) for name, tensor in contiguous.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {"made_with": made_with, "sha256": digests}  # as one entry: safetensors gives several in any order
    write_file(file, save(contiguous, {"icebear": json.dumps(facts)}))


def read_tensors(file: Path, *names: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return these tensors of a file (without names: all), and what made them.

    Raises `FileNotFoundError` if there is no file, and `Damaged` if it is not as it was written.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            facts = json.loads(opened.metadata()["icebear"])
            digests, made_with = facts["sha256"], facts["made_with"]
            tensors = {name: opened.get_tensor(name) for name in names or digests}
        if any(_digest(tensor) != digests[name] for name, tensor in tensors.items()):
            raise Damaged
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError, ValueError, TypeError, KeyError):
        raise Damaged from None
    return tensors, made_with


def made_by(model: Model) -> dict[str, Any]:
    """Return who measures: the model and versions, the device, and the threads, on which sums depend."""
    return {**model.made_with, "device": model.device.type, "threads": torch.get_num_threads()}


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
