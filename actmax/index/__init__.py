"""The index of maximally activating examples: scan, statistics, vectors, annotation."""
