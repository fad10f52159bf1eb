"""Sets of nodes: controls."""
