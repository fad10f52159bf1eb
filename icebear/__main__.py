"""The `icebear` command, also as ``python -m icebear``."""

from __future__ import annotations


def main() -> None:
    from icebear.app.cli import main as command

    command(prog_name="icebear")


if __name__ == "__main__":
    main()
