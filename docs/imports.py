"""Draws which parts of icebear import which, as docs/imports.svg.

python docs/imports.py

A box is a room or a room inside a room; files that lie in `concepts/` itself are boxes of their own. A room whose
files would close a circle with others is drawn file by file. Every arrow goes down; one that follows from others is
left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "imports.svg"
ROOMS = {
    "app": "#cfe8d5",
    "actmax": "#fbe3c0",
    "steering": "#f8cfcf",
    "concepts": "#cfe0f5",
    "db": "#e3d7f0",
    "icebear": "#e4e4e4",
}
"""Each with its colour, from the top."""
DOORS = {"icebear", "icebear.__main__"}
"""They name what is above them, and import it when it is asked for."""
INSTALLED = re.compile(rf"^icebear\.(?=({'|'.join(set(ROOMS) - {'icebear'})})\b)")
"""What a folder's modules are called before their folder, once installed."""
OPEN = "concepts"
"""Its files are boxes of their own."""

Graph = dict[str, set[str]]


def files() -> dict[str, Path]:
    """Every module of ours, by its name."""
    paths = (path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {".".join(path.with_suffix("").parts): path for path in sorted(paths) if path.name != "__init__.py"}


def imported(path: Path) -> Iterator[str]:
    """What a file imports, inside functions too, but not what is only for types."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    typed = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {id(part) for node in typed for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in skipped:
            home = INSTALLED.sub("", node.module)
            yield home
            yield from (f"{home}.{name.name}" for name in node.names)


def box_of(name: str, opened: set[str]) -> str:
    """The box that a module is drawn in: its room, or the one inside that it is in."""
    *rooms, file = name.split(".")
    box = "/".join(rooms[:2])
    return box if box not in opened | {OPEN} else "/".join([*rooms, file])


def graph() -> Graph:
    """Box -> the boxes it imports, without a circle. Raises `SystemExit` where single files import one another."""
    modules = files()
    arrows = {
        (name, other)
        for name, path in modules.items()
        if name not in DOORS
        for other in imported(path)
        if other in modules
    }
    opened: set[str] = set()
    while True:
        found: Graph = {box_of(name, opened): set() for name in modules if name not in DOORS}
        for name, other in arrows:
            if (box := box_of(name, opened)) != (below := box_of(other, opened)):
                found[box].add(below)
        circle = circles(found)
        if not circle:
            return found
        closed = {box for box in circle if (ROOT / box).is_dir()}
        if not closed:
            raise SystemExit(f"These import one another: {', '.join(sorted(circle))}.")
        opened |= closed


def circles(found: Graph) -> set[str]:
    """The boxes that are part of a circle."""
    return {box for box in found if box in below(found, box)}


def below(found: Graph, box: str) -> set[str]:
    """All that can be reached from a box."""
    reached: set[str] = set()
    todo = set(found[box])
    while todo:
        reached.add(one := todo.pop())
        todo |= found[one] - reached
    return reached


def needed(found: Graph) -> Graph:
    """Without the arrows that follow from others."""
    return {
        box: {one for one in direct if not any(one in below(found, other) for other in direct)}
        for box, direct in found.items()
    }


def heights(found: Graph) -> dict[str, int]:
    """Each box above all that it imports."""
    height: dict[str, int] = {}
    for box in sorted(found, key=lambda box: len(below(found, box))):
        height[box] = max((height[one] + 1 for one in found[box]), default=0)
    return height


# --- the picture ----------------------------------------------------------------------------------------

WIDTH, BOX_HEIGHT, STEP, LETTER = 860, 30, 54, 7.6
Chain = list[str]
"""The boxes at the ends of an arrow, and between them an empty place in each row that it passes."""


def chains(found: Graph) -> list[Chain]:
    height = heights(found)
    return [
        [box, *(f"{box}>{one}>{level}" for level in range(height[box] - 1, height[one], -1)), one]
        for box, direct in sorted(needed(found).items())
        for one in sorted(direct)
    ]


def rows(found: Graph, arrows: list[Chain]) -> list[list[str]]:
    """Boxes and empty places, the top row first, so that few arrows cross: each is near those it has arrows with."""
    height = heights(found)
    levels: list[list[str]] = [[] for _ in range(max(height.values()) + 1)]
    for box in sorted(found):
        levels[-1 - height[box]].append(box)
    near: dict[str, set[str]] = {box: set() for box in found}
    for chain in arrows:
        for place in chain[1:-1]:
            levels[-1 - int(place.split(">")[2])].append(place)
        for one, other in pairwise(chain):
            near.setdefault(one, set()).add(other)
            near.setdefault(other, set()).add(one)
    for _ in range(24):
        for level in levels:
            at = {box: x for row in levels for box, x in zip(row, places(row), strict=True)}
            level.sort(key=lambda box: (sum(at[one] for one in near[box]) / max(1, len(near[box])), box))
    return levels


def width_of(box: str) -> float:
    return 0 if ">" in box else 22 + LETTER * len(_shown(box))


def places(row: list[str]) -> list[float]:
    """The middle of each box of a row, with equal room between them."""
    gap = (WIDTH - sum(map(width_of, row))) / (len(row) + 1)
    return [gap * (i + 1) + sum(map(width_of, row[:i])) + width_of(box) / 2 for i, box in enumerate(row)]


def picture(found: Graph) -> str:
    """The drawing as SVG, on a ground of its own so that it suits dark pages."""
    arrows = chains(found)
    levels = rows(found, arrows)
    at = {
        box: (x, 40.0 + STEP * number)
        for number, row in enumerate(levels)
        for box, x in zip(row, places(row), strict=True)
    }
    height = 80 + STEP * (len(levels) - 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="ui-monospace, monospace" font-size="12.5">',
            "<title>What imports what in icebear: every arrow goes down</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>',
            f'<text x="12" y="22" fill="#555">{OPEN}/ is blue</text>',
            *(_arrow([at[place] for place in chain]) for chain in arrows),
            *(_box(box, *at[box]) for box in sorted(found)),
            "</svg>\n",
        ]
    )


def _arrow(points: list[tuple[float, float]]) -> str:
    """From the lower edge of the first box, straight through empty places, to the upper edge of the last."""
    x, y = points[0][0], points[0][1] + BOX_HEIGHT / 2
    path = f"M{x:.0f} {y:.0f}"
    for number, (to, middle) in enumerate(points[1:], 2):
        top, bottom = middle - BOX_HEIGHT / 2, middle + BOX_HEIGHT / 2
        bend = (top - y) / 2
        path += f"C{x:.0f} {y + bend:.0f} {to:.0f} {top - bend:.0f} {to:.0f} {top:.0f}"
        if number < len(points):
            path += f"V{bottom:.0f}"
        x, y = to, bottom
    return f'<path d="{path}" fill="none" stroke="#667" marker-end="url(#tip)"/>'


def _shown(box: str) -> str:
    return box.removeprefix(f"{OPEN}/")


def _box(box: str, x: float, y: float) -> str:
    return (
        f'<rect x="{x - width_of(box) / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{width_of(box):.0f}" '
        f'height="{BOX_HEIGHT}" rx="5" fill="{ROOMS[box.split("/")[0]]}" stroke="#667"/>'
        f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" fill="#111">{escape(_shown(box))}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(graph()), encoding="utf-8")
    print(f"Wrote {PICTURE.relative_to(ROOT)}")
