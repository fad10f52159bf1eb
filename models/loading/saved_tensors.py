"""Files of torch.save that others made: tensors and plain values, without code."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from icebear.errors import IcebearError, InputError
from icebear.paths import existing


def read_saved(file: Path, error: type[IcebearError] = InputError, known: Sequence[Any] = ()) -> Any:
    """Return what torch saved in a file, on the CPU. Raises `error` for other files, and for Python objects.

    known: classes that are read too, as of `torch.serialization.safe_globals`.
    """
    try:
        path = existing(file, error)
    except FileNotFoundError:
        raise error(f"There is no file {file}; check the path.") from None
    try:
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(list(known)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise error(
            f"{file} has Python objects, which can run code when they are read; if you trust the file, load it with "
            "torch and save only its tensors, such as model.state_dict()."
        ) from None
    except Exception:  # of any kind: zip, old formats, pickles cut short
        raise error(f"{file} is not a file of torch.save, or it is damaged; download it again.") from None
