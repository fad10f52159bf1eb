"""Models whose mechanism is known."""
