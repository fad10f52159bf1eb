"""What a prediction is made of, with its controls: the one investigation that every face shows."""
