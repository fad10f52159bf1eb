"""The records that travel between the packages: frozen, printed as ids, parsed back from them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from icebear.errors import InputError
from icebear.values import one_of, shown, whole

SITES = ("ffn", "attn", "q", "k", "v", "cross", "router", "shared")
"""Where neurons are read; `cross`, attention to the encoder, is only in decoders that have one, and
`router`, the weights of experts, only in mixtures."""
WRITERS = ("ffn", "shared", "attn", "cross")
"""Of these, what writes to the residual stream: the inputs of a linear map."""

_NEURON = re.compile(r"L(\d{1,9})\.([a-z]+)\.(\d{1,9})")


@dataclass(frozen=True, order=True)
class Neuron:
    """One neuron, written ``L29.ffn.860``; the site ``head`` names a whole attention head."""

    layer: int
    site: str
    index: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", whole(self.layer, "The layer of a neuron", 0))
        object.__setattr__(self, "index", whole(self.index, "The index of a neuron", 0))
        one_of(self.site, "site", (*SITES, "head"))

    def __str__(self) -> str:
        return f"L{self.layer}.{self.site}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> Neuron:
        """The inverse of ``str``. Raises `InputError` for anything else."""
        match = _NEURON.fullmatch(text.strip()) if isinstance(text, str) else None
        if not match:
            raise InputError(f"{shown(text)} is not a neuron id; write it like L29.ffn.860 or L4.head.3.")
        return cls(int(match[1]), match[2], int(match[3]))


def as_neuron(neuron: Neuron | str) -> Neuron:
    """A neuron, or one named by its id. Raises `InputError` for anything else."""
    return neuron if isinstance(neuron, Neuron) else Neuron.parse(neuron)


POLARITIES = ("+", "-")


@dataclass(frozen=True)
class Ranked:
    """A neuron at a token position, with its activation there and its relevance for the target (a sum over several
    positions is told at the one that gave most)."""

    neuron: Neuron
    position: int
    activation: float | None
    """None for a whole head, which has many."""
    relevance: float
    counterfactual: float | None = None
    """The activation in the other prompt, where the relevance is compared with one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "neuron", as_neuron(self.neuron))

    @property
    def polarity(self) -> str:
        """The sign of the activation (less that in the other prompt), ``+`` or ``-``; empty for a head."""
        return "" if self.activation is None else "-" if self.activation - (self.counterfactual or 0) < 0 else "+"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a head has no activation of its own."""
        row = {**vars(self), "neuron": str(self.neuron), "polarity": self.polarity or None}
        return row if self.counterfactual is not None else {key: row[key] for key in row if key != "counterfactual"}


@dataclass(frozen=True)
class TokenScore:
    """A token of the vocabulary, or a label, with its logit and probability."""

    id: int
    text: str
    logit: float
    probability: float | None
    """None where a model predicts a number: the logit itself."""

    @property
    def number(self) -> str:
        """The probability, or the predicted number, for people."""
        return f"{self.logit:+.2f}" if self.probability is None else f"{self.probability:.2f}"


@dataclass(frozen=True)
class Sentence:
    """One sentence of a corpus; `start` and `end` are character offsets in the document called `title`."""

    id: int
    text: str
    title: str
    start: int
    end: int
    tokens: tuple[str, ...] = ()
    """As the model splits it; only of sentences from a store."""


@dataclass(frozen=True)
class Example:
    """A sentence and the token position where a neuron had this value."""

    value: float
    """Its activation, or its relevance, as `by` says."""
    token: int
    sentence: Sentence
    relevance: tuple[float, ...] | None = None
    """Of the sentence's tokens for the activation, once annotated."""
    by: str = "activation"

    @property
    def activation(self) -> float:
        """The value. Raises `InputError` where that is a relevance."""
        if self.by != "activation":
            raise InputError(f"This is an example by {self.by}, whose activation is not known; use its value.")
        return self.value

    @property
    def token_text(self) -> str:
        return self.sentence.tokens[self.token]


@dataclass(frozen=True)
class NeuronStatistics:
    """A neuron's activations over a corpus: per token, the histogram over one token of each sentence."""

    neuron: Neuron
    mean: float
    std: float
    min: float
    max: float
    positive: float
    """The share of tokens with activation > 0."""
    histogram: tuple[int, ...]
    more: dict[str, Any] = field(default_factory=dict)
    """Column -> value of statistics beyond these (see `icebear.actmax.index.activation_statistics`)."""

    def to_dict(self) -> dict[str, Any]:
        numbers = {**vars(self), **self.more}
        return {name: value for name, value in numbers.items() if name not in ("neuron", "more")}


@dataclass(frozen=True)
class Meaning:
    """The automatic label of a neuron at a polarity, and how well it holds on documents it was not made from."""

    neuron: Neuron
    polarity: str
    kind: str
    """Of label, see actmax/labels/kinds.py; empty where the neuron hardly goes to this side."""
    text: str
    by: str
    """What is told apart, ``token`` or ``sentence``:"""
    score: float
    """the AUROC of the label for those that drive the neuron furthest (chance 0.5)."""
    p: float
    """The share of what chance gives, through the same choice, that is as good."""
    significant: bool
    """Whether the score passes its bar and 95 % of what chance gives."""
    record: dict[str, Any]
    """All that was measured."""

    @property
    def badge(self) -> str:
        """The label with its score, or that there is none, for a table's cell."""
        return f"{self.text} ({self.score:.2f})" if self.significant else "no significant label"

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "neuron": str(self.neuron)}


@dataclass(frozen=True)
class Hit:
    """A neuron that a search found; `why` has a sentence for each reason."""

    neuron: Neuron
    polarity: str
    """Empty where the sign of its activation has nothing to do with the reason."""
    score: float
    why: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.neuron} {self.polarity}".strip()


@dataclass(frozen=True)
class Promotion:
    """A token, the logit that one unit of activation adds to it on the direct path at a typical token (None where the
    unembedding does not give the model's answers), and that in standard deviations over the vocabulary."""

    id: int
    text: str
    logit: float | None
    z: float


@dataclass(frozen=True)
class Projection:
    """The tokens that a neuron with positive activation promotes and suppresses, strongest first."""

    neuron: Neuron
    promoted: tuple[Promotion, ...]
    suppressed: tuple[Promotion, ...]
    typical: tuple[float, float] | None = None
    """What the logits are to be multiplied by at the 10th and 90th percentile of tokens; None without logits."""
    std: float | None = None
    """The neuron's standard deviation, where a store knows it: logit x std is what one deviation adds."""

    @property
    def about(self) -> str:
        """What the numbers are."""
        if self.typical is None:
            return f"{self.neuron}: words of its W2 row, in standard deviations over the vocabulary (z)"
        low, high = self.typical
        return (
            f"{self.neuron}: change of the logit by one unit of activation, on the direct path, at a typical token "
            f"({low:.2f}-{high:.2f}x, 10th-90th percentile of tokens)"
        )

    def to_dict(self) -> dict[str, Any]:
        def row(token: Promotion) -> dict[str, Any]:
            known = self.std is not None and token.logit is not None
            return {**vars(token), "logit_per_std": token.logit * self.std if known else None}  # type: ignore[operator]

        return {
            "neuron": str(self.neuron),
            "about": self.about,
            "typical": self.typical,
            "promoted": list(map(row, self.promoted)),
            "suppressed": list(map(row, self.suppressed)),
        }

    def words(self, polarity: str = "+", k: int = 4) -> str:
        """The k tokens promoted at this polarity, for a table's cell."""
        tokens = self.promoted if polarity == "+" else self.suppressed
        return ", ".join(token.text.strip() or repr(token.text) for token in tokens[:k])
