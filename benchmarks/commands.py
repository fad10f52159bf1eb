"""Numbers of 25 commands, before and after a change of the code: `commands.py --out before.json`, and later
`commands.py --compare before.json after.json`. How long six commands take, beside the imports that none can do
without: `commands.py --times 5`, on an idle machine.

Each command runs with --json, on one thread, in one folder, with one cache; later ones read what earlier ones wrote.
The comparison names every field that is gone, new or further than 1e-6 from what it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BEAR, CAMEL = '"The ice bear lives in the"', '"The wild camel lives in the"'
DOCTOR = '"The doctor asked the woman whether" --counterfactual "The doctor asked the man whether"'
COMMANDS = f"""
explain {BEAR}
explain {BEAR} --counterfactual {CAMEL}
explain {BEAR} --contrast " desert" --units word --method cp-lrp
explain {DOCTOR} --site head
explain --chat "Where do ice bears live?" --sources --max-new-tokens 12
rank {BEAR} --counterfactual {CAMEL} --site ffn --top 5 --ablate
rank {BEAR} --site head --position all --top 5
rank {BEAR} --target-text " Arctic Ocean" --by absolute
rank {DOCTOR} --site attn --top 5 --claim claims.yaml
circuit {BEAR} --counterfactual {CAMEL} --nodes 20 --no-heads --ablate
circuit {DOCTOR} --nodes 12
index --corpus wiki-summaries --limit 40 --store wiki.db
neuron L29.ffn.860
neuron L29.ffn.860 --store wiki.db
search "ice cold water" --store wiki.db
label L29.ffn.860 "the far north" --store wiki.db
steer {BEAR} --edit L29.ffn.860=-20 --max-new-tokens 8
flip {BEAR} --to " desert" --source {CAMEL} --max-neurons 12 --save flip.json --unbounded
recipe show {EXAMPLES}/ice-bear-to-desert.json
concept find music --with {EXAMPLES}/music.txt --without {EXAMPLES}/not-music.txt --store wiki.db
concept measure music "The band played on." --store wiki.db
concept steer music "Yesterday I" --strength 0.5 --max-new-tokens 8 --store wiki.db
check claims.yaml
evaluate groundtruth --task agreement --samples 2 --methods attnlrp,random --out groundtruth
"""
IMPORTS = "import torch; from transformers import LlamaForCausalLM, AutoTokenizer"
TIMED = f"""
rank {BEAR} --json
explain {BEAR} --counterfactual {CAMEL}
explain {BEAR}
flip {BEAR} --to " desert" --source "The camel lives in the"
circuit {BEAR} --counterfactual {CAMEL} --png circuit.png
neuron L21.ffn.780
search water
"""
UNLIKE = ("seconds", "date", "out", "folder", "store")
"""Fields that no two runs share."""
CLOSE = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--out", type=Path)
    way.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    way.add_argument("--times", type=int, metavar="ROUNDS")
    options = parser.parse_args()
    if options.times:
        print_times(options.times)
    elif options.out:
        options.out.write_text(json.dumps(measured(), ensure_ascii=False, indent=1))
    else:
        before, after = (json.loads(path.read_text()) for path in options.compare)
        changes = list(differences(before, after))
        print(*changes, f"{len(changes)} fields of {len(before)} commands differ", sep="\n")
        sys.exit(bool(changes))


def measured() -> dict[str, Any]:
    """Return command -> its document, or its error."""
    documents = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    icebear = str(Path(sys.executable).with_name("icebear"))
    with tempfile.TemporaryDirectory() as folder:
        for line in COMMANDS.strip().splitlines():
            begun, command = time.monotonic(), [icebear, *shlex.split(line), "--json"]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            name = line.replace(f"{EXAMPLES}/", "")
            documents[name] = json.loads(done.stdout) if done.stdout else {"error": done.stderr.splitlines()[-1:]}
            print(f"{time.monotonic() - begun:5.0f} s  {done.returncode}  {name}", flush=True)
    return documents


def print_times(rounds: int) -> None:
    """Print the wall and CPU seconds of each timed command, in turn with the bare imports; medians and ranges."""
    icebear = str(Path(sys.executable).with_name("icebear"))
    commands = {"imports": [sys.executable, "-c", IMPORTS]}
    commands |= {line: [icebear, *shlex.split(line)] for line in TIMED.strip().splitlines()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name, command in commands.items():
                took = timed(command, folder)
                seconds[name] += [took] if number else []  # the first round fills caches
    bare = statistics.median(cpu for _, cpu in seconds["imports"])
    for name, rows in seconds.items():
        wall, cpu = ([round(row[at], 2) for row in rows] for at in (0, 1))
        ratio = statistics.median(cpu) / bare
        print(f"{name}: {statistics.median(wall)} s [{min(wall)}, {max(wall)}], CPU {statistics.median(cpu)} s")
        print(f"    CPU of the imports' {ratio:.2f} [{min(cpu) / bare:.2f}, {max(cpu) / bare:.2f}]", flush=True)


def timed(command: list[str], folder: str) -> tuple[float, float]:
    """Return the wall and the CPU seconds of a command."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def differences(before: Any, after: Any) -> Iterator[str]:
    """Yield a line for each field that differs."""
    old, new = dict(fields(before)), dict(fields(after))
    for place in old | new:
        if place not in old or place not in new:
            yield f"{place}: {'new' if place in new else 'gone'}"
        elif not same(old[place], new[place]):
            yield f"{place}: {old[place]!r:.60} and {new[place]!r:.60}"


def fields(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each number and text in a document, and its value."""
    if not isinstance(value, dict | list):
        yield place, value
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        if key not in UNLIKE:
            yield from fields(part, f"{place}/{key}")


def same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=CLOSE, abs_tol=CLOSE)
    return old == new


if __name__ == "__main__":
    main()
