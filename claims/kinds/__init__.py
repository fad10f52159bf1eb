"""The kinds of claims. `KINDS` has all of them by name."""

from icebear.claims.kind import Kind
from icebear.claims.kinds import edits, meanings, predictions, sources

_CLASSES = [
    cls for module in (edits, meanings, predictions, sources) for cls in vars(module).values() if isinstance(cls, type)
]
KINDS: dict[str, type[Kind]] = {
    kind.kind: kind
    for kind in sorted(
        (cls for cls in _CLASSES if issubclass(cls, Kind) and "kind" in vars(cls)), key=lambda cls: cls.kind
    )
}
"""Name -> class."""
