"""`Card`: what a store and a model know about a neuron, as a record and as HTML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from icebear.actmax.head_attention import HeadAttention, attended_text, attended_token
from icebear.actmax.labels.significance import HELD_OUT_GROUPS, label_title, score_lines
from icebear.actmax.page import (
    STYLE,
    Crop,
    examples_html,
    histogram_html,
    images_html,
    projections_html,
    writes_verdict,
)
from icebear.convert import Tabled
from icebear.records import (
    FEW_WORDS,
    IMAGES,
    POLARITIES,
    AutomaticLabel,
    Example,
    Neuron,
    NeuronStatistics,
    Projection,
    Writes,
)
from icebear.render import page, render
from icebear.result_files import SavedResult

if TYPE_CHECKING:
    import pandas


WRITES = "What the neuron writes at its maximally activating sentences"
HEAD_WRITES = "What the head writes in the sentences in which it writes most"
HEAD_MARKS = "Underlined: the token where it writes; the number is the norm of what it writes there, less its mean."
HEAD_SENTENCES = "Each sentence is the one in which it writes most, for one token that it attends to."
HEAD_COLORS = "Red: its attention from there, darker for more; the line below names the token with the most."
CROPS = {
    "patch": "Each crop shows the patch (outlined) with the patches around it.",
    "relevance": "Each crop is the smallest square with half of the relevance of the activation (of a head: of its "
    "attention). Patches with less are darker. Outlined: the patch.",
}
"""The kinds of crops of an index of images."""


@dataclass(frozen=True)
class ExamplesBeside:
    """The maximally activating examples of a neuron in another index, or in sentences that were read for it alone."""

    index: str
    """What was read, such as "4,000 summaries, shipped with icebear"."""
    examples: dict[str, list[Example]]
    """polarity -> examples, largest first."""


@dataclass(frozen=True, repr=False)
class Card(SavedResult, Tabled):
    """A neuron with its vocabulary projection, examples of both signs, statistics and labels, and its page."""

    neuron: Neuron
    projection: Projection | None
    other: Projection | None
    """The projection through the other lens, which is shown second; None without a model."""
    writes: dict[str, Writes]
    """polarity -> the measured effect at the first examples; empty without a model."""
    examples: dict[str, list[Example]]
    """polarity -> maximally activating examples, largest first."""
    statistics: NeuronStatistics
    meanings: dict[str, AutomaticLabel]
    """polarity -> automatic label with its score; empty before `icebear label --auto`."""
    held_out: dict[str, dict[str, list[Example]]]
    """polarity -> group (`icebear.actmax.labels.significance.HELD_OUT_GROUPS`) -> sentences of documents that the
    label was not made from."""
    label: str | None
    """The label that a person gave."""
    label_scores: dict[str, dict[str, Any]]
    """polarity -> the measured score of this label."""
    left_out: bool
    """Whether the vector index is not read (so that without a model the vocabulary is left out), see `describe`."""
    made_with: dict[str, Any]
    """See `Store.made_with`."""
    attention: HeadAttention | None = None
    """Of a head, where it looks; None for a neuron, and for models where that is not measured."""
    attends_to: dict[str, int] = field(default_factory=dict)
    """Of a head, the tokens that it attends to most in all its sentences -> in how many; the most frequent first."""
    beside: tuple[ExamplesBeside, ...] = ()
    """Other examples, which are shown beside those of the index."""
    crops: dict[str, list[Crop]] = field(default_factory=dict)
    """polarity -> a crop for each example, of an index of images; empty without a model."""
    crop: str = "patch"
    """The kind of the crops (`CROPS`)."""

    @property
    def is_of_images(self) -> bool:
        """Whether the examples are images, and their tokens patches."""
        return self.made_with["index"].get("input") == IMAGES

    @property
    def index_name(self) -> str:
        """Which index the card is of, in a few words."""
        from icebear.actmax.shipped.index_choice import named_index

        index = self.made_with["index"]
        return named_index(index, index["file"]) if "file" in index else ""

    @property
    def by_index(self) -> list[tuple[str, str, list[Example]]]:
        """The name of an index, a polarity, and the examples there."""
        rows = [(self.index_name, polarity, examples) for polarity, examples in self.examples.items()]
        return rows + [(other.index, *side) for other in self.beside for side in other.examples.items()]

    @property
    def projections(self) -> list[Projection]:
        return [projection for projection in (self.projection, self.other) if projection]

    @property
    def has_fixed_words(self) -> bool:
        """Whether a projection can say what the neuron writes, as far as that is measured (`Reliability.ceiling`)."""
        known = [projection.reliability for projection in self.projections if projection.reliability]
        return not known or known[0].ceiling >= FEW_WORDS

    @property
    def is_head(self) -> bool:
        return self.neuron.site == "head"

    def absence(self, polarity: str) -> str:
        """Say that an index, which was made of dashboards, has none of a side; empty where it has sentences, and for
        other indexes, in which each neuron is read in all sentences."""
        if self.examples.get(polarity) or self.made_with["index"].get("from") != "neuronpedia":
            return ""
        return (
            f"Not in this index: its texts are dashboards of other neurons, none of {self.neuron} at polarity "
            f"{polarity}."
        )

    @property
    def swap(self) -> str:
        """The command of `swap_edit`; empty without one."""
        return (
            shlex.join(["icebear", "steer", self.swap_edit[0], "--edit", self.swap_edit[1]]) if self.swap_edit else ""
        )

    @property
    def swap_edit(self) -> tuple[str, str] | None:
        """The head's strongest sentence, up to where it writes, and the edit that gives it its value in the next one;
        None for a neuron, and without two sentences."""
        prompts = dict.fromkeys("".join(e.sentence.tokens[: e.token + 1]) for e in self.examples.get("+", ()))
        if not self.is_head or self.is_of_images or len(prompts) < 2:
            return None
        prompt, source = list(prompts)[:2]
        return prompt, f"{self.neuron}<-{json.dumps(source, ensure_ascii=False)}@last"

    @property
    def title(self) -> str:
        """The label that a person gave, with its scores."""
        scores = ", ".join(f"{p} {row['score']:.2f} by {row['by']}" for p, row in self.label_scores.items())
        return f"{self.label} ({scores})" if scores else self.label or ""

    def to_html(self) -> str:
        """Return a self-contained HTML page."""
        return str(page(f"{self.neuron} - icebear", card_fragment(self), STYLE))

    def _repr_html_(self) -> str:
        """Return the card with its style, for notebooks."""
        return f"<style>{STYLE}</style>{card_fragment(self)}"

    def to_frame(self) -> pandas.DataFrame:
        """Return the examples as a pandas table. `to_arrow` returns an Arrow table."""
        import pandas

        rows = [
            {
                "neuron": str(self.neuron),
                "polarity": polarity,
                "activation": example.activation,
                **self._columns(example),
                **({"attends_to": attended_text(example)} if self.is_head else {}),
                **({"index": index} if self.beside else {}),
            }
            for index, polarity, examples in self.by_index
            for example in examples
        ]
        return pandas.DataFrame(rows)

    def _columns(self, example: Example) -> dict[str, str]:
        """Return an example as columns of a table."""
        names = ("patch", "file", "sha256") if self.is_of_images else ("token", "text", "title")
        sentence = example.sentence
        return dict(zip(names, (example.token_text, sentence.text, sentence.title), strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.made_with,
            "neuron": str(self.neuron),
            "label": self.label,
            "label_scores": self.label_scores,
            "automatic_label": {polarity: meaning.to_dict() for polarity, meaning in self.meanings.items()},
            "statistics": self.statistics.to_dict(),
            "vocabulary": self.projection and self.projection.to_dict(),
            "other_lens": self.other and self.other.to_dict(),
            "writes": {polarity: effects.to_dict() for polarity, effects in self.writes.items()},
            "examples": {polarity: list(map(self._example, rows)) for polarity, rows in self.examples.items()},
            **({"beside": [self._beside(other) for other in self.beside]} if self.beside else {}),
            **(
                {
                    "attention": self.attention and self.attention.to_dict(),
                    "attends_to": self.attends_to,
                    "swap": self.swap,
                }
                if self.is_head
                else {}
            ),
        }

    def _example(self, example: Example) -> dict[str, Any]:
        row = (_head_row if self.is_head else _row)(example)
        return {**row, **self._columns(example)} if self.is_of_images else row

    def _beside(self, other: ExamplesBeside) -> dict[str, Any]:
        row_of = _head_row if self.is_head else _row
        examples = {polarity: list(map(row_of, rows)) for polarity, rows in other.examples.items()}
        return {"index": other.index, "examples": examples}


def _row(example: Example) -> dict[str, Any]:
    return {
        "activation": example.activation,
        "token": example.token,
        "token_text": example.token_text,
        "text": example.sentence.text,
        "title": example.sentence.title,
        "relevance": example.relevance,  # of its tokens
    }


def _head_row(example: Example) -> dict[str, Any]:
    row = _row(example)
    return {**row, "attention": row.pop("relevance"), "attends_to": attended_token(example)}


def heading(card: Card, polarity: str) -> str:
    """Return the heading of the examples at a polarity."""
    what = IMAGES if card.is_of_images else "sentences"
    if card.is_head:
        return f"{what.capitalize()} in which it writes most"
    return f"Strongest {'positive' if polarity == '+' else 'negative'} {what}"


def card_fragment(card: Card) -> Markup:
    """Return the card, for a page with `STYLE`."""
    return render(
        "icebear.actmax/card.html",
        card=card,
        statistics=statistics_line(card),
        heading=heading,
        marks=head_marks(card),
        meaning=meaning_html,
        examples=partial(examples_html, of_head=card.is_head),
        images=partial(images_html, of_head=card.is_head),
        histogram=histogram_html(card.statistics.histogram),
        writes=writes_html(card),
        vocabulary=projections_html(card.projections),
    )


def head_marks(card: Card) -> str:
    """Return which sentences of a head are shown, and what the marks in them are; of images, what the crops are; empty
    for a neuron of texts."""
    if card.is_of_images:
        return CROPS[card.crop]
    attended = f"{attended_line(card)} {HEAD_MARKS} {HEAD_COLORS}" if card.attends_to else HEAD_MARKS
    return attended if card.is_head else ""


def attended_line(card: Card) -> str:
    """Say which sentences of a head are shown, and which tokens it attends to in all of them."""
    count = sum(card.attends_to.values())
    often = ", ".join(f"{piece!r} in {times}" for piece, times in card.attends_to.items() if times > 1)
    return f"{HEAD_SENTENCES} Among its {count} strongest sentences, it attends to {often or 'another token in each'}."


def statistics_line(card: Card) -> str:
    statistics = card.statistics
    if card.is_head:
        return (
            f"norm of what it writes, less its mean: mean {statistics.mean:.3f}, std {statistics.std:.3f}, maximum "
            f"{statistics.max:.2f}{token_count_note(card)}"
        )
    tokens = "patches" if card.is_of_images else "tokens"
    return (
        f"mean {statistics.mean:+.3f}, std {statistics.std:.3f}, positive on {statistics.positive:.0%} of "
        f"the {tokens}{token_count_note(card)}; minimum {statistics.min:+.2f}, maximum {statistics.max:+.2f}"
    )


def token_count_note(card: Card) -> str:
    """Return the number of tokens that means are taken over, if it is not all, and which index the card is from."""
    index = card.made_with["index"]
    averaged, every = index.get("statistics_tokens"), index.get("tokens")
    notes = [] if averaged in (None, every) else [f"of {averaged:,} tokens"]
    notes += [f"from {card.index_name}"] if card.index_name else []
    return f" ({', '.join(notes)})" if notes else ""


def meaning_html(card: Card, polarity: str) -> Markup:
    """Return the label with its score, and on a click its test and held-out sentences."""
    label = card.meanings.get(polarity)
    held_out = card.held_out[polarity] if label and label.significant else {}
    return render(
        "icebear.actmax/meaning.html",
        title=label_title(label),
        lines=score_lines(label) if label else [],
        held_out=[(HELD_OUT_GROUPS[name], examples_html(rows)) for name, rows in held_out.items()],
    )


def writes_title(card: Card) -> str:
    return HEAD_WRITES if card.is_head else WRITES


def writes_about(card: Card) -> str:
    """Return what the words and numbers of `Card.writes` are; there are some."""
    effects = next(iter(card.writes.values()))
    if card.is_head:
        return (
            f"Effects on the likely next words are measured in each of the first {len(effects.places)} sentences. An "
            "effect compares what the head writes with its mean on the calibration texts. A sentence has words only if "
            "the effect is larger than at every one of as many random tokens; their mean has words only if the effects "
            "are more alike than at random tokens (alike, random: mean correlation of two effects)."
        )
    return (
        f"Effects on the likely next words are measured in each of the first {len(effects.places)} sentences, and "
        f"averaged. An effect compares the neuron's activation with its average activation ({effects.average:+.2f}). "
        "alike: correlation between the effects in two of these sentences, averaged over all pairs. random: the same "
        "average over pairs of random sentences."
    )


def writes_html(card: Card, polarities: Sequence[str] = POLARITIES) -> Markup:
    """Return what the neuron writes at its sentences, by polarity; nothing if that is not measured."""
    about = writes_about(card) if card.writes else ""
    measured_at = {polarity: card.writes[polarity] for polarity in polarities if polarity in card.writes}
    return render(
        "icebear.actmax/writes.html",
        title=writes_title(card),
        writes=measured_at,
        of_head=card.is_head,
        verdict=writes_verdict,
        about=about,
    )
