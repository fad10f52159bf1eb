"""The five rooms have everyday names: is one of them hidden by somebody else's package?

Imports nothing of theirs, because that may be the intruder.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ROOMS = ("concepts", "actmax", "steering", "db", "app")


def roots() -> dict[str, str]:
    """room -> the folder it would be imported from."""
    found = {}
    for name in ROOMS:
        spec = find_spec(name)
        where = spec.origin or next(iter(spec.submodule_search_locations or ()), None) if spec else None
        path = Path(where) if where else None
        home = path.parent.parent if path and path.name == "__init__.py" else path and path.parent
        found[name] = str(home) if home else "nowhere"
    return found


def intruders() -> str:
    """A sentence naming those rooms that would come from elsewhere, or nothing."""
    ours = str(Path(__file__).parent.parent)
    found = [f"{name} from {place}" for name, place in roots().items() if place != ours]
    if not found:
        return ""
    return (
        f"icebear is in {ours}, but Python finds {', '.join(found)}; install icebear in an environment of its own, and "
        "start Python where no file or folder has one of these names."
    )
