"""Questions about answers: where they come from, over many prompts."""
