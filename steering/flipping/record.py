"""The record of a flip in its recipe's provenance: the request and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from icebear.concepts.models.model import Model
from icebear.convert import CONVERTER, Record
from icebear.errors import RecipeError
from icebear.recipe import Recipe
from icebear.records import Neuron, TokenScore
from icebear.values import whole

KEY = "flip"


@dataclass(frozen=True)
class EditedNeuron:
    """An edited neuron of a flip, before its edit."""

    neuron: Neuron
    activation: float
    relevance: float
    """The relevance for the margin of the flip, without edits."""
    range_share: float | None
    """The value that it is set to, as a multiple of its activation range (`Calibration.share`)."""
    raises: tuple[str, ...]
    """The likely next words that this edit alone raises most, at its step, relative to the other likely tokens."""
    lowers: tuple[str, ...]
    examples: tuple[str, ...]
    """Sentences with large activations of the sign that it is set to, if there was an index."""


@dataclass(frozen=True)
class FlipRecord:
    """How a recipe was found by `icebear.steering.flipping.search.flip`."""

    prompt: Any
    """A text, token ids, or the messages of a chat; so are `source` and `paraphrases`."""
    text: str
    """The wanted or suppressed token or phrase."""
    phrase: tuple[int, ...]
    """Its token ids."""
    top_k: int | None
    """None if `text` is wanted; else `text` is suppressed: it shall leave the k most probable tokens."""
    source: Any
    paraphrases: tuple[Any, ...]
    chosen_by: str
    unbounded: bool
    left_source: bool
    """Whether moving towards the source prompt (or, to suppress, towards zero) was not enough."""
    before: tuple[TokenScore, ...]
    """The most probable next tokens without the edits."""
    rounds: tuple[tuple[int, float], ...]
    """For each round of the search the total of edited rows, and the margin in logits."""
    neurons: tuple[EditedNeuron, ...]

    def provenance(self) -> dict[str, Any]:
        """JSON-ready, for a recipe."""
        return {KEY: CONVERTER.unstructure(self)}

    @classmethod
    def of(cls, recipe: Recipe) -> FlipRecord | None:
        """Return the record of a recipe that `flip` made, None for another. Raises `RecipeError` where it is not as
        icebear writes it."""
        return from_provenance(recipe.name, recipe.provenance, KEY, cls)

    @classmethod
    def all_of(cls, recipe: Recipe) -> list[FlipRecord]:
        """Return the records of a recipe and of the recipes that it combines. Raises `RecipeError`."""
        sources = [recipe.provenance, *recipe.provenance.get("parts", [])]
        records = [from_provenance(recipe.name, source, KEY, cls) for source in sources]
        return [record for record in records if record]

    def check(self, model: Model) -> None:
        """Raise `InputError` if its tokens are not in the model's vocabulary."""
        whole(len(self.phrase), "The number of a flip's tokens")
        for token in self.phrase:
            model.answer_id(token, "token of a flip")
        if self.top_k is not None:
            whole(self.top_k, "top_k", 1, model.output_size - 1)


def from_provenance(name: str, provenance: dict[str, Any], key: str, kind: type[Record]) -> Record | None:
    """Read a record from a recipe's provenance. Raises `RecipeError` where it is not as icebear writes it."""
    try:
        return CONVERTER.structure(provenance[key], kind) if key in provenance else None
    except Exception as error:
        raise RecipeError(f"The provenance of the recipe {name!r} has a bad part ({error}); make it again.") from None
