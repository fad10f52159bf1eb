"""`icebear app`: Streamlit, on localhost only."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import click

from icebear.app.base_path import BasePath
from icebear.app.cli.options import ModelOptions, check_port, is_given, option, record, verb
from icebear.app.cli.output import log_to_stderr
from icebear.errors import need
from icebear.paths import check_model_path
from icebear.stopping import SIGNALS

SETTINGS = (
    "--server.address=localhost",
    "--server.headless=true",
    "--server.fileWatcherType=none",
    "--server.enableCORS=true",  # also where the user's own apps, or their environment, switch these two off
    "--server.enableXsrfProtection=true",
    "--browser.gatherUsageStats=false",
    "--client.toolbarMode=minimal",
    "--runner.postScriptGC=false",  # 0.3 s with torch, and no other thread runs: half of the time between two polls
    "--global.disableWidgetStateDuplicationWarning=true",  # callbacks may set what also has a default
    "--theme.light.primaryColor=#2166ac",
    "--theme.dark.primaryColor=#67a9cf",
)


@record
class Options:
    store: str = option(type="file")
    port: int = option(default=8501)
    base_path: str | None
    model: ModelOptions


@verb(Options)
def app(options: Options) -> None:
    """Open the app in the browser: explain, search and steer. Only this machine can reach the app.

    With --base-path, a proxy of this machine (JupyterHub, VS Code) can serve it below a path.

    Example:
      icebear app --store wiki.db
      icebear app --base-path https://hub.example.org/user/me/proxy/absolute/8501
    """
    need("app")
    base = BasePath.parse(options.base_path) if options.base_path else BasePath()
    check_model_path(options.model.model)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else a pass is 5 times slower while another process computes
    os.environ["ICEBEAR_APP"] = json.dumps(
        {"store": options.store if is_given("store") else None, **asdict(options.model)}
    )
    _serve(options.port, base)


def _serve(port: int, base: BasePath) -> None:
    """Serve until interrupted. Open a browser if stdout is a terminal."""
    import webbrowser

    check_port(port)
    url = f"http://localhost:{port}{base.quoted}"
    click.echo(f"icebear app: {url}  (press Ctrl-C to stop)", err=True)
    if sys.stdout.isatty():
        threading.Timer(3, webbrowser.open, (url,)).start()
    from streamlit import config, file_util
    from streamlit.web.cli import main as streamlit

    # Without config.toml and secrets.toml of the current folder, which may be somebody else's: the former can open the
    # app to other hosts, and each line of the latter becomes an environment variable.
    config.get_config_files = lambda file_name: [file_util.get_streamlit_file_path(file_name)]
    log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    script = str(Path(__file__).parents[2] / "web" / "script" / "server.py")
    for number in SIGNALS:  # the server ends in order, and then sends itself the signal again
        signal.signal(number, lambda *_: None)
    # In this process: a server in a process of its own would survive the end of this one.
    of_base = f"--server.baseUrlPath={base.path}", f"--browser.serverAddress={base.host or 'localhost'}"
    try:
        streamlit(["run", script, f"--server.port={port}", *of_base, *SETTINGS], prog_name="streamlit")
    except SystemExit as end:
        logging.shutdown()
        os._exit(end.code if isinstance(end.code, int) else 0)  # threads inside torch would abort an orderly end
