"""HTML of ours whose marked parts can be clicked on: one Streamlit component."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

CLICKS = """
export default function ({ data, parentElement, setTriggerValue }) {
  const place = parentElement.querySelector(".place");
  if (place.innerHTML !== data && place.dataset.drawn !== data) {
    place.innerHTML = data;
    place.dataset.drawn = data;
  }
  const part = (event) => event.target.closest("[data-pick],[data-neuron]");
  const click = (event) => {
    const clicked = part(event);
    if (!clicked) return;
    event.preventDefault();
    setTriggerValue("clicked", clicked.dataset.pick ?? clicked.dataset.neuron);
  };
  place.onclick = click;
  place.onkeydown = (event) => { if (["Enter", " "].includes(event.key)) click(event); };
}
"""
component = st.components.v2.component("icebear_clickable", html='<div class="place"></div>', js=CLICKS)


def draw(html: str, key: str, on_clicked: Callable[[str], object]) -> None:
    """Draw HTML, in which texts are escaped. A click on a part with `data-pick` or `data-neuron` calls `on_clicked`."""

    def clicked() -> None:
        if st.session_state[key].clicked:
            on_clicked(st.session_state[key].clicked)

    component(data=str(html), key=key, on_clicked_change=clicked)
