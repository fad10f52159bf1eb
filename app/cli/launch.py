"""`icebear app`: Streamlit, on localhost only."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

import click

from icebear.errors import InputError

OPTIONS = (
    "--server.address=localhost",
    "--server.headless=true",
    "--server.fileWatcherType=none",
    "--browser.gatherUsageStats=false",
    "--client.toolbarMode=minimal",
    "--global.disableWidgetStateDuplicationWarning=true",  # callbacks may set what also has a default
    "--theme.light.primaryColor=#2166ac",
    "--theme.dark.primaryColor=#67a9cf",
)


class _OnStderr(logging.Handler):
    """Where stderr is when something is said, which tests and notebooks move."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def log_to_stderr(form: str = "%(message)s") -> None:
    """What icebear's loggers say from INFO on; called again, in another form."""
    handler = _OnStderr()
    handler.setFormatter(logging.Formatter(form))
    ours = logging.getLogger("icebear")
    ours.handlers[:] = [handler]
    ours.setLevel(logging.INFO)


def launch(port: int, environment: dict[str, str]) -> None:
    """Serve until interrupted or ended; opens a browser when there is a terminal to have come from."""
    import socket
    import webbrowser

    with socket.socket() as probe:
        if probe.connect_ex(("localhost", port)) == 0:
            raise InputError(f"Port {port} is taken; choose another one with --port.")
    url = f"http://localhost:{port}"
    click.echo(f"icebear app: {url}  (Ctrl-C ends it)", err=True)
    if sys.stdout.isatty():
        threading.Timer(3, webbrowser.open, (url,)).start()
    from streamlit.web.cli import main as streamlit

    log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    os.environ.update(environment)
    script = str(Path(__file__).parents[1] / "web" / "script" / "main.py")
    # In this process: a server in one of its own would stay behind when this one is ended.
    try:
        streamlit(["run", script, f"--server.port={port}", *OPTIONS], prog_name="streamlit")
    except SystemExit as end:
        logging.shutdown()
        os._exit(end.code if isinstance(end.code, int) else 0)  # threads inside torch would abort an orderly end
