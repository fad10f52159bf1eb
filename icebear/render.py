"""Relevance as colors, and HTML by templates, which escape everything that is not `Markup`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any
from unicodedata import combining

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

POSITIVE = (178, 24, 43)
"""Red, an end of ColorBrewer's RdBu, which color-blind readers can distinguish."""
NEGATIVE = (33, 102, 172)
"""Blue, the other end."""

NAME = re.compile(r"\b(L\d+\.[a-z]+\.\d+)\b")
"""A neuron or head, as `icebear.records.Neuron` writes it."""
PART = "[part of a character]"
"""In place of a token that is no text without others."""
JOINER = "\u200d"
JOINED = f"{JOINER}\ufe0f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
"""What belongs to the emoji before it: a joiner, a way to draw it, skin tones."""


@cache
def environment() -> Environment:
    """Return the environment of all templates. A template is named by its package and its file in ``templates`` there:
    ``icebear.actmax/card.html``."""
    jinja = Environment(
        loader=FunctionLoader(_source), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    jinja.filters.update(
        number=format, visible=visible, repr=repr, made_with=made_with_line, xml=_xml, style=style, linked=linked
    )
    jinja.globals.update(headline=headline, heatmap=heatmap, marked=marked)
    return jinja


def _source(name: str) -> str:
    package, _, file = name.partition("/")
    return files(package).joinpath("templates", file).read_text(encoding="utf-8")


def _xml(text: str) -> str:
    """Replace the characters that XML forbids."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


def render(template: str, **values: Any) -> Markup:
    """Render a template as HTML."""
    return Markup(environment().get_template(template).render(**values))


def literal(text: str) -> str:
    """Return a text so that Markdown shows it as it is, in one line."""
    special = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|"})
    return " ".join(text.split()).translate(special)


def percent(*shares: float) -> str:
    """Return a share, or the limits of an interval, in percent."""
    return f"{' to '.join(f'{100 * share:.{0 if share >= 0.1 or not share else 1}f}' for share in shares)} %"


def color(share: float) -> tuple[int, int, int]:
    """Return the RGB color of a signed share of the largest value, -1 to 1: blue, white, red."""
    end = POSITIVE if share >= 0 else NEGATIVE
    weight = min(1.0, abs(share))
    red, green, blue = (round(255 + (channel - 255) * weight) for channel in end)
    return red, green, blue


def hexadecimal(rgb: tuple[int, int, int]) -> str:
    """Return a color as CSS, SVG and terminals write it."""
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def ink(rgb: tuple[int, int, int]) -> str:
    """Return black or white, whichever has more contrast on `rgb`."""
    red, green, blue = rgb
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def style(share: float) -> str:
    """Return the CSS of a token with this share; 0 is transparent, for light and dark pages. The text is white where
    that has more contrast than the gray of the app."""
    (red, green, blue), white = (POSITIVE, 0.65) if share >= 0 else (NEGATIVE, 0.75)
    text = ";color:#fff" if abs(share) > white else ""
    return f"background:rgba({red},{green},{blue},{min(1.0, abs(share)):.2f}){text}"


def linked(text: str, cards: Collection[str] | None = ()) -> Markup:
    """Escape a text whose names of neurons and heads are links to their cards.

    cards: the names that the page has cards of; None if it opens a card on a click (`data-neuron`)."""
    parts = NAME.split(text)  # every second one is a name
    link = Markup('<a href="#{0}" data-neuron="{0}" style="color:inherit">{0}</a>')
    return Markup().join(
        link.format(part) if number % 2 and (cards is None or part in cards) else part
        for number, part in enumerate(parts)
    )


def headline(sentence: str, cards: Collection[str] | None = ()) -> Markup:
    """Return the sentence on top of a result. cards: see `linked`."""
    style = "font-size:20px;font-weight:600;line-height:1.3;margin:.4rem 0"
    return Markup('<p class="finding" style="{}">{}</p>').format(style, linked(sentence, cards))


def normalized(values: list[float], apart: Collection[int] = ()) -> list[float]:
    """Divide values by the largest magnitude, without the positions in `apart`."""
    largest = max((abs(value) for position, value in enumerate(values) if position not in apart), default=0) or 1.0
    return [value / largest for value in values]


def visible(token: str) -> str:
    """Make the white space of a token visible, and say where it is only a part of a character."""
    return token.replace("\n", "⏎").replace("\t", "⇥").replace("\ufffd", PART) or "∅"


def as_word(token: str) -> str:
    """Return an answer as a word: without its spaces, or ␣ for each if it is nothing else."""
    return visible(token.strip(" ") or token.replace(" ", "␣"))


def quoted(token: str) -> str:
    """Return an answer in quotes, with ␣ for each space if it is nothing else."""
    return visible(repr(token if token.strip(" ") else token.replace(" ", "␣")))


def heatmap(
    tokens: list[str],
    values: list[float],
    sinks: Sequence[int] = (),
    template: Sequence[int] = (),
    full_color: float = 0.0,
    picks: Mapping[int, str] = MappingProxyType({}),
) -> Markup:
    """Return tokens on the color of their relevance; those of one character stand together, with their largest value.

    The value appears on hover, and on the token that has the focus; sinks have a dotted outline, the tokens of a chat
    template are gray. full_color: the value of the darkest color, unless the largest one is larger. picks: positions of
    tokens that are underlined, and can be clicked on -> their `data-pick`."""
    shares, rows = normalized([*values, full_color], set(template)), []
    for positions in characters(tokens):
        largest = max(positions, key=lambda position: abs(values[position]))
        rows.append((largest, "".join(tokens[position] for position in positions), values[largest], shares[largest]))
    return render("icebear/heatmap.html", rows=rows, sinks=sinks, template_positions=template, picks=picks)


def characters(tokens: Sequence[str]) -> list[list[int]]:
    """Return the positions of tokens, those of one character together: of an emoji, or of a letter and its marks."""
    groups: list[list[int]] = []
    for position, token in enumerate(tokens):
        before = tokens[position - 1] if groups else " "
        if not before or before[-1] == JOINER or (token and (combining(token[0]) or token[0] in JOINED)):
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups


def page(title: str, body: Markup, style: str = "") -> Markup:
    """Return a self-contained page around HTML."""
    return render("icebear/page.html", title=title, body=body, style=Markup(style))


def marked(tokens: Sequence[str], values: Sequence[float] | None, extreme: int) -> Markup:
    """Return the tokens of a sentence on the colors of their relevance, if any; the extreme token is bold."""
    colors = [style(share) for share in normalized(list(values))] if values else [""] * len(tokens)
    titles = [f"{value:+.3f}" for value in values or ()] or colors
    rows = zip(tokens, colors, titles, strict=True)
    return render("icebear/marked.html", rows=rows, extreme=extreme)


def made_with_line(made_with: dict[str, Any]) -> str:
    """Return `Model.made_with` in one line, for the foot of a page."""
    model = made_with["model"]
    facts = made_with.get("index", {})
    index = [f"{key} {facts[key]}" for key in ("corpus", "limit", "k", "by") if key in facts]
    parts = [
        f"{model['name']} ({model['fingerprint']}), {model['dtype']}, {model['weights']}",
        ", ".join(index),
        ", ".join(f"{name} {number}" for name, number in made_with["versions"].items()),
    ]
    return "; ".join(part for part in parts if part)
