"""Texts, pairs and concepts that evaluations read."""
