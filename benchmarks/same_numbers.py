"""Do the commands still print the same numbers? Run it before and after a change that should not alter any.

    python benchmarks/same_numbers.py record before/            # at the earlier commit
    python benchmarks/same_numbers.py record after/             # at the later one
    python benchmarks/same_numbers.py compare before/ after/ [--renamed old=new ...]

`record` runs each command with --json in a folder of its own. `compare` looks for each number of the earlier documents
among those of the later one that stand under the same key, wherever that key is; it prints what is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEAR, CAMEL = "The ice bear lives in the", "The wild camel lives in the"
PAIR = [BEAR, "--counterfactual", CAMEL]
FRANCE = [("France", "Paris"), ("Spain", "Madrid"), ("Germany", "Berlin")]
ASKED = ["--chat", "Where do ice bears live?"]
QUESTION = ["--chat", "Anna lives in Oslo. Tom lives in Rome. Where does Tom live?"]
MANY, STORE, EVALUATE = ["--top", "400"], ["--store", "wiki.db"], ["evaluate"]
SCORES = "difference,cp-lrp@midpoint,gxi,matched"
COMMANDS: dict[str, list[str]] = {
    "attribute": ["rank", BEAR, *MANY],
    "attribute-contrast": ["rank", BEAR, "--contrast", " desert", "--method", "cp-lrp", *MANY],
    "attribute-pa": ["rank", BEAR, "--method", "pa-lrp", *MANY],
    "attribute-gxi": ["explain", BEAR, "--method", "gxi"],
    "attribute-logit": ["rank", BEAR, "--number", "logit", *MANY],
    "attribute-text": ["rank", BEAR, "--target-text", " Arctic Ocean", *MANY],
    "attribute-span": ["rank", *ASKED, "--span", "all", "--max-new-tokens", "8", *MANY],
    "attribute-counterfactual": ["rank", *PAIR, "--contrast", " desert", "--position", "last", *MANY],
    "rank": ["rank", BEAR],
    "rank-counterfactual": ["rank", *PAIR, "--site", "ffn", "--ablate", "--top", "10"],
    "rank-midpoint": ["rank", *PAIR, "--site", "attn", "--method", "cp-lrp@midpoint", "--top", "10"],
    "rank-heads": ["rank", *PAIR, "--site", "head", "--ablate", "--top", "5"],
    "rank-file": ["rank", "--file", "prompts.jsonl", "--site", "ffn", "--top", "5"],
    "project": ["neuron", "L29.ffn.860", "--top", "5"],
    "answer": ["explain", *QUESTION, "--sources", "--max-new-tokens", "10"],
    "circuit": ["circuit", *PAIR, "--contrast", " desert", "--nodes", "20", "--ablate"],
    "steer": ["steer", BEAR, "--edit", "L29.ffn.860*0", "--edit", "L29.ffn.490=-6.2", "--max-new-tokens", "10"],
    "flip": ["flip", BEAR, "--to", " desert", "--source", "The camel lives in the"],
    "index": ["index", "--limit", "300", *STORE],
    "neuron": ["neuron", "L29.ffn.860", *STORE, "--annotate", "--top", "5"],
    "search": ["search", "Arctic ice", *STORE, "--top", "5"],
    "label": ["label", "--auto", "L29.ffn.860", "L20.ffn.100", *STORE],
    "neuron-labelled": ["neuron", "L29.ffn.860", *STORE, "--top", "5"],
    "concept-find": ["concept", "find", "music", "--with", "music.txt", "--without", "not-music.txt", *STORE],
    "concept-measure": ["concept", "measure", "music.json", "The band played on.", "--through"],
    "concept-steer": ["concept", "steer", "music.json", "Yesterday I", "--kl", "0.25", "--max-new-tokens", "10"],
    "faithfulness": [*EVALUATE, "faithfulness", "--methods", "attnlrp,cp-lrp,gxi,ig,occlusion,random"],
    "groundtruth": [*EVALUATE, "groundtruth", "--methods", "attnlrp,gxi,random"],
    "pruning": [*EVALUATE, "pruning", "--methods", "attnlrp,random"],
    "ablation": [*EVALUATE, "ablation", "--tasks", "capitals,simple", "--methods", SCORES],
    "circuits": [*EVALUATE, "circuits", "--tasks", "phrase", "--nodes", "20"],
    "flips": [*EVALUATE, "flips", "--data", "flips.json"],
    "labels": [*EVALUATE, "labels", "--neurons", "3", *STORE],
}
SAMPLES = ("faithfulness", "groundtruth", "pruning", "ablation", "circuits")
TOLERANCE = 1e-6
MOVING = {"seconds", "version", "torch", "transformers", "numpy"}
"""Keys of numbers that are not results."""


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "examples").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    flips = json.loads((ROOT / "benchmarks/flips-design.json").read_text())[:2]
    (folder / "flips.json").write_text(json.dumps(flips))
    rows = [{"prompt": f"The capital of {land} is", "target": f" {city}", "contrast": " Rome"} for land, city in FRANCE]
    rows = [{**row, "counterfactual": "The capital of Italy is"} for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def record(out: Path, names: list[str]) -> int:
    work, failed = out / "work", 0
    prepare(work)
    for name, command in COMMANDS.items():
        if names and name not in names:
            continue
        if command[0] == "evaluate":
            command = [*command, *(["--samples", "3"] if name in SAMPLES else []), "--out", f"evaluations/{name}"]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "icebear", *command, "--json"], cwd=work, capture_output=True, text=True
        )
        (out / f"{name}.json").write_text(done.stdout)
        failed += done.returncode != 0
        last = done.stderr.strip().splitlines()[-1:] if done.returncode else ""
        print(f"{name}: exit {done.returncode}, {time.perf_counter() - start:.1f} s {last}", flush=True)
    return failed


def numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a document with the key that it stands under; those of a list have the list's key."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from numbers(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, float(value)


def by_key(path: Path, renamed: dict[str, str]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for key, value in numbers(json.loads(path.read_text())):
        if key not in MOVING:
            values[renamed.get(key, key)].append(value)
    return values


def missing(before: list[float], after: list[float]) -> list[float]:
    """Values of `before` without a partner in `after`; each partner is used once."""
    left, lost = deque(sorted(after)), []
    for value in sorted(before):
        room = TOLERANCE * max(1.0, abs(value))
        while left and left[0] < value - room:
            left.popleft()
        if left and left[0] <= value + room:
            left.popleft()
        else:
            lost.append(value)
    return lost


def compare(before: Path, after: Path, renamed: dict[str, str]) -> int:
    bad = 0
    for name in sorted(path.stem for path in before.glob("*.json")):
        old, new = by_key(before / f"{name}.json", renamed), by_key(after / f"{name}.json", {})
        every = sum(map(len, old.values()))
        gone = sorted(key for key in old if key not in new)
        lost = {key: missing(old[key], new[key]) for key in old if key in new}
        lost = {key: values for key, values in lost.items() if values}
        same = every - sum(map(len, lost.values())) - sum(len(old[key]) for key in gone)
        bad += bool(lost)
        print(f"{name}: {same} of {every} numbers the same" + (f"; keys gone: {', '.join(gone)}" if gone else ""))
        for key, values in lost.items():
            print(f"  DIFFERENT {key}: {values[:5]} not among {len(new[key])} values such as {new[key][:3]}")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--renamed", nargs="*", default=[])
    options = parser.parse_args()
    if options.what == "record":
        return record(options.folders[0].resolve(), options.only)
    return compare(options.folders[0], options.folders[1], dict(pair.split("=") for pair in options.renamed))


if __name__ == "__main__":
    sys.exit(main())
