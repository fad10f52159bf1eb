"""The five packages have everyday names: make sure that none is shadowed by somebody else's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from db.errors import IcebearError

PACKAGES = ("concepts", "actmax", "steering", "db", "app")


def roots() -> dict[str, str]:
    """package -> the folder it would be imported from."""
    found = {}
    for name in PACKAGES:
        spec = find_spec(name)
        found[name] = str(Path(spec.origin).parent.parent) if spec and spec.origin else "nowhere"
    return found


def check_roots() -> None:
    """Raise `IcebearError` naming the intruder unless all five come from one folder."""
    found = roots()
    ours = str(Path(__file__).parent.parent)
    intruders = [f"{name} from {place}" for name, place in found.items() if place != ours]
    if intruders:
        raise IcebearError(
            f"icebear is in {ours}, but Python finds {', '.join(intruders)}; install icebear in an environment "
            "of its own."
        )
