"""FAISS or a memory-mapped matrix: what an exact search over a store's vectors costs, each in its own process.

python benchmarks/vectors.py FILE.faiss [--queries 20]

load: opening the file and the first search; query: the median of later ones; both in processor seconds of one thread.
memory: what the process holds more than before (of a map these are pages that the system may take back).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import os, re, statistics, sys, time
from pathlib import Path
import numpy as np
import faiss

def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

kind, file, width, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
before = {field: resident(field) for field in ("RssAnon", "RssFile")}
begun = time.process_time()
if kind in ("faiss", "faiss mapped"):
    index = faiss.read_index(file, *([faiss.IO_FLAG_MMAP_IFC] if kind == "faiss mapped" else []))
    def search(query):
        return index.search(query[None], 20)[1][0]
else:
    rows = np.memmap(file, np.float16, "r").reshape(-1, width)
    def search(query):
        scores = np.concatenate([rows[i : i + 4096].astype(np.float32) @ query for i in range(0, len(rows), 4096)])
        best = np.argpartition(-scores, 20)[:20]
        return best[np.argsort(-scores[best])]
queries = np.random.default_rng(0).standard_normal((count, width)).astype(np.float32)
results = [search(queries[0])]
load = time.process_time() - begun
taken = []
for query in queries[1:]:
    start = time.process_time()
    results.append(search(query))
    taken.append(time.process_time() - start)
held = [resident(field) - before[field] for field in ("RssAnon", "RssFile")]
same = sum(int(i) for part in results for i in part)
print(f"{load:.3f} {statistics.median(taken):.4f} {held[0]:.0f} {held[1]:.0f} {same}")
"""


def main() -> None:
    import faiss
    import numpy as np

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--queries", type=int, default=20)
    options = parser.parse_args()
    index = faiss.read_index(str(options.file))
    width = index.d
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "rows"
        faiss.vector_to_array(index.codes).view(np.float16).tofile(raw)
        print(f"{index.ntotal} rows of {width}\n")
        print("| | load, s | query, s | memory of its own, MB | of the file, MB | the same rows found |")
        print("| --- | --- | --- | --- | --- | --- |")
        expected = None
        for kind, file in (("faiss", options.file), ("faiss mapped", options.file), ("numpy mapped", raw)):
            rows = []
            for _ in range(3):
                done = subprocess.run(
                    [sys.executable, "-c", CHILD, kind, str(file), str(width), str(options.queries)],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                rows.append([float(part) for part in done.stdout.split()])
            load, query, own, mapped, hits = (statistics.median(column) for column in zip(*rows, strict=True))
            expected = hits if expected is None else expected
            print(f"| {kind} | {load:.3f} | {query:.4f} | {own:.0f} | {mapped:.0f} | {hits == expected} |", flush=True)


if __name__ == "__main__":
    main()
