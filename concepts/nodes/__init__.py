"""Sets of nodes: controls, groups, rounds."""
