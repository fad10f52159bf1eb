"""Change what the model says: flips, concepts, single edits."""
