"""What an answer hangs on: words of the prompt that are exchanged, sources that are removed, parts of its relevance."""
