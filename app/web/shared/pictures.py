"""Charts and pictures with their downloads; drawn without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import streamlit as st

from icebear.errors import need

if TYPE_CHECKING:
    import altair as alt


def chart(drawn: alt.Chart | alt.LayerChart, name: str) -> None:
    """Show a chart, and offer it as a picture."""
    st.altair_chart(drawn)
    offer(name, lambda: converter().vegalite_to_svg(drawn.to_json()))


def offer(name: str, svg: Callable[[], str]) -> None:
    """Offer a picture as SVG and PNG."""
    downloads(name, {"svg": svg, "png": lambda: converter().svg_to_png(svg(), scale=2)})


def converter() -> ModuleType:
    """Return what makes pictures of charts. Raises `InputError` where it is not installed."""
    need("circuits")
    return importlib.import_module("vl_convert")


def downloads(name: str, files: dict[str, Callable[[], str | bytes]]) -> None:
    """Offer files for download. files: suffix -> the function that makes the file, called on the click."""
    with st.popover("Download", icon=":material/download:"):
        for suffix, make in files.items():
            st.download_button(suffix.upper(), make, f"{name}.{suffix}", key=f"{name}.{suffix}", on_click="ignore")
