"""Concepts: found from examples, measured in texts, steered."""
