"""Monitors: a concept's detector with a threshold of a known false positive rate, which reads texts and generations."""
