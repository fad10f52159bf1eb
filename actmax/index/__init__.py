"""The index: corpus, scan, vectors, annotation."""
