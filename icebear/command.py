"""The `icebear` command: `icebear` itself is imported first, and says whether a room is hidden."""

from __future__ import annotations


def main() -> None:
    from app.cli import main as command

    command()
