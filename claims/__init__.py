"""Claims about a model: what was measured, as a file that is measured again after every change of the model."""
