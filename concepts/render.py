"""Relevance as colours and HTML. Everything that comes from a text or a model is escaped."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from icebear.concepts.attribution.result import Relevance

POSITIVE, NEGATIVE = (178, 24, 43), (33, 102, 172)
"""The ends of ColorBrewer's RdBu, which colour-blind readers tell apart."""


def color(share: float) -> tuple[int, int, int]:
    """RGB for a signed share of the largest value, -1 to 1: blue, white, red."""
    end = POSITIVE if share >= 0 else NEGATIVE
    weight = min(1.0, abs(share))
    red, green, blue = (round(255 + (channel - 255) * weight) for channel in end)
    return red, green, blue


def hexadecimal(rgb: tuple[int, int, int]) -> str:
    """As CSS, SVG and a terminal write it."""
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def ink(rgb: tuple[int, int, int]) -> str:
    """Black or white, whichever reads better on `rgb`."""
    red, green, blue = rgb
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def style(share: float) -> str:
    """CSS for a token with this share: transparent at 0, so that it suits light and dark pages."""
    red, green, blue = POSITIVE if share >= 0 else NEGATIVE
    text = ";color:#fff" if abs(share) > 0.55 else ""
    return f"background:rgba({red},{green},{blue},{min(1.0, abs(share)):.2f}){text}"


def shares(values: list[float], apart: Collection[int] = ()) -> list[float]:
    """Values divided by the largest magnitude of those that are not apart."""
    largest = max((abs(value) for place, value in enumerate(values) if place not in apart), default=0) or 1.0
    return [value / largest for value in values]


def visible(token: str) -> str:
    """A token with its white space made visible where it would not be."""
    return token.replace("\n", "⏎").replace("\t", "⇥") or "∅"


def heatmap(tokens: list[str], values: list[float], sinks: Sequence[int] = (), template: Sequence[int] = ()) -> str:
    """Tokens on their relevance's colour, the value on hover and, after a click, beside them; sinks are dotted, a
    chat's template is grey."""
    spans = []
    for place, (token, value, share) in enumerate(zip(tokens, values, shares(values, set(template)), strict=True)):
        sink = ";outline:1px dotted #888" if place in sinks else ""
        what = " (template)" if place in template else " (sink)" if place in sinks else ""
        look = "color:#888" if place in template else style(share)
        spans.append(
            f'<span tabindex="-1" title="{escape(f"{place}: {value:+.4f}{what}")}" style="{look}{sink};'
            f'padding:.15em 0;white-space:pre-wrap">{escape(visible(token))}</span>'
        )
    look = "line-height:2;font-family:ui-monospace,monospace"
    return f'<div class="tokens" style="{look}">{CLICKED}{"".join(spans)}</div>'


CLICKED = '<style>.tokens span:focus::after{content:" "attr(title)" ";font-size:.8em;opacity:.8}</style>'
"""A token that has the focus says its number: no script, which a notebook may not trust."""


def relevance_fragment(relevance: Relevance, k: int = 10) -> str:
    """The heatmap, what is explained, conservation and the top k neurons, for a notebook."""
    against = f" against {escape(repr(relevance.contrast_text))}" if relevance.contrast_text else ""
    every = relevance.counterfactual and (relevance.largest or len(relevance.recorded) == len(relevance.tokens))
    k = min(k, relevance.largest.k) if relevance.largest else k
    rows = "".join(
        f"<tr><td><code>{escape(str(ranked.neuron))}</code></td>"
        f"<td>{escape(repr(relevance.token_strings[ranked.position]))}</td><td>{ranked.activation:+.3f}</td>"
        f"<td>{ranked.relevance:+.4f}</td></tr>"
        for ranked in (relevance.top(k, position="all" if every else "last") if relevance.sites else [])
    )
    predictions = ", ".join(f"{escape(repr(token.text))} {token.number}" for token in relevance.predictions[:5])
    table = (
        "<table><thead><tr><th>neuron</th><th>token</th><th>activation</th><th>relevance</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
        if rows
        else ""
    )
    return (
        f"<p>Why <b>{escape(repr(relevance.target_text))}</b>{against}? "
        f"<small>{escape(f'method: {relevance.method!r}'.removesuffix('()'))}</small></p>"
        + _where(relevance)
        + f"<p><small>Predicted: {predictions}<br>{escape(relevance.account())}"
        + (f"<br>{escape(relevance.meaning())}" if relevance.counterfactual else "")
        + "</small></p>"
        + table
        + f"<p><small>{escape(said(relevance.made_with))}</small></p>"
    )


def _where(relevance: Relevance) -> str:
    """The tokens, and what went to their positions; or the image."""
    if relevance.image:
        data = b64encode(relevance.image.png()).decode()
        return (
            f'<img alt="The image, red where it speaks for the label, blue against" src="data:image/png;base64,{data}">'
        )
    names = list(relevance.token_strings)
    found = heatmap(names, relevance.tokens.tolist(), relevance.sinks, relevance.template)
    if relevance.positions is not None:
        found += "<p><small>Their positions, all layers together:</small></p>"
        found += heatmap(names, relevance.positions.sum(0).tolist(), relevance.sinks, relevance.template)
    return found


def relevance_page(relevance: Relevance) -> str:
    """A self-contained page: no scripts, nothing fetched."""
    return page("icebear relevance", relevance_fragment(relevance, k=30))


def page(title: str, body: str, style: str = "") -> str:
    """A self-contained page around HTML; only the title is escaped here."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>'
        ":root{color-scheme:light dark}"
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{text-align:right;padding:.1rem .8rem}td:first-child,th:first-child{text-align:left}"
        f"{style}</style></head><body>{body}</body></html>"
    )


def marked(tokens: Sequence[str], values: Sequence[float] | None, extreme: int) -> str:
    """A sentence's tokens on the colours of their relevance (if there is any); the extreme token stands out."""
    parts = shares(list(values or ()))
    spans = []
    for place, token in enumerate(tokens):
        if not token:  # part of a character that a later token completes
            continue
        text = escape(visible(token))
        text = f"<b><u>{text}</u></b>" if place == extreme else text
        if values:
            text = f'<span title="{values[place]:+.3f}" style="{style(parts[place])}">{text}</span>'
        spans.append(text)
    return f'<span dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere">{"".join(spans)}</span>'


def said(told: dict[str, Any]) -> str:
    """`icebear.concepts.models.provenance` in a line, for the foot of a page."""
    model = told["model"]
    index = [f"{key} {told['index'][key]}" for key in ("corpus", "limit", "k", "by") if key in told.get("index", {})]
    parts = [
        f"{model['name']} ({model['fingerprint']}), {model['dtype']}, {model['weights']}",
        ", ".join(index),
        ", ".join(f"{name} {number}" for name, number in told["versions"].items()),
    ]
    return "; ".join(part for part in parts if part)
