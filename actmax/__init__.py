"""What a neuron means: the sentences of a corpus that drive it furthest, in one SQLite file."""
