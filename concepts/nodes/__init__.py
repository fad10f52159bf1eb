"""Sets of nodes: controls, groups."""
