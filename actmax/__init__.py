"""What a neuron means: an index of the sentences that activate it most, labels, its card, the atlas of all neurons."""
