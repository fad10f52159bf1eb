"""The index: scan, statistics, vectors, annotation."""
