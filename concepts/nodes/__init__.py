"""Controls of sets of nodes, of image patches and of tokens."""
