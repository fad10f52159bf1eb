"""The optional parts of icebear, and the packages that they need (see pyproject.toml)."""

from __future__ import annotations

from importlib.util import find_spec

from icebear.errors import InputError

EXTRAS = {
    "app": {"streamlit": "streamlit", "altair": "altair", "vl_convert": "vl-convert-python"},
    "index": {"faiss": "faiss-cpu", "sentencex": "sentencex", "datasets": "datasets"},
    "circuits": {"vl_convert": "vl-convert-python"},
    "evaluate": {"matplotlib": "matplotlib"},
    "arrow": {"pyarrow": "pyarrow"},
    "mcp": {"mcp": "mcp"},
    "devices": {"accelerate": "accelerate"},
    "bits": {"accelerate": "accelerate", "bitsandbytes": "bitsandbytes"},
}
"""Part -> module -> package."""


def need(extra: str) -> None:
    """Raise `InputError` if a package of this part is missing."""
    missing = [package for module, package in EXTRAS[extra].items() if find_spec(module) is None]
    if missing:
        raise InputError(
            f"This feature needs the missing package{'s' * (len(missing) > 1)} {', '.join(missing)}; install with: "
            f"pip install {' '.join(missing)} (or, in a checkout of icebear: pip install -e '.[{extra}]')."
        )
