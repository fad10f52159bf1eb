"""Tables of neurons and of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas
import streamlit as st

from icebear.app.web.shared import links, pictures, served
from icebear.concepts.results.effect_words import BY_LENS, IN_PROMPT
from icebear.explanation.explanation import Explanation
from icebear.records import Neuron

SIGNED = st.column_config.NumberColumn(format="%+.3f")
PERCENT = st.column_config.NumberColumn(format="%.1f%%")
FORMATS: dict[str, Any] = {
    "relevance": SIGNED,
    "activation": SIGNED,
    "counterfactual": st.column_config.NumberColumn("value in the counterfactual", format="%+.3f"),
    "label": st.column_config.TextColumn(width=380),
}
"""How columns of tables of neurons are shown."""
TABLE_ROWS = 10
"""Rows that a table shows before it scrolls."""


def node_table(explanation: Explanation, key: str, columns: Sequence[str], **values: str) -> None:
    """Show the nodes of an explanation with these columns and their words.

    values: typed into the steering view when the first neuron is sent there.
    """
    table = explanation.to_frame().rename(columns={"polarity": "sign"})
    words = ("raises", "lowers") if explanation.effects else ("promotes",)
    joined = {name: table[name].map(", ".join) for name in ("raises", "lowers")}
    table = table.assign(label=table["label"].fillna(""), **joined)
    columns = (*columns, *words)
    if any(node.ranked.neuron.site == "head" for node in explanation.nodes):
        apart = {"activation", "counterfactual"}
        shown = [name for name in columns if name in table and name not in apart]
        data_table(table, column_order=shown, column_config=FORMATS)
    else:
        shown = [*columns, *(["label"] if table["label"].any() else [])]
        neuron_table(table, key, column_order=shown)
    if explanation.effects:
        st.caption(f"Raises, lowers: {IN_PROMPT.lower()}, each node alone, among the likely next words.")
    else:
        st.caption(f"Promotes: {BY_LENS['direct'][0].lower()}{BY_LENS['direct'][1:]}.")
    neuron = explanation.nodes[0].ranked.neuron
    with st.container(horizontal=True):
        pictures.downloads(key, {"html": explanation.to_html, "json": explanation.to_json})
        st.button(
            f"Switch off {neuron} in {links.VIEWS['steer'].title}",
            key=f"{key}_steer",
            on_click=links.to_steer,
            args=(neuron,),
            kwargs=values,
        )


def neuron_table(table: pandas.DataFrame, key: str, labels: bool = False, **options: Any) -> None:
    """Show a table of neurons. A click on a row opens the card of the neuron in its columns neuron and sign.

    labels: add the labels of the index, if it has any.
    """

    def open_chosen() -> None:
        chosen = st.session_state[key]["selection"]
        rows = [*chosen["rows"], *(row for row, _ in chosen["cells"])]
        if rows:
            row = table.iloc[rows[0]]
            links.open_card(row["neuron"], row["sign"])

    if labels:
        table = _with_labels(table)
    st.caption("Click a row for the neuron's card.")
    # Where columns can be chosen, which means nothing here, their heads do not sort.
    modes: list[Any] = ["single-row", "single-cell", "single-column"]
    formats = FORMATS | options.pop("column_config", {})
    data_table(table, key=key, on_select=open_chosen, selection_mode=modes, column_config=formats, **options)


def ticked_neurons(rows: list, key: str) -> list:
    """Show rows of neuron, sign, cluster and clarity with a box each. Return those that are ticked."""
    table = _with_labels(pandas.DataFrame(rows, columns=["neuron", "sign", "cluster", "clarity"]))
    formats = {**FORMATS, "clarity": st.column_config.NumberColumn(format="%.3f")}
    data_table(table, key=key, on_select="rerun", selection_mode="multi-row", column_config=formats)
    return [rows[number] for number in st.session_state[key]["selection"]["rows"] if number < len(rows)]


def _with_labels(table: pandas.DataFrame) -> pandas.DataFrame:
    """Add the labels of the neurons in the columns neuron and sign, if the index has any."""
    if not served.has_readable_store():
        return table
    with served.store() as opened:
        pairs = zip(table["neuron"], table["sign"], strict=True)
        names = [opened.labels.shown(Neuron.parse(neuron), sign) or "" for neuron, sign in pairs]
    return table.assign(label=names) if any(names) else table


def data_table(
    table: pandas.DataFrame,
    rows: int = TABLE_ROWS,
    *,
    shares: Sequence[str] = (),
    column_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Show a table of at most `rows` rows at a time; a longer one shows half of the next row, and scrolls.

    The columns `shares` are shown in percent, with one decimal.
    Without a height, what is below the table would move, perhaps under a click, when the browser has loaded its code.
    """
    height = int(35 * (1 + max(1, min(len(table), rows + 0.5)))) + 2
    percents = {name: (100 * table[name]).round(1) + 0.0 for name in shares}  # -0.0 + 0.0 is 0.0
    formats = {**(column_config or {}), **dict.fromkeys(shares, PERCENT)}
    st.dataframe(table.assign(**percents), hide_index=True, height=height, column_config=formats, **options)


def neuron_pills(label: str, pairs: Iterable[tuple[Neuron, str]], key: str) -> None:
    """Show neurons with a polarity, if they have one; a click on one opens its card."""

    def open_chosen() -> None:
        if st.session_state[key]:
            neuron, _, polarity = st.session_state[key].partition(" ")
            st.session_state[key] = None
            links.open_card(neuron, polarity)

    names = list(dict.fromkeys(f"{neuron} {polarity}".strip() for neuron, polarity in pairs))
    st.pills(label, names, key=key, on_change=open_chosen)
