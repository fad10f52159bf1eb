"""The kinds of claims. `KINDS` has all of them by name."""

from icebear.claims.kind import Kind
from icebear.claims.kinds import edits, meanings, predictions

_CLASSES = [one for module in (edits, meanings, predictions) for one in vars(module).values() if isinstance(one, type)]
KINDS: dict[str, type[Kind]] = {
    kind.kind: kind
    for kind in sorted(
        (one for one in _CLASSES if issubclass(one, Kind) and "kind" in vars(one)), key=lambda one: one.kind
    )
}
"""Name -> class."""
