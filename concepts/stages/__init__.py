"""How an answer is computed: where the prompts differ, what is moved to the last token, and what is written there."""
