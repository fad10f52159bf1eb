"""The record of a task: what stages choose for each of many pairs of prompts, and the set that the pairs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from icebear.convert import Saved, Tabled
from icebear.errors import InputError
from icebear.models.text.prompts import prompt_line
from icebear.records import Neuron, TokenScore

if TYPE_CHECKING:
    import pandas

FAILING_SHARE = 0.5
"""The shared set fails on a pair if it gives less than this share."""


@dataclass(frozen=True)
class TaskPair:
    """A pair of prompts of a task: its own heads and FFN neurons, and what the shared ones give."""

    prompt: Any
    counterfactual: Any
    target: TokenScore | None = None
    contrast: TokenScore | None = None
    left_out: str = ""
    """Why shares of this pair mean nothing, in a sentence without its period; empty for a pair that counts."""
    difference: float | None = None
    """Between the prompts, in logits."""
    reached: bool = False
    """Whether its own set gives between `ENOUGH` and `OVERSHOOT` of the difference; else it is the nearest one."""
    heads: tuple[Neuron, ...] = ()
    neurons: tuple[Neuron, ...] = ()
    whole_parts: tuple[str, ...] = ()
    """The whole parts of earlier tokens that are recomputed as well, such as ``ffn:differing``."""
    share: float | None = None
    """The share that the shared set gives alone; None for a pair that helped to choose it."""
    without: float | None = None
    """The share that is lost when only the shared set takes its counterfactual values."""
    random: float | None = None
    """The median share of as many random heads and neurons."""

    @property
    def text(self) -> str:
        return f"{prompt_line(self.prompt)!r}, not {prompt_line(self.counterfactual)!r}"


@dataclass(frozen=True)
class TaskPart:
    """A head or FFN neuron of the last token, and in how many pairs it is."""

    neuron: Neuron
    pairs: int
    shared: bool
    """Whether it is in the shared set."""


@dataclass(frozen=True, repr=False)
class TaskRecord(Saved, Tabled):
    """A task: pairs of prompts, the heads and FFN neurons of their stages, and the set that they share.

    The shared set is chosen on one half of the pairs, and every share of it is measured on the other half.
    """

    pairs: tuple[TaskPair, ...]
    """In the order of the file."""
    parts: tuple[TaskPart, ...]
    """Those of any pair: heads before neurons, those in most pairs first."""
    share: float
    """The mean share of the difference that the shared set gives alone."""
    low: float
    """`low` to `high` is the 95 % bootstrap interval of the mean over the measured pairs."""
    high: float
    without: float
    """The mean share that is lost when only the shared set takes its counterfactual values."""
    random: float
    """The mean over pairs of the median share of as many random heads and neurons."""
    seed: int
    """Of the halves and the random sets."""
    made_with: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not {"name", "fingerprint"} <= {*(self.made_with.get("model") or ())}:
            raise InputError("It does not say which model it was made with; make the task again.")

    @property
    def compared(self) -> list[TaskPair]:
        """The pairs that count."""
        return [pair for pair in self.pairs if not pair.left_out]

    @property
    def measured(self) -> list[TaskPair]:
        """The half on which the shared set is measured."""
        return [pair for pair in self.pairs if pair.share is not None]

    @property
    def failing(self) -> list[TaskPair]:
        """The measured pairs of which the shared set gives less than `FAILING_SHARE`."""
        return [pair for pair in self.measured if pair.share is not None and pair.share < FAILING_SHARE]

    @property
    def heads(self) -> list[Neuron]:
        """The heads of the shared set."""
        return [part.neuron for part in self.parts if part.shared and is_head(part.neuron)]

    @property
    def neurons(self) -> list[Neuron]:
        """The FFN neurons of the shared set."""
        return [part.neuron for part in self.parts if part.shared and not is_head(part.neuron)]

    def to_frame(self) -> pandas.DataFrame:
        """Return the heads and neurons as a pandas table. `to_arrow` returns an Arrow table."""
        import pandas

        rows = [(str(part.neuron), part.pairs, len(self.compared), part.shared) for part in self.parts]
        return pandas.DataFrame(rows, columns=["neuron", "pairs", "of_pairs", "shared"])


def is_head(neuron: Neuron) -> bool:
    return neuron.site in ("head", "cross")


def parts_of(pairs: Sequence[TaskPair], shared: Sequence[Neuron]) -> tuple[TaskPart, ...]:
    """Count in how many pairs each head and neuron is. shared: the shared set."""
    counts: dict[Neuron, int] = {}
    for pair in pairs:
        for neuron in (*pair.heads, *pair.neurons):
            counts[neuron] = counts.get(neuron, 0) + 1
    order = sorted(counts, key=lambda neuron: (not is_head(neuron), -counts[neuron], neuron not in shared, neuron))
    return tuple(TaskPart(neuron, counts[neuron], neuron in shared) for neuron in order)
