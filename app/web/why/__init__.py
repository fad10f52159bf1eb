"""The first view: why the model predicts this word."""
