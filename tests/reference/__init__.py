"""Slow, obvious reference implementations."""
