"""Files of torch.save that others made: tensors and plain values, without code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from icebear.errors import InputError
from icebear.paths import existing


def read_saved(file: Path) -> Any:
    """Return what torch saved in a file, on the CPU. Raises `InputError` for other files, and for Python objects."""
    try:
        return torch.load(existing(file), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"There is no file {file}; check the path.") from None
    except pickle.UnpicklingError:
        raise InputError(
            f"{file} has Python objects, which can run code when they are read; save its tensors only."
        ) from None
    except Exception:  # of any kind: zip, old formats, pickles cut short
        raise InputError(f"{file} is not a file of torch.save, or it is damaged; download it again.") from None
