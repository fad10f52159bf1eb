"""Layer-wise relevance propagation: the rules, the tables of operations, and `relevance_rules`."""
