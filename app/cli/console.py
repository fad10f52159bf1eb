"""A console that a token cannot steer: control characters are shown, not sent to the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from icebear.app.cli.streams import CONTROL_PICTURES
from icebear.render import PART


class SafeConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else segment.text.replace("\ufffd", PART).translate(CONTROL_PICTURES)
            yield segment._replace(text=text)
