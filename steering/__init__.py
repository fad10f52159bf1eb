"""Steering while a model generates: edits put in, flips, concepts, side effects, weight patches."""
