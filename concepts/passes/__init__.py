"""One forward and backward pass: the number that it explains, what is recorded of it, and how it runs."""
