"""One forward and backward pass: what it explains, what is kept of it, how it runs."""
