"""The scripts of docs/, and the site as `make docs` builds it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_site(folder, notebook_page):
    """Builds the site in `folder` from a copy of docs/; `notebook_page(path)` is the Markdown of a notebook."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("README.md", "zensical.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "docs" / "api.md").write_text(script("api").page())
    for path in NOTEBOOKS:
        (folder / "docs" / "notebooks" / f"{path.stem}.md").write_text(notebook_page(path))
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"
