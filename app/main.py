"""The Streamlit app: `icebear app`."""

from __future__ import annotations

import sys
from pathlib import Path

# Streamlit puts this folder first, where our file names would hide other people's modules.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]

import importlib  # noqa: E402
import logging  # noqa: E402

import streamlit as st  # noqa: E402

from app.web.state import VIEWS, model_name, plain, store_path, typed  # noqa: E402
from icebear.errors import IcebearError, out_of_memory  # noqa: E402

STYLE = """<style>
.stMainBlockContainer{padding-top:4.5rem;max-width:72rem}
.heat,.heat *{overflow-wrap:anywhere}
</style>"""


def main() -> None:
    st.set_page_config("icebear", ":material/search_insights:", layout="wide", initial_sidebar_state="collapsed")
    st.html(STYLE)
    view = typed(st.segmented_control, "View", "view", VIEWS, default=VIEWS[0], required=True,
                 label_visibility="collapsed")  # fmt: skip
    with st.sidebar:
        st.caption(f"model: {plain(model_name())}")
        st.caption(f"store: {plain(str(store_path()))}")
        st.caption("Chosen with `icebear app --model ... --store ...`.")
    trouble = st.session_state.pop("trouble", None)
    if trouble:
        st.error(plain(trouble))
    try:
        importlib.import_module(f"app.web.{view}").show()
    except IcebearError as error:
        st.error(plain(str(error)))
    except Exception as error:  # a view must not take the app with it
        logging.getLogger("icebear.app").exception("The view %s failed.", view)
        said = f"That failed ({type(error).__name__}: {error}); change what you asked for and try again."
        st.error(plain(str(out_of_memory(error) or said)))


main()
