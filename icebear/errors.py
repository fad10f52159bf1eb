"""Everything icebear raises on purpose. Each message says what is wrong and what to do next."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class IcebearError(Exception):
    """The root of all errors a caller may want to show to a person."""


class InputError(IcebearError):
    """A prompt, target, neuron id, edit or option that cannot be used."""


class ModelError(IcebearError):
    """A model that cannot be loaded or lacks what was asked of it."""


class DownloadError(ModelError):
    """A preset or corpus that could not be fetched or stored."""


class MissingRule(IcebearError):
    """An operation that no relevance rule covers."""


class NumericalError(IcebearError):
    """NaN or infinity in a forward or backward pass."""


class RecipeError(IcebearError):
    """A recipe that is malformed or belongs to another model."""


class StoreError(IcebearError):
    """A store that is missing, foreign, damaged, locked or made of something else."""


class UnknownName(InputError):
    """`name` is not one of `known`; suggests the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str], then: str):
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"{name!r} is not a known {kind}.{hint} {then}")


def out_of_memory(error: BaseException) -> IcebearError | None:
    """What to do about a full memory, of whichever device and library; None for another error."""
    if not (isinstance(error, MemoryError) or re.search("(out of|not enough|allocate) memory", str(error))):
        return None
    return InputError(
        "The memory is full; try a shorter prompt, --checkpoint, --dtype bfloat16, --device cpu, or a smaller model."
    )
