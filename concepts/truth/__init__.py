"""Models whose mechanism is known: programs, a compiler to weights, decoys, and a search for the true nodes."""
