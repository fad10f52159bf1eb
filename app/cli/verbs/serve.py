"""`icebear serve`: an HTTP server for other software, on localhost only."""

from __future__ import annotations

import os
from pathlib import Path

import click

from icebear.app.base_path import BasePath
from icebear.app.cli.options import ModelOptions, check_port, option, record, verb
from icebear.errors import InputError, need
from icebear.paths import check_model_path


@record
class Options:
    port: int = option(default=8502)
    base_path: str | None
    model: ModelOptions


@verb(Options)
def serve(options: Options) -> None:
    """Serve Neuronpedia's inference API for neurons, and icebear's stages, over HTTP, to this machine only.

    Example:
      icebear serve --model smollm2-135m
    """
    need("serve")
    base = BasePath.parse(options.base_path) if options.base_path else BasePath()
    check_model_path(options.model.model)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the app
    check_port(options.port)
    model = options.model.load()
    import uvicorn

    from icebear.app.api.server import server
    from icebear.app.session import Session
    from icebear.points import model_id

    session = Session(options.model.model, options.model.arguments)
    if not (model.task.is_causal and model.task.generates):
        raise InputError(f"{model.name} does not continue a text; serve a model that does.")
    if Path(model.name).exists():  # answers and errors have the name, and clients need no path of this machine
        model.name = model_id(model.name)
    session.model = model
    click.echo(f"icebear serve: http://localhost:{options.port}{base.quoted}/v1  (press Ctrl-C to stop)", err=True)
    uvicorn.run(server(session, base), host="localhost", port=options.port, log_level="warning", server_header=False)
