"""The real app in real Chromium, for the browser test, the pictures in docs/ and benchmarks/card.py."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Ends 200 ms after the last drawing of a run of the script, or after 500 ms in which no run begins. The state is
# "initial" before the first run, which is waited for however long the server takes. A skeleton stands where the browser
# still loads the code of a table or a widget.
SETTLED = """() => new Promise(done => {
    const app = document.querySelector('[data-testid=stApp]'), skeleton = '[data-testid=stSkeleton]';
    const ends = () => app.dataset.testScriptState == 'notRunning' && !app.querySelector(skeleton);
    let ran = !ends(), timer = ran ? null : setTimeout(done, 500, true);
    const drawn = new MutationObserver(() => {
        ran ||= !ends();
        if (!ran) return;
        clearTimeout(timer);
        if (ends()) timer = setTimeout(done, 200, true);
    });
    const attributeFilter = ['data-test-script-state'];
    drawn.observe(app, {attributeFilter, childList: true, characterData: true, subtree: true});
})"""


@contextmanager
def serving(store: Path, *options: str, few: bool = False) -> Iterator[str]:
    """`icebear app` on a free port; yields its address."""
    with started(store, *options, few=few) as (_, address):
        yield address


@contextmanager
def started(
    store: Path, *options: str, few: bool = False, base: str = "", **environment: str
) -> Iterator[tuple[subprocess.Popen, str]]:
    """The process that was started, and its address; at the end it is ended with all that it started.

    few: whether side effects and controls have few contexts and draws, as of few.py. base: the path of --base-path.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    program = [str(Path(__file__).parent / "few.py")] if few else ["-m", "icebear"]
    command = [sys.executable, *program, "app", "--store", str(store), "--port", str(port), *options]
    process = subprocess.Popen(
        command, start_new_session=True, cwd=Path(__file__).parent.parent, env={**os.environ, **environment}
    )
    address = f"http://localhost:{port}{base}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/_stcore/health", timeout=2).read()
                break
            except OSError:
                assert process.poll() is None, "the app ended"
                time.sleep(0.5)
        yield process, address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


@contextmanager
def browser(*options: str) -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", *options]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield chromium
        finally:
            chromium.close()


class Tabs:
    """A browser whose pages are tabs with one cache: only the first of them reads the scripts of the app."""

    def __init__(self, chromium: Any) -> None:
        self.new_context = chromium.new_context
        self._context = chromium.new_context()

    def new_page(self, viewport: dict[str, int] | None = None, color_scheme: str | None = None) -> Any:
        page = self._context.new_page()
        if viewport:
            page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=color_scheme)
        return page


def settled(page: Any) -> Any:
    """Wait until the script has run and the page has drawn it."""
    page.wait_for_function(SETTLED, timeout=180_000)
    return page


def open_view(page: Any, address: str, query: str = "") -> Any:
    page.goto(f"{address}/{query}")
    page.wait_for_selector("[data-testid=stApp]", timeout=60_000)
    return settled(page)
