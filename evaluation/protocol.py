"""The protocol of evaluations: options, and parts with samples, a measure and the columns of a table.

`icebear.evaluation.runner` resumes an evaluation, computes the statistics and writes the reports;
`icebear evaluate NAME` is generated from its options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

from icebear.evaluation.baselines import methods_of
from icebear.models.model import Model
from icebear.values import check_int, seed_of

Line = dict[str, Any]
"""The measurements of a sample, JSON-ready. ``methods`` has the numbers, method -> column -> number; a line with a
false ``counts`` stays out of the tables."""
Lines = Sequence[Line]


@dataclass(frozen=True)
class Setting:
    """How the command line shows a field of an evaluation; `Annotated` adds it to the field's type.

    A `Literal` type gives the choices; a field without a default is required.
    """

    help: str = ""
    """Empty for an option with the same help in all commands (`icebear.app.cli.options`)."""
    least: int | None = None
    is_file: bool = False
    decides: bool = True
    """Whether the samples of a folder depend on it: a folder with another value is refused."""


Seed = Annotated[int, Setting()]
Samples = Annotated[int, Setting("Number of prompts.", least=1)]
Methods = Annotated[str, Setting("Names separated by commas (docs/evaluate.md), or LRP written out.", decides=False)]
"""`Part.methods` has the settings of the methods."""
DataFile = Annotated[str | None, Setting("Your own file to evaluate on.", is_file=True)]
CorpusName = Annotated[str | None, Setting(decides=False)]


@dataclass(frozen=True)
class Table:
    """The columns of a table, and lines that have their numbers."""

    columns: Mapping[str, str]
    """Name -> meaning. "... lower is better" decides which method is the best; "median ..." shows medians."""
    lines: Lines


@dataclass(frozen=True)
class Part:
    """A folder of an evaluation: samples that are measured in the same way, and the reports on their lines."""

    columns: Mapping[str, str]
    samples: Sequence[Any]
    measure: Callable[[Any], Any]
    """Sample -> line; with `batch_size`, a list of at most so many samples -> a line for each."""
    name: str = ""
    """The folder in --out; empty where an evaluation has one part."""
    batch_size: int | None = None
    methods: Mapping[str, Any] = field(default_factory=dict)
    unable: Mapping[str, str] = field(default_factory=dict)
    """Methods that cannot run on the model, and why."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that decide the numbers, besides the options, the model and the methods."""
    tables: Callable[[Lines], Mapping[str, Table]] | None = None
    """Tables by name, each in a folder of its name; None for one table of all lines that count."""
    notes: Callable[[Lines], Sequence[str]] = lambda lines: ()
    listings: Callable[[Lines], Mapping[str, list[dict[str, Any]]]] = lambda lines: {}
    """Name -> rows of a table without methods; JSON-ready."""
    write: Callable[[Path, Lines], None] = lambda folder, lines: None
    """Writes further files."""

    def of(self, lines: Lines) -> Mapping[str, Table]:
        if self.tables:
            return self.tables(lines)
        return {"": Table(self.columns, [line for line in lines if line.get("counts", True)])}


@dataclass(frozen=True)
class Evaluation:
    """A subclass has its options as fields with a `Setting` each, its help as docstring, and `parts`."""

    name: ClassVar[str]
    needs_model: ClassVar[bool] = True
    """Whether it evaluates a model of the user, or makes its own; `parts` then gets None."""

    def __post_init__(self) -> None:
        """Check the numbers. Raises `InputError`."""
        for name, option in self._options().items():
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if name == "seed":
                seed_of(value)
            elif type(value) is int:
                check_int(value, flag, option.least or 0)

    def parts(self, model: Model) -> Iterator[Part]:
        """Yield the parts; each is measured and reported before the next is asked for. Raises `InputError` if there is
        nothing to measure."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Return the options that decide the numbers."""
        return {name: getattr(self, name) for name, option in self._options().items() if option.decides}

    def _options(self) -> dict[str, Setting]:
        hints = get_type_hints(type(self), include_extras=True)
        return {option.name: next(iter(hints[option.name].__metadata__)) for option in fields(self)}


@dataclass(frozen=True)
class MethodEvaluation(Evaluation):
    """An evaluation that compares methods on samples."""

    methods: Methods = "all"
    samples: Samples = 20
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chosen()

    def chosen(self) -> dict[str, Any]:
        """Return the methods by name. Raises `UnknownName`."""
        return methods_of(self.methods)


def accuracy(lines: Lines) -> list[str]:
    """Return a note on how many samples the model is right on (``correct`` of a line), and how many are left out."""
    judged = [line["correct"] for line in lines if line.get("correct") is not None]
    left = len(lines) - sum(line.get("counts", True) for line in lines)
    left_out = f"; left out, as not predicted or unusable: {left}" if left else ""
    return [f"accuracy of the model: {sum(judged)} of {len(judged)}{left_out}"] if judged else []
