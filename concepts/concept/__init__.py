"""Latent concepts: read activations, rank and choose neurons."""
