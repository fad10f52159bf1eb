"""Time and memory of a circuit by its nodes and tokens, as multiples of one paired pass in the same round.

    python benchmarks/circuit.py [--rounds 3] [--model smollm2-135m]

Peak memory is that of a fresh process for each line, less what the loaded model takes. `--edges 3` instead runs
circuits of three pairs of each task along their first edges, ranked by contribution and by estimate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from attribution import tokens
from resident import resident

from benchmarks.circuit_graph import EDGE_COUNTS
from benchmarks.task_pairs import TASKS, answers, usable_by_task
from icebear import attribute, circuit, load_model
from icebear.concepts.circuits.checks import faithfulness

SIZES = ((20, 6), (60, 6), (60, 32), (100, 32), (100, 128))
"""Nodes and tokens."""


def pair(model, count: int) -> tuple[list[int], list[int]]:
    ids = tokens(model, count)
    return ids, [*ids[:1], 200, *ids[2:]]


def draw(model, nodes: int, count: int):
    ids, other = pair(model, count)
    return circuit(model, ids, 1000, 1001, counterfactual=other, nodes=nodes, heads=False)


def table(model, rounds: int) -> None:
    print("| nodes | tokens | s | of a paired pass |\n| --- | --- | --- | --- |")
    for nodes, count in SIZES:
        ids, other = pair(model, count)
        seconds, ratios = [], []
        for turn in range(rounds + 1):
            start = time.perf_counter()
            attribute(model, ids, 1000, 1001, counterfactual=other)
            middle = time.perf_counter()
            draw(model, nodes, count)
            end = time.perf_counter()
            if turn:  # the first round warms up
                seconds.append(end - middle)
                ratios.append((end - middle) / (middle - start))
        print(f"| {nodes} | {count} | {statistics.median(seconds):.1f} | {statistics.median(ratios):.1f} |", flush=True)


def memory(name: str) -> None:
    print("\n| nodes | tokens | peak MB |\n| --- | --- | --- |")
    for nodes, count in SIZES:
        command = [sys.executable, __file__, "--model", name, "--peak", str(nodes), str(count)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        print(f"| {nodes} | {count} | {output} |", flush=True)


def peak(model, nodes: int, count: int) -> None:
    attribute(model, tokens(model, 8))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (Linux)
    before = resident("VmRSS")
    draw(model, nodes, count)
    print(round(resident("VmHWM") - before))


def along_edges(model, count: int) -> None:
    """Print the sufficiency of edges, and of random ones, for each pair and order."""
    for task, pairs, _ in usable_by_task(model, TASKS, count, 0):
        for one in pairs:
            options = {"counterfactual": one.counterfactual, "nodes": 60, "heads": False, "edges": EDGE_COUNTS[-1]}
            graph = circuit(model, one.prompt, *answers(model, one), **options)
            orders = {"contribution": graph, "estimate": replace(graph, contribution=graph.estimate)}
            for order, ranked in orders.items():
                rows = [
                    (row.edges, row.sufficiency, row.matched_sufficiency) for row in faithfulness(ranked, EDGE_COUNTS)
                ]
                print(json.dumps({"task": task, "prompt": one.prompt, "order": order, "rows": rows}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peak", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--edges", type=int)
    options = parser.parse_args()
    loaded = load_model(options.model)
    if options.peak:
        peak(loaded, *options.peak)
    elif options.edges:
        along_edges(loaded, options.edges)
    else:
        print(f"{loaded!r}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
        table(loaded, options.rounds)
        memory(options.model)
