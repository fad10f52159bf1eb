"""Turning neurons while a model runs: edits, recipes, `steer`."""
