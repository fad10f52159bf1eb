"""Evaluations of explanations, and the protocol, runner and report of all evaluations."""
