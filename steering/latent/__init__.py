"""Latent concepts: sets of neurons found from examples, measured in a text, turned at a known price, and compared."""
