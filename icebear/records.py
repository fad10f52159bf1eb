"""Frozen records that all packages share."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from reprlib import Repr
from typing import Any, Literal, NamedTuple

from icebear.errors import InputError
from icebear.points import HOOKS, check_model, hook_name, parse_name
from icebear.result_files import SavedResult
from icebear.values import check_int, one_of, shown

SITES = ("ffn", "attn", "q", "k", "v", "cross", "mixer", "router", "shared")
"""The sites of neurons. `cross` is attention to an encoder; `mixer`, what a scan or short convolution over tokens
returns; `router`, the weights of experts, is in mixtures only."""
WRITERS = ("ffn", "shared", "attn", "cross", "mixer")
"""The sites that write to the residual stream: the inputs of W_out."""

SITES_AND_HEADS = (*SITES, "head")

_NEURON = re.compile(r"L(\d{1,9})\.([a-z_]+)\.(\d{1,9})")

TABLE_ROWS = 20
"""Of a result in a notebook."""
LONGEST_CELL = 500
"""Characters."""
REPR_LINES = 25
"""Of a result in Python's shell and in logs."""
REPR_COLUMNS = 120


class InNotebooks:
    """A result that a notebook shows as its sentence or name, and its table, or else its fields; and Python as its
    text, which `print` shows whole, or else its fields."""

    def __repr__(self) -> str:
        return shortened(self._fields_text() if type(self).__str__ is object.__str__ else str(self))

    def _fields_text(self) -> str:
        shown_fields = [field.name for field in fields(self) if field.repr]  # type: ignore[arg-type]
        parts = [f"{name}={_BRIEF.repr(getattr(self, name))}" for name in shown_fields]
        name, line = type(self).__name__, ", ".join(parts)
        return f"{name}({line})" if len(name) + len(line) < REPR_COLUMNS - 1 else "\n    ".join([f"{name}:", *parts])

    def _repr_html_(self) -> str:
        kind = type(self)
        sentence = kind.__name__ if kind.__str__ is object.__str__ else str(self)
        if hasattr(self, "to_frame"):
            table = self.to_frame().head(TABLE_ROWS)
            rows = [["", *table.columns], *table.itertuples()]
        else:
            rows = list(vars(self).items())
        lines = ("".join(f"<td>{escape(_cell(value))}</td>" for value in row) for row in rows)
        return f"<p>{escape(sentence)}</p><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def shortened(text: str) -> str:
    """Return a text in at most `REPR_LINES` lines of `REPR_COLUMNS` characters."""
    lines = text.splitlines() or [""]
    cut = [line if len(line) <= REPR_COLUMNS else f"{line[: REPR_COLUMNS - 3]}..." for line in lines[:REPR_LINES]]
    if len(lines) > REPR_LINES:
        cut[-1] = f"... {len(lines) - REPR_LINES + 1} more lines (print shows them)"
    return "\n".join(cut)


class _Brief(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 4
        self.maxstring = self.maxother = 80

    def repr_instance(self, x: Any, level: int) -> str:
        return super().repr_instance(x, level).replace("\n   ", "")

    def repr_Tensor(self, x: Any, level: int) -> str:  # as reprlib names it
        return f"tensor {tuple(x.shape)}"


_BRIEF = _Brief()


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:LONGEST_CELL]


@dataclass(frozen=True, order=True)
class Neuron:
    """A neuron, written ``L29.ffn.860``, or an attention head, written ``L4.head.3``.

    Parameters
    ----------
    layer : int
        From 0.
    site : str
        One of `icebear.records.SITES`, or ``head``.
    index : int
        From 0.

    Raises
    ------
    InputError
        If a number is negative or the site is unknown.
    """

    layer: int
    site: str
    index: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", check_int(self.layer, "The layer of a neuron", 0))
        object.__setattr__(self, "index", check_int(self.index, "The index of a neuron", 0))
        one_of(self.site, "site", SITES_AND_HEADS)

    def __str__(self) -> str:
        return f"L{self.layer}.{self.site}.{self.index}"

    @classmethod
    def parse(cls, text: str, model: str | None = None) -> Neuron:
        """Parse the id of a neuron or head, or its name in TransformerLens (``blocks.29.mlp.hook_post[860]``,
        ``blocks.4.attn.hook_z[3]``, ``L4H3``), interp-engine (``mlp_act.29[860]``, ``z.4[70]``) or Neuronpedia
        (``29-ffn-plus/860``); see `icebear.points`. Raises `InputError` for any other text, and for a neuron of another
        model than the one of this name, where both are named."""
        if model is not None and isinstance(text, str):
            check_model(text.strip(), model)
        match = _NEURON.fullmatch(text.strip()) if isinstance(text, str) else None
        named = parse_name(text.strip()) if isinstance(text, str) and not match else None
        if named:
            return cls(named.layer, named.site, named.index)
        if not match:
            raise InputError(f"{shown(text)} is not a neuron id; write it like L29.ffn.860 or L4.head.3.")
        return cls(int(match[1]), match[2], int(match[3]))

    def to_transformer_lens(self) -> str:
        """Return TransformerLens' name, such as ``blocks.29.mlp.hook_post[860]``; `parse` reads it.

        Raises
        ------
        InputError
            If TransformerLens has no point with its site's neurons.
        """
        if self.site not in HOOKS:
            raise InputError(f"{self} has no name in TransformerLens; the sites with one are {', '.join(HOOKS)}.")
        return hook_name(self.layer, self.site, self.index)


def as_neuron(neuron: Neuron | str, model: str | None = None) -> Neuron:
    """Return a neuron, given as a record or by its id. model: as of `Neuron.parse`. Raises `InputError` for any other
    value."""
    return neuron if isinstance(neuron, Neuron) else Neuron.parse(neuron, model)


POLARITIES: tuple[Literal["+"], Literal["-"]] = ("+", "-")
IMAGES = "images"
"""What the fact ``input`` of an index of images says; an index of texts has no such fact."""


def sign_of(polarity: str) -> int:
    return 1 if polarity == "+" else -1


@dataclass(frozen=True)
class Ranked:
    """A neuron at a token position, with its activation and its relevance for the target.

    A sum over several positions has the position with the largest part.
    """

    neuron: Neuron
    position: int
    activation: float | None
    """None for a head."""
    relevance: float
    counterfactual: float | None = None
    """The activation in the counterfactual prompt, if there is one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "neuron", as_neuron(self.neuron))

    @property
    def polarity(self) -> str:
        """The sign of the activation (less the counterfactual one), ``+`` or ``-``; empty for a head."""
        return "" if self.activation is None else "-" if self.activation - (self.counterfactual or 0) < 0 else "+"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a head has no activation."""
        row = {**vars(self), "neuron": str(self.neuron), "polarity": self.polarity or None}
        return row if self.counterfactual is not None else {key: row[key] for key in row if key != "counterfactual"}


@dataclass(frozen=True)
class TokenScore:
    """A token of the vocabulary, or a class of a classifier, with its logit and probability."""

    id: int
    text: str
    logit: float
    probability: float | None
    """None for a regression model, whose prediction is the logit."""

    @property
    def number(self) -> str:
        """The probability, or the predicted number, for display."""
        return f"{self.logit:+.2f}" if self.probability is None else f"{self.probability:.2f}"


@dataclass(frozen=True)
class Sentence:
    """A sentence of a corpus; `start` and `end` are character offsets in the document `title`."""

    id: int
    text: str
    title: str
    start: int
    end: int
    tokens: tuple[str, ...] = ()
    """The tokens of the model; empty unless the sentence is from a store."""


@dataclass(frozen=True, repr=False)
class Example(InNotebooks):
    """A sentence, and the token position where a neuron has this activation."""

    activation: float
    token: int
    sentence: Sentence
    relevance: tuple[float, ...] | None = None
    """The relevance of each token for the activation, if the example is annotated."""

    @property
    def token_text(self) -> str:
        return self.sentence.tokens[self.token]


HISTOGRAM_EDGES = (*(-(2.0**e) for e in range(7, -6, -1)), 0.0, *(2.0**e for e in range(-5, 8)))
"""Powers of two from 1/32 to 128 on both sides of zero: 28 bins, the outer ones open."""


@dataclass(frozen=True)
class NeuronStatistics:
    """Statistics of the activations of a neuron in a corpus; the histogram is over one token of each sentence."""

    neuron: Neuron
    mean: float
    std: float
    min: float
    max: float
    positive: float
    """The share of tokens with activation > 0."""
    histogram: tuple[int, ...]
    more: dict[str, Any] = field(default_factory=dict)
    """Further statistics (see `icebear.actmax.index.activation_statistics`)."""

    def to_dict(self) -> dict[str, Any]:
        numbers = {**vars(self), **self.more}
        return {name: value for name, value in numbers.items() if name not in ("neuron", "more")}


@dataclass(frozen=True)
class AutomaticLabel:
    """The automatic label of a neuron at a polarity, with its score on test documents."""

    neuron: Neuron
    polarity: str
    kind: str
    """``topic``, a token pattern (``tokens``, ``before``, ``after``), or ``description``; empty if the neuron is hardly
    active at this polarity."""
    text: str
    by: str
    """The unit of the score, ``token``, ``sentence`` or ``pattern``."""
    score: float
    """The AUROC of the label for the units with the largest activations (chance 0.5)."""
    p: float
    """The p value against the larger null, which repeats the choice."""
    significant: bool
    """Whether the score passes its threshold and 95 % of both nulls."""
    record: dict[str, Any]
    """All scores and controls."""

    @classmethod
    def hardly_active(cls, neuron: Neuron, polarity: str) -> AutomaticLabel:
        return cls(neuron, polarity, "", "hardly active at this polarity", "token", 0.5, 1.0, False, {})

    @property
    def badge(self) -> str:
        """The label with its score for a table, or ``no label passed``."""
        return f"{self.text} ({self.score:.2f})" if self.significant else "no label passed"

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "neuron": str(self.neuron)}


@dataclass(frozen=True, repr=False)
class Hit(InNotebooks):
    """A neuron that matches a search; `why` has the reasons."""

    neuron: Neuron
    polarity: str
    """Empty if the reason does not depend on the sign of the activation."""
    score: float
    why: tuple[str, ...]
    by: str
    """What it rests on. Of a search by words: ``sentences`` (the words are in examples of this polarity, or in its
    label), or ``weights`` (only the output is similar to the words). Else the kind of similarity."""

    def __repr__(self) -> str:
        return shortened(self._fields_text())

    def __str__(self) -> str:
        return f"{self.neuron} {self.polarity}".strip()


@dataclass(frozen=True)
class Promotion:
    """A token, the logit that one unit of activation adds to it on the direct path at a typical token, and its z score
    over the vocabulary. The logit is None if the model's answers do not come from the unembedding."""

    id: int
    text: str
    logit: float | None
    z: float


LENSES = ("direct", "mean")
FEW_WORDS = 0.2
"""Below this ceiling a neuron has no fixed words."""


class Reliability(NamedTuple):
    """How well a lens predicts what one unit of a neuron does in one text: medians over random neurons of a layer."""

    correlation: float
    """With the measured change of the logits, over the vocabulary."""
    ratio: float
    """The measured effect on the five words that the lens puts first, divided by that on the five that rise most."""
    ceiling: float
    """The correlation of the mean effect in the other texts, which estimates how well words without context can do. The
    texts are few, so that a good lens can be above it."""

    def __str__(self) -> str:
        if self.ceiling < FEW_WORDS:
            return (
                "no fixed words, because what a neuron writes depends on the text (the effect measured in one text has "
                f"a correlation of only {self.ceiling:.2f} with the mean effect in other texts)"
            )
        return (
            f"the effect measured in one text has a correlation of {self.correlation:.2f} with the lens, and of "
            f"{self.ceiling:.2f} with the mean effect in other texts; a property of the layer, not of the neuron"
        )


@dataclass(frozen=True, repr=False)
class Projection(SavedResult, InNotebooks):
    """The tokens that a neuron with positive activation promotes and suppresses, largest first."""

    neuron: Neuron
    promoted: tuple[Promotion, ...]
    suppressed: tuple[Promotion, ...]
    typical: tuple[float, float] | None = None
    """The factors of the logits at the 10th and 90th percentile of tokens; None without logits."""
    std: float | None = None
    """The standard deviation of the activation, if a store has it; logit x std is the change by one deviation."""
    lens: str = "direct"
    """``direct`` (logit lens), ``mean`` (averaged Jacobian), or the name of a lens from a file."""
    reliability: Reliability | None = None
    """Of this lens in the neuron's layer, if `icebear index --lens` has measured it."""
    kurtosis: float | None = None
    """Of the projected row over the vocabulary; None if it was not compared with random rows."""
    kurtosis_by_chance: float | None = None
    """The 95th percentile for random rows with the covariance of the layer's rows (of those on the direct path, for the
    averaged Jacobian of a neuron without the lens)."""
    direct_correlation: float | None = None
    """Of a lens from a file: the correlation of the direct path's words with measured effects in this layer."""

    @property
    def has_words(self) -> bool:
        """Whether its words stand out more than those of 95 % of random rows, as far as that is measured."""
        return self.kurtosis is None or self.kurtosis_by_chance is None or self.kurtosis > self.kurtosis_by_chance

    @property
    def no_words(self) -> str:
        """The sentence instead of words that do not stand out."""
        return (
            "The words that the weights promote stand out no more than those of random weights in this layer (kurtosis "
            f"{self.kurtosis:.2f}; random: up to {self.kurtosis_by_chance:.2f}), so they are not shown."
        )

    @property
    def heading(self) -> str:
        """The meaning of the numbers."""
        unit = "change of the logit by one unit of activation" if self.has_logits else "z scores over the vocabulary"
        if self.lens == "mean":
            return f"{self.neuron}: {unit}, through the averaged Jacobian of the layers above"
        if self.lens not in LENSES:
            return f"{self.neuron}: {unit}, through {self.lens}"
        if self.typical is None:
            return f"{self.neuron}: vocabulary projection of w_out, as z scores over the vocabulary"
        low, high = self.typical
        return (
            f"{self.neuron}: {unit}, on the direct path, at a typical token "
            f"({low:.2f}-{high:.2f}x, 10th-90th percentile of tokens)"
        )

    @property
    def about(self) -> str:
        """The meaning of the numbers, with the reliability if it is measured."""
        return f"{self.heading} ({self.reliability})" if self.reliability else self.heading

    @property
    def line(self) -> str:
        """The first words as one line, for the lens that is shown second."""
        name = "Averaged Jacobian" if self.lens == "mean" else "Logit lens"
        measured = f" (correlation {self.reliability.correlation:.2f} in this layer)" if self.reliability else ""
        if not self.has_words:
            return f"{name}{measured}: no words that stand out"
        return f"{name}{measured}: promotes {self.words('+')}; suppresses {self.words('-')}"

    def to_dict(self) -> dict[str, Any]:
        def row(token: Promotion) -> dict[str, Any]:
            known = self.std is not None and token.logit is not None
            return {**vars(token), "logit_per_std": token.logit * self.std if known else None}  # type: ignore[operator]

        return {
            "neuron": str(self.neuron),
            "about": self.about,
            "typical": self.typical,
            "lens": self.lens,
            "reliability": self.reliability and self.reliability._asdict(),
            "kurtosis": self.kurtosis,
            "kurtosis_by_chance": self.kurtosis_by_chance,
            "direct_correlation": self.direct_correlation,
            "has_words": self.has_words,
            "promoted": list(map(row, self.promoted)),
            "suppressed": list(map(row, self.suppressed)),
        }

    def at(self, polarity: str) -> Projection:
        """Return the tokens that the neuron promotes and suppresses at a polarity, by one unit of activation."""
        if polarity == "+":
            return self
        promoted, suppressed = (
            tuple(replace(token, logit=None if token.logit is None else -token.logit, z=-token.z) for token in tokens)
            for tokens in (self.suppressed, self.promoted)
        )
        return replace(self, promoted=promoted, suppressed=suppressed)

    @property
    def has_logits(self) -> bool:
        return bool(self.promoted) and self.promoted[0].logit is not None

    def words(self, polarity: str = "+", k: int = 4) -> str:
        """Return the k tokens that are promoted at a polarity, for a table."""
        tokens = self.promoted if polarity == "+" else self.suppressed
        return ", ".join(token.text.strip() or repr(token.text) for token in tokens[:k])


EFFECT_SENTENCES = 12
"""The number of sentences of each polarity on a card where effects are measured."""


@dataclass(frozen=True)
class SentenceEffects:
    """A sentence up to a token, and the likely next words that the neuron raises and lowers after it."""

    text: str
    activation: float
    raises: tuple[str, ...]
    lowers: tuple[str, ...]


@dataclass(frozen=True)
class Writes:
    """What a neuron writes at its maximally activating sentences of one polarity: its mean effect on the likely next
    tokens, relative to their mean, when the neuron is set to its mean on the calibration texts."""

    average: float
    """The mean activation that the neuron is set to."""
    raises: tuple[str, ...]
    lowers: tuple[str, ...]
    correlation: float | None
    """How alike the effects are at these sentences: the mean correlation of two of them; None for a single one."""
    random_correlation: float | None
    """The same at random tokens of random sentences."""
    places: tuple[SentenceEffects, ...]
    """The sentences, those with the largest activation first."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


@dataclass(frozen=True, repr=False)
class RandomControl(SavedResult, InNotebooks):
    """A number before and after an intervention, and after equal random interventions."""

    what: str
    """The intervention, in words."""
    others: str
    """The random interventions, in words."""
    number: str
    """The measured number, in words."""
    before: float
    after: float
    drawn: tuple[float, ...]
    """The number after each random intervention."""

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def largest(self) -> float:
        """The largest change of a random intervention."""
        return max((number - self.before for number in self.drawn), key=abs, default=0.0)

    @property
    def as_large(self) -> int:
        """The number of random interventions that change the number as much, in either direction."""
        return sum(abs(number - self.before) >= abs(self.change) for number in self.drawn)

    @property
    def p(self) -> float:
        """The p value; the intervention itself counts as a draw (Phipson & Smyth 2010)."""
        return (1 + self.as_large) / (1 + len(self.drawn))

    @property
    def beyond_chance(self) -> bool | None:
        """Whether p <= 0.05; None if no random intervention is as large, but they are too few to decide."""
        return None if self.p > 0.05 and not self.as_large else self.p <= 0.05

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict: the verdict in a sentence, and its numbers."""
        return {
            "verdict": str(self),
            "beyond_chance": self.beyond_chance,
            "change": self.change,
            "largest_by_chance": self.largest,
            "draws": len(self.drawn),
            "p": self.p,
        }

    def __str__(self) -> str:
        claim = f"{self.number} goes from {self.before:+.3f} to {self.after:+.3f} ({self.change:+.3f}) with {self.what}"
        if not self.drawn:
            return f"{claim}; there is nothing for a random control."
        chance = f"{self.others} ({len(self.drawn)} draws) change it by {self.largest:+.3f} at most"
        if self.beyond_chance:
            return f"{claim}; {chance}: more than chance (p {self.p:.2f})."
        if not self.as_large:
            return f"{claim}; {chance}: more than any of these, which are too few to rule out chance (p {self.p:.2f})."
        return (
            f"{claim}; {chance}, and {self.as_large} of them as much: NOT more than chance (p {self.p:.2f}), so this "
            "is no evidence that they matter."
        )
