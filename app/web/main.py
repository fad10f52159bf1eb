"""The Streamlit app: its pages, and how they show an error."""

from __future__ import annotations

import logging
from pathlib import Path

import streamlit as st

from icebear.app.web.shared import background_job, header, jobs, links, markdown
from icebear.errors import IcebearError, StoreError, known_error

ICON = Path(__file__).with_name("icon.svg")
"""A file of ours: for an emoji or a Material icon the browser asks a foreign host."""
STYLE = """<style>
[data-testid=stExpandSidebarButton]::after{content:"Menu";margin-left:.3em;font-size:.9rem}
[data-testid=stExpandSidebarButton]{width:auto;padding:0 .5em}
.stMainBlockContainer{padding-top:4rem;max-width:72rem}
.stMain h2{padding-top:.4rem;font-size:1.35rem}.stMain h3{font-size:1.15rem}
.heat,.heat *{overflow-wrap:anywhere}
.answer{display:flex;flex-wrap:wrap;align-items:center;gap:0 .8rem}
.st-key-header button{padding:0 .4rem}
@media(min-width:1000px){.st-key-header{position:fixed;top:.55rem;right:1rem;width:auto;z-index:1000000}}
.stApp [data-testid=stCaptionContainer]{color:light-dark(#5f5f5b,#b4b4b0);opacity:1}
.stApp [data-testid=stBaseButton-primary]:enabled{color:light-dark(#fff,#111)}
h1.title,div.title{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
</style>"""
PAGE_SCRIPT = """<script>if (!history.oneStep) {
  const push = history.pushState.bind(history), replace = history.replaceState.bind(history);
  let acted = false;
  for (const kind of ["pointerdown", "click", "keydown"]) addEventListener(kind, () => { acted = true; }, true);
  addEventListener("popstate", () => { acted = false; }, true);
  history.pushState = history.replaceState = (state, title, url) => {
    if (new URL(url, location.href).href === location.href) return;
    (acted ? push : replace)(state, title, url);
    acted = false;
  };
  history.oneStep = true;
  const status = Object.assign(document.createElement("div"), {role: "status", className: "title"});
  document.body.append(status);
  setInterval(() => {
    const text = document.querySelector("[data-testid=stProgress]")?.innerText ?? (status.textContent && "Done.");
    if (status.textContent !== text) status.textContent = text;
    document.querySelector("[data-testid=stExpandSidebarButton]")?.setAttribute("aria-label", "Menu");
    for (const code of document.querySelectorAll("[role=dialog] code"))
      if (code.textContent.includes("yourscript")) code.textContent = "icebear app";
  }, 3000);
  addEventListener("keydown", (event) => {
    const side = {ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling"}[event.key];
    const token = side && event.composedPath()[0].closest?.(".tokens span")?.[side];  // also in a shadow root
    if (!token?.matches("span")) return;
    event.preventDefault();
    token.focus();
  });
}
document.currentScript?.remove()</script>"""
"""What a person does is one step of the browser's Back, though Streamlit changes the URL several times: first the page,
then each field of it. A live region has the progress, and arrow keys move through a heatmap."""


@background_job.drawing()
def main() -> None:
    view = links.navigation()
    st.set_page_config(f"{view.title} - icebear", ICON, layout="wide", initial_sidebar_state="collapsed")
    st.html(STYLE + PAGE_SCRIPT, unsafe_allow_javascript=True)
    st.html(f'<h1 class="title">{view.title}</h1>')
    trouble = st.session_state.pop("trouble", None)
    jobs.begin_run()
    try:
        header.show()
        if trouble:
            st.error(markdown.message(trouble))
        view.run()
        jobs.end_unwatched()
    except StoreError as error:  # only a command makes a named index again
        st.error(markdown.plain(str(error)))
    except IcebearError as error:
        st.error(markdown.message(error))
    except Exception as error:  # a view must not take the app with it
        logging.getLogger("icebear.app").exception("The view %s failed.", view.title)
        message = f"This page failed ({type(error).__name__}: {error}); change the settings and try again."
        st.error(markdown.message(known_error(error) or message))
    finally:
        background_job.set_first_page()
