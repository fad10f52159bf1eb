"""Relevance compared with another prompt: which tokens are partners, and the differences that are ranked."""
