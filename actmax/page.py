"""A neuron's card as HTML. Everything that comes from a text or a model is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from icebear.actmax.index.topk import HISTOGRAM_EDGES
from icebear.actmax.labels.telling import HELD_OUT, measured, title
from icebear.concepts.render import NEGATIVE, POSITIVE, marked, page, said
from icebear.records import Example, Projection, Promotion

if TYPE_CHECKING:
    from icebear.actmax.card import Card

STYLE = """
.card{--line:#8886;--dim:color-mix(in srgb,currentColor 65%,transparent)}
.card h2{margin:.2rem 0}.card h3{font-size:1rem;margin:1.2rem 0 .3rem}
.card .dim{color:var(--dim);font-size:.85rem}.card .two{display:flex;flex-wrap:wrap;gap:0 2rem}
.card .two>*{flex:1 1 20rem;min-width:0}
.card .row{display:flex;gap:.8rem;padding:.35rem 0;border-top:1px solid var(--line)}
.card .number{flex:0 0 4.5rem;text-align:right;font-variant-numeric:tabular-nums}
.card .bar{height:.7rem;border-radius:2px}
.card .word{flex:0 0 9rem;overflow-wrap:anywhere;font-family:ui-monospace,monospace}
.card .bars{display:flex;align-items:flex-end;gap:1px;height:3.5rem;max-width:30rem}.card .bars span{flex:1}
.card .ticks{position:relative;max-width:30rem;height:1.5rem}
.card .ticks span{position:absolute;transform:translateX(-50%)}
"""
NEAREST = {
    "writes": "Write most nearly the same as at +",
    "reads": "Read the same",
    "examples": "Have the examples most like those at +",
}
HEADINGS = {"activation": "What drives it to", "relevance": "Where its relevance is furthest to"}
"""What a card's examples are extremes of -> the heading of those at a polarity."""
RELMAX = (
    "An index by relevance: the examples, and the classes made of them, are of the neuron's "
    "relevance for the model's own predictions (RelMax), not of its activation; so are + and -."
)


def nearest_title(by: str, chance: tuple[float, float]) -> str:
    """What a list of the nearest is of, and what it has to be compared with."""
    return f"{NEAREST[by]} (the nearest to random neurons: {chance[0]:.2f}, at most {chance[1]:.2f})"


def card_page(card: Card) -> str:
    """A self-contained page: no scripts, nothing fetched."""
    return page(f"{card.neuron} - icebear", card_fragment(card), STYLE)


def card_fragment(card: Card) -> str:
    """The card itself, for a page with `STYLE`."""
    parts = [
        f"<h2><code>{card.neuron}</code> {escape(card.title)}</h2>",
        f'<p class="dim">{statistics_line(card)}</p>',
        histogram(card.statistics.histogram),
    ]
    if card.projection:
        parts.append(vocabulary(card.projection))
    if card.by == "relevance":
        parts.append(f'<p class="dim">{RELMAX}</p>')
    for polarity, examples in card.examples.items():
        parts.append(
            f"<h3>{HEADINGS[card.by]} {escape(polarity)}</h3>{meaning(card, polarity)}"
            f"<p class='dim'>class: {escape(card.kind[polarity])}</p>{''.join(map(example_row, examples))}"
        )
    for by, hits in card.nearest.items():
        names = ", ".join(f"<code>{escape(str(hit))}</code> ({hit.score:.2f})" for hit in hits)
        parts.append(f'<p class="dim">{nearest_title(by, card.nearest_by_chance[by])}: {names}</p>')
    parts.append(f'<p class="dim">{escape(said(card.made_with))}</p>')
    return f'<div class="card">{"".join(parts)}</div>'


def statistics_line(card: Card) -> str:
    found = card.statistics
    return (
        f"mean {found.mean:+.3f}, standard deviation {found.std:.3f}, positive on {found.positive:.0%} of the tokens"
        f"{counted(card)}; least {found.min:+.2f}, most {found.max:+.2f}"
    )


def counted(card: Card) -> str:
    """Of how many tokens means are, where they are not of all."""
    index = card.made_with["index"]
    some, every = index.get("statistics_tokens"), index.get("tokens")
    return "" if some in (None, every) else f" (of {some:,} tokens)"


def meaning(card: Card, polarity: str) -> str:
    """The label with its score; on a click what it was measured on, and sentences it was not made from."""
    found = card.meanings.get(polarity)
    head = f"<b>{escape(title(found))}</b>"
    if found is None or not found.record:
        return f"<p>{head}</p>"
    lines = "".join(f'<p class="dim">{escape(line)}</p>' for line in measured(found))
    shown = "".join(
        f"<h4>{HELD_OUT[name]}</h4>{''.join(map(example_row, rows)) or NONE}"
        for name, rows in card.held_out[polarity].items()
    )
    return f"<details><summary>{head}</summary>{lines}{shown}</details>"


NONE = '<p class="dim">None.</p>'


def example_row(example: Example) -> str:
    text = marked(example.sentence.tokens, example.relevance, example.token)
    source = f'<span class="dim">{escape(example.sentence.title)}</span>'
    return f'<div class="row"><span class="number">{example.value:+.2f}</span><span>{text} {source}</span></div>'


def vocabulary(projection: Projection) -> str:
    """Promoted and suppressed tokens side by side, as bars."""
    largest = max(abs(token.z) for token in (*projection.promoted, *projection.suppressed)) or 1.0

    def number(token: Promotion) -> str:
        return f"z {token.z:+.1f}" if token.logit is None else f"{token.logit:+.3f}"

    def side(name: str, tokens: Sequence[Promotion], rgb: tuple[int, int, int]) -> str:
        rows = "".join(
            f'<div class="row" style="border:0;padding:0;align-items:center"><span class="word">{escape(repr(t.text))}'
            f'</span><span class="bar" style="background:rgb{rgb};flex:0 1 {9 * abs(t.z) / largest:.2f}rem" '
            f'title="z {t.z:+.1f}"></span><span class="dim">{number(t)}</span></div>'
            for t in tokens
        )
        return f"<div><h3>{name}</h3>{rows}</div>"

    promoted = side("Promotes at + (suppresses at -)", projection.promoted, POSITIVE)
    suppressed = side("Suppresses at +", projection.suppressed, NEGATIVE)
    return f'<div class="two">{promoted}{suppressed}</div><p class="dim">{escape(projection.about)}</p>'


def histogram(counts: Sequence[int]) -> str:
    """Activations of one token a sentence, in bins by powers of two; the height is the square root of the count."""
    largest = max(counts) or 1
    edges = [float("-inf"), *HISTOGRAM_EDGES.tolist(), float("inf")]
    colours = [NEGATIVE if edge < 0 else POSITIVE for edge in edges]
    bars = "".join(
        f'<span title="{edges[i]:g} to {edges[i + 1]:g}: {count}" '
        f'style="height:{3.5 * (count / largest) ** 0.5:.2f}rem;background:rgb{colours[i]}"></span>'
        for i, count in enumerate(counts)
    )
    ticks = "".join(
        f'<span style="left:{100 * edges.index(edge) / len(counts):.1f}%">{edge:g}</span>'
        for edge in (-128.0, -8.0, -0.5, 0.5, 8.0, 128.0)
    )
    return f'<div class="bars" role="img" aria-label="activations">{bars}</div><div class="ticks dim">{ticks}</div>'
