"""Evaluations of uses: flips, labels and concepts."""
