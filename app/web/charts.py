"""Results as Altair charts, on the colours of `icebear.concepts.render`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import altair as alt
import pandas

from icebear.concepts.render import NEGATIVE, POSITIVE, hexadecimal, visible

if TYPE_CHECKING:
    from icebear.concepts.attribution.result import Relevance
    from icebear.concepts.attribution.sources import Origins
    from icebear.records import TokenScore

FOR, AGAINST = "for it", "against it"
BLUE, RED = map(hexadecimal, (NEGATIVE, POSITIVE))


def layer_map(relevance: Relevance, site: str) -> alt.Chart:
    """Layers x tokens: the relevance of a site's neurons."""
    names = [f"{place} {visible(token)}" for place, token in enumerate(relevance.prompt.strings)]
    rows = [
        {"layer": layer, "token": names[place], "relevance": value}
        for layer, values in enumerate(relevance.layers(site).tolist())
        for place, value in enumerate(values)
        if place not in relevance.prompt.sinks
    ]
    return _map(rows, alt.X("token:N", sort=names, title=None), "token", f"{site} by layer and token (sinks left out)")


def head_map(relevance: Relevance) -> alt.Chart:
    """Layers x heads, summed over the tokens that are no sinks."""
    kept = [place for place in range(len(relevance.tokens)) if place not in relevance.prompt.sinks]
    heads = relevance.heads()[:, kept].sum(1)
    rows = [
        {"layer": layer, "head": head, "relevance": value}
        for layer, values in enumerate(heads.tolist())
        for head, value in enumerate(values)
    ]
    return _map(rows, alt.X("head:O", title="head"), "head", "attention heads (sinks left out)")


def _map(rows: list[dict[str, Any]], x: alt.X, across: str, title: str) -> alt.Chart:
    largest = max((abs(row["relevance"]) for row in rows), default=1.0) or 1.0
    scale = alt.Scale(domain=[-largest, 0, largest], range=[BLUE, "#ffffff", RED], interpolate="rgb")
    return (
        alt.Chart(pandas.DataFrame(rows), title=title)
        .mark_rect()
        .encode(
            x=x,
            y=alt.Y("layer:O", sort="descending", title="layer", axis=alt.Axis(labelOverlap=True)),
            color=alt.Color("relevance:Q", scale=scale, legend=alt.Legend(orient="bottom", format="+.2f", title=None)),
            tooltip=["layer", across, alt.Tooltip("relevance:Q", format="+.4f")],
        )
        .properties(height=330)
    )


def paired_bars(plain: Sequence[TokenScore], steered: Sequence[TokenScore]) -> alt.Chart:
    """The probabilities of the next token, without and with edits; of a model that predicts a number that number."""
    value = "logit" if any(token.probability is None for token in plain) else "probability"
    scale = alt.Scale() if value == "logit" else alt.Scale(domain=[0, 1])
    rows = [
        {"token": repr(token.text), value: getattr(token, value), "text": name}
        for name, tokens in (("plain", plain), ("steered", steered))
        for token in tokens
    ]
    order = list(dict.fromkeys(row["token"] for row in rows))
    return (
        alt.Chart(pandas.DataFrame(rows), title="next token")
        .mark_bar()
        .encode(
            y=alt.Y("token:N", sort=order, title=None, axis=alt.Axis(labelOverlap=False)),
            yOffset=alt.YOffset("text:N", sort=["plain", "steered"]),
            x=alt.X(f"{value}:Q", scale=scale),
            color=alt.Color(
                "text:N",
                scale=alt.Scale(domain=["plain", "steered"], range=["#8a8a8a", BLUE]),
                legend=alt.Legend(orient="bottom", title=None),
            ),
            tooltip=["token", "text", alt.Tooltip(f"{value}:Q", format=".4f")],
        )
        .properties(height=34 * len(order) + 100)  # the page takes axis, legend and title out of it
    )


def shared(table: pandas.DataFrame) -> alt.Chart:
    """Neurons by their relevance on both sides of a comparison."""
    return (
        alt.Chart(table, title="each neuron's relevance on both sides")
        .mark_circle(size=70)
        .encode(
            x=alt.X("A:Q"),
            y=alt.Y("B:Q"),
            color=alt.Color(
                "in:N",
                scale=alt.Scale(domain=["both", "A", "B"], range=["#999999", RED, BLUE]),
                legend=alt.Legend(orient="bottom", title="among the top of"),
            ),
            tooltip=["neuron", alt.Tooltip("A:Q", format="+.4f"), alt.Tooltip("B:Q", format="+.4f")],
        )
        .properties(height=330)
    )


def origins(found: Origins) -> alt.Chart:
    """What each part gave, for it and against it; biases are a bar of their own."""
    rows: list[dict[str, Any]] = [
        {"part": part.name, "relevance": value, "speaks": speaks}
        for part in found.parts
        for value, speaks in ((part.positive, FOR), (part.negative, AGAINST))
    ]
    rows.append({"part": "biases", "relevance": found.biases, "speaks": FOR if found.biases > 0 else AGAINST})
    order = list(dict.fromkeys(row["part"] for row in rows))
    scale = alt.Scale(domain=[FOR, AGAINST], range=[RED, BLUE])
    return (
        alt.Chart(pandas.DataFrame(rows))
        .mark_bar()
        .encode(
            y=alt.Y("part:N", sort=order, title=None, axis=alt.Axis(labelOverlap=False, labelLimit=220)),
            x=alt.X("relevance:Q", title="logits"),
            color=alt.Color("speaks:N", scale=scale, legend=alt.Legend(orient="bottom", title=None)),
            tooltip=["part", "speaks", alt.Tooltip("relevance:Q", format="+.3f")],
        )
        .properties(height=28 * len(order) + 130)  # as above
    )


def files(chart: alt.Chart) -> dict[str, Callable[[], str | bytes]]:
    """suffix -> what makes the picture, for downloads."""

    def svg() -> str:
        text = io.StringIO()
        chart.save(text, format="svg")
        return text.getvalue()

    def png() -> bytes:
        data = io.BytesIO()
        chart.save(data, format="png", scale_factor=2)
        return data.getvalue()

    return {"svg": svg, "png": png}
