"""Evaluations of explanations and of their uses."""
