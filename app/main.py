"""The Streamlit app: `icebear app`."""

from __future__ import annotations

import sys
from pathlib import Path

# Streamlit puts this folder first, where our file names would hide other people's modules.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]

import logging  # noqa: E402

import streamlit as st  # noqa: E402

from app.web import header  # noqa: E402
from app.web.state import VIEWS, page, plain  # noqa: E402
from icebear.errors import IcebearError, out_of_memory  # noqa: E402

STYLE = """<style>
.stMainBlockContainer{padding-top:4.5rem;max-width:72rem}
.heat,.heat *{overflow-wrap:anywhere}
.answer{display:flex;flex-wrap:wrap;align-items:center;gap:0 .8rem}
.st-key-header button{padding:0 .4rem}
</style>"""


def main() -> None:
    st.set_page_config("icebear", ":material/search_insights:", layout="wide", initial_sidebar_state="collapsed")
    st.html(STYLE)
    view = st.navigation([page(name) for name in VIEWS], position="top")
    st.session_state["came"] = st.session_state.get("view") != view.title
    st.session_state["view"] = view.title
    trouble = st.session_state.pop("trouble", None)
    try:
        header.show()
        if trouble:
            st.error(plain(trouble))
        view.run()
    except IcebearError as error:
        st.error(plain(str(error)))
    except Exception as error:  # a view must not take the app with it
        logging.getLogger("icebear.app").exception("The view %s failed.", view.title)
        said = f"That failed ({type(error).__name__}: {error}); change what you asked for and try again."
        st.error(plain(str(out_of_memory(error) or said)))


main()
