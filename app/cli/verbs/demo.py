"""`icebear demo`: the ice bear, end to end."""

from __future__ import annotations

from icebear.app.cli.options import record, verb
from icebear.app.cli.output import print_json, stdout
from icebear.extras import need


@record
class Options:
    json: bool


@verb(Options)
def demo(options: Options) -> None:
    """The ice bear, end to end, in a terminal.

    \b
    Example:
      icebear demo
    """
    from rich.console import Console

    from icebear.app.cli.demo import run

    need("index")
    result = run(Console(stderr=True, highlight=False) if options.json else stdout())
    if options.json:
        print_json(result)
