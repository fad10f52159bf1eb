"""How neurons make an answer together: nodes, direct edges, groups, the graph and its files."""
