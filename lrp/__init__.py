"""Relevance rules, and where they are applied."""
