"""Views of the app in Streamlit's own test runner."""

import json
import os
import threading

from streamlit.components.v2 import manifest_scanner
from streamlit.config import set_option
from streamlit.proto.WidgetStates_pb2 import WidgetState
from streamlit.testing.v1 import AppTest, element_tree, local_script_runner
from streamlit.util import calc_hash

from icebear.app.web.shared import background_job

MAIN = "../app/web/script/main.py"

_require_end = local_script_runner.require_widgets_deltas


def _ended(runner, timeout):
    runner._script_thread.join(timeout)
    _require_end(runner, 1)


def _chosen(box):
    """As the browser, also a word that is no option of the box."""
    return WidgetState(id=box.id, string_value=None if box.value is None else box.format_func(box.value))


# The first run would read the metadata of all installed packages for components of theirs, and each would look every
# millisecond whether the script has ended, and collect garbage, as `icebear app` does not.
set_option("runner.postScriptGC", False)
manifest_scanner.scan_component_manifests = list
local_script_runner.require_widgets_deltas = _ended
element_tree.Selectbox._widget_state = property(_chosen)


def set_up(monkeypatch, **settings):
    """As `icebear app` with these options, and those set before."""
    monkeypatch.setenv("ICEBEAR_APP", json.dumps(json.loads(os.environ.get("ICEBEAR_APP", "{}")) | settings))


def visit(view="why", **parameters):
    page = AppTest.from_file(MAIN, default_timeout=120)
    for name, value in parameters.items():
        page.query_params[name] = value
    return shown(page, view)


def shown(page, view):
    """As its name in the navigation does; AppTest's own switch_page() knows only pages that are files."""
    page._page_hash = calc_hash(view)
    page.run()
    page._page_hash = ""
    return page


def text(page):
    """Everything the page says, as Markdown and HTML, also in its components."""
    kinds = (page.markdown, page.caption, page.html, page.error, page.warning, page.info, page.code)
    texts = [str(getattr(element, "value", None) or element.proto.body) for kind in kinds for element in kind]
    return "\n".join([*texts, *(str(json.loads(element.proto.json)) for element in page.get("bidi_component"))])


def fine(page):
    assert not page.exception, page.exception
    assert not page.error, [element.value for element in page.error]
    return page


def end_jobs():
    """End what works in the background, but for loading a model, lest it run on beside other tests. It starts anew for
    the next page that shows it."""
    loads = background_job.loads.values()
    jobs = [job for job in threading.enumerate() if isinstance(job, background_job.Job) and job not in loads]
    for job in jobs:
        job.abandoned = True
        job.stop()
    for job in jobs:
        job.join()
