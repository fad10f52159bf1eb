"""The Streamlit app: its pages, and how they show an error."""

from __future__ import annotations

import logging
from pathlib import Path

import streamlit as st

from icebear.app.web.shared import header, links, markdown
from icebear.errors import IcebearError, exhausted

ICON = Path(__file__).with_name("icon.svg")
"""A file of ours: for an emoji or a Material icon the browser asks a foreign host."""
STYLE = """<style>
.stMainBlockContainer{padding-top:4rem;max-width:72rem}
.stMain h4{padding-top:.4rem}
.heat,.heat *{overflow-wrap:anywhere}
.answer{display:flex;flex-wrap:wrap;align-items:center;gap:0 .8rem}
.st-key-header button{padding:0 .4rem}
@media(min-width:1000px){.st-key-header{position:fixed;top:.55rem;right:1rem;width:auto;z-index:1000000}}
</style>"""


def main() -> None:
    st.set_page_config("icebear", ICON, layout="wide", initial_sidebar_state="collapsed")
    st.html(STYLE)
    view = links.navigation()
    trouble = st.session_state.pop("trouble", None)
    try:
        header.show()
        if trouble:
            st.error(markdown.message(trouble))
        view.run()
    except IcebearError as error:
        st.error(markdown.message(error))
    except Exception as error:  # a view must not take the app with it
        logging.getLogger("icebear.app").exception("The view %s failed.", view.title)
        message = f"This page failed ({type(error).__name__}: {error}); change the settings and try again."
        st.error(markdown.message(exhausted(error) or message))
