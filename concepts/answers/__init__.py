"""What an answer hangs on: words that are exchanged, sources that are removed, weights that are restored, and parts of
its relevance."""
