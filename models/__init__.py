"""Models: their parts, their prompts, how they are loaded."""
