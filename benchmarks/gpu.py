"""Check in eight minutes whether icebear is right and quick on a GPU.

    benchmarks/gpu_wheels.sh wheels                                      # beforehand, with a network
    python3 benchmarks/gpu.py --wheels wheels [--device cpu] [--quick] [--out FOLDER]

It needs Python 3.11 or newer, torch 2.11 or newer, transformers 5.17 or newer, numpy, safetensors, and the packages
that `gpu_wheels.sh` fetches. It needs no network, no weights and no installation of icebear: models have random weights
in the shapes of published ones, and prompts are token ids. Each part writes `gpu.json` and `gpu.md` again when it ends.
A part that fails leaves the results of the others.

right    results equal those of the CPU (float32 without TF32); the same twice, in two threads and in a batch
waiting  lines of icebear at which Python waits for the GPU in one pass
quick    ratios to gradient x input, scan speed, peak memory, kernels
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "app claims explanation evaluation actmax steering concepts lrp models db".split()
"""The folders that are installed as parts of `icebear`."""
NEEDED = ("torch", "transformers", "numpy", "safetensors", "attrs", "cattrs")
PLAN = (
    *(("right", "135M"), ("waiting", "135M"), ("quick", "135M"), ("right", "Mixtral, 2 of 32 layers")),
    *(("right", "Gemma 3 1B"), ("quick", "1B"), ("quick", "8B"), ("right", "1B")),
)
"""What matters most comes first, because a run may be cut off."""
Part = Callable[[str, bool, str], Iterator[dict[str, Any]]]
"""Device, whether it is quick, shape -> rows of a table."""


def provide(wheels: str | None) -> str:
    """Make icebear and what it needs importable. Return how."""
    if wheels:
        site = tempfile.mkdtemp(prefix="site-")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", site, *map(str, Path(wheels).glob("*.whl"))], check=True)
        sys.path.insert(0, site)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"Missing: {', '.join(missing)}. Fetch wheels with benchmarks/gpu_wheels.sh, and name them: --wheels")
    if find_spec("icebear"):
        return "installed"
    links = Path(tempfile.mkdtemp(prefix="icebear-"))
    (links / "icebear").mkdir()
    for source in [*(ROOT / "icebear").iterdir(), *(ROOT / name for name in FOLDERS)]:
        (links / "icebear" / source.name).symlink_to(source)
    (links / "icebear-0.dist-info").mkdir()
    (links / "icebear-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: icebear\nVersion: 0\n")
    sys.path.insert(0, str(links))
    return "folders linked"


def attempt(part: Part, device: str, quick: bool, shape: str) -> dict[str, Any]:
    """Run a part. Return its rows, and its error if it fails."""
    start, rows, error = time.perf_counter(), [], None
    try:
        for row in part(device, quick, shape):
            rows.append(row)
    except Exception as problem:  # a part must leave the results of the others
        error = f"{type(problem).__name__}: {problem}"
        traceback.print_exc()
    gc.collect()
    return {"rows": rows, "error": error, "seconds": round(time.perf_counter() - start, 1)}


def markdown(report: dict[str, Any]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in report["facts"].items())]
    for part in report["parts"]:
        lines += ["", f"## {part['part']}, {part['shape']} ({part['seconds']:.0f} s)", ""]
        lines += [f"FAILED: {part['error']}", ""] if part["error"] else []
        lines += ["| check | value | limit | verdict |", "| --- | --- | --- | --- |"]
        lines += ["| {check} | {value:.3g} | {limit} | {verdict} |".format(**row) for row in part["rows"]]
    return "\n".join(lines) + "\n"


def main(parts: Mapping[str, Part], facts: Mapping[str, Any], device: str, quick: bool, out: str) -> int:
    """Run the plan, and write the report after each part. Return the number of parts and checks that failed."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"facts": dict(facts), "parts": []}
    for name, shape in PLAN:
        report["parts"].append({"part": name, "shape": shape, **attempt(parts[name], device, quick, shape)})
        (folder / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / "gpu.md").write_text(markdown(report))
        print(markdown({**report, "parts": report["parts"][-1:]}), flush=True)
    large = sum(row["verdict"] == "TOO LARGE" for part in report["parts"] for row in part["rows"])
    return large + sum(part["error"] is not None for part in report["parts"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="models of two narrow layers, short prompts, few rounds")
    parser.add_argument("--wheels", metavar="FOLDER", help="wheels of packages that are missing")
    parser.add_argument("--out", metavar="FOLDER", default="gpu-check")
    options = parser.parse_args()
    provided = provide(options.wheels)
    import gpu_checks

    facts = {**gpu_checks.facts(options.device), "quick": options.quick, "icebear": provided}
    sys.exit(main(gpu_checks.PARTS, facts, options.device, options.quick, options.out) > 0)
