"""The errors of icebear. Each message says what is wrong and what to do next."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable
from importlib.util import find_spec


class IcebearError(Exception):
    """The base class of all errors of icebear."""


class InputError(IcebearError):
    """A prompt, target, neuron id, edit or option that cannot be used."""


class SameAnswer(InputError):
    """Two prompts with the same most probable answer, without a named contrast."""

    def __init__(self, answer: str, lists: tuple[str, str], contrast: str):
        """lists: the first answers to the prompt and to the counterfactual. contrast: one of them, which the
        counterfactual makes more probable."""
        self.contrast = contrast
        super().__init__(
            f"The answer to both prompts is {answer!r}, so there is nothing to compare. Prompt: {lists[0]}. "
            f"Counterfactual: {lists[1]}. Name another contrast, such as {contrast!r}, or give another counterfactual."
        )


class ModelError(IcebearError):
    """A model that cannot be loaded, or lacks a requested feature."""


class DownloadError(ModelError):
    """A preset or corpus that could not be downloaded or stored."""


class MissingRule(IcebearError):
    """An operation without a relevance rule."""


class NumericalError(IcebearError):
    """NaN or infinity in a forward or backward pass."""


class RecipeError(IcebearError):
    """A recipe that is malformed or belongs to another model."""


class StoreError(IcebearError):
    """A store that is missing, damaged, locked, or made with another model or setting."""


SYNONYMS = {"mlp": "ffn", "attention": "attn", "self_attn": "attn", "heads": "head", "gpu": "cuda"}
"""What other tools call a site or a device."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the question `` Did you mean ...?`` with the most similar known name; empty without one."""
    names = list(known)
    near = [SYNONYMS[name]] if SYNONYMS.get(name) in names else difflib.get_close_matches(name, names, 1, 0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


class UnknownName(InputError):
    """A name that is not known; the message suggests the most similar one."""

    def __init__(self, kind: str, name: str, known: Iterable[str], then: str):
        super().__init__(f"{name!r} is not a known {kind}.{nearest(name, known)} {then}")


def too_many_files(error: BaseException | None) -> IcebearError | None:
    """Return an error that says what to do about too many open files; None for another error."""
    while error is not None and getattr(error, "errno", None) != errno.EMFILE:
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    return InputError("Too many files are open; allow more, such as with: ulimit -n 1024")


def known_error(error: BaseException) -> IcebearError | None:
    """Return an error of icebear itself, or one that says what to do about a machine that lacks memory or open files;
    None for another error."""
    if isinstance(error, IcebearError):
        return error
    if not (isinstance(error, MemoryError) or re.search("(out of|not enough|allocate) memory", str(error))):
        return too_many_files(error)
    return InputError(
        "The memory is full; try a shorter prompt, --checkpoint, --dtype bfloat16, --device cpu, or a smaller model."
    )


EXTRAS = {
    "app": {"streamlit": "streamlit", "altair": "altair", "vl_convert": "vl-convert-python"},
    "index": {"faiss": "faiss-cpu", "sentencex": "sentencex", "datasets": "datasets"},
    "circuits": {"vl_convert": "vl-convert-python"},
    "figures": {"altair": "altair", "vl_convert": "vl-convert-python"},
    "arrow": {"pyarrow": "pyarrow"},
    "atlas": {"openTSNE": "openTSNE"},
    "images": {"PIL": "pillow", "onnx": "onnx"},
    "mcp": {"mcp": "mcp"},
    "serve": {"fastapi": "fastapi", "uvicorn": "uvicorn"},
    "devices": {"accelerate": "accelerate"},
    "ray": {"ray": "ray"},
    "bits": {"accelerate": "accelerate", "bitsandbytes": "bitsandbytes"},
}
"""Optional part of icebear (see pyproject.toml) -> module -> package."""


def need(extra: str) -> None:
    """Raise `InputError` if a package of this part is missing."""
    missing = [package for module, package in EXTRAS[extra].items() if find_spec(module) is None]
    if missing:
        raise InputError(
            f"This feature needs the missing package{'s' * (len(missing) > 1)} {', '.join(missing)}; install with: "
            f"pip install {' '.join(missing)} (or, in a checkout of icebear: pip install -e '.[{extra}]')."
        )
