"""The files that an index of weights names, which must be in the model's folder."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath

from icebear.errors import ModelError


def check_weight_index(folder: str | Path) -> None:
    """Raise `ModelError` if ``*.safetensors.index.json`` of a folder names a file outside of it, or of another format.

    transformers would open ``../../etc/passwd``, and unpickle a ``.bin``.
    """
    for index in sorted(Path(folder).glob("*.safetensors.index.json")):
        try:
            names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ModelError(f"{index} is not an index of weights; download the model again.") from None
        for name in names:
            parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
            rooted = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
            if rooted or ".." in parts or not name.endswith(".safetensors"):
                raise ModelError(
                    f"{index} names the file {name!r}, which is no .safetensors file of its folder; download the model "
                    "again."
                )
