"""Models and what goes into them: loading, families, tokens and tasks."""
