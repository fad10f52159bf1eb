"""`icebear app`: Streamlit, on localhost only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import webbrowser
from pathlib import Path

import click

from db.errors import InputError

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


def launch(port: int, environment: dict[str, str]) -> None:
    """Serve until interrupted; opens a browser when there is a terminal to have come from."""
    with socket.socket() as probe:
        if probe.connect_ex(("localhost", port)) == 0:
            raise InputError(f"Port {port} is taken; choose another one with --port.")
    url = f"http://localhost:{port}"
    click.echo(f"icebear app: {url}  (Ctrl-C ends it)", err=True)
    if sys.stdout.isatty():
        threading.Timer(3, webbrowser.open, (url,)).start()
    command = [sys.executable, "-m", "streamlit", "run", str(Path(__file__).parent / "main.py")]
    process = subprocess.Popen([*command, f"--server.port={port}", *OPTIONS], env={**os.environ, **environment})
    try:
        sys.exit(process.wait())
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
