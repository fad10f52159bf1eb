"""Evaluations of steering."""
