"""Edits of neurons and their notation (``L29.ffn.860*0``, ``L24.ffn.559+2std@last``, ``L23.head.4<-"A"@last``), and
vectors that are added to the residual stream."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

from icebear.errors import InputError
from icebear.points import NAMED, check_model, parse_name
from icebear.records import Neuron, as_neuron
from icebear.values import check_int, one_of, real, several, shown, stable_hash, text_of

SYMBOLS = {"set": "=", "scale": "*", "add": "+"}
UNITS = ("", "max", "std")
TOKEN_GROUPS = ("all", "prompt", "last", "generated", "answer")
EXAMPLES = (
    'write it like L29.ffn.860*0, L29.ffn.490=-6.2, L24.ffn.559+2std@last or L23.head.4<-"The capital of Italy is"@last'
)

_EDIT = re.compile(
    rf"(?P<neuron>L\d+\.[a-z_]+\.\d+|{NAMED})\s*"
    r'(?:<-\s*(?P<source>"(?:[^"\\]|\\.)*"|\[[\d,\s]+\])'
    r"|(?P<op>[*=+-])(?P<value>[^@~^a-z]+(?:e[+-]?\d+)?|[+-]?(?:nan|inf))(?P<unit>max|std)?)"
    r"(?:@(?P<where>[a-z]+(?::[\d,-]+)?))?"
    r"(?:~(?P<decay>[^^]+))?(?:\^(?P<share>.+))?"
)
_WHERE = re.compile(r"(position|step):\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*")

SwapSource = str | tuple[int, ...]
"""The prompt of a swap: a text, or token ids."""


@dataclass(frozen=True)
class Edit:
    """One change of the activation of a neuron or (site ``head``) of the output of an attention head.

    Parameters
    ----------
    neuron : Neuron or str
        The name of another library (`Neuron.parse`) may have the tokens, as in ``blocks.21.mlp.hook_post[:, -1, 780]``.
        The values of a source at negative activation on Neuronpedia, ``21-ffn-minus/780``, are activations times -1.
    op : str
        ``set`` the activation to `value`, ``scale`` it by `value`, or ``add`` `value` to it; ``swap`` it for the
        activation after another prompt (`Edit.from_prompt`).
    value : float
        0 for a swap.
    unit : str
        ``""`` for raw activation; ``max`` or ``std`` for the largest magnitude or the standard deviation that an index
        recorded for the neuron.
    where : str
        The tokens that are edited: ``all``; ``prompt``; ``last`` (the last prompt token, which predicts the first new
        token); ``generated`` (the tokens after it); ``answer`` (``last`` and ``generated``); ``position:0,3-5``
        (positions in the text, from 0); ``step:0-2`` (new tokens, from 0).
    decay : float
        From 0 to 1; step s > 0 applies decay**s of the change.
    share : float
        The share of the change that is applied, from 0 to 1.
    source : str or tuple of int, optional
        The prompt of a swap, a text or token ids. The activation is that of its last token, or with ``position:N`` that
        of its token N; it is read, without edits, when the edit is applied to a model.

    Raises
    ------
    InputError
        If a value is not possible.
    """

    neuron: Neuron
    op: Literal["set", "scale", "add", "swap"]
    value: float
    unit: Literal["", "max", "std"] = ""
    where: str = "all"
    decay: float = 1.0
    share: float = 1.0
    source: SwapSource | None = None

    def __post_init__(self) -> None:
        name: Any = self.neuron
        object.__setattr__(self, "neuron", as_neuron(name))
        one_of(self.op, "kind of edit", (*SYMBOLS, "swap"))
        one_of(self.unit, "unit of an edit", UNITS)
        _as_floats(self, {"value": (), "decay": (0, 1), "share": (0, 1)})
        if isinstance(name, str):
            self._read_name(name.strip())
        if self.unit and self.op == "scale":
            raise InputError(
                f"The edit of {self.neuron} scales by a number, which cannot be in units of {self.unit}; leave out "
                f"{self.unit}."
            )
        if (self.op == "swap") is (self.source is None) or (self.source is not None and (self.value or self.unit)):
            raise InputError(
                f"A swap of {self.neuron} has a prompt and no value, and other edits have a value and no prompt; use "
                "Edit.from_prompt for a swap."
            )
        if self.source is not None:
            _check_source(self.source)
        _check_where(self.where)

    def _read_name(self, text: str) -> None:
        """Take from a name of other libraries the tokens that it has, and the sign of its values."""
        named = parse_name(text)
        if named is None:
            return
        if named.where != "all":
            if self.where not in ("all", named.where):
                raise InputError(f"{text} is at {named.where}, and its edit at {self.where}; leave out one of them.")
            object.__setattr__(self, "where", named.where)
        if named.sign < 0 and self.op in ("set", "add"):
            object.__setattr__(self, "value", 0.0 - self.value)  # not -0.0

    @property
    def layer(self) -> int:
        return self.neuron.layer

    @property
    def target(self) -> Neuron:
        """What is edited."""
        return self.neuron

    @property
    def polarity(self) -> str:
        """The polarity of the value; + of 0 and of a swap."""
        return "+" if self.value >= 0 else "-"

    @classmethod
    def from_prompt(cls, neuron: Neuron | str, prompt: SwapSource, where: str = "last") -> Edit:
        """Return the edit that gives a neuron, or a head, its value after another prompt.

        Parameters
        ----------
        neuron : Neuron or str
        prompt : str or tuple of int
            A text, or token ids. The value is read at its last token; with ``position:N`` at its token N.
        where : str
            The tokens that are edited, see `Edit`.

        Returns
        -------
        Edit

        Raises
        ------
        InputError
            If a value is not possible.
        """
        return cls(neuron, "swap", 0.0, where=where, source=prompt)  # type: ignore[arg-type]

    def __str__(self) -> str:
        sign = "-" if self.op == "add" and math.copysign(1, self.value) < 0 else SYMBOLS.get(self.op, "")
        number = repr(abs(self.value) if self.op == "add" else self.value).removesuffix(".0")
        change = (
            f"{sign}{number}{self.unit}" if self.source is None else f"<-{json.dumps(self.source, ensure_ascii=False)}"
        )
        share = "" if self.share == 1 else f"^{self.share!r}"
        return f"{self.neuron}{change}{_where_text(self)}{share}"

    @classmethod
    def parse(cls, text: str, model: str | None = None) -> Edit:
        """Parse the notation of an edit. model: as of `Neuron.parse`. Raises `InputError` for any other text."""
        match = _EDIT.fullmatch(text.strip()) if isinstance(text, str) else None
        if not match:
            raise InputError(f"{shown(text)} is not an edit; {EXAMPLES}.")
        neuron: Any = match["neuron"]
        if model is not None:
            check_model(neuron, model)
        try:
            value = float(match["value"] or 0)
            decay = float(match["decay"] or 1)
            share = float(match["share"] or 1)
        except ValueError:
            raise InputError(f"{text!r} has a value that is not a number; {EXAMPLES}.") from None
        amount: dict[str, Any] = {"where": match["where"] or "all", "decay": decay, "share": share}
        if match["source"]:
            return cls(neuron, "swap", 0.0, source=_source(match["source"]), **amount)
        sign = -1 if match["op"] == "-" else 1
        op = {"=": "set", "*": "scale"}.get(match["op"], "add")
        return cls(neuron, op, sign * value, match["unit"] or "", **amount)  # type: ignore[arg-type]

    def in_raw_units(self, statistic: Callable[[Neuron, str], float] | None) -> Edit:
        """Return the edit with its value in raw activation. statistic(neuron, unit): the value of a unit."""
        if not self.unit:
            return self
        if statistic is None:
            raise InputError(
                f"An edit of {self.neuron} is in units of its {self.unit}, which only an index records; build an index "
                "with icebear index and name it with --store (in Python, pass statistic=), or give a plain number."
            )
        unit_value = real(statistic(self.neuron, self.unit), f"The {self.unit} of {self.neuron}")
        return replace(self, value=self.value * unit_value, unit="")


@dataclass(frozen=True)
class VectorEdit:
    """A vector that is added to the residual stream after a layer.

    Parameters
    ----------
    layer : int
    vector : tuple of float
        As long as the hidden size.
    where : str
    decay : float
    share : float
        As of `Edit`.

    Raises
    ------
    InputError
        If a value is not possible.
    """

    layer: int
    vector: tuple[float, ...] = field(repr=False)
    where: str = "all"
    decay: float = 1.0
    share: float = 1.0

    def __post_init__(self) -> None:
        check_int(self.layer, "The layer of a vector", 0)
        numbers = tuple(real(number, "A number of a vector") for number in several(self.vector))
        object.__setattr__(self, "vector", numbers)
        _as_floats(self, {"decay": (0, 1), "share": (0, 1)})
        _check_where(self.where)

    @property
    def target(self) -> str:
        return f"the residual stream after layer {self.layer}"

    def __str__(self) -> str:
        length = f"{self.share * math.hypot(*self.vector):.4g} (id {stable_hash(str(self.vector)):016x})"
        return f"a vector of length {length} in {self.target}{_where_text(self)}"

    def in_raw_units(self, statistic: Any) -> VectorEdit:
        return self


AnyEdit = Edit | VectorEdit


def _as_floats(edit: AnyEdit, ranges: Mapping[str, tuple[float, ...]]) -> None:
    """Check numbers of an edit, and keep them as plain floats, for text and JSON."""
    for name, limits in ranges.items():
        number = real(getattr(edit, name), f"The {name} of an edit of {edit.target}", *limits)
        object.__setattr__(edit, name, number)


def _where_text(edit: AnyEdit) -> str:
    where = "" if edit.where == "all" else f"@{edit.where}"
    return where + ("" if edit.decay == 1 else f"~{edit.decay!r}")


def _check_where(where: Any) -> None:
    text = where if isinstance(where, str) else ""
    ordered = _WHERE.fullmatch(text) and all(low <= high for low, high in _bounds(text))
    if not (text in TOKEN_GROUPS or ordered):
        raise InputError(
            f"{shown(where)} names no tokens of an edit; use {'; '.join(TOKEN_GROUPS)}; position:0,3-5; step:0-2."
        )


def _source(text: str) -> SwapSource:
    try:
        prompt = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{text} is not a JSON string, or a list of token ids; {EXAMPLES}.") from None
    return tuple(prompt) if isinstance(prompt, list) else str(prompt)


def _check_source(source: SwapSource) -> None:
    if not isinstance(source, tuple):
        text_of(source)
        return
    check_int(len(source), "The number of token ids of a swap's prompt")
    for token in source:
        check_int(token, "A token id of a swap's prompt", 0)


@overload
def parse_edits(edits: Edit | str | Iterable[Edit | str], model: str | None = None) -> list[Edit]: ...
@overload
def parse_edits(edits: AnyEdit | str | Iterable[AnyEdit | str], model: str | None = None) -> list[AnyEdit]: ...
def parse_edits(edits: Any, model: str | None = None) -> Any:
    """Return one or several edits, given as records or text. model: as of `Neuron.parse`. Raises `InputError`."""
    return [edit if isinstance(edit, AnyEdit) else Edit.parse(edit, model) for edit in several(edits)]


def _bounds(where: str) -> list[tuple[int, int]]:
    """Return the first and last number of each range of positions or steps."""
    parts = (part.partition("-") for part in where.partition(":")[2].split(","))
    return [(int(low), int(high or low)) for low, _, high in parts]


def last_position(where: str) -> int:
    """Return the largest position that an edit names; 0 if it names none."""
    return max((high for _, high in _bounds(where)), default=0) if where.startswith("position:") else 0


def acts_at(where: str, position: int, prompt_length: int) -> bool:
    """Return whether an edit with this `where` acts on the token at a position, from 0."""
    last = prompt_length - 1
    if where in TOKEN_GROUPS:
        return {
            "all": True,
            "prompt": position <= last,
            "last": position == last,
            "generated": position > last,
            "answer": position >= last,
        }[where]
    number = position if where.startswith("position:") else position - last
    return any(low <= number <= high for low, high in _bounds(where))
